"""What a captured step needs of transformers' key-value cache: memory that stays, and counts that Python need not keep.

A sliding window counts its tokens in Python as well, and computes one way until it is full and another way from then on: a step is captured
for each of the two, and a replay counts along (`advance`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FIXED = (StaticLayer, StaticSlidingWindowLayer)


def why_not_static(cache: Any) -> str | None:
    """Why a step on this cache cannot be replayed; None where it can."""
    if cache is None:
        return "there is no key-value cache"
    layers = getattr(cache, "layers", None) or []
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in FIXED})
    if others or not layers:
        kinds = f" of {', '.join(others)}" if others else ""
        return (
            f"the key-value cache ({type(cache).__name__}{kinds}) is not of fixed size, full attention and sliding windows; for a model "
            "that has no other, generate makes such a one with cache_implementation='static'"
        )
    if getattr(cache, "offloading", False):
        return "the key-value cache is offloaded"
    if not all(isinstance(getattr(layer, "cumulative_length", None), torch.Tensor) for layer in layers):
        return "this version of transformers counts the tokens of a static cache elsewhere than in it"
    return None


def why_unseen_positions(arguments: Mapping[str, Any], cache: Any) -> str | None:
    """Why a step over sliding windows would count in Python where its tokens are; None where it is told."""
    if not _windows(cache):
        return None
    mask = arguments.get("attention_mask")
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    made = all(isinstance(each, torch.Tensor) and each.dim() == 4 for each in masks)
    if made and isinstance(arguments.get("position_ids"), torch.Tensor):
        return None
    return "the step is not given the masks of its sliding windows and its positions, as generate gives them"


def is_filled(cache: Any) -> bool:
    """Whether its memory is there: it comes with the first tokens."""
    return all(layer.is_initialized for layer in cache.layers)


def places(cache: Any) -> tuple[tuple[int, torch.Size, torch.dtype], ...]:
    """Where its memory is and what form it has, which a captured step reads and writes: of a cache that is gone another may have both."""
    tensors = (tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length))
    return tuple((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors)


def phase(cache: Any) -> tuple[bool, ...]:
    """Which sliding windows are full: they compute another way then."""
    return tuple(layer.cumulative_length_int >= layer.max_cache_len for layer in _windows(cache))


def advance(cache: Any) -> None:
    """Counts a token that a replay has written."""
    for layer in _windows(cache):
        layer.cumulative_length_int += 1


@contextmanager
def being_captured(cache: Any) -> Iterator[None]:
    """While it lasts, full windows move on by copies alone: transformers' own way makes a tensor out of a number, for which a GPU that
    captures would have to wait. Counts in Python are afterwards what they were, as nothing is written while a step is captured."""
    windows = _windows(cache)
    counts = [layer.cumulative_length_int for layer in windows]
    for layer, full in zip(windows, phase(cache), strict=True):
        if full:
            layer.update = partial(_moved_on, layer)
    try:
        yield
    finally:
        for layer, count in zip(windows, counts, strict=True):
            vars(layer).pop("update", None)
            layer.cumulative_length_int = count


def _moved_on(layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A full window with one more token, (B, heads, 1, width) of each: the first leaves."""
    layer.cumulative_length_int += 1
    for held, new in ((layer.keys, keys), (layer.values, values)):
        held.copy_(torch.cat((held[:, :, 1:], new), dim=2))
    return layer.keys, layer.values


def _windows(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if type(layer) is StaticSlidingWindowLayer]


class Mark:
    """What a cache held, to go back to: the number of tokens, and of windows, whose tokens leave, all of them."""

    def __init__(self, cache: Any) -> None:
        self._counters = [(layer.cumulative_length, layer.cumulative_length.clone()) for layer in cache.layers]
        self._windows = [(layer, layer.cumulative_length_int, layer.keys.clone(), layer.values.clone()) for layer in _windows(cache)]

    def restore(self) -> None:
        for counter, value in self._counters:
            counter.copy_(value)
        for layer, count, keys, values in self._windows:
            layer.cumulative_length_int = count
            layer.keys.copy_(keys)
            layer.values.copy_(values)


def has_static_form(config: PretrainedConfig) -> bool:
    """Whether a static cache of this model is of full attention and sliding windows alone."""
    try:
        cache = StaticCache(config=config, max_cache_len=1)
    except (KeyError, ValueError, TypeError, NotImplementedError):
        return False  # layers of a kind that has no static form
    return why_not_static(cache) is None


def names_a_cache(arguments: Mapping[str, Any], default: Any) -> bool:
    """Whether `generate` was told which cache to use, by its arguments or by its model's own configuration."""
    own = arguments.get("generation_config") or default
    named = arguments.get("cache_implementation") or getattr(own, "cache_implementation", None)
    return named is not None or "past_key_values" in arguments or arguments.get("use_cache") is False


def fixed(cache: DynamicCache | None, config: PretrainedConfig, tokens: int) -> StaticCache:
    """A cache of room for `tokens` with what `cache` holds, which is of full attention and sliding windows."""
    made: Any = StaticCache(config=config, max_cache_len=tokens)
    layers: list[Any] = [] if cache is None else cache.layers  # of several kinds without a common type
    for number, layer in enumerate(layers):
        if not layer.is_initialized:
            continue
        made.update(layer.keys, layer.values, number)
        held = layer.keys
        gone = layer.cumulative_length - held.shape[2] if isinstance(layer, DynamicSlidingWindowLayer) and held is not None else 0
        if gone:  # the first place of a full window is for the token that leaves with the next, and is not read before
            for tensor in (made.layers[number].keys, made.layers[number].values):
                tensor.copy_(tensor.roll(1, dims=2))
            made.layers[number].cumulative_length_int += gone
    return made  # type: ignore[no-any-return]


def grown(cache: StaticCache, config: PretrainedConfig) -> DynamicCache:
    """A cache that grows, with what `cache` holds."""
    made: Any = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        if not layer.is_initialized:
            continue
        window = type(layer) is StaticSlidingWindowLayer
        tokens = layer.cumulative_length_int if window else int(layer.cumulative_length)
        made.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), number)
        if window:
            made.layers[number].cumulative_length = tokens
    return made  # type: ignore[no-any-return]
