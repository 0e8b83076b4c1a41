"""What a router returned, read by shapes and types: families order it differently and turn logits into scores in different ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F

# How families make scores of logits. The first that explains a router's weights is taken.
SCORE_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "probabilities": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
EXPLAINS = 0.02  # of a token's weight: bfloat16 weights are off by up to 0.004, another function's by more


@dataclass(frozen=True, slots=True)
class RouterOutput:
    """The logits, or already scores, of (T, E or more) experts; the weights and ids (T, K) of those chosen, where it returns them."""

    logits: torch.Tensor
    top_k_weights: torch.Tensor | None
    top_k_index: torch.Tensor | None

    @classmethod
    def read(cls, output: Any, num_experts: int) -> Self:
        """
        Raises:
            ValueError: no floating-point tensor with a column for each expert is in `output`.
        """
        parts = [part for part in (output if isinstance(output, tuple | list) else (output,)) if isinstance(part, torch.Tensor)]
        index = next((part for part in parts if not part.is_floating_point()), None)
        wide = [part for part in parts if part.is_floating_point() and part.shape[-1] >= num_experts]
        if not wide:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts) or "no tensor"
            raise ValueError(f"a router of {num_experts} experts returned {shapes}: no scores of all experts are among them")
        # Only a layer that chooses all its experts has two; its ids stand first where the logits stand last.
        logits = wide[-1] if parts[0] is index else wide[0]
        rest = [part for part in parts if part is not logits and part.is_floating_point()]
        weights = next((part for part in rest if index is not None and part.shape == index.shape), None)
        return cls(_flat(logits), None if weights is None else _flat(weights), None if index is None else _flat(index))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _are_probabilities(logits: torch.Tensor) -> bool:
    values = logits.float()
    return bool((values >= 0).all()) and bool(((values.sum(-1) - 1).abs() < EXPLAINS).all())


def score_function(output: RouterOutput) -> str:
    """The name of the function in `SCORE_FUNCTIONS` that the weights of the chosen experts follow, up to a factor for each token.

    `softmax` where none does, or where one expert a token leaves nothing to compare.
    """
    if _are_probabilities(output.logits):
        return "probabilities"
    if output.top_k_index is None or output.top_k_weights is None or output.top_k_index.shape[-1] < 2:
        return "softmax"
    weights = _shares(output.top_k_weights.float())
    logits = output.logits.float()
    errors = {
        name: float((_shares(function(logits).gather(-1, output.top_k_index.long())) - weights).abs().max())
        for name, function in SCORE_FUNCTIONS.items()
        if name != "probabilities"
    }
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < EXPLAINS else "softmax"


def follows(scores: torch.Tensor, top_k_weights: torch.Tensor, top_k_index: torch.Tensor) -> bool:
    """Whether the weights (T, K) of the chosen are their scores of (T, E), up to a factor for each token."""
    found = _shares(scores.gather(-1, top_k_index.long()))
    return bool(((found - _shares(top_k_weights.float())).abs() < EXPLAINS).all())


def _shares(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


def scores_of(router_output: Any, num_experts: int, function: str | None = None) -> torch.Tensor:
    """Every expert's share of what a router gives a token: (T, E) float32, rows sum to 1 (less where a router may choose no expert).

    Args:
        router_output: what the router's forward pass returned: logits (T, E) alone, or among weights and ids in any order.
        function: how the family makes scores of logits, a name in `SCORE_FUNCTIONS`; found from the output where it is not known.

    Raises:
        ValueError: there are no scores of all experts in `router_output`.
    """
    read = RouterOutput.read(router_output, num_experts)
    name = function or score_function(read)
    scores = SCORE_FUNCTIONS[name](read.logits.float())
    if name in ("sigmoid", "sqrtsoftplus"):
        scores = _shares(scores[:, :num_experts])
    return scores[:, :num_experts]
