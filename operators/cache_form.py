"""The form of a model's key-value cache: its kinds of layers, how keys and values are stored, and the bytes they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

SHOWN_LAYERS = 3  # that a message names


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """The storage of a quantised cache.

    Attributes:
        value_bits: bits of a stored key or value.
        group: values that share a scale and a zero point; None where a whole layer shares one scale, whose bytes are not counted.
        residual: number of latest tokens that may still be in the model's dtype.
    """

    value_bits: int
    group: int | None
    residual: int

    def layer_bytes(self, bytes_per_token: int, itemsize: int, tokens: int) -> int:
        """Return the most bytes that `tokens` tokens take in one layer.

        Args:
            bytes_per_token: bytes of one token in the model's dtype.
            itemsize: bytes of one value in the model's dtype, which scales and zero points have as well.
        """
        values = bytes_per_token // itemsize
        quantised = values * self.value_bits / 8 + (2 * itemsize * values / self.group if self.group else 0)
        recent = min(tokens, self.residual)
        return round(quantised * (tokens - recent)) + bytes_per_token * recent

    def cache_bytes(self, bytes_per_token: Sequence[int], itemsize: int, tokens: int) -> int:
        """Return the most bytes that `tokens` tokens take in all layers; `bytes_per_token` has one entry per layer.

        The layer that is being computed is also held twice in the model's dtype: without the new token, and with it.
        """
        return sum(self.layer_bytes(size, itemsize, tokens) for size in bytes_per_token) + 2 * max(bytes_per_token) * tokens


def token_bytes(config: PretrainedConfig, dtype: torch.dtype) -> list[int]:
    """Return the bytes of one token's keys and values in each layer, by the config's numbers of heads; a latent cache takes less."""
    text = config.get_text_config()
    found = []
    for layer in getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        found.append(int(2 * heads * size * dtype.itemsize))
    return found


def kv_cache_bytes(config: PretrainedConfig, context: int, dtype: torch.dtype, form: QuantisedForm | None = None) -> int:
    """Return the bytes of `context` tokens by `token_bytes`; a windowed cache takes less."""
    layers = token_bytes(config, dtype)
    return context * sum(layers) if form is None else form.cache_bytes(layers, dtype.itemsize, context)


def layer_types(config: PretrainedConfig) -> Sequence[str]:
    """Return the kinds of a model's layers as its config names them; empty where it does not."""
    return getattr(config.get_text_config(decoder=True), "layer_types", None) or ()


def name_layers(layers: Sequence[object], indices: Sequence[int], names: Sequence[str]) -> tuple[str, str]:
    """Describe the layers of a cache at `indices`, as in `layers 0, 2 are of kind conv`; also return their kind alone."""
    kinds = {names[index] if index < len(names) else type(layers[index]).__name__ for index in indices}
    shown = ", ".join(map(str, indices[:SHOWN_LAYERS])) + (" ..." if len(indices) > SHOWN_LAYERS else "")
    kind = ", ".join(sorted(kinds))
    return (f"layer {shown} is of kind {kind}" if len(indices) == 1 else f"layers {shown} are of kind {kind}"), kind
