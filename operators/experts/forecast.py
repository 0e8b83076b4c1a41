"""The predicted time of a layer's experts on a CPU and a GPU together, from the scheduler's own plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.estimates import ExpertSlots, GpuRates, Rate, RoutedExperts, SlotCount
from moegraft.operators.offload.devices.base import Neurons
from moegraft.operators.offload.devices.profiles import MachineProfile
from moegraft.operators.offload.options import GpuOptions
from moegraft.operators.offload.scheduler import UNBOUNDED, LayerProblem, ScheduleName, Scheduler

ROUTINGS = 12  # random routings to average over: their mean is within a few per cent of the mean of many


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
