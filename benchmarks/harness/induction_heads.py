"""Initial weights with which two attention layers copy: training starts from induction heads and need not find them.

An induction head (arXiv:2209.11895) continues a text as it went on where the present token stood before. It needs two layers: a head of
the first writes beside each token which token was before it, and a head of the second looks for the present token there and copies what
it finds. From random weights that takes a small model many steps to find; the calls of tools consist of little else than copies.

Shapes: V vocabulary, H hidden, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch

EMBEDDING_STD = 0.08
CONSTANT = 4.0  # of the embeddings' channel that is the same for all tokens, in standard deviations of the others
PREVIOUS_GAIN, MATCH_GAIN = 4.0, 2.5  # weights of the norms of queries and keys: they bound how sharp attention can be
WRITTEN, COPIED = 2.0, 2.0  # weights of the outputs, in standard deviations of the embeddings
PREVIOUS_PAIRS = (0.3, 0.25, 0.15, 0.1, 0.1, 0.1)  # energy of the fastest rotary pairs, whose phases find the token before


@torch.no_grad()
def add_induction_heads(model: Any, seed: int) -> None:
    """Write induction heads into the first two layers of an untrained Qwen3-MoE model with tied embeddings, in place.

    In the first layer, the first half of the key-value heads attend to the token before: their queries and keys read only the constant
    channel, and the keys are turned by one position. In the second layer all heads match, by the slow half of the rotary pairs, which
    distance hardly turns.
    """
    config = model.config
    heads, kv_heads, size, hidden = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
    group, half, slow = heads // kv_heads, size // 2, size // 4
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    draw = torch.Generator().manual_seed(seed)
    embedding = model.model.embed_tokens.weight
    embedding.copy_(torch.randn(embedding.shape, generator=draw) * EMBEDDING_STD)
    embedding[:, 0] = CONSTANT * EMBEDDING_STD
    directions = torch.zeros(hidden - 1, hidden)
    directions[:, 1:] = torch.linalg.qr(torch.randn(hidden - 1, hidden - 1, generator=draw))[0].T
    writers = kv_heads // 2
    code, place = directions[: writers * size], directions[writers * size : 2 * writers * size]  # what is written of a token, and where

    first, second = (layer.self_attn for layer in model.model.layers[:2])
    pairs = len(PREVIOUS_PAIRS)
    energy = 2 * torch.tensor(PREVIOUS_PAIRS).sqrt()
    for head in range(writers):
        key = first.k_proj.weight.view(kv_heads, size, hidden)[head]
        key[:, 0] = 0
        key[:pairs, 0] = energy * frequencies[:pairs].cos()
        key[half : half + pairs, 0] = energy * frequencies[:pairs].sin()
        part = slice(head * size, (head + 1) * size)
        first.v_proj.weight.view(kv_heads, size, hidden)[head] = code[part]
        for member in range(head * group, (head + 1) * group):
            query = first.q_proj.weight.view(heads, size, hidden)[member]
            query[:, 0] = 0
            query[:pairs, 0] = energy
            first.o_proj.weight.view(hidden, heads, size)[:, member] = WRITTEN * EMBEDDING_STD * place[part].T
    rows = [*range(half - slow, half), *range(size - slow, size)]
    for head in range(kv_heads):
        part = slice(head * 2 * slow, (head + 1) * 2 * slow)
        second.k_proj.weight.view(kv_heads, size, hidden)[head, rows] = place[part]
        copied = directions[torch.randperm(hidden - 1, generator=draw)[:size]]
        second.v_proj.weight.view(kv_heads, size, hidden)[head] = copied
        for member in range(head * group, (head + 1) * group):
            second.q_proj.weight.view(heads, size, hidden)[member, rows] = code[part]
            second.o_proj.weight.view(hidden, heads, size)[:, member] = COPIED * EMBEDDING_STD * copied.T
    for layer, gain in ((first, PREVIOUS_GAIN), (second, MATCH_GAIN)):
        layer.q_norm.weight.fill_(gain)
        layer.k_norm.weight.fill_(gain)
