"""What an engine watches of its own work: the costs that keep its plans true, and a timeline where one is wanted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.experts.devices.interface import Device, Event, Stream
from moegraft.operators.experts.engine.timeline import Timeline
from moegraft.operators.experts.scheduling.cost_model import CostModel

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
