"""Modelled machines: the time of experts where no hardware is measured. Assumptions, not measurements."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moegraft.operators.offload.devices.base import Neurons

INT4_BITS = 4.5  # per weight, with its share of the group's 16-bit scale


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Effective rates of a CPU, a GPU and the link between them.

    An expert takes the longer of reading its weights and of its arithmetic, plus a constant. `launch` is that constant: for the
    GPU an expert's kernels, for the CPU handing its blocks to the threads. The first expert of a layer on the CPU takes
    `first_cpu_share` of reading its weights and `first_cpu_overhead_ms` more than the next ones (HybriMoE, Figure 3e).

    Where neurons are left out, the gates are read and computed whole, and of the other weights the rows that any of the expert's tokens
    needs are read once; tokens are assumed to need neurons independently of each other. The CPU computes what each token needs, the GPU
    all tokens over all these rows, as tensor cores do. Transfers move whole experts.
    """

    name: str
    cpu_gb_s: float
    cpu_gflop_s: float
    gpu_gb_s: float
    gpu_tflop_s: float
    link_gb_s: float
    cpu_launch_ms: float = 0.010
    gpu_launch_ms: float = 0.040
    first_cpu_share: float = 0.5
    first_cpu_overhead_ms: float = 0.020

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            rate = field.name.endswith("_s")
            if field.name != "name" and not (value > 0 if rate else value >= 0):
                raise ValueError(f"MachineProfile {self.name!r}: {field.name} is {value}; it must be {'above' if rate else 'at least'} 0")

    def cpu_ms(
        self, loads: ArrayLike, expert_bytes: int, bits_per_weight: float = INT4_BITS, neurons: Neurons | None = None
    ) -> NDArray[np.float64]:
        """Return the time of each expert on the CPU alone; 0 without tokens. `loads` (A,) are tokens."""
        tokens = np.asarray(loads, np.float64)
        gflop = 2e-9 * tokens * _share_of_one(neurons) * (expert_bytes * 8 / bits_per_weight)
        read_gb = 1e-9 * expert_bytes * _share_of_all(tokens, neurons)
        return _expert_ms(tokens, read_gb / self.cpu_gb_s, gflop / self.cpu_gflop_s, self.cpu_launch_ms)

    def gpu_ms(
        self, loads: ArrayLike, expert_bytes: int, bits_per_weight: float = INT4_BITS, neurons: Neurons | None = None
    ) -> NDArray[np.float64]:
        """Return the time of each resident expert on the GPU; 0 without tokens. `loads` (A,) are tokens."""
        tokens = np.asarray(loads, np.float64)
        share = _share_of_all(tokens, neurons)
        gflop = 2e-9 * tokens * share * (expert_bytes * 8 / bits_per_weight)
        read_gb = 1e-9 * expert_bytes * share
        return _expert_ms(tokens, read_gb / self.gpu_gb_s, gflop / (self.gpu_tflop_s * 1e3), self.gpu_launch_ms)

    def transfer_ms(self, nbytes: int) -> float:
        return nbytes / self.link_gb_s / 1e6

    def first_cpu_ms(self, expert_bytes: int, neurons: Neurons | None = None) -> float:
        """Return what the first expert of a layer on the CPU takes on top of `cpu_ms`; where neurons are left out, for one token."""
        return self.first_cpu_share * expert_bytes * _share_of_one(neurons) / self.cpu_gb_s / 1e6 + self.first_cpu_overhead_ms


def _share_of_one(neurons: Neurons | None) -> float:
    """Return the share of an expert's weights that one token needs."""
    return 1.0 if neurons is None else neurons.gate_share + (1.0 - neurons.gate_share) * neurons.active


def _share_of_all(tokens: NDArray[np.float64], neurons: Neurons | None) -> NDArray[np.float64]:
    """Return the share of an expert's weights that so many tokens need together, (A,)."""
    if neurons is None:
        return np.ones_like(tokens)
    union = 1.0 - (1.0 - neurons.active) ** tokens
    return np.asarray(neurons.gate_share + (1.0 - neurons.gate_share) * union)


def _expert_ms(
    tokens: NDArray[np.float64], read_s: NDArray[np.float64], compute_s: NDArray[np.float64], launch_ms: float
) -> NDArray[np.float64]:
    return np.where(tokens > 0, launch_ms + 1e3 * np.maximum(read_s, compute_s), 0.0)


PROFILES = {
    profile.name: profile
    for profile in (
        #                              CPU GB/s, GFLOP/s; GPU GB/s, TFLOP/s; link GB/s
        MachineProfile("a6000_10core", 60, 350, 540, 60, 24),
        MachineProfile("rtx4090_8core", 50, 400, 700, 90, 24),
        MachineProfile("a100_amx36", 200, 5000, 1100, 150, 24),
        MachineProfile("rtx5090_6core", 45, 250, 1200, 120, 50),
    )
}
