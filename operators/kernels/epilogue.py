"""The epilogue of a matrix product, applied to its sums before they are stored: biases, activation, gate, threshold. All in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

# "gate": 16 gate rows and 16 up rows, alternating, become neurons; "act": gate rows become activations; "rows": rows stay as they are.
Epilogue = Literal["gate", "act", "rows"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """Which neurons count as zero, in device memory, so that a captured graph follows it.

    Attributes:
        value: (1,) float32: neurons with a smaller `|act(gate)|`.
        counts: (2,) int64: kernels add the neurons that reached the threshold, and all.
    """

    value: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Threshold:
        """Return a threshold of 0, which every neuron reaches."""
        return cls(torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(2, dtype=torch.int64, device=device))


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
def activated(gate, GATE: tl.constexpr):
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


@triton.jit
def reaches(activations, threshold):
    """Whether each activation is kept: not smaller than the threshold, so that a NaN is seen."""
    return ~(tl.abs(activations) < threshold)


@triton.jit
def count(counts_ptr, kept, counted):
    """Add to the counts of a `Threshold`; both are boolean tensors."""
    tl.atomic_add(counts_ptr, tl.sum(kept.to(tl.int32)).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, tl.sum(counted.to(tl.int32)).to(tl.int64), sem="relaxed")


@triton.jit
def bias_of(biases_ptr, lanes, M: tl.constexpr):
    """Biases of the first matrix's gate rows, or of its only rows; 0 beyond the last output."""
    return tl.load(biases_ptr + M.bias_word + lanes, mask=lanes < M.outputs, other=0.0)


@triton.jit
def finish_tile(
    total,  # (ROWS, BM) float32
    first_row,
    biases_ptr,  # of the expert
    M: tl.constexpr,
    GATE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
):
    """The outputs that a tile's rows become, and their numbers; those beyond the last output are zeros."""
    if EPILOGUE == "gate":
        COUNT: tl.constexpr = ROWS // 2
        gate, up = tl.split(tl.permute(tl.reshape(total, (ROWS // 32, 2, 16, BM)), (0, 2, 3, 1)))
        gate = tl.reshape(gate, (COUNT, BM))
        up = tl.reshape(up, (COUNT, BM))
        lanes = first_row // 2 + tl.arange(0, COUNT)
        if M.bias_word >= 0:
            gate += bias_of(biases_ptr, lanes, M)[:, None]
            up += tl.load(biases_ptr + M.up_bias_word + lanes, mask=lanes < M.outputs, other=0.0)[:, None]
        value = activated(gate, GATE) * limited_up(up, GATE)
    else:
        lanes = first_row + tl.arange(0, ROWS)
        value = total
        if M.bias_word >= 0:
            value += bias_of(biases_ptr, lanes, M)[:, None]
        if EPILOGUE == "act":
            value = activated(value, GATE)
    # a gate need not map zero to zero, and neurons beyond the last must not reach the output
    return tl.where((lanes < M.outputs)[:, None], value, 0.0), lanes
