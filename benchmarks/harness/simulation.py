"""A model's decode and prefill on a modelled machine: the real engine, scheduler, cache, queue and prefetcher on the virtual clock.

Experts have sizes and no weights: the simulation covers placement, transfers and the times of all devices. Attention, router and shared
experts are one piece of GPU work per layer, unless shared experts overlap the routed ones. `HOST_MS` is the modelled time of a layer's
decision on the host; its real time is measured as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from support.virtual_device import Timed, VirtualDevice, Work

from harness.routing import ModelShape
from moegraft.operators.experts.forecast import INT4_BITS, MachineProfile
from moegraft.operators.offload.costs import CostModel, warm_up
from moegraft.operators.offload.devices.base import CpuTicket, Event
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.options import CacheOptions, make_policy
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.queue import open_expert_cache
from moegraft.operators.offload.scheduler import LayerStep, Prediction, ScheduleName, Scheduler, layers_that_fit
from moegraft.operators.offload.statistics import TimingRecorder
from moegraft.operators.offload.store import ExpertStore, SlotPlan, even_plan
from moegraft.operators.offload.transfers import Urgency
from moegraft.operators.routing_trace import Trace

HOST_MS = 0.0
STAGING = 4
Foresight = Literal["router", "perfect"]


@dataclass(frozen=True, slots=True)
class System:
    """One way to run a model.

    Attributes:
        foresight: the source of predictions; `perfect` knows the choices of later layers and gives a bound.
    """

    name: str
    schedule: ScheduleName
    cache: CacheOptions = field(default_factory=CacheOptions)
    prefetch: PrefetchOptions = field(default_factory=lambda: PrefetchOptions(policy="none", promote=False))
    foresight: Foresight = "router"


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of a run.

    Attributes:
        step_ms: time of every step by the virtual clock.
        cpu, gpu, link: share of the time that each was busy.
        host_us: real time of a layer's decisions in Python.
    """

    step_ms: NDArray[np.float64]
    hit_rate: float
    cpu: float
    gpu: float
    link: float
    predicted_over_measured: float
    host_us: float


class _Counted:
    """An executor that computes nothing: the clock charges the work on experts (A,), of which each has `loads` (A,) tokens."""

    def __init__(self, experts: Sequence[int] | NDArray[np.int64], loads: Sequence[int] | NDArray[np.int32], expert_bytes: int) -> None:
        self._loads = dict(zip(np.asarray(experts).tolist(), np.asarray(loads).tolist(), strict=True))
        self._expert_bytes = expert_bytes

    def on_cpu(self, experts: NDArray[np.int64]) -> Timed:
        return Timed(Work(tuple(self._loads[expert] for expert in experts.tolist()), self._expert_bytes))

    def on_gpu(self, experts: NDArray[np.int64], slots: NDArray[np.int32]) -> Timed:
        return self.on_cpu(experts)

    def defer(self, experts: NDArray[np.int64], submit: Callable[[None], CpuTicket]) -> None:
        raise AssertionError("nothing is deferred in this simulation")

    def join(self, cpu: CpuTicket | None, gpu: Sequence[Event]) -> None:
        if cpu is not None:
            cpu.wait()

    def restart(self) -> None:
        raise AssertionError("nothing fails in this simulation")


class Simulation:
    """One model on one machine under one system.

    Args:
        ratio: share of each layer's experts that have a slot.
        profile: a trace whose most used experts fill the slots at the start.
    """

    def __init__(
        self, model: ModelShape, machine: MachineProfile, ratio: float, system: System, profile: Trace, bits_per_weight: float = INT4_BITS
    ) -> None:
        self.model = model
        self.bits = bits_per_weight
        self.system = system
        self.device = VirtualDevice(machine, bits_per_weight=bits_per_weight)
        self.machine = machine
        self.expert_bytes = model.expert_bytes(bits_per_weight)
        store = ExpertStore.phantom(model.layers, model.num_experts, self.expert_bytes)
        policy = make_policy(system.cache, list(map(str, range(model.layers))), model.num_experts, model.top_k)
        slots, admission = _slots(model, ratio, system), "bypass" if system.cache.bypasses else "always"
        timings = TimingRecorder(self.device)
        cache = open_expert_cache(
            self.device, store, slots, policy.priority, admission, on_span=timings.on_span, on_transfer=timings.on_transfer
        )
        assert cache is not None, "the modelled GPU has room"
        costs = CostModel(warm_up(self.device, cache, lambda experts, load: _Counted(experts, [load] * len(experts), self.expert_bytes)))
        gpu_layers = [cache.slots.capacity_of(layer) > 0 for layer in range(model.layers)] if system.schedule == "layer_map" else None
        self.engine = Engine(self.device, cache, Scheduler(system.schedule, gpu_layers), costs, policy, system.prefetch, timings)
        self._fill(profile)

    def _fill(self, profile: Trace) -> None:
        hot = np.argsort(-profile.loads(), axis=1, kind="stable")
        queue, slots = self.engine.cache.queue, self.engine.cache.slots
        for layer in range(self.model.layers):
            for expert in hot[layer][: slots.capacity_of(layer)].tolist():
                queue.request(layer, int(expert), Urgency.PROMOTION)
        while not queue.idle:
            self.device.stream("copy").record().wait()
            self.device.synchronize()

    def run(self, trace: Trace, batch: int = 1, *, beside: bool = False) -> Figures:
        """Replay the trace, `batch` tokens per step; with `beside`, shared experts overlap the CPU and the link."""
        device, engine = self.device, self.engine
        compute = device.stream("compute")
        rest_ms = rest_layer_ms(self.model, self.machine, batch)
        shared_ms = rest_ms * self.model.shared_share if beside else 0.0
        between = partial(device.launch, compute, Timed(Work(cost_ms=shared_ms))) if beside else None
        start_ms, busy = device.now_ms(), self._busy_ms()
        step_ms: list[float] = []
        host_s = 0.0
        for tokens in _batches(trace, batch):
            began_ms = device.now_ms()
            for step in self._steps(tokens):
                device.launch(compute, Timed(Work(cost_ms=rest_ms - shared_ms)))
                compute.record().wait()
                device.advance(HOST_MS)
                executor = _Counted(step.experts, step.loads, self.expert_bytes)
                begin = time.perf_counter()
                engine.run(step, executor, between)
                host_s += time.perf_counter() - begin
            compute.record().wait()
            step_ms.append(device.now_ms() - began_ms)
        took_ms = device.now_ms() - start_ms
        shares = [(after - before) / took_ms for after, before in zip(self._busy_ms(), busy, strict=True)]
        rest_and_host = (rest_ms - shared_ms + HOST_MS) * self.model.layers * len(step_ms)
        return Figures(
            np.asarray(step_ms),
            engine.statistics.hit_rate,
            *shares,
            predicted_over_measured=(engine.statistics.planned_ms + rest_and_host) / took_ms,
            host_us=1e6 * host_s / len(step_ms) / self.model.layers,
        )

    def _busy_ms(self) -> tuple[float, float, float]:
        return tuple(self.device.busy_ms(lane) for lane in ("cpu", "compute", "copy"))  # type: ignore[return-value] # three

    def _steps(self, tokens: Trace) -> Iterator[LayerStep]:
        depth = self.system.prefetch.depth(tokens.num_tokens)
        for layer in range(self.model.layers):
            ahead = range(layer + 1, min(layer + 1 + depth, self.model.layers))
            predictions = [Prediction.of(later, self._foreseen(tokens, layer, later)) for later in ahead]
            yield LayerStep.of(layer, tokens.chosen[:, layer], tokens.scores[:, layer], predictions)

    def _foreseen(self, tokens: Trace, layer: int, later: int) -> NDArray[np.int64]:
        if self.system.foresight == "perfect":
            return tokens.chosen[:, later]
        return tokens.predicted[later - layer - 1, :, later]


def _slots(model: ModelShape, ratio: float, system: System) -> SlotPlan:
    total = round(ratio * model.num_experts) * model.layers
    if system.schedule == "layer_map":
        whole = layers_that_fit(model.layers, model.num_experts, total)
        return SlotPlan(tuple(model.num_experts * on_gpu for on_gpu in whole), STAGING)
    return even_plan(model.layers, total, STAGING)


def _batches(trace: Trace, batch: int) -> Sequence[Trace]:
    return [trace.part(first, first + batch) for first in range(0, trace.num_tokens - batch + 1, batch)]


def rest_layer_ms(model: ModelShape, machine: MachineProfile, tokens: int) -> float:
    """Return the ms of a layer's attention, router and shared experts: the modelled time of one token, and arithmetic for the others.

    Each further token counts 12 H^2 multiplications and additions: four projections and a shared MLP of two more hidden sizes.
    """
    return model.rest_ms + (tokens - 1) * 2 * 12 * model.hidden**2 / (machine.gpu_tflop_s * 1e9)


def head_ms(model: ModelShape, machine: MachineProfile) -> float:
    """Return the ms of the head on the GPU, which reads its weights in 16 bits once for all tokens of a pass."""
    return 2 * model.vocabulary * model.hidden / machine.gpu_gb_s / 1e6
