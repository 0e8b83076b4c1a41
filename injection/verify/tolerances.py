"""How far an operator's output may be from the stock module's, by the type of its weights and activations, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Expected:
    """A relative error, `|output - stock| / |stock|` in the Frobenius norm.

    Attributes:
        typical: what bell-shaped weights give.
        limit: above it, something else than rounding is wrong.
    """

    typical: float
    limit: float
    reason: str


# Errors of the three products of an expert add up as independent ones: gate and up meet in a product, down adds its own.
BY_WEIGHTS: Mapping[str, Expected] = {
    "float32": Expected(1e-6, 1e-4, "float32 sums in another order"),
    "float16": Expected(4e-4, 2e-3, "weights of 11 bits, each off by up to 0.05 %"),
    "bfloat16": Expected(3e-3, 1e-2, "weights and, with bfloat16 activations, products of 8 bits, each off by up to 0.4 %"),
    "int8": Expected(1.5e-2, 4e-2, "32 weights share a scale of 127 steps, as do 32 activations: about 0.5 % each, in three products"),
    "q4_k": Expected(1.2e-2, 4e-2, "weights as the file has them; 32 activations share a scale of 127 steps, in three products"),
    "q6_k": Expected(1.2e-2, 4e-2, "weights as the file has them; 32 activations share a scale of 127 steps, in three products"),
    "int4": Expected(1.5e-1, 3e-1, "32 weights share a scale of 8 steps: about 8 % each, in three products"),
}
# The stock module is computed in float32, the operator takes and gives the model's dtype.
BY_ACTIVATIONS: Mapping[torch.dtype, Expected] = {
    torch.float32: Expected(0.0, 0.0, "float32 activations"),
    torch.float16: Expected(4e-4, 2e-3, "float16 activations"),
    torch.bfloat16: Expected(3e-3, 1e-2, "bfloat16 activations"),
}


def expected_error(weight_type: str | None, activations: torch.dtype) -> Expected | None:
    """What to expect, or None for a weight type whose error is not known; of `gate_up+down`, the larger."""
    parts = [BY_WEIGHTS.get(name) for name in (weight_type or "").split("+")]
    given = BY_ACTIVATIONS.get(activations)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or given is None:
        return None
    weights = max(known, key=lambda part: part.limit)
    typical = (weights.typical**2 + given.typical**2) ** 0.5
    reason = weights.reason if not given.limit else f"{weights.reason}; {given.reason}"
    return Expected(typical, weights.limit + given.limit, reason)
