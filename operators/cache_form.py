"""How a key-value cache is stored: what the operator that quantises it and those that plan memory around it agree on."""

from __future__ import annotations

from dataclasses import dataclass

WORKED_ON = 2  # copies of a layer's keys and values in the model's dtype while it is computed: as they were, and with the new token


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """
    Attributes:
        value_bits: of a stored key or value.
        group: values that share a scale and a zero point; None: they are not counted, being one for a whole layer.
        residual: the latest tokens, which may still be in the model's dtype.
    """

    value_bits: int
    group: int | None
    residual: int

    def layer_bytes(self, bytes_per_token: int, itemsize: int, tokens: int) -> int:
        """What a layer holds of `tokens`, at most.

        Args:
            bytes_per_token: what it would hold of each in the model's dtype.
            itemsize: of that dtype, which scales and zero points have as well.
        """
        values = bytes_per_token // itemsize
        small = values * self.value_bits / 8 + (2 * itemsize * values / self.group if self.group else 0)
        late = min(tokens, self.residual)
        return round(small * (tokens - late)) + bytes_per_token * late


class CacheForm:
    """One a model, `context.shared(CacheForm, CacheForm)`: what its rules make of the cache."""

    def __init__(self) -> None:
        self.quantised: QuantisedForm | None = None
