"""The dense path over PyTorch's `grouped_mm`: what the project's own kernels have to beat."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moegraft.operators.sparse.call import Call
from moegraft.operators.sparse.kernels.gate_rows import gate_rows
from moegraft.operators.sparse.weights import SparseWeights


def takes(weights: SparseWeights) -> bool:
    """Whether `grouped_mm` has a fast kernel for these weights: bfloat16, rows of whole 16 bytes."""
    return weights.gate_up.dtype == torch.bfloat16 and weights.hidden % 8 == 0 and weights.neurons % 8 == 0


def run_grouped_mm(call: Call) -> None:
    """All rows of the chosen experts; neurons below the threshold become zeros. No step waits for the device, so it can be captured."""
    weights, top_k = call.weights, call.top_k
    ids = call.ids.flatten()
    # padded slots come behind all experts, where no group takes them
    order = torch.where(ids < 0, weights.num_experts, ids).sort(stable=True)
    experts = torch.arange(1, weights.num_experts + 1, dtype=order.values.dtype, device=ids.device)
    ends = torch.searchsorted(order.values, experts).to(torch.int32)
    sums = F.grouped_mm(call.hidden_states[order.indices // top_k], weights.gate_up.transpose(1, 2), offs=ends)
    neurons = sums.new_empty(len(ids), weights.neurons)
    gate_rows(call, sums, order.values, neurons)
    rows = F.grouped_mm(neurons, weights.down_t, offs=ends).float()
    present = order.values < weights.num_experts
    if weights.down_bias is not None:
        rows = rows + weights.down_bias[order.values.clamp(max=weights.num_experts - 1)]
    shares = torch.where(present, call.top_k_weights.flatten()[order.indices].float(), 0.0)
    # what no group wrote may be anything, NaN too
    rows = torch.where(present[:, None], rows, 0.0) * shares[:, None]
    unsorted = torch.empty_like(rows)
    unsorted[order.indices] = rows
    call.out.copy_(unsorted.view(*call.ids.shape, -1).sum(1))
