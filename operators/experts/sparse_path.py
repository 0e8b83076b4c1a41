"""The forward pass of packed experts on the CPU, with the neurons left out that a layer's threshold says."""

from __future__ import annotations

import numpy as np
import torch

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.cpu import as_array
from moegraft.operators.sparse.layer import LayerSparsity


def forward_packed(
    runtime: Runtime,
    packed: PackedExperts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    out: torch.Tensor,
    sparsity: LayerSparsity | None,
) -> None:
    """Fills `out (T, H)`; all tensors are on the CPU and contiguous, ids int64 and weights float32."""
    arrays = (as_array(hidden_states), top_k_index.numpy(), as_array(top_k_weights), as_array(out))
    if sparsity is None:
        runtime.forward(packed, *arrays)
        return
    sparsity.begin(len(hidden_states))
    acted = None if sparsity.observer is None else np.empty((*top_k_index.shape, packed.shape.intermediate), np.float32)
    now = sparsity.in_force()
    runtime.forward(packed, *arrays, threshold=now.threshold, neuron_counts=now.counts, acted=acted)
    if sparsity.observer is not None and acted is not None:
        sparsity.observer(top_k_index, torch.from_numpy(acted))
