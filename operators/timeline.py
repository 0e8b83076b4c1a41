"""Timelines of the GPU, the CPU and the link, with steps, each layer's plan and the rounds of drafts, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from moegraft.operators.atomic_file import write_file

LANES = ("rounds", "step", "plan", "GPU", "CPU", "link")  # from top to bottom


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work on one lane, in ms of the device's host clock."""

    lane: str
    name: str
    start_ms: float
    end_ms: float
    details: Mapping[str, object] = field(default_factory=dict)


def host_ms() -> float:
    """Return the host clock."""
    return 1e3 * time.perf_counter()


class Timeline:
    """The latest spans of one device, at most `capacity`, in ms of its clock `now_ms`."""

    def __init__(self, device: str, now_ms: Callable[[], float] = host_ms, capacity: int = 1_000_000) -> None:
        self.device = device
        self.now_ms = now_ms
        self.spans: list[Span] = []
        self._capacity = capacity

    def at(self, host_ns: int) -> float:
        """Return a time of `time.perf_counter_ns` in ms of this clock.

        Where this is another clock, as of an emulated device, the thread may have to wait between the readings of both.
        """
        late_ms = 0.0 if self.now_ms is host_ms else self.now_ms() - time.perf_counter_ns() / 1e6
        return host_ns / 1e6 + late_ms

    def add(self, lane: str, name: str, start_ms: float, end_ms: float, **details: object) -> None:
        if len(self.spans) >= self._capacity:
            del self.spans[: self._capacity // 2]
        self.spans.append(Span(lane, name, start_ms, end_ms, details))


@contextmanager
def round_spans(timelines: Sequence[Timeline], name: str) -> Iterator[dict[str, object]]:
    """Add the body to each timeline as one phase of a round of drafting and verifying, also where it raises.

    Yields the details of the span, to be filled in.
    """
    start_ms = [timeline.now_ms() for timeline in timelines]
    details: dict[str, object] = {}
    try:
        yield details
    finally:
        for timeline, begun_ms in zip(timelines, start_ms, strict=True):
            timeline.add("rounds", name, begun_ms, timeline.now_ms(), **details)


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, object]:
    """Return the timelines in the trace event format, with a process per device, a thread per lane, and times in microseconds."""
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


def write_trace(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> None:
    """Write `chrome_trace` to a file.

    Raises:
        OSError: the file cannot be written.
    """
    write_file(path, json.dumps(chrome_trace(timelines)))
