"""The form of a model's key-value cache: its kinds of layers, how keys and values are stored, and the bytes that they and states take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

SHOWN_LAYERS = 3  # that a message names


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """The storage of a quantised cache.

    Attributes:
        value_bits: bits of a stored key or value.
        group: values that share a scale and a zero point; None where a whole layer shares one scale, whose bytes are not counted.
        residual: number of latest tokens that may still be in the model's dtype.
        scale_bytes: of a group; None for those of a scale and a zero point in the model's dtype.
        in_place: whether attention reads the stored values themselves, so that none are restored to the model's dtype.
    """

    value_bits: int
    group: int | None
    residual: int
    scale_bytes: int | None = None
    in_place: bool = False

    def layer_bytes(self, bytes_per_token: int, itemsize: int, tokens: int) -> int:
        """Return the most bytes that `tokens` tokens take in one layer.

        Args:
            bytes_per_token: bytes of one token in the model's dtype.
            itemsize: bytes of one value in the model's dtype, which scales and zero points have as well.
        """
        values = bytes_per_token // itemsize
        scale_bytes = 2 * itemsize if self.scale_bytes is None else self.scale_bytes
        quantised = values * self.value_bits / 8 + (scale_bytes * values / self.group if self.group else 0)
        recent = min(tokens, self.residual)
        return round(quantised * (tokens - recent)) + bytes_per_token * recent

    def cache_bytes(self, bytes_per_token: Sequence[int], itemsize: int, tokens: int) -> int:
        """Return the most bytes that `tokens` tokens take in all layers; `bytes_per_token` has one entry per layer.

        Unless it is read in place, the layer that is being computed is also held twice in the model's dtype: without the new token, and
        with it.
        """
        restored = 0 if self.in_place else 2 * max(bytes_per_token) * tokens
        return sum(self.layer_bytes(size, itemsize, tokens) for size in bytes_per_token) + restored


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer for one sequence.

    Attributes:
        bytes_per_token: of keys and values.
        fixed_bytes: of recurrent and convolution states, which stand for any number of tokens.
        window: the maximum number of tokens that are kept; None: all.
    """

    bytes_per_token: int
    fixed_bytes: int
    window: int | None


@dataclass(frozen=True, slots=True)
class KvCache:
    """A model's key-value cache, its states included.

    Attributes:
        exact: whether it is measured on the model; otherwise it is computed from the config's numbers of heads, without states.
        itemsize: bytes of a value in the model's dtype.
        form: the form of a quantised cache.
    """

    layers: tuple[LayerCache, ...]
    exact: bool
    itemsize: int
    form: QuantisedForm | None = None

    @property
    def state_bytes(self) -> int:
        """The bytes of a sequence's states, of any number of tokens."""
        return sum(layer.fixed_bytes for layer in self.layers)

    def nbytes(self, context: int, batch: int = 1) -> int:
        """Return the bytes of `batch` sequences of `context` tokens."""
        if self.form is not None:
            tokens = self.form.cache_bytes([layer.bytes_per_token for layer in self.layers], self.itemsize, context)
            return batch * (self.state_bytes + tokens)
        kept = (min(context, layer.window) if layer.window else context for layer in self.layers)
        return batch * sum(layer.fixed_bytes + layer.bytes_per_token * tokens for layer, tokens in zip(self.layers, kept, strict=True))


def kv_cache(model: PreTrainedModel) -> KvCache:
    """Measure the cache of a model, which may be on meta, with one and with two tokens, for any kind of attention."""
    try:
        one, two = (_filled(model, tokens) for tokens in (1, 2))
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        one = two = []  # some families read values, which meta tensors do not have
    layers = tuple(
        LayerCache(after - before, 2 * before - after, window) for (before, window), (after, _) in zip(one, two, strict=True) if after
    )
    if layers:
        return KvCache(layers, True, model.dtype.itemsize)
    by_config = tuple(LayerCache(size, 0, None) for size in _token_bytes(model.config, model.dtype))
    return KvCache(by_config, False, model.dtype.itemsize)


def _token_bytes(config: PretrainedConfig, dtype: torch.dtype) -> list[int]:
    """Return the bytes of one token's keys and values in each layer, by the config's numbers of heads; a latent cache takes less."""
    from transformers import DynamicCache
    from transformers.cache_utils import CacheLayerMixin

    text = config.get_text_config()
    configs = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    layers: list[Any] = DynamicCache(config=text).layers
    attention = [isinstance(layer, CacheLayerMixin) for layer in layers] if len(layers) == len(configs) else [True] * len(configs)
    sizes = []
    for layer, has_keys in zip(configs, attention, strict=True):
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        sizes.append(int(2 * heads * size * dtype.itemsize) if has_keys else 0)
    return sizes


def _filled(model: PreTrainedModel, tokens: int) -> list[tuple[int, int | None]]:
    """Return the bytes and the window of each layer of a cache with this many tokens, and of what the cache holds beside its layers."""
    import torch
    from torch.fx.experimental import _config

    from moegraft.operators.base import CACHE

    call: Any = model
    meta_options: Any = _config
    # Which positions are not zero has no effect on the sizes in a cache.
    with _only_shapes(model), torch.no_grad(), model.device, meta_options.patch(meta_nonzero_assume_all_nonzero=True):
        cache = call(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=True)[CACHE]
    layers = [(sum(map(_nbytes, vars(layer).values())), getattr(layer, "sliding_window", None)) for layer in cache.layers]
    return [*layers, (sum(map(_nbytes, vars(cache).values())), None)]


def _nbytes(value: object) -> int:
    import torch

    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


@contextmanager
def _only_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Let experts, and norms on meta, return their input while the body runs: it has the shape and the dtype of what they compute.

    Routing needs values. On meta norms take half of the time; elsewhere they keep the values of deep models finite.
    """
    from moegraft.operators.structure import kinds

    left_out = {"experts", "norm"} if model.device.type == "meta" else {"experts"}
    skipped = [module for path, module in model.named_modules() if left_out & kinds(path, module, model)]
    for module in skipped:
        module.forward = lambda hidden_states, *args, **kwargs: hidden_states  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in skipped:
            del module.forward


def layer_types(config: PretrainedConfig) -> Sequence[str]:
    """Return the kinds of a model's layers as its config names them; empty where it does not."""
    return getattr(config.get_text_config(decoder=True), "layer_types", None) or ()


def name_layers(layers: Sequence[object], indices: Sequence[int], names: Sequence[str]) -> tuple[str, str]:
    """Describe the layers of a cache at `indices`, as in `layers 0, 2 are of kind conv`; also return their kind alone."""
    kinds = {names[index] if index < len(names) else type(layers[index]).__name__ for index in indices}
    shown = ", ".join(map(str, indices[:SHOWN_LAYERS])) + (" ..." if len(indices) > SHOWN_LAYERS else "")
    kind = ", ".join(sorted(kinds))
    return (f"layer {shown} is of kind {kind}" if len(indices) == 1 else f"layers {shown} are of kind {kind}"), kind
