"""Modelled machines and model shapes: what experts cost where no hardware is measured. Assumptions, not measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moegraft.operators.offload.devices.base import Neurons

INT4_BITS = 4.5  # a weight with its share of the group's 16-bit scale


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Effective rates of a CPU, a GPU and the link between them.

    An expert costs the slower of reading its weights and of its arithmetic, plus a constant. `launch` is that constant: for the
    GPU an expert's kernels, for the CPU handing its blocks to the threads. The first expert of a layer on the CPU costs
    `first_cpu_share` of reading its weights and `first_cpu_overhead_ms` more than the next ones (HybriMoE, Figure 3e).

    Where neurons are left out, the gates are read and computed whole, and of the other weights the rows that one of the expert's tokens
    needs are read once; tokens are taken to need neurons independently of each other. The CPU computes what each token needs, the GPU
    all of its tokens over all these rows, as tensor cores do. Transfers bring whole experts.
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
            rate = field.name.endswith("_s") and not field.name.endswith("_ms")
            if field.name != "name" and not (value > 0 if rate else value >= 0):
                raise ValueError(f"MachineProfile {self.name!r}: {field.name} is {value}; it must be {'above' if rate else 'at least'} 0")

    def cpu_ms(
        self, loads: ArrayLike, expert_bytes: int, bits_per_weight: float = INT4_BITS, neurons: Neurons | None = None
    ) -> NDArray[np.float64]:
        """What each expert takes on the CPU alone; no token, no time. `loads` (A,) are tokens."""
        tokens = np.asarray(loads, np.float64)
        needed = 1.0 if neurons is None else _of_weights(neurons, neurons.active)
        gflop = 2e-9 * tokens * needed * (expert_bytes * 8 / bits_per_weight)
        read_gb = 1e-9 * expert_bytes * _read(tokens, neurons)
        return _ms(tokens, read_gb / self.cpu_gb_s, gflop / self.cpu_gflop_s, self.cpu_launch_ms)

    def gpu_ms(
        self, loads: ArrayLike, expert_bytes: int, bits_per_weight: float = INT4_BITS, neurons: Neurons | None = None
    ) -> NDArray[np.float64]:
        """What each resident expert takes on the GPU; no token, no time. `loads` (A,) are tokens."""
        tokens = np.asarray(loads, np.float64)
        read = _read(tokens, neurons)
        gflop = 2e-9 * tokens * read * (expert_bytes * 8 / bits_per_weight)
        return _ms(tokens, 1e-9 * expert_bytes * read / self.gpu_gb_s, gflop / (self.gpu_tflop_s * 1e3), self.gpu_launch_ms)

    def transfer_ms(self, nbytes: int) -> float:
        return nbytes / self.link_gb_s / 1e6

    def first_cpu_ms(self, expert_bytes: int, neurons: Neurons | None = None) -> float:
        """What the first expert of a layer on the CPU costs on top of `cpu_ms`; of neurons that are left out, for one token."""
        read = 1.0 if neurons is None else _of_weights(neurons, neurons.active)
        return self.first_cpu_share * expert_bytes * read / self.cpu_gb_s / 1e6 + self.first_cpu_overhead_ms


def _of_weights(neurons: Neurons, share: ArrayLike) -> Any:
    """The share of an expert's weights that the gates and a share of the neurons' other rows are."""
    return neurons.judged + (1.0 - neurons.judged) * np.asarray(share)


def _read(tokens: NDArray[np.float64], neurons: Neurons | None) -> NDArray[np.float64]:
    """The share of an expert's weights that so many tokens need together, (A,)."""
    if neurons is None:
        return np.ones_like(tokens)
    union: NDArray[np.float64] = _of_weights(neurons, 1.0 - (1.0 - neurons.active) ** tokens)
    return union


def _ms(tokens: NDArray[np.float64], read_s: NDArray[np.float64], busy_s: NDArray[np.float64], launch_ms: float) -> NDArray[np.float64]:
    return np.where(tokens > 0, launch_ms + 1e3 * np.maximum(read_s, busy_s), 0.0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The routed experts of a model, and what the rest of a layer takes.

    Attributes:
        rest_ms: attention, router and shared experts of one layer on the GPU when one token is decoded. Taken to be the same
            on every modelled machine.
        shared_share: of it, the shared experts; by the weights that are read, of the models' own configs.
    """

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    layers: int
    rest_ms: float
    shared_share: float = 0.0

    def expert_bytes(self, bits_per_weight: float = INT4_BITS) -> int:
        """Gate, up and down of one expert."""
        return round(3 * self.hidden * self.intermediate * bits_per_weight / 8)


Row = TypeVar("Row", MachineProfile, ModelShape)


def _named(*rows: Row) -> Mapping[str, Row]:
    return MappingProxyType({row.name: row for row in rows})


PROFILES: Mapping[str, MachineProfile] = _named(
    #                                CPU GB/s, GFLOP/s; GPU GB/s, TFLOP/s; link GB/s
    MachineProfile("a6000_10core", 60, 350, 540, 60, 24),
    MachineProfile("rtx4090_8core", 50, 400, 700, 90, 24),
    MachineProfile("a100_amx36", 200, 5000, 1100, 150, 24),
    MachineProfile("rtx5090_6core", 45, 250, 1200, 120, 50),
)

MODELS: Mapping[str, ModelShape] = _named(
    # 3 x 2048 x 2816 of 31 million weights a layer
    ModelShape("deepseek-v2-lite", 64, 6, 2048, 1408, layers=26, rest_ms=0.150, shared_share=0.55),
    ModelShape("moonlight-16b-a3b", 64, 6, 2048, 1408, layers=26, rest_ms=0.150, shared_share=0.55),  # the same experts and another router
    # Of the model's own config: HybriMoE's Table I prints the intermediate size of its dense layers, 18944.
    # 3 x 3584 x 20480 of 250 million.
    ModelShape("qwen2-57b-a14b", 64, 8, 3584, 2560, layers=28, rest_ms=0.220, shared_share=0.88),
    ModelShape("mixtral-8x7b", 8, 2, 4096, 14336, layers=32, rest_ms=0.260),
)
