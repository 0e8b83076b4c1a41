"""How a key-value cache is stored and the bytes that it takes: what the operator that quantises it and the plans of memory share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """The storage of a quantised cache.

    Attributes:
        value_bits: of a stored key or value.
        group: values that share a scale and a zero point; None: one for a whole layer, which is not counted.
        residual: the latest tokens, which may still be in the model's dtype.
    """

    value_bits: int
    group: int | None
    residual: int

    def layer_bytes(self, bytes_per_token: int, itemsize: int, tokens: int) -> int:
        """Return the most bytes that a layer holds of `tokens`.

        Args:
            bytes_per_token: those of one token in the model's dtype.
            itemsize: of that dtype, which scales and zero points have as well.
        """
        values = bytes_per_token // itemsize
        quantised = values * self.value_bits / 8 + (2 * itemsize * values / self.group if self.group else 0)
        recent = min(tokens, self.residual)
        return round(quantised * (tokens - recent)) + bytes_per_token * recent

    def cache_bytes(self, bytes_per_token: Sequence[int], itemsize: int, tokens: int) -> int:
        """Return the most bytes of all layers' `tokens`, given those of one token by layer.

        The layer that is computed is also there twice in the model's dtype: as it was, and with the new token.
        """
        return sum(self.layer_bytes(size, itemsize, tokens) for size in bytes_per_token) + 2 * max(bytes_per_token) * tokens


class CacheForm:
    """What the rules of one model make of its cache; an operator that is built later may still set it."""

    def __init__(self) -> None:
        self.quantised: QuantisedForm | None = None


def token_bytes(config: PretrainedConfig, dtype: torch.dtype) -> list[int]:
    """Return the bytes of one token's keys and values in each layer, by the config's numbers of heads; a latent cache is smaller."""
    text = config.get_text_config()
    found = []
    for layer in getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        found.append(int(2 * heads * size * dtype.itemsize))
    return found


def kv_cache_bytes(config: PretrainedConfig, context: int, dtype: torch.dtype, form: QuantisedForm | None = None) -> int:
    """Return the bytes of `context` tokens by `token_bytes`; a windowed cache is smaller."""
    layers = token_bytes(config, dtype)
    return context * sum(layers) if form is None else form.cache_bytes(layers, dtype.itemsize, context)
