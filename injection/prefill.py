"""Prefill in chunks, which limits the memory of activations to that of one chunk."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moegraft.injection.injected import new_cache

PREFILL_CHUNK = 2048  # tokens
APPENDABLE = (DynamicLayer, DynamicSlidingWindowLayer)  # layers to which tokens can be appended in chunks


def why_not_appendable(model: PreTrainedModel) -> str | None:
    """Return the reason why this model cannot prefill in chunks; None if it can."""
    if getattr(model, "_is_stateful", False):
        return "its layers keep a recurrent state"
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    bad = [index for index, layer in enumerate(layers) if type(layer) not in APPENDABLE]
    if not bad:
        return None
    layer_types = getattr(config, "layer_types", None) or ()
    kinds = {layer_types[index] if index < len(layer_types) else type(layers[index]).__name__ for index in bad}
    return f"{len(bad)} of its layers are of kind {', '.join(sorted(kinds))}"


@torch.no_grad()
def read_ahead(model: PreTrainedModel, token_ids: list[int], cache: DynamicCache | None, chunk_tokens: int) -> DynamicCache | None:
    """Compute a prompt chunk by chunk until at most `chunk_tokens` are left, which `generate` computes.

    Args:
        token_ids: the whole prompt; `cache` may hold its beginning.
        cache: None for a new one.
        chunk_tokens: 0 leaves everything to `generate`.

    Returns:
        The cache; `cache` itself, None included, if no chunk was computed.
    """
    held = cache.get_seq_length() if cache is not None else 0
    if not chunk_tokens or len(token_ids) - held <= chunk_tokens or why_not_appendable(model) is not None:
        return cache
    cache = cache if cache is not None else new_cache(model)
    call: Any = model
    # The logits of a chunk are not used, and with a large vocabulary they would be the largest tensor.
    extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    while len(token_ids) - held > chunk_tokens:
        chunk = torch.tensor([token_ids[held : held + chunk_tokens]], device=model.device)
        call(input_ids=chunk, past_key_values=cache, use_cache=True, **extra)
        held += chunk_tokens
    return cache
