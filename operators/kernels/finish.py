"""What a matrix product does with its sums before it stores them: biases, activation, gate, threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.activations import acted, limited_up

# "gate": tiles of 16 gate rows and 16 up rows in turn become neurons; "act": gate rows become activations; "rows": they stay as they are.
Finish = Literal["gate", "act", "rows"]


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
