"""A gate as a compile-time constant of the kernels."""

from __future__ import annotations

from typing import NamedTuple

from moegraft.cpu_backend import GateSpec


class Gate(NamedTuple):
    """`min(act(min(gate, gate_limit); alpha), act_limit) * (clamp(up, +-up_limit) + up_offset)`; ungated `act(up; alpha)`."""

    gated: bool
    activation: str
    alpha: float
    gate_limit: float
    act_limit: float
    up_limit: float
    up_offset: float


def gate_of(spec: GateSpec, *, gated: bool = True) -> Gate:
    return Gate(gated, spec.activation, spec.alpha, spec.gate_limit, spec.act_limit, spec.up_limit, spec.up_offset)
