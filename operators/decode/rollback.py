"""Removal of tokens from a key-value cache: a mark of its length, and rewinding the cache to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from moegraft.operators.cache_form import layer_types, name_layers

REWINDABLE_KINDS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
STATELESS_KINDS = ("DummyLayer",)  # by name: transformers 5.17 does not have the class
RECURRENT = "keeps a recurrent state, from which a rejected draft token cannot be removed"
CONVOLVED = "keeps the state of a convolution, from which a rejected draft token cannot be removed"
INDEXED = "selects other tokens to attend to for several tokens at once than for one, so verified text would differ"
REASONS = {
    "linear_attention": RECURRENT,
    "conv": CONVOLVED,
    "hybrid": CONVOLVED,
    "indexed_attention": INDEXED,
    "deepseek_sparse_attention": INDEXED,  # its name in transformers 5.17
}
UNKNOWN_REASON = "keeps a state from which a rejected draft token cannot be removed"


class CacheMark:
    """The length of a cache at one moment. `rewind` may be called repeatedly, each time after at most `longest_rewind` more tokens."""

    def __init__(self, cache: Cache) -> None:
        self._rewinds = [rewind for layer in cache.layers if (rewind := _mark_layer(layer)) is not None]

    def rewind(self, keep: int = 0) -> None:
        """Keep the first `keep` tokens since the mark and drop the later ones.

        Every layer is rewound by its own length: an interrupted forward pass may have fed only some layers.
        """
        for rewind in self._rewinds:
            rewind(keep)


def _mark_layer(layer: Any) -> Callable[[int], None] | None:
    """Return a function that rewinds a layer to its present length plus a number of tokens; None for a layer without state."""
    kind = type(layer)
    keys, values = (layer.keys, layer.values) if getattr(layer, "is_initialized", False) else (None, None)
    if kind is DynamicLayer:
        return partial(_crop, layer, _length(layer))
    if kind is StaticLayer:
        return partial(_reset_length, layer, _length(layer))
    if kind is DynamicSlidingWindowLayer:  # grows by concatenation, which leaves these tensors unchanged
        return partial(_restore_window, layer, layer.cumulative_length, keys, values)
    if kind is StaticSlidingWindowLayer:  # shifts its tensors in place
        keys, values = (None if tensor is None else tensor.clone() for tensor in (keys, values))
        return partial(_restore_static_window, layer, layer.cumulative_length_int, keys, values)
    return None


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if layer.is_initialized else 0


def _crop(layer: Any, length: int, keep: int) -> None:
    extra = _length(layer) - length - keep
    if extra > 0:
        layer.crop(-extra)


def _reset_length(layer: Any, length: int, keep: int) -> None:
    """Rewind a layer of fixed size; tokens past its length are not read and will be overwritten."""
    if _length(layer) > length + keep:
        layer.cumulative_length.fill_(length + keep)


# keys and values: (1, heads, tokens or window, head_dim), or None where the layer was empty
def _restore_window(layer: Any, length: int, keys: torch.Tensor | None, values: torch.Tensor | None, keep: int) -> None:
    added = layer.cumulative_length - length
    if added <= keep:
        return
    for name, before in (("keys", keys), ("values", values)):
        if before is None:
            before = getattr(layer, name)[:, :, :0]
        since = getattr(layer, name)[:, :, -added:][:, :, :keep]
        setattr(layer, name, torch.cat([before, since], dim=2)[:, :, -layer.sliding_window + 1 :])
    layer.cumulative_length = length + keep


def _restore_static_window(layer: Any, length: int, keys: torch.Tensor | None, values: torch.Tensor | None, keep: int) -> None:
    added, window = layer.cumulative_length_int - length, layer.max_cache_len
    if added <= keep:
        return
    for now, before in ((layer.keys, keys), (layer.values, values)):
        end = min(length + added, window)
        since = now[:, :, end - added : end][:, :, :keep]
        held = now[:, :, :0] if before is None else before[:, :, : min(length, window)]
        kept = torch.cat([held, since], dim=2)[:, :, -window:]
        now[:, :, : kept.shape[2]].copy_(kept)
    layer.cumulative_length_int = length + keep
    layer.cumulative_length.fill_(length + keep)


def longest_rewind(cache: Cache) -> int | None:
    """Return how many tokens may follow a mark before the cache can no longer be rewound to it; None for any number."""
    windows = [layer.sliding_window - 1 for layer in cache.layers if type(layer) is DynamicSlidingWindowLayer]
    windows += [layer.max_cache_len for layer in cache.layers if type(layer) is StaticSlidingWindowLayer]
    return min(windows, default=None)


def unsupported_cache_reason(cache: object, names: Sequence[str] = ()) -> str | None:
    """Return why tokens cannot be removed from `cache`, or None where they can; `names` are the kinds of its layers, where known."""
    if not isinstance(cache, Cache):
        return f"a cache of type {type(cache).__name__} cannot be rolled back"
    if getattr(cache, "offloading", False):
        return "an offloaded cache cannot be rolled back"
    others = [
        index
        for index, layer in enumerate(cache.layers)
        if type(layer) not in REWINDABLE_KINDS and type(layer).__name__ not in STATELESS_KINDS
    ]
    if not others:
        return None
    named, kind = name_layers(cache.layers, others, names)
    return f"{named}: {'it' if len(others) == 1 else 'each'} {REASONS.get(kind, UNKNOWN_REASON)}"


def unsupported_model_reason(config: PreTrainedConfig) -> str | None:
    """Return `unsupported_cache_reason` of the cache that a model of `config` creates."""
    return unsupported_cache_reason(DynamicCache(config=config.get_text_config(decoder=True)), layer_types(config))
