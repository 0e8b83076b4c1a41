"""Tokens a second, from what a token passes and the rates of this machine.

Tokens a second with a GPU: all but the experts there, and of each layer's experts what the scheduler plans for even routing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moegraft.injection.estimate.measure import Measurements, Rate
from moegraft.injection.estimate.memory import GpuMemory, Shared
from moegraft.injection.estimate.work import GpuRates, Load, Work, weight_type
from moegraft.injection.meta_model import MetaModel
from moegraft.operators.experts_layer import experts_layer, experts_per_token
from moegraft.operators.layout import read_layout
from moegraft.operators.offload.devices.base import Neurons
from moegraft.operators.offload.devices.profiles import MachineProfile
from moegraft.operators.offload.scheduler import UNBOUNDED, LayerProblem, ScheduleName, Scheduler

# What has no rate of its own, and what is read as fast by kernels of about the same arithmetic.
MEASURED_AS = {"float16": "bfloat16", "q4_k": "int4", "q6_k": "int8"}


@dataclass(frozen=True, slots=True)
class Speed:
    """A prediction; `missing` names weight types without a measured rate, and then there is no figure."""

    decode_tokens_s: float | None
    prefill_tokens_s: float | None
    missing: tuple[str, ...] = ()


def predict(works: Iterable[Work], measured: Measurements, *, layers: int, kv_bytes: int, load: Load) -> Speed:
    """Each module takes as long as reading its weights or its arithmetic, whichever is longer; Python's share is by layer.

    Args:
        kv_bytes: of the whole cache at `load.context`, read once a step.

    Arithmetic of attention itself is left out: it counts in prompts of tens of thousands of tokens.
    """
    works = list(works)
    missing = missing_rates(works, measured)
    if missing:
        return Speed(None, None, tuple(sorted(missing)))
    overhead_s = layers * measured.layer_overhead_ms / 1e3
    step_s = overhead_s + kv_bytes / (measured.read_gbps * 1e9) + sum(seconds(work, measured, load.batch) for work in works)
    prompt_s = overhead_s + sum(seconds(work, measured, load.prompt) for work in works)
    return Speed(load.batch / step_s, load.prompt / prompt_s)


def missing_rates(works: Iterable[Work], measured: Measurements) -> set[str]:
    """The kinds and weight types that nothing was measured of."""
    return {f"{work.kind}, {work.weights}" for work in works if rate_of(work.kind, work.weights, measured) is None}


def rate_of(kind: str, weights: str, measured: Measurements) -> Rate | None:
    """That of this machine's CPU."""
    rates = measured.experts if kind == "experts" else measured.linear
    found = [rates.get(MEASURED_AS.get(name, name)) for name in weights.split("+")]
    known = [rate for rate in found if rate is not None]
    if len(known) < len(found):
        return None
    return Rate(min(rate.decode_gbps for rate in known), min(rate.prefill_gflops for rate in known))


def seconds(work: Work, measured: Measurements, tokens: int) -> float:
    """What the CPU takes for a module with so many tokens."""
    rate = rate_of(work.kind, work.weights, measured)
    assert rate is not None, "missing rates are looked for first"
    # Tokens choose experts independently: the expected part of them that at least one token needs.
    touched = 1 - (1 - work.share) ** tokens
    # Nor do tokens share their neurons: the expected part of a touched expert, whose gate is always read, that one of its tokens needs.
    of_expert = (3 - 2 * math.pow(work.left_out, tokens * work.share / touched)) / 3
    reading_s = work.nbytes * touched * of_expert / (rate.decode_gbps * 1e9)
    arithmetic_s = 2 * work.weight_count * work.share * tokens / (rate.prefill_gflops * 1e9)
    return max(reading_s, arithmetic_s)


def tokens_text(tokens_s: float) -> str:
    """A rate for people, three figures of it."""
    return f"{tokens_s:,.0f} tokens/s" if tokens_s >= 100 else f"{tokens_s:.3g} tokens/s"


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
        scheduler = Scheduler(schedule)
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
    works: Iterable[Work], memory: GpuMemory, measured: Measurements, rates: GpuRates, meta_model: MetaModel, *, kv_bytes: int, load: Load
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
        f"experts, {name}" for group in memory.shared if rate_of("experts", name := _weights(group, meta_model), measured) is None
    }
    if missing:
        return Speed(None, None, tuple(sorted(missing)))
    layers = meta_model.source.config.get_text_config().num_hidden_layers
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
            for group, layer in zip(memory.shared, _layers(memory, measured, rates, meta_model), strict=True)
        )
        own_s = on_gpu_s(gpu if experts_layers else [*gpu, *beside], tokens)
        return float(overhead_s + own_s + experts_ms / 1e3 + sum(seconds(work, measured, tokens) for work in on_cpu))

    return Speed(load.batch / (taken_s(load.batch) + kv_bytes / rates.gbps / 1e9), load.prompt / taken_s(load.prompt))


def _weights(group: Shared, meta_model: MetaModel) -> str:
    return weight_type(group.swaps[0], meta_model.stored) or "unknown"


def _layers(memory: GpuMemory, measured: Measurements, rates: GpuRates, meta_model: MetaModel) -> Iterator[ExpertsLayer]:
    top_k = experts_per_token(meta_model.source.config)
    for group in memory.shared:
        cpu = rate_of("experts", _weights(group, meta_model), measured)
        assert cpu is not None, "predict_with_gpu looks for all rates first"
        module = meta_model.skeleton.get_submodule(group.swaps[0].module)
        count = sum(parameter.numel() for parameter in module.parameters()) / group.num_experts
        options: Any = group.swaps[0].options
        sparsity = group.swaps[0].operator_type.sparsity_options(options)
        left_out = 0.0 if sparsity is None else experts_layer(group.swaps[0].module, meta_model.skeleton).routed_target(sparsity)
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
