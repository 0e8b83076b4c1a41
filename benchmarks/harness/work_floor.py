"""The work of a layer of experts: the bytes and operations that its routing and, if sparse, its active neurons require.

Sizes are those of the routed experts of Qwen3.5-35B-A3B. A share of *total* neurons includes the shared expert's, which are
always computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moegraft.operators.sparsity import ExpertsLayer, SparsityOptions


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    shared_intermediate: int

    def routed(self, total: float) -> float:
        """Return the share of routed neurons to leave out for a share of all neurons."""
        layer = ExpertsLayer("", self.num_experts, self.hidden, self.intermediate, self.shared_intermediate, self.top_k)
        return layer.routed_target(SparsityOptions(total, "total"))


SHAPES = {
    "qwen3.5-35b-a3b": Shape(2048, 512, 256, 8, 512),
    "tiny": Shape(64, 32, 8, 2, 8),  # for machines without a GPU
}


@dataclass(frozen=True, slots=True)
class Work:
    """The bytes and floating-point operations of one call, in which each weight is read once."""

    read_bytes: float
    flops: float


def dense_work(ids: torch.Tensor, shape: Shape, element_bytes: float = 2) -> Work:
    """Return the work of a dense layer for `ids` (T, K)."""
    row = shape.intermediate * shape.hidden
    experts = int(ids.unique().numel())
    return Work(3.0 * experts * row * element_bytes, 6.0 * ids.numel() * row)


def sparse_work(ids: torch.Tensor, active: torch.Tensor, shape: Shape, element_bytes: float = 2) -> Work:
    """Return the work of a sparse layer: the gates of the chosen experts, and the rows of up and down that any of their tokens needs.

    Args:
        active: (T, K, I) bool.
    """
    experts = int(ids.unique().numel())
    union = torch.zeros(shape.num_experts, shape.intermediate, dtype=torch.int32, device=active.device)
    union.index_add_(0, ids.flatten().long(), active.flatten(0, 1).to(torch.int32))
    rows = 2 * int((union > 0).sum())
    gates = experts * shape.intermediate * shape.hidden * element_bytes
    flops = 2.0 * ids.numel() * shape.intermediate * shape.hidden + 4.0 * int(active.sum()) * shape.hidden
    return Work(gates + rows * shape.hidden * element_bytes, flops)
