"""What a matrix product does with its sums before it stores them: biases, activation, gate, threshold.

Activations and gates inside kernels; in float32.

A gate as a compile-time constant of the kernels.

The last step of every path that computes pairs apart: each token's sum over its experts, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import LAUNCH


@triton.jit
def _tanh(x):
    # exp of a number that is not positive cannot overflow
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def _activation(x, GATE: tl.constexpr):
    if GATE.activation == "silu":
        return x * tl.sigmoid(GATE.alpha * x)
    elif GATE.activation == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif GATE.activation == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif GATE.activation == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif GATE.activation == "relu2":
        return tl.where(x < 0.0, 0.0, x * x)
    elif GATE.activation == "sigmoid":
        return tl.sigmoid(x)
    elif GATE.activation == "tanh":
        return _tanh(x)
    else:
        tl.static_assert(GATE.activation == "identity", "unknown activation")
        return x


@triton.jit
def acted(gate, GATE: tl.constexpr):
    """What a threshold is compared with: `min(act(min(gate, gate_limit)), act_limit)`, ungated `act(up)`."""
    # `where`, not `minimum`: a NaN must stay one
    if GATE.gated and GATE.gate_limit < float("inf"):
        gate = tl.where(gate > GATE.gate_limit, GATE.gate_limit, gate)
    value = _activation(gate, GATE)
    if GATE.gated and GATE.act_limit < float("inf"):
        value = tl.where(value > GATE.act_limit, GATE.act_limit, value)
    return value


@triton.jit
def limited_up(up, GATE: tl.constexpr):
    """`clamp(up, +-up_limit) + up_offset`."""
    if GATE.up_limit < float("inf"):
        up = tl.where(up > GATE.up_limit, GATE.up_limit, up)
        up = tl.where(up < -GATE.up_limit, -GATE.up_limit, up)
    return up + GATE.up_offset


# "gate": tiles of 16 gate rows and 16 up rows in turn become neurons; "act": gate rows become activations; "rows": they stay as they are.
Epilogue = Literal["gate", "act", "rows"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """Which neurons count as zero, in device memory, so that a captured graph follows it.

    Attributes:
        value: (1,) float32: neurons with a smaller `|act(gate)|`.
        counts: (2,) int64: to it are added the neurons that reached the threshold, and all.
        group: this many neurons in a row are kept when one of them reaches it.
    """

    value: torch.Tensor
    counts: torch.Tensor
    group: int = 1


@triton.jit
def reaches(activations, threshold):
    """Whether each activation is to be kept: not smaller than the threshold, so that a NaN is seen."""
    return ~(tl.abs(activations) < threshold)


@triton.jit
def any_in_group(kept, GROUP: tl.constexpr, COUNT: tl.constexpr, BM: tl.constexpr):
    """(COUNT, BM) int32 with each of GROUP rows in a row set where one is."""
    if GROUP == 1:
        return kept
    else:
        one = tl.max(tl.reshape(kept, (COUNT // GROUP, GROUP, BM)), 1)
        return tl.reshape(tl.broadcast_to(one[:, None, :], (COUNT // GROUP, GROUP, BM)), (COUNT, BM))


@triton.jit
def _thresholded(value, activations, counted, threshold_ptr, counts_ptr, GROUP: tl.constexpr, COUNT: tl.constexpr, BM: tl.constexpr):
    """`value` where the activation's group is kept, else zero; adds to the counts what is `counted`."""
    kept = (reaches(activations, tl.load(threshold_ptr)) & counted).to(tl.int32)
    tl.atomic_add(counts_ptr, tl.sum(kept).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, tl.sum(counted.to(tl.int32)).to(tl.int64), sem="relaxed")
    return tl.where(any_in_group(kept, GROUP, COUNT, BM) != 0, value, 0.0)


@triton.jit
def finish_tile(
    total,  # (ROWS, BM) float32
    first_row,
    biases_ptr,  # of the expert
    present,  # (BM,)
    threshold_ptr,
    counts_ptr,
    M: tl.constexpr,
    GATE: tl.constexpr,
    FINISH: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
):
    """The outputs that a tile's rows become, and their numbers; those beyond the last output are zeros."""
    if FINISH == "gate":
        COUNT: tl.constexpr = ROWS // 2
        gate, up = tl.split(tl.permute(tl.reshape(total, (ROWS // 32, 2, 16, BM)), (0, 2, 3, 1)))
        gate = tl.reshape(gate, (COUNT, BM))
        up = tl.reshape(up, (COUNT, BM))
        lanes = first_row // 2 + tl.arange(0, COUNT)
        if M.bias_word >= 0:
            gate += tl.load(biases_ptr + M.bias_word + lanes * M.bias_stride, mask=lanes < M.outputs, other=0.0)[:, None]
            up += tl.load(biases_ptr + M.up_bias_word + lanes * M.bias_stride, mask=lanes < M.outputs, other=0.0)[:, None]
        activations = acted(gate, GATE)
        value = activations * limited_up(up, GATE)
        if threshold_ptr is not None:
            counted = (lanes < M.outputs)[:, None] & present[None, :]
            value = _thresholded(value, activations, counted, threshold_ptr, counts_ptr, GROUP, COUNT, BM)
    else:
        lanes = first_row + tl.arange(0, ROWS)
        value = total
        if M.bias_word >= 0:
            value += tl.load(biases_ptr + M.bias_word + lanes * M.bias_stride, mask=lanes < M.outputs, other=0.0)[:, None]
        if FINISH == "act":
            value = acted(value, GATE)
            if threshold_ptr is not None:
                counted = (lanes < M.outputs)[:, None] & present[None, :]
                value = _thresholded(value, value, counted, threshold_ptr, counts_ptr, GROUP, ROWS, BM)
    # a gate need not map zero to zero, and neurons beyond the last must not reach the output
    return tl.where((lanes < M.outputs)[:, None], value, 0.0), lanes


COLUMNS = 512


@triton.jit
def _combine_kernel(
    rows_ptr,  # (T * K, H) float32; rows of absent pairs are never read
    ids_ptr,  # (T, K) int32, -1: absent
    weights_ptr,  # (T, K) floating
    out_ptr,  # (T, H) floating
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (T, H / COLUMNS)."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        present = tl.load(ids_ptr + pair) >= 0
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        width = tl.where(present, H, 0)
        row = tl.load(rows_ptr + pair.to(tl.int64) * H + columns, mask=columns < width, other=0.0)
        total += tl.where(present, weight, 0.0) * row
    tl.store(out_ptr + token.to(tl.int64) * H + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


def combine(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """`out (T, H) = sum over k of weights[t, k] * rows[t * K + k]` over the pairs whose id is not -1; deterministic."""
    tokens, hidden = out.shape
    _combine_kernel[tokens, triton.cdiv(hidden, COLUMNS)](
        rows, ids, weights, out, H=hidden, TOP_K=ids.shape[1], COLUMNS=COLUMNS, num_warps=4, **LAUNCH
    )
