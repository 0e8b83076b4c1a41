"""A layer for multi-token prediction (MTP) trained on a frozen body: the layer in PyTorch, its data, its training and its acceptance.

The layer is Qwen3-Next's, with the names of its checkpoints' tensors without `mtp.`: from the body's last state at a position (after its
last norm) and the token that follows, it computes a state from which the body's own head predicts the token after that. Longer drafts
feed the layer's states back to it.

Shapes: B windows, S tokens per window, H hidden, V vocabulary, D depths (how often a state was fed back, and 1).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeRMSNorm, rotate_half


class MtpLayer(nn.Module):
    """One MTP layer with a dense MLP, without the embedding and head that it shares with the body."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.mlp_only_layers = [0]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Qwen3MoeRMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = Qwen3MoeRMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList([Qwen3MoeDecoderLayer(config, 0)])
        self.norm = Qwen3MoeRMSNorm(hidden, eps=eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, embedded: Tensor, states: Tensor, rotary: tuple[Tensor, Tensor], keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the layer's states (B, S, H), after its last norm.

        Row j has the embedding of token j + 1 and, at depth d, the state of row j of the depth before (d > 1: of row j - 1).

        Args:
            embedded, states: (B, S, H).
            rotary: cosines and sines, (1, S, head_dim) each.
            keys: of the depths before, keys and values; those of this depth are appended. Row j attends to the first depth's up to
                row j - d + 1, and to one row of each later depth: what a draft finds in the layer's cache.
        """
        layer: Any = self.layers[0]
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], dim=-1)
        found = self.fc(joined)
        found = found + attend(layer.self_attn, layer.input_layernorm(found), rotary, keys)
        found = found + layer.mlp(layer.post_attention_layernorm(found))
        normed: Tensor = self.norm(found)
        return normed


def attend(attention: Any, inputs: Tensor, rotary: tuple[Tensor, Tensor], keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return causal attention over several depths' keys (see `MtpLayer.forward`), (B, S, H) for inputs (B, S, H)."""
    size = inputs.shape[1]
    shape = (*inputs.shape[:2], -1, attention.head_dim)
    cosines, sines = (each[:, None] for each in rotary)

    def turned(heads: Tensor) -> Tensor:
        return heads * cosines + rotate_half(heads) * sines

    query = turned(attention.q_norm(attention.q_proj(inputs).view(shape)).transpose(1, 2))  # (B, heads, S, head_dim)
    key = turned(attention.k_norm(attention.k_proj(inputs).view(shape)).transpose(1, 2))
    value = attention.v_proj(inputs).view(shape).transpose(1, 2)
    groups = attention.num_key_value_groups
    keys.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    depth = len(keys)
    rows = torch.arange(size)
    first_key, first_value = keys[0]
    seen = rows[None, :] <= rows[:, None] - (depth - 1)
    scores = [(query @ first_key.mT).masked_fill(~seen, -math.inf)]  # (B, heads, S, S)
    shifted = []
    for later in range(1, depth):
        back = depth - 1 - later  # rows
        key, value = (functional.pad(each, (0, 0, back, 0))[:, :, :size] for each in keys[later])
        scores.append((query * key).sum(-1, keepdim=True).masked_fill((rows < back)[:, None], -math.inf))
        shifted.append(value)
    weights = (torch.cat(scores, dim=-1) * attention.scaling).softmax(-1)
    mixed = weights[..., :size] @ first_value
    for number, value in enumerate(shifted):
        mixed = mixed + weights[..., size + number, None] * value
    projected: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return projected


def drafted_logits(layer: MtpLayer, body: Any, ids: Tensor, states: Tensor, depths: int) -> list[Tensor]:
    """Return what each depth predicts, D tensors (B, S - 1, V): row j is about the token after token j + 1, and counts from row D - 1.

    Args:
        ids: tokens (B, S).
        states: the body's last states (B, S, H).
    """
    embedded = body.model.embed_tokens(ids[:, 1:])
    rotary = body.model.rotary_emb(embedded, torch.arange(1, ids.shape[1])[None])
    keys: list[tuple[Tensor, Tensor]] = []
    fed, found = states[:, :-1], []
    for _ in range(depths):
        own = layer(embedded, fed, rotary, keys)
        found.append(body.lm_head(own))
        fed = functional.pad(own, (0, 0, 1, 0))[:, :-1]
    return found


def sampled_acceptance(logits: Tensor, body_logits: Tensor, temperature: float) -> Tensor:
    """Return the probability that a sampled draft is accepted, sum of min(p, q) (arXiv:2211.17192, corollary 3.6), (...) for (..., V)."""
    return torch.minimum((logits / temperature).softmax(-1), (body_logits / temperature).softmax(-1)).sum(-1)
