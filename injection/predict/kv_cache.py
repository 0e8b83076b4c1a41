"""How large a model's key-value cache grows: measured on meta tensors, so that every kind of attention tells its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from moegraft.injection.plan import Plan
from moegraft.operators.cache_form import WORKED_ON, QuantisedForm
from moegraft.operators.experts.engine.room import token_bytes
from moegraft.operators.kv_cache.operator import QuantizedKvCache, group_of
from moegraft.operators.kv_cache.options import QuantizedKvCacheOptions
from moegraft.operators.structure import kinds


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache for one sequence; `window` bounds the tokens it keeps."""

    bytes_per_token: int
    fixed_bytes: int
    window: int | None


@dataclass(frozen=True, slots=True)
class KvCache:
    """A model's cache.

    Attributes:
        exact: False where it is from the config's numbers of heads instead of from the model itself.
        itemsize: bytes of a value in the model's dtype.
        form: of a quantised cache, of which one layer at a time is in that dtype as well.
    """

    layers: tuple[LayerCache, ...]
    exact: bool
    itemsize: int
    form: QuantisedForm | None = None

    def nbytes(self, context: int, batch: int = 1) -> int:
        """For `batch` sequences of `context` tokens."""
        if self.form is not None:
            held = sum(self.form.layer_bytes(layer.bytes_per_token, self.itemsize, context) for layer in self.layers)
            return batch * (held + WORKED_ON * context * max(layer.bytes_per_token for layer in self.layers))
        kept = (min(context, layer.window) if layer.window else context for layer in self.layers)
        per_sequence = sum(layer.fixed_bytes + layer.bytes_per_token * tokens for layer, tokens in zip(self.layers, kept, strict=True))
        return batch * per_sequence


def form_of(plan: Plan, skeleton: PreTrainedModel) -> QuantisedForm | None:
    """What a plan's rules make of the cache; None: nothing."""
    found = next((swap.options for swap in plan.swaps if swap.operator == QuantizedKvCache.name), None)
    return found.form(group_of(skeleton.config, found)) if isinstance(found, QuantizedKvCacheOptions) else None


def kv_cache(skeleton: PreTrainedModel) -> KvCache:
    """The cache of a model on meta: what one and two tokens leave in it, read off its tensors."""
    try:
        one, two = (_filled(skeleton, tokens) for tokens in (1, 2))
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        # Some families look at values, which meta tensors do not have.
        return _by_config(skeleton)
    layers = tuple(
        LayerCache(after - before, 2 * before - after, window) for (before, window), (after, _) in zip(one, two, strict=True) if after
    )
    return KvCache(layers, True, skeleton.dtype.itemsize) if layers else _by_config(skeleton)


def _filled(skeleton: PreTrainedModel, tokens: int) -> list[tuple[int, int | None]]:
    """Bytes and window of each layer of a cache with this many tokens."""
    with _without_experts(skeleton), torch.no_grad(), torch.device("meta"):
        cache = skeleton(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=True).past_key_values
    return [(sum(map(_nbytes, vars(layer).values())), getattr(layer, "sliding_window", None)) for layer in cache.layers]


def _nbytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


@contextmanager
def _without_experts(skeleton: PreTrainedModel) -> Iterator[None]:
    """While it lasts, experts give back what they are given: which expert a token goes to is a value, and no cache depends on it."""
    experts = [module for path, module in skeleton.named_modules() if "experts" in kinds(path, module, skeleton)]
    for module in experts:
        module.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        yield
    finally:
        for module in experts:
            del module.forward


def _by_config(skeleton: PreTrainedModel) -> KvCache:
    config = skeleton.config.get_text_config()
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    found = tuple(LayerCache(token_bytes(layer, skeleton.dtype), 0, None) for layer in layers)
    return KvCache(found, False, skeleton.dtype.itemsize)
