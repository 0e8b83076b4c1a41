"""The bytes that a key-value cache takes, in the model's dtype or quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

WORKING_COPIES = 2  # of a layer's keys and values in the model's dtype while it is computed: as they were, and with the new token


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """How a quantised cache stores keys and values.

    Attributes:
        value_bits: of a stored key or value.
        group: values that share a scale and a zero point; None: they are not counted, being one for a whole layer.
        residual: the latest tokens, which may still be in the model's dtype.
    """

    value_bits: int
    group: int | None
    residual: int

    def layer_bytes(self, bytes_per_token: int, itemsize: int, tokens: int) -> int:
        """Return what a layer holds of `tokens` tokens at most.

        Args:
            bytes_per_token: what it would hold of each in the model's dtype.
            itemsize: of that dtype, which scales and zero points have as well.
        """
        values = bytes_per_token // itemsize
        small = values * self.value_bits / 8 + (2 * itemsize * values / self.group if self.group else 0)
        late = min(tokens, self.residual)
        return round(small * (tokens - late)) + bytes_per_token * late

    def nbytes(self, bytes_per_token: Sequence[int], itemsize: int, tokens: int) -> int:
        """Return what the cache of one sequence takes at most, by layer as `layer_bytes`, with one layer's working copies."""
        held = sum(self.layer_bytes(size, itemsize, tokens) for size in bytes_per_token)
        return held + WORKING_COPIES * max(bytes_per_token) * tokens


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
    return context * sum(layers) if form is None else form.nbytes(layers, dtype.itemsize, context)
