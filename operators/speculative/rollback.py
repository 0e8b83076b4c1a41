"""Taking tokens back out of a KV cache: a mark, and the way back to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

REWINDABLE_KINDS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
STATELESS_KINDS = ("DummyLayer",)  # by name: transformers 5.17 does not have it
RECURRENT = "keeps a recurrent state, which a rejected draft token cannot be taken out of again"
CONVOLVED = "keeps the state of a convolution, which a rejected draft token cannot be taken out of again"
INDEXED = "picks other tokens to attend to for several tokens at once than for one, so verified text would differ"
REASONS = {
    "linear_attention": RECURRENT,
    "conv": CONVOLVED,
    "hybrid": CONVOLVED,
    "indexed_attention": INDEXED,
    "deepseek_sparse_attention": INDEXED,  # its name in transformers 5.17
}
UNKNOWN_REASON = "keeps a state that a rejected draft token cannot be taken out of again"
SHOWN_LAYERS = 3


class _LayerMark(Protocol):
    def rewind(self, keep: int) -> None:
        """Keeps the first `keep` tokens since the mark and forgets the later ones."""
        ...


@dataclass(frozen=True, slots=True)
class _Cropped:
    """A layer that holds every token: the last ones are cut off."""

    layer: Any
    length: int

    def rewind(self, keep: int) -> None:
        extra = _length(self.layer) - self.length - keep
        if extra > 0:
            self.layer.crop(-extra)


@dataclass(frozen=True, slots=True)
class _Sliding:
    """A window that grows by concatenation, so that the tensors of the mark stay as they were."""

    layer: Any
    length: int
    keys: torch.Tensor | None  # (1, heads, tokens, head_dim)
    values: torch.Tensor | None

    def rewind(self, keep: int) -> None:
        layer, added = self.layer, self.layer.cumulative_length - self.length
        if added <= keep:
            return
        for name, before in (("keys", self.keys), ("values", self.values)):
            if before is None:
                before = getattr(layer, name)[:, :, :0]
            since = getattr(layer, name)[:, :, -added:][:, :, :keep]
            setattr(layer, name, torch.cat([before, since], dim=2)[:, :, -layer.sliding_window + 1 :])
        layer.cumulative_length = self.length + keep


@dataclass(frozen=True, slots=True)
class _Static:
    """A layer of fixed size, written in place: what is past its length is not read and is written anew."""

    layer: Any
    length: int

    def rewind(self, keep: int) -> None:
        if _length(self.layer) > self.length + keep:
            self.layer.cumulative_length.fill_(self.length + keep)


@dataclass(frozen=True, slots=True)
class _StaticSliding:
    """A window of fixed size, shifted in place: the mark holds a copy of it."""

    layer: Any
    length: int
    keys: torch.Tensor | None  # (1, heads, window, head_dim)
    values: torch.Tensor | None

    def rewind(self, keep: int) -> None:
        layer, added = self.layer, self.layer.cumulative_length_int - self.length
        if added <= keep:
            return
        window = layer.max_cache_len
        for now, before in ((layer.keys, self.keys), (layer.values, self.values)):
            end = min(self.length + added, window)
            since = now[:, :, end - added : end][:, :, :keep]
            held = now[:, :, :0] if before is None else before[:, :, : min(self.length, window)]
            kept = torch.cat([held, since], dim=2)[:, :, -window:]
            now[:, :, : kept.shape[2]].copy_(kept)
        layer.cumulative_length_int = self.length + keep
        layer.cumulative_length.fill_(self.length + keep)


def _length(layer: Any) -> int:
    return int(layer.get_seq_length()) if layer.is_initialized else 0


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _mark_layer(layer: Any) -> _LayerMark | None:
    kind = type(layer)
    keys, values = (layer.keys, layer.values) if getattr(layer, "is_initialized", False) else (None, None)
    if kind is DynamicSlidingWindowLayer:
        return _Sliding(layer, layer.cumulative_length, keys, values)
    if kind is StaticSlidingWindowLayer:
        return _StaticSliding(layer, layer.cumulative_length_int, _copy(keys), _copy(values))
    if kind is StaticLayer:
        return _Static(layer, _length(layer))
    if kind is DynamicLayer:
        return _Cropped(layer, _length(layer))
    return None


class CacheMark:
    """Where a cache stood. `rewind(keep)` may be called again and again, each time after at most `longest_rewind` more tokens."""

    def __init__(self, cache: Cache) -> None:
        self._layers = [mark for layer in cache.layers if (mark := _mark_layer(layer)) is not None]

    def rewind(self, keep: int = 0) -> None:
        """Keeps the first `keep` tokens since the mark and forgets the later ones, layer by layer: an interrupted forward pass
        may have fed some layers and not others."""
        for layer in self._layers:
            layer.rewind(keep)


def longest_rewind(cache: Cache) -> int | None:
    """How many tokens may follow a mark so that it can still be gone back to; None: any number."""
    windows = [layer.sliding_window - 1 for layer in cache.layers if type(layer) is DynamicSlidingWindowLayer]
    windows += [layer.max_cache_len for layer in cache.layers if type(layer) is StaticSlidingWindowLayer]
    return min(windows, default=None)


def why_not_rewindable(cache: object, layer_types: Sequence[str] = ()) -> str | None:
    """Why tokens cannot be taken back out of `cache`, or None when they can. Names the layers by `layer_types` where given."""
    if not isinstance(cache, Cache):
        return f"a cache of type {type(cache).__name__} cannot be rolled back"
    if getattr(cache, "offloading", False):
        return "an offloaded cache cannot be rolled back"
    bad = [index for index, layer in enumerate(cache.layers) if not _is_rewindable(layer)]
    if not bad:
        return None
    kinds = {layer_types[index] if index < len(layer_types) else type(cache.layers[index]).__name__ for index in bad}
    kind = ", ".join(sorted(kinds))
    reason = REASONS.get(kind, UNKNOWN_REASON)
    layers = ", ".join(map(str, bad[:SHOWN_LAYERS])) + (" ..." if len(bad) > SHOWN_LAYERS else "")
    return f"layer {layers} is of kind {kind}: it {reason}" if len(bad) == 1 else f"layers {layers} are of kind {kind}: each {reason}"


def _is_rewindable(layer: object) -> bool:
    return type(layer) in REWINDABLE_KINDS or type(layer).__name__ in STATELESS_KINDS


def why_model_not_rewindable(config: PreTrainedConfig) -> str | None:
    """The same for the cache that a model of `config` makes by itself."""
    text = config.get_text_config(decoder=True)
    return why_not_rewindable(DynamicCache(config=text), getattr(text, "layer_types", None) or ())
