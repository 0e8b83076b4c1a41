"""The gate between two products that others computed: PyTorch's grouped_mm gives all gate and up sums of a pair at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.activations import acted, limited_up
from moegraft.operators.kernels.finish import reaches
from moegraft.operators.kernels.launch import LAUNCH
from moegraft.operators.sparse.call import Call
from moegraft.operators.sparse.kernels.rows import neuron_rows


@triton.jit
def _gate_rows_kernel(
    sums_ptr,  # (P, rows of gate_up) floating, pairs by expert
    experts_ptr,  # (P,) int, sorted; E: a padded slot
    biases_ptr,  # (E, rows) float32, or anything
    threshold_ptr,  # (1,) float32
    counts_ptr,  # (2,) int64
    out_ptr,  # (P, I) of the dtype of the sums
    R: tl.constexpr,
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
):
    """Grid (P, I / R.lanes). A pair's gated neurons, zeros where they do not reach the threshold."""
    pair = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * R.lanes + tl.arange(0, R.lanes)
    inside = lanes < R.neurons
    out_ptr += pair * R.neurons
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert >= NUM_EXPERTS:  # no product wrote its sums
        tl.store(out_ptr + lanes, tl.zeros((R.lanes,), out_ptr.dtype.element_ty), mask=inside)
        return
    rows = lanes * R.step
    gate = tl.load(sums_ptr + pair * R.rows + rows, mask=inside, other=0.0).to(tl.float32)
    if R.bias:
        gate += tl.load(biases_ptr + expert * R.rows + rows, mask=inside, other=0.0)
    value = acted(gate, GATE)
    kept = (reaches(value, tl.load(threshold_ptr)) & inside).to(tl.int32)
    tl.atomic_add(counts_ptr, tl.sum(kept).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, tl.sum(inside.to(tl.int32)).to(tl.int64), sem="relaxed")
    if GROUP > 1:
        GROUPS: tl.constexpr = R.lanes // GROUP
        one = tl.max(tl.reshape(kept, (GROUPS, GROUP)), 1)
        kept = tl.reshape(tl.broadcast_to(one[:, None], (GROUPS, GROUP)), (R.lanes,))
    if R.gated:
        up = tl.load(sums_ptr + pair * R.rows + rows + R.up_offset, mask=inside, other=0.0).to(tl.float32)
        if R.bias:
            up += tl.load(biases_ptr + expert * R.rows + rows + R.up_offset, mask=inside, other=0.0)
        value *= limited_up(up, GATE)
    tl.store(out_ptr + lanes, tl.where(kept != 0, value, 0.0).to(out_ptr.dtype.element_ty), mask=inside)


def gate_rows(call: Call, sums: torch.Tensor, experts: torch.Tensor, out: torch.Tensor) -> None:
    """`out (P, I)`: the gated neurons from the sums (P, rows of gate_up) of pairs that are sorted by `experts (P,)`."""
    weights = call.weights
    rows = neuron_rows(weights)
    _gate_rows_kernel[len(sums), triton.cdiv(rows.neurons, rows.lanes)](
        sums, experts, weights.gate_up_bias, call.threshold.value, call.threshold.counts, out,
        R=rows, GATE=weights.gate, GROUP=call.threshold.group, NUM_EXPERTS=weights.num_experts, num_warps=4, **LAUNCH,
    )  # fmt: skip
