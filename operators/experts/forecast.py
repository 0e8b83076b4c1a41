"""The predicted time of a layer's experts on a CPU and a GPU together, from the rates of a machine and the scheduler's own plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moegraft.operators.base import ExpertSlots, GpuRates, Rate, RoutedExperts, SlotCount
from moegraft.operators.offload.options import GpuOptions
from moegraft.operators.offload.scheduler import UNBOUNDED, LayerProblem, ScheduleName, Scheduler

ROUTINGS = 12  # random routings to average over: their mean is within a few per cent of the mean of many
INT4_BITS = 4.5  # per weight, with its share of the group's 16-bit scale


@dataclass(frozen=True, slots=True)
class Neurons:
    """The part of an expert's weights that a token needs where inactive neurons are skipped.

    Attributes:
        active: share of the neurons that are computed.
        gate_share: share of the expert's weights that decides which neurons are active, and is always read.
    """

    active: float
    gate_share: float

    @classmethod
    def without(cls, left_out: float, *, gated: bool) -> Self:
        """Return what remains when a share is left out; the gate is one of three matrices, or, without gates, the up matrix of two."""
        return cls(1.0 - left_out, 1 / 3 if gated else 1 / 2)


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


@dataclass(frozen=True, slots=True)
class SharedSlots(ExpertSlots):
    """The slots that a rule of `hybrid_experts` describes."""

    gpu: GpuOptions

    @property
    def context(self) -> int:
        return self.gpu.cache.context

    @property
    def is_sized(self) -> bool:
        cache = self.gpu.cache
        return any(size is not None for size in (cache.ratio, cache.slots, cache.gpu_memory))

    def with_ratio(self, ratio: float) -> SharedSlots:
        return SharedSlots(replace(self.gpu, cache=replace(self.gpu.cache, ratio=ratio, slots=None, gpu_memory=None)))

    def count(self, layers: int, num_experts: int, expert_bytes: int, free_bytes: int, share: float = 1.0) -> SlotCount:
        plan = self.gpu.cache.plan(layers, num_experts, expert_bytes, free_bytes, captured=self.gpu.captures, share=share)
        return SlotCount(plan.total, plan.slots)

    def layer_ms(self, layer: RoutedExperts, tokens: int, cpu: Rate, gpu: GpuRates, shared_ms: float) -> float:
        machine = MachineProfile(
            "planned",
            cpu.decode_gbps,
            cpu.prefill_gflops,
            gpu.gbps,
            gpu.tflops,
            gpu.link_gbps,
            cpu_launch_ms=0.0,  # the measured rate includes it, and the cost of a layer's first expert
            first_cpu_share=0.0,
        )
        return experts_ms(layer, tokens, machine, self.gpu.schedule, shared_ms)


def experts_ms(layer: RoutedExperts, tokens: int, machine: MachineProfile, schedule: ScheduleName, shared_ms: float = 0.0) -> float:
    """Return the mean ms of a layer over even routings, in which slots are hit as often as their share; a cache that learns does better.

    Args:
        shared_ms: time of the shared experts, which the GPU computes first while the CPU and the link work. The result includes it.
    """
    if schedule == "layer_map":  # whole layers on one device: on the GPU as long as there are slots
        on_gpu = experts_ms(replace(layer, resident=1.0), tokens, machine, "on_demand", shared_ms)
        on_cpu = experts_ms(replace(layer, resident=0.0), tokens, machine, "all_cpu", shared_ms)
        return layer.resident * on_gpu + (1 - layer.resident) * on_cpu
    neurons = Neurons.without(layer.left_out, gated=layer.gated) if layer.left_out else None
    scheduler = Scheduler(schedule)
    random = np.random.default_rng(0)
    slots = round(layer.resident * layer.num_experts)
    times = []
    for _ in range(ROUTINGS):
        chosen = _even_routing(layer, tokens, random)
        active = np.flatnonzero(chosen)
        has_slot = np.zeros(layer.num_experts, bool)
        has_slot[random.permutation(layer.num_experts)[:slots]] = True
        loads = chosen[active]
        problem = LayerProblem(
            loads=loads,
            cpu_ms=machine.cpu_ms(loads, layer.expert_bytes, layer.bits_per_weight, neurons),
            gpu_ms=machine.gpu_ms(loads, layer.expert_bytes, layer.bits_per_weight, neurons),
            arrival_ms=np.where(has_slot[active], 0.0, math.inf),
            transfer_ms=machine.transfer_ms(layer.expert_bytes),
            first_cpu_ms=machine.first_cpu_ms(layer.expert_bytes, neurons),
            gpu_free_ms=shared_ms,
            max_transfers=UNBOUNDED if slots else 0,  # one slot can receive any number of experts, one after another
        )
        times.append(max(shared_ms, scheduler.plan(0, problem).makespan_ms))
    return float(np.mean(times))


def _even_routing(layer: RoutedExperts, tokens: int, random: np.random.Generator) -> NDArray[np.int32]:
    """Return the tokens of each expert, (E,) int32."""
    if tokens == 1:
        chosen = np.zeros(layer.num_experts, np.int32)
        chosen[random.permutation(layer.num_experts)[: layer.top_k]] = 1
        return chosen
    counts = random.multinomial(tokens * layer.top_k, np.full(layer.num_experts, 1 / layer.num_experts))
    return np.minimum(counts, tokens).astype(np.int32)
