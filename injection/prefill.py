"""Prefill in chunks, which limits the memory of activations to that of one chunk."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moegraft.injection.injected import new_cache
from moegraft.operators.cache_form import layer_types, name_layers
from moegraft.operators.decode.states import attention_part, has_states, keeps_nothing, moves_states, passes_are_split, why_not_split

PREFILL_CHUNK = 2048  # tokens
APPENDABLE = (DynamicLayer, DynamicSlidingWindowLayer)  # layers to which tokens can be appended in chunks
# Tokens of a model with states: a chunk and the rest have several each, as one alone is a step of decoding, which may round otherwise
# (Nemotron-H limits its time steps in prompts only).
LEAST_STATE_CHUNK = 4


def why_not_appendable(model: PreTrainedModel) -> str | None:
    """Return the reason why this model cannot prefill in chunks; None if it can.

    Tokens are appended to layers of attention in their dtype, to those with recurrent or convolution states, and to both in one.
    """
    cache, names = DynamicCache(config=model.config.get_text_config(decoder=True)), layer_types(model.config)
    bad = [number for number, layer in enumerate(cache.layers) if not keeps_nothing(layer) and not _is_appendable(layer)]
    if bad:
        return name_layers(cache.layers, bad, names)[0]
    reason = why_not_split(model, cache, names)
    if reason is None and not all(passes_are_split(module) for module in model.modules() if moves_states(module)):
        return "its layers keep states, and moegraft has not loaded it"
    return reason


def _is_appendable(layer: object) -> bool:
    part = attention_part(layer)
    return part in APPENDABLE or (part is None and has_states(layer))


def chunk_size(model: PreTrainedModel, chunk_tokens: int) -> int:
    """Return the tokens of a model's chunks where `chunk_tokens` are asked for; 0 where it computes prompts at once."""
    if not chunk_tokens or why_not_appendable(model) is not None:
        return 0
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return max(chunk_tokens, LEAST_STATE_CHUNK) if any(map(has_states, layers)) else chunk_tokens


@torch.no_grad()
def read_ahead(model: PreTrainedModel, token_ids: list[int], cache: DynamicCache | None, chunk_tokens: int) -> DynamicCache | None:
    """Compute a prompt chunk by chunk until at most `chunk_tokens` are left, which `generate` computes.

    Args:
        token_ids: the whole prompt; `cache` may hold its beginning.
        cache: None for a new one.
        chunk_tokens: 0 leaves everything to `generate`; see `chunk_size`.

    Returns:
        The cache; `cache` itself, None included, if no chunk was computed.
    """
    held = cache.get_seq_length() if cache is not None else 0
    if len(token_ids) - held <= chunk_tokens:
        return cache
    chunk_tokens = chunk_size(model, chunk_tokens)
    if not chunk_tokens or len(token_ids) - held <= chunk_tokens:
        return cache
    cache = cache if cache is not None else new_cache(model)
    stateful = any(map(has_states, cache.layers))
    call: Any = model
    # The logits of a chunk are not used, and with a large vocabulary they would be the largest tensor.
    extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    while (left := len(token_ids) - held) > chunk_tokens:
        size = chunk_tokens - 1 if stateful and left == chunk_tokens + 1 else chunk_tokens
        chunk = torch.tensor([token_ids[held : held + size]], device=model.device)
        call(input_ids=chunk, past_key_values=cache, use_cache=True, **extra)
        held += size
    return cache
