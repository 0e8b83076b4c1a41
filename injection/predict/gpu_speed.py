"""Tokens a second with a GPU: all but the experts there, and of each layer's experts what the scheduler plans for even routing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moegraft.injection.outline import Outline
from moegraft.injection.predict.gpu import GpuRates
from moegraft.injection.predict.gpu_memory import GpuMemory, Shared
from moegraft.injection.predict.layers import Work, weight_type
from moegraft.injection.predict.measure import Measurements
from moegraft.injection.predict.speed import Load, Speed, missing_rates, rate_of, seconds
from moegraft.injection.routing import experts_per_token
from moegraft.injection.sparsity.targets import experts_layer, sparsity_options
from moegraft.operators.experts.devices.interface import Neurons
from moegraft.operators.experts.devices.profiles import MachineProfile
from moegraft.operators.experts.layout import read_layout
from moegraft.operators.experts.scheduling.problem import UNBOUNDED, LayerProblem
from moegraft.operators.experts.scheduling.scheduler import ScheduleName, make_scheduler

TRIALS = 12  # layers with their own routing; their mean is within a few per cent of that of many
HOST_MS = 0.2  # a layer's decisions in Python: host_us_per_layer in benchmarks/results/hybrid_modelled.csv, 2 slow cores


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """One layer's experts on a machine.

    Attributes:
        resident: share of the experts that have a slot.
        neurons: what a token needs of each; None: all of it.
    """

    num_experts: int
    top_k: int
    resident: float
    expert_bytes: int
    bits: float
    machine: MachineProfile
    schedule: ScheduleName
    neurons: Neurons | None = None

    def milliseconds(self, tokens: int, beside_ms: float = 0.0) -> float:
        """The mean over even routings: slots hit as often as their share, so that a cache that learns does better.

        Args:
            beside_ms: what the GPU computes first while the CPU and the link are at work: shared experts, which the result includes.
        """
        if self.schedule == "layer_map":
            on_gpu, on_cpu = (self._mean(tokens, name, share, beside_ms) for name, share in (("on_demand", 1.0), ("all_cpu", 0.0)))
            return self.resident * on_gpu + (1 - self.resident) * on_cpu
        return self._mean(tokens, self.schedule, self.resident, beside_ms)

    def _mean(self, tokens: int, schedule: Any, resident: float, beside_ms: float) -> float:
        scheduler = make_scheduler(schedule)
        rng = np.random.default_rng(0)
        slots = round(resident * self.num_experts)
        times = []
        for _ in range(TRIALS):
            chosen = self._routing(tokens, rng)
            has_slot = np.zeros(self.num_experts, bool)
            has_slot[rng.permutation(self.num_experts)[:slots]] = True
            active = np.flatnonzero(chosen)
            plan = scheduler.plan(0, self._problem(chosen[active], has_slot[active], slots, beside_ms))
            times.append(max(beside_ms, plan.makespan_ms))
        return float(np.mean(times))

    def _routing(self, tokens: int, rng: np.random.Generator) -> NDArray[np.int32]:
        """Tokens of each expert."""
        if tokens == 1:
            chosen = np.zeros(self.num_experts, np.int32)
            chosen[rng.permutation(self.num_experts)[: self.top_k]] = 1
            return chosen
        counts = rng.multinomial(tokens * self.top_k, np.full(self.num_experts, 1 / self.num_experts))
        return np.minimum(counts, tokens).astype(np.int32)

    def _problem(self, loads: NDArray[np.int32], has_slot: NDArray[np.bool_], slots: int, beside_ms: float) -> LayerProblem:
        machine = self.machine
        return LayerProblem(
            loads=loads,
            cpu_ms=machine.cpu_ms(loads, self.expert_bytes, self.bits, self.neurons),
            gpu_ms=machine.gpu_ms(loads, self.expert_bytes, self.bits, self.neurons),
            arrival_ms=np.where(has_slot, 0.0, math.inf),
            transfer_ms=machine.transfer_ms(self.expert_bytes),
            first_cpu_ms=machine.first_cpu_ms(self.expert_bytes, self.neurons),
            gpu_free_ms=beside_ms,
            max_transfers=UNBOUNDED if slots else 0,  # one slot is enough to bring any number, one after another
        )


def predict_with_gpu(
    works: Iterable[Work], memory: GpuMemory, measured: Measurements, rates: GpuRates, outline: Outline, *, kv_bytes: int, load: Load
) -> Speed:
    """As `speed.predict`, for a model of which `memory` says what is on the GPU.

    The GPU reads weights and cache at its bandwidth or computes, whichever takes longer; Python's share is by layer, on whatever
    device the layer is; a layer's experts take what the schedule plans for them (`moegraft.operators.experts.scheduling`).

    Raises:
        UnsupportedModelError: how many experts a token has is not known.
    """
    works = [work for work in works if work.device != "shared"]
    on_cpu = [work for work in works if work.device == "cpu"]
    missing = missing_rates(on_cpu, measured) | {
        f"experts, {name}" for group in memory.shared if rate_of("experts", name := _weights(group, outline), measured) is None
    }
    if missing:
        return Speed(None, None, tuple(sorted(missing)))
    layers = outline.source.config.get_text_config().num_hidden_layers
    overhead_s = layers * (measured.layer_overhead_ms + HOST_MS) / 1e3
    beside = [work for work in works if work.device == "gpu" and work.beside]
    gpu = [work for work in works if work.device == "gpu" and not work.beside]
    experts_layers = sum(len(group.swaps) for group in memory.shared)

    def on_gpu_s(some: Iterable[Work], tokens: int) -> float:
        return sum(max(work.nbytes / rates.gbps / 1e9, 2 * work.weight_count * work.share * tokens / rates.tflops / 1e12) for work in some)

    def taken_s(tokens: int) -> float:
        beside_ms = 1e3 * on_gpu_s(beside, tokens) / experts_layers if experts_layers else 0.0
        experts_ms = sum(
            len(group.swaps) * layer.milliseconds(tokens, beside_ms)
            for group, layer in zip(memory.shared, _layers(memory, measured, rates, outline), strict=True)
        )
        own_s = on_gpu_s(gpu if experts_layers else [*gpu, *beside], tokens)
        return float(overhead_s + own_s + experts_ms / 1e3 + sum(seconds(work, measured, tokens) for work in on_cpu))

    return Speed(load.batch / (taken_s(load.batch) + kv_bytes / rates.gbps / 1e9), load.prompt / taken_s(load.prompt))


def _weights(group: Shared, outline: Outline) -> str:
    return weight_type(group.swaps[0], outline.stored) or "unknown"


def _layers(memory: GpuMemory, measured: Measurements, rates: GpuRates, outline: Outline) -> Iterator[ExpertsLayer]:
    top_k = experts_per_token(outline.source.config)
    for group in memory.shared:
        cpu = rate_of("experts", _weights(group, outline), measured)
        assert cpu is not None, "predict_with_gpu looks for all rates first"
        module = outline.skeleton.get_submodule(group.swaps[0].module)
        count = sum(parameter.numel() for parameter in module.parameters()) / group.num_experts
        options: Any = group.swaps[0].options
        sparsity = sparsity_options(options)
        left_out = 0.0 if sparsity is None else experts_layer(group.swaps[0].module, outline.skeleton).routed_target(sparsity)
        neurons = None if sparsity is None else Neurons.without(left_out, gated=read_layout(module).gated)
        machine = MachineProfile(
            "planned",
            cpu.decode_gbps,
            cpu.prefill_gflops,
            rates.gbps,
            rates.tflops,
            rates.link_gbps,
            cpu_launch_ms=0.0,  # in the measured rate already, as is what a layer's first expert costs
            first_cpu_share=0.0,
        )
        bits = 8 * group.expert_bytes / count
        yield ExpertsLayer(group.num_experts, top_k, group.resident, group.expert_bytes, bits, machine, options.schedule, neurons)
