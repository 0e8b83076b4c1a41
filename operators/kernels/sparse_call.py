"""One forward pass of one layer, as the paths are given it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.operators.kernels.epilogue import Threshold
from moegraft.operators.kernels.routing import PairGroups
from moegraft.operators.kernels.sparse_weights import SparseWeights
from moegraft.operators.kernels.workspace import Buffers


@dataclass(frozen=True, slots=True)
class Call:
    """
    Attributes:
        hidden_states: (T, H), contiguous, of the dtype of the weights.
        ids: (T, K) int32, contiguous, -1: a padded slot.
        top_k_weights: (T, K) floating, contiguous.
        out: (T, H) floating, written in full.
        margin: of the threshold: what a sketched activation has to reach to be looked at.
    """

    hidden_states: torch.Tensor
    ids: torch.Tensor
    top_k_weights: torch.Tensor
    out: torch.Tensor
    weights: SparseWeights
    threshold: Threshold
    buffers: Buffers
    margin: float

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class Lists:
    """The active neurons of each pair, or of each block of pairs.

    Attributes:
        neurons: (count, I) int32: neurons, or groups of them, in their order; only the first ones are written.
        values: (count, I) float32: their activations by place; of groups, by neuron.
        lengths: (count,) int32.
    """

    neurons: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor


Order = PairGroups | None  # pairs by expert, one a block; None: as they come
