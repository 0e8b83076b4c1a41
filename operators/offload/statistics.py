"""What an engine records of its own work: counts for users, times that keep its cost model accurate, and a timeline on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.costs import CostModel
from moegraft.operators.offload.devices.base import CpuTicket, Device, Event, Stream
from moegraft.operators.offload.scheduler import LayerPlan, LayerProblem
from moegraft.operators.timeline import Timeline


@dataclass(slots=True)
class EngineStatistics:
    """Counts since the model was loaded.

    Attributes:
        layers: of the engine; `used_by_layer` and `found_by_layer` are (layers,).
        steps: layers computed.
        used: active experts, layer by layer; `found` of them were resident when their layer began, `arriving` were in flight.
        on_cpu: active experts that the CPU computed; `stolen` of them were resident, `deferred` were added to the next layer.
        transferred: experts loaded because the plan asked for it.
        planned_ms: makespans of all plans.
        recoveries: layers that were computed again on the CPU after a failure of the device.
        replayed: decode steps that were captured ones.
        loaded_for_verification: experts that a verification found resident because its draft had them loaded.
        shared_in_verification: tokens of verifications whose missing expert was loaded or computed for another of them as well.
    """

    layers: int
    steps: int = 0
    used: int = 0
    found: int = 0
    arriving: int = 0
    on_cpu: int = 0
    stolen: int = 0
    deferred: int = 0
    transferred: int = 0
    planned_ms: float = 0.0
    recoveries: int = 0
    replayed: int = 0
    loaded_for_verification: int = 0
    shared_in_verification: int = 0
    found_by_layer: NDArray[np.int64] = field(init=False)
    used_by_layer: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.found_by_layer = np.zeros(self.layers, np.int64)
        self.used_by_layer = np.zeros(self.layers, np.int64)

    def count_layers(self, used: NDArray[np.int64], on_cpu: NDArray[np.int64]) -> None:
        """Count every layer once, (layers,) each: what the CPU did not compute was resident."""
        self.steps += self.layers
        self.used += int(used.sum())
        self.found += int((used - on_cpu).sum())
        self.on_cpu += int(on_cpu.sum())
        self.used_by_layer += used
        self.found_by_layer += used - on_cpu

    def count_planned(self, layer: int, problem: LayerProblem, plan: LayerPlan) -> None:
        """Count a layer that was scheduled."""
        resident, missing = problem.arrival_ms == 0, np.isinf(problem.arrival_ms)
        used, found = len(resident), int(resident.sum())
        self.steps += 1
        self.used += used
        self.found += found
        self.on_cpu += int(plan.on_cpu.sum())
        self.used_by_layer[layer] += used
        self.found_by_layer[layer] += found
        self.arriving += used - found - int(missing.sum())
        self.stolen += int((plan.on_cpu & resident).sum())
        self.transferred += int((missing & ~plan.on_cpu).sum())
        self.planned_ms += plan.makespan_ms

    @property
    def hit_rate(self) -> float:
        """Share of the active experts that were resident when their layer began; 0 before the first."""
        return self.found / self.used if self.used else 0.0

    def as_mapping(self) -> Mapping[str, object]:
        """The counts under names for users."""
        return {
            "layers computed": self.steps,
            "decode steps replayed": self.replayed,
            "experts found on the GPU": f"{self.hit_rate:.1%}",
            "experts computed by the CPU": f"{self.on_cpu / max(self.used, 1):.1%}",
            "experts added to the next layer": self.deferred,
            "experts transferred on demand": self.transferred,
            "layers computed again after a failure": self.recoveries,
            "experts loaded ahead of verifications and used there": self.loaded_for_verification,
            "loads shared by tokens verified together": self.shared_in_verification,
        }


TIMED_EVERY = 16  # launches from one that is timed to the next: timed events cost the host a little
MAX_PENDING = 64
OVERLAP_ALPHA = 0.1  # the newest measurement's weight in the average


@dataclass(frozen=True, slots=True)
class _Launch:
    before: Event
    after: Event
    layer: int
    loads: NDArray[np.int32]
    waited: bool  # for a transfer: its time is not the GPU's alone


class TimingRecorder:
    """Measures one engine's work, for its cost model and for a timeline.

    Calls come under the engine's lock, except for `on_span` and `on_transfer`, which the transfer queue calls from the device's notifier.

    Attributes:
        costs: learns from every measurement; set by the engine.
    """

    def __init__(self, device: Device) -> None:
        self.costs: CostModel | None = None
        self._device = device
        self._timeline: Timeline | None = None
        self._gpu_origin: tuple[Event, float] | None = None  # an event of the GPU, and its time by the host's clock
        self._launches: deque[_Launch] = deque()
        self._launch_count = 0
        self._cpu_end_ms = 0.0  # of its last job, for a timeline
        self._overlap_ms: dict[int, float] = {}  # moving averages by the bit length of the number of tokens
        self._overlaps: deque[tuple[int, Event, Event]] = deque()
        self._overlap_count = 0

    @property
    def timeline(self) -> Timeline | None:
        """Collects spans while it is set."""
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        if timeline is not None:
            self._device.synchronize()
            origin = self._device.stream("compute").record(timed=True)
            origin.wait()
            self._gpu_origin = origin, self._device.now_ms()
        self._timeline = timeline

    def planned(self, layer: int, start_ms: float, plan: LayerPlan) -> None:
        if self._timeline is not None:
            details = {"on_cpu": int(plan.on_cpu.sum()), "experts": len(plan.on_cpu), "ms": plan.makespan_ms}
            self._timeline.add("plan", f"layer {layer}", start_ms, self._device.now_ms(), **details)

    def launch(self, compute: Stream, layer: int, loads: NDArray[np.int32], launch: Callable[[], None], *, waited: bool) -> Event:
        """Launch experts of these loads and return the event behind them; some launches are timed, with a timeline all."""
        self._launch_count += 1
        timed = self._timeline is not None or self._launch_count % TIMED_EVERY == 0
        before = compute.record(timed=True) if timed else None
        launch()
        after = compute.record(timed=timed)
        if before is not None and len(self._launches) < MAX_PENDING:
            self._launches.append(_Launch(before, after, layer, loads, waited))
        return after

    def computed_on_cpu(self, layer: int, loads: NDArray[np.int32], ticket: CpuTicket, submitted_ms: float) -> None:
        """Record the CPU's part of a layer, which was submitted then and has been waited for."""
        ms = ticket.elapsed_ms
        if ms is None:
            return
        if self.costs is not None:
            self.costs.observe_cpu(loads, ms)
        if self._timeline is not None:
            start_ms = max(submitted_ms, self._cpu_end_ms)
            self._cpu_end_ms = start_ms + ms
            self._timeline.add("CPU", f"layer {layer}", start_ms, start_ms + ms, tokens=loads.tolist())

    def replayed(self, start_ms: float) -> None:
        """Record a captured decode step, which has just ended; the devices' shares of it are not seen."""
        if self._timeline is not None:
            self._timeline.add("GPU", "captured step", start_ms, self._device.now_ms())

    def overlap_ms(self, tokens: int) -> float:
        """Return what the GPU's shared experts take that overlap with a layer of so many tokens; 0 until measured.

        A plan that does not know of it would leave the GPU more experts than it can compute while the CPU is at work.
        """
        return self._overlap_ms.get(tokens.bit_length(), 0.0)

    def launch_overlap(self, compute: Stream, tokens: int, launch: Callable[[], None]) -> None:
        """Launch the shared experts; some launches are timed."""
        self._overlap_count += 1
        size = tokens.bit_length()
        if (size in self._overlap_ms and self._overlap_count % TIMED_EVERY) or len(self._overlaps) == MAX_PENDING:
            launch()
            return
        before = compute.record(timed=True)
        launch()
        self._overlaps.append((size, before, compute.record(timed=True)))

    def collect(self) -> None:
        """Learn from the timed launches that are done. Never blocks."""
        while self._overlaps and self._overlaps[0][2].done():
            size, before, after = self._overlaps.popleft()
            ms = self._device.elapsed_ms(before, after)
            self._overlap_ms[size] = ms + (1 - OVERLAP_ALPHA) * (self._overlap_ms.get(size, ms) - ms)
        while self._launches and self._launches[0].after.done():
            launch = self._launches.popleft()
            ms = self._device.elapsed_ms(launch.before, launch.after)
            if self.costs is not None and not launch.waited:
                self.costs.observe_gpu(launch.loads, ms)
            if self._timeline is not None and self._gpu_origin is not None:
                event, origin_ms = self._gpu_origin
                start_ms = origin_ms + self._device.elapsed_ms(event, launch.before)
                self._timeline.add("GPU", f"layer {launch.layer}", start_ms, start_ms + ms, tokens=launch.loads.tolist())

    def on_span(self, lane: str, name: str, start_ms: float, end_ms: float) -> None:
        """Record a chunk's transfer; a hook of the transfer queue."""
        if self._timeline is not None:
            self._timeline.add(lane, name, start_ms, end_ms)

    def on_transfer(self, nbytes: int, ms: float) -> None:
        """Learn from a transfer that had the link to itself; a hook of the transfer queue."""
        if self.costs is not None:
            self.costs.observe_transfer(nbytes, ms)
