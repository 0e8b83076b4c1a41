"""What a captured step needs of transformers' key-value cache: memory that stays, and no count kept in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def why_not_static(cache: Any) -> str | None:
    """Why a step on this cache cannot be replayed; None where it can."""
    if cache is None:
        return "there is no key-value cache"
    layers = getattr(cache, "layers", None) or []
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not StaticLayer})
    if others or not layers:
        kinds = f" of {', '.join(others)}" if others else ""
        return (
            f"the key-value cache ({type(cache).__name__}{kinds}) is not of fixed size and full attention; where a model's attention "
            "is full, generate makes such a one with cache_implementation='static'"
        )
    if getattr(cache, "offloading", False):
        return "the key-value cache is offloaded"
    if not all(isinstance(getattr(layer, "cumulative_length", None), torch.Tensor) for layer in layers):
        return "this version of transformers counts the tokens of a static cache elsewhere than in it"
    return None


def is_filled(cache: Any) -> bool:
    """Whether its memory is there: it comes with the first tokens."""
    return all(layer.is_initialized for layer in cache.layers)


def places(cache: Any) -> tuple[tuple[int, torch.Size, torch.dtype], ...]:
    """Where its memory is and what form it has, which a captured step reads and writes: of a cache that is gone another may have both."""
    tensors = (tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length))
    return tuple((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors)


class Length:
    """How many tokens a cache held, to go back to."""

    def __init__(self, cache: Any) -> None:
        self._kept = [(layer.cumulative_length, layer.cumulative_length.clone()) for layer in cache.layers]

    def restore(self) -> None:
        for counter, value in self._kept:
            counter.copy_(value)


def has_static_form(config: PretrainedConfig) -> bool:
    """Whether a static cache of this model is of full attention alone."""
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
    """A cache of room for `tokens` with what `cache` holds, which is of full attention."""
    made = StaticCache(config=config, max_cache_len=tokens)
    layers: list[Any] = [] if cache is None else cache.layers  # of several kinds without a common type
    for number, layer in enumerate(layers):
        made.update(layer.keys, layer.values, number)
    return made


def grown(cache: StaticCache, config: PretrainedConfig) -> DynamicCache:
    """A cache that grows, with what `cache` holds."""
    made = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        tokens = int(layer.cumulative_length)
        made.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), number)
    return made
