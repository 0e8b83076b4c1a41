"""What an engine did, in numbers for people: who computed, what was there, what plans promised.

What an engine watches of its own work: the costs that keep its plans true, and a timeline where one is wanted.

Who worked when: spans of the GPU, the CPU and the link, each layer's plan and the rounds of drafts, as a trace.

Perfetto and chrome://tracing open it.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.costs import CostModel
from moegraft.operators.offload.devices.base import Device, Event, Stream
from moegraft.operators.offload.scheduler import LayerProblem


@dataclass(slots=True)
class EngineStatistics:
    """Counts since the model was loaded.

    Attributes:
        used: active experts, layer by layer; `found` of them had a slot when their layer began, `arriving` were on their way.
        on_cpu: active experts that the CPU computed; `stolen` of them had a slot.
        transferred: loaded because the plan asked for it.
        planned_ms: what the plans promised, summed.
        recoveries: layers that had to be computed anew on the CPU.
        replayed: decode steps that were captured ones.
    """

    layers: int
    steps: int = 0
    used: int = 0
    found: int = 0
    arriving: int = 0
    on_cpu: int = 0
    stolen: int = 0
    transferred: int = 0
    planned_ms: float = 0.0
    recoveries: int = 0
    replayed: int = 0
    found_by_layer: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    used_by_layer: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.found_by_layer = np.zeros(self.layers, np.int64)
        self.used_by_layer = np.zeros(self.layers, np.int64)

    def count(self, layer: int, problem: LayerProblem, on_cpu: NDArray[np.bool_], makespan_ms: float) -> None:
        there = problem.arrival_ms == 0
        absent = np.isinf(problem.arrival_ms)
        found, used = int(there.sum()), len(there)
        self.steps += 1
        self.used += used
        self.found += found
        self.used_by_layer[layer] += used
        self.found_by_layer[layer] += found
        self.arriving += used - found - int(absent.sum())
        self.on_cpu += int(on_cpu.sum())
        self.stolen += int((on_cpu & there).sum())
        self.transferred += int((absent & ~on_cpu).sum())
        self.planned_ms += makespan_ms

    def count_split(self, layer: int, used: int, on_cpu: int) -> None:
        """Of a layer in a captured step, where the CPU computes what has no slot."""
        self.steps += 1
        self.used += used
        self.found += used - on_cpu
        self.used_by_layer[layer] += used
        self.found_by_layer[layer] += used - on_cpu
        self.on_cpu += on_cpu

    @property
    def hit_rate(self) -> float:
        """Share of the active experts that had a slot when their layer began; 0 before the first."""
        return self.found / self.used if self.used else 0.0

    def as_mapping(self) -> Mapping[str, object]:
        used = max(self.used, 1)
        return {
            "layers computed": self.steps,
            "decode steps replayed": self.replayed,
            "experts found on the GPU": f"{self.hit_rate:.1%}",
            "experts computed by the CPU": f"{self.on_cpu / used:.1%}",
            "experts transferred on demand": self.transferred,
            "layers computed anew after a failure": self.recoveries,
        }


LANES = ("rounds", "plan", "GPU", "CPU", "link")  # from top to bottom


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work on one lane, in ms of the device's host clock."""

    lane: str
    name: str
    start_ms: float
    end_ms: float
    details: Mapping[str, object] = field(default_factory=dict)


class Timeline:
    """Collects spans of one device; keeps the latest `most`."""

    def __init__(self, device: str, most: int = 1_000_000) -> None:
        self.device = device
        self.spans: list[Span] = []
        self._most = most

    def add(self, lane: str, name: str, start_ms: float, end_ms: float, **details: object) -> None:
        if len(self.spans) >= self._most:
            del self.spans[: self._most // 2]
        self.spans.append(Span(lane, name, start_ms, end_ms, details))

    def busy_ms(self, lane: str) -> float:
        """Time that spans of a lane cover, overlaps counted once."""
        covered, end_ms = 0.0, float("-inf")
        for span in sorted((span for span in self.spans if span.lane == lane), key=lambda span: span.start_ms):
            covered += max(0.0, span.end_ms - max(span.start_ms, end_ms))
            end_ms = max(end_ms, span.end_ms)
        return covered


@contextmanager
def round_spans(timelines: Sequence[tuple[Timeline, Callable[[], float]]], name: str) -> Iterator[dict[str, object]]:
    """A part of a round of drafting and verifying, on each timeline by its device's clock (ms); what fails has its span as well."""
    start_ms = [now_ms() for _, now_ms in timelines]
    details: dict[str, object] = {}
    try:
        yield details
    finally:
        for (timeline, now_ms), begun_ms in zip(timelines, start_ms, strict=True):
            timeline.add("rounds", name, begun_ms, now_ms(), **details)


def chrome_trace(timelines: list[Timeline]) -> dict[str, object]:
    """The trace event format: a process for each device, a thread for each lane, times in microseconds."""
    events: list[dict[str, object]] = []
    start_ms = min((span.start_ms for timeline in timelines for span in timeline.spans), default=0.0)
    for process, timeline in enumerate(timelines):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.device}})
        for thread, lane in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}})
        for span in timeline.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane,
                    "pid": process,
                    "tid": LANES.index(span.lane),
                    "ts": round(1e3 * (span.start_ms - start_ms), 3),
                    "dur": round(1e3 * (span.end_ms - span.start_ms), 3),
                    "args": dict(span.details),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | os.PathLike[str], timelines: list[Timeline]) -> None:
    """
    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")


GPU_EVERY = 16  # launches from one that is timed to the next: timed events cost the host a little
MOST_PENDING = 64
BESIDE_ALPHA = 0.1  # the newest measurement's weight in the average


@dataclass(frozen=True, slots=True)
class _Launch:
    before: Event
    after: Event
    layer: int
    loads: NDArray[np.int32]
    waited: bool  # for a transfer: its time is not the GPU's alone


class BesideTimes:
    """What the GPU's other work takes that is handed over between a layer's experts, by the tokens of a step: moving averages.

    A plan that does not know of it would leave the GPU more experts than it can compute while the CPU is at work.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._average_ms: dict[int, float] = {}  # by the bits of the number of tokens
        self._pending: deque[tuple[int, Event, Event]] = deque()
        self._calls = 0

    def ms(self, tokens: int) -> float:
        """0 until it was measured."""
        return self._average_ms.get(tokens.bit_length(), 0.0)

    def run(self, tokens: int, compute: Stream, between: Callable[[], None]) -> None:
        """Hands it over, and times it now and then."""
        self._calls += 1
        known = tokens.bit_length() in self._average_ms
        if (known and self._calls % GPU_EVERY) or len(self._pending) == MOST_PENDING:
            between()
            return
        before = compute.record(timed=True)
        between()
        self._pending.append((tokens.bit_length(), before, compute.record(timed=True)))

    def collect(self) -> None:
        """Takes in what is done. Never blocks."""
        while self._pending and self._pending[0][2].done():
            bits, before, after = self._pending.popleft()
            ms = self._device.elapsed_ms(before, after)
            self._average_ms[bits] = ms + (1 - BESIDE_ALPHA) * (self._average_ms.get(bits, ms) - ms)


class Observer:
    """One engine's. Calls come under the engine's lock, but for the link's, which come from the device's notifier."""

    def __init__(self, device: Device) -> None:
        self.costs: CostModel | None = None
        self.beside = BesideTimes(device)
        self._device = device
        self._timeline: Timeline | None = None
        self._origin: tuple[Event, float] | None = None  # of the GPU's clock on the host's
        self._pending: deque[_Launch] = deque()
        self._launches = 0

    @property
    def timeline(self) -> Timeline | None:
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        if timeline is not None:
            self._device.synchronize()
            origin = self._device.stream("compute").record(timed=True)
            origin.wait()
            self._origin = origin, self._device.now_ms()
        self._timeline = timeline

    def wants_launch(self) -> bool:
        """Whether the next launch is to be timed."""
        self._launches += 1
        return self._timeline is not None or self._launches % GPU_EVERY == 0

    def launched(self, layer: int, loads: NDArray[np.int32], before: Event, after: Event, *, waited: bool) -> None:
        if len(self._pending) < MOST_PENDING:
            self._pending.append(_Launch(before, after, layer, loads, waited))

    def collect(self) -> None:
        """Takes in the launches that are done. Never blocks."""
        self.beside.collect()
        while self._pending and self._pending[0].after.done():
            launch = self._pending.popleft()
            ms = self._device.elapsed_ms(launch.before, launch.after)
            if self.costs is not None and not launch.waited:
                self.costs.observe_gpu(launch.loads, ms)
            if self._timeline is not None and self._origin is not None:
                event, origin_ms = self._origin
                start_ms = origin_ms + self._device.elapsed_ms(event, launch.before)
                self._timeline.add("GPU", f"layer {launch.layer}", start_ms, start_ms + ms, tokens=launch.loads.tolist())

    def replayed(self, began_ms: float) -> None:
        """A captured decode step has just ended; who computed what within it is not seen."""
        if self._timeline is not None:
            self._timeline.add("GPU", "captured step", began_ms, self._device.now_ms())

    def computed_on_cpu(self, layer: int, loads: NDArray[np.int32], ms: float | None) -> None:
        """The CPU's part of a layer has just ended; None: it ended before anybody looked."""
        if ms is None:
            return
        if self.costs is not None:
            self.costs.observe_cpu(loads, ms)
        if self._timeline is not None:
            now_ms = self._device.now_ms()
            self._timeline.add("CPU", f"layer {layer}", now_ms - ms, now_ms, tokens=loads.tolist())

    def planned(self, layer: int, start_ms: float, **details: object) -> None:
        if self._timeline is not None:
            self._timeline.add("plan", f"layer {layer}", start_ms, self._device.now_ms(), **details)

    def on_span(self, lane: str, name: str, start_ms: float, end_ms: float) -> None:
        """Of the transfer queue."""
        if self._timeline is not None:
            self._timeline.add(lane, name, start_ms, end_ms)

    def on_transfer(self, nbytes: int, ms: float) -> None:
        """Of the transfer queue."""
        if self.costs is not None:
            self.costs.observe_transfer(nbytes, ms)
