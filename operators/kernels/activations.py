"""Activations and gates inside kernels; in float32."""

from __future__ import annotations

import triton
import triton.language as tl


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
