"""Removal of tokens from a key-value cache: a mark of its length, rewinding to it, and passes that are taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from moegraft.operators.cache_form import layer_types, name_layers
from moegraft.operators.decode.coded_cache import CodedLayer
from moegraft.operators.decode.states import StateMark, attention_part, has_states, keep_past, keeps_nothing, why_not_split

if TYPE_CHECKING:
    from moegraft.operators.decode.replay import StepReplay

REWINDABLE_KINDS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer, CodedLayer)
INDEXED = "selects other tokens to attend to for several tokens at once than for one, so verified text would differ"
REASONS = {
    "indexed_attention": INDEXED,
    "deepseek_sparse_attention": INDEXED,  # its name in transformers 5.17
}
UNKNOWN_REASON = "keeps a state from which a rejected draft token cannot be removed"


class CacheMark:
    """The length of a cache at one moment. `rewind` may be called repeatedly, each time after at most `longest_rewind` more tokens.

    Args:
        longest: tokens of the longest pass of which `rewind` may keep some and drop others, where the cache has recurrent or convolution
            states. It keeps their memory (`drop_past`), and a mark ends those before it.
        singly: whether passes over one token may follow before the first `rewind`. Such states are copied for it.
    """

    def __init__(self, cache: Cache, longest: int = 8, *, singly: bool = True) -> None:
        self._cache = cache
        keep_past(cache, longest)
        self._states = [StateMark(layer, copies=singly) for layer in cache.layers if has_states(layer)]
        self._length = int(cache.get_seq_length()) if self._states else 0  # static caches count in a tensor
        self._rewinds = [rewind for layer in cache.layers if (rewind := _mark_layer(layer)) is not None]

    def rewind(self, keep: int = 0) -> None:
        """Keep the first `keep` tokens since the mark and drop the later ones. Tokens that are kept were fed in one pass from the mark on.

        Every layer is rewound by its own length: an interrupted forward pass may have fed only some layers.
        """
        at_once = self._states and int(self._cache.get_seq_length()) - self._length > 1
        for mark in self._states:
            if not keep:
                mark.restore()
            elif at_once:
                mark.keep(keep)
        for rewind in self._rewinds:
            rewind(keep)


def _mark_layer(layer: Any) -> Callable[[int], None] | None:
    """Return a function that rewinds a layer's keys and values to their present length plus a number of tokens; None where it has none."""
    kind = attention_part(layer)
    keys, values = (layer.keys, layer.values) if getattr(layer, "is_initialized", False) else (None, None)
    if kind in (DynamicLayer, CodedLayer):
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
        kind = attention_part(layer)
        assert kind is not None, "the layer has keys and values"
        kind.crop(layer, -extra)  # type: ignore[attr-defined] # a layer that also has states would refuse


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
    layers: list[Any] = cache.layers
    windows = [layer.sliding_window - 1 for layer in layers if attention_part(layer) is DynamicSlidingWindowLayer]
    windows += [layer.max_cache_len for layer in layers if attention_part(layer) is StaticSlidingWindowLayer]
    return min(windows, default=None)


def unsupported_cache_reason(cache: object, names: Sequence[str] = ()) -> str | None:
    """Return why tokens cannot be removed from `cache`, or None where they can; `names` are the kinds of its layers, where known."""
    if not isinstance(cache, Cache):
        return f"a cache of type {type(cache).__name__} cannot be rolled back"
    if getattr(cache, "offloading", False):
        return "an offloaded cache cannot be rolled back"
    others = [index for index, layer in enumerate(cache.layers) if not keeps_nothing(layer) and not _is_rewindable(layer)]
    if not others:
        only_states = all(has_states(layer) and attention_part(layer) is None for layer in cache.layers)
        return "none of its layers is of attention, by whose length a mark counts tokens" if only_states and cache.layers else None
    named, kind = name_layers(cache.layers, others, names)
    return f"{named}: {'it' if len(others) == 1 else 'each'} {REASONS.get(kind, UNKNOWN_REASON)}"


def _is_rewindable(layer: object) -> bool:
    part = attention_part(layer)
    return part in REWINDABLE_KINDS or (part is None and has_states(layer))


def unsupported_model_reason(model: PreTrainedModel) -> str | None:
    """Return `unsupported_cache_reason` of the cache that a model creates, or why its passes over states cannot be split."""
    cache, names = DynamicCache(config=model.config.get_text_config(decoder=True)), layer_types(model.config)
    return unsupported_cache_reason(cache, names) or why_not_split(model, cache, names)


def passes_over(cache: Cache | None, replay: StepReplay | None) -> CachedPasses:
    """Return the passes over a cache, those of `replay` if it replays the model's steps; `cache` is None where a model keeps none."""
    return CachedPasses(cache) if cache is None or replay is None else replay.passes(cache)


class CachedPasses:
    """A cache, and the passes of its model that feed tokens to it.

    Here the model computes each of them, between `leave` and `note`. `NativePasses` (native/steps.py) computes what it can itself, by
    `follow` and `greedy`; the cache then has the tokens after `close`.

    Args:
        cache: which nothing else uses meanwhile; None where a model keeps none.

    Attributes:
        hidden_states: the last ones of the latest native pass, (B, T, H); None where its program was recorded without them.
        step_ns: the time of each step of the latest `greedy`.
    """

    def __init__(self, cache: Cache | None) -> None:
        self.cache = cache
        self.hidden_states: torch.Tensor | None = None
        self.step_ns: Sequence[int] = ()
        self._new_mark: Callable[[Cache], CacheMark] | None = None  # while passes may be taken back
        self._mark: CacheMark | None = None  # from the first pass of the model on

    def follow(self, tokens: Sequence[int], states: torch.Tensor | None = None) -> torch.Tensor | None:
        """Feed some tokens of one sequence, or one of each of several, in a native pass.

        Args:
            states: what an MTP layer is given beside the tokens, (1, T, H).

        Returns:
            The logits, (R, V) float32 until the next pass over as many; None where the model must compute them.
        """
        return None

    def greedy(self, token: int, count: int, ends: Sequence[int], *, hidden: bool) -> list[int]:
        """Of one sequence: feed a token, the likeliest one after it, and so on; return the likeliest after each.

        At most `count`, none after one of `ends`, and as many as a user who interrupts them does not wait for; none at all where the model
        must compute a pass. `hidden`: whether `hidden_states` has those of each step, (1, T, H).
        """
        return []

    def leave(self) -> None:
        """Let the cache have all tokens, for a pass of the model."""
        if self._new_mark is not None and self._mark is None:
            assert self.cache is not None, "only passes over a cache are taken back"
            self._mark = self._new_mark(self.cache)

    def note(self) -> bool:
        """Note that the model has computed a pass over the cache; return whether one over as many tokens may follow natively."""
        return False

    def close(self) -> None:
        """Let the cache have all tokens, before anything else may happen to it."""

    def mark(self, longest: int, *, singly: bool) -> None:
        """Let `rewind` take back the passes that follow; the arguments are those of `CacheMark`."""
        self._mark, self._new_mark = None, partial(CacheMark, longest=longest, singly=singly)

    def unmark(self) -> None:
        """Let the passes that follow stand."""
        self._new_mark = self._mark = None

    def rewind(self, keep: int = 0) -> None:
        """Keep the first `keep` tokens since the mark, which were fed in one pass from it on, and take back the later ones.

        Nothing is taken back without a mark.
        """
        if self._mark is not None:
            self._mark.rewind(keep)
