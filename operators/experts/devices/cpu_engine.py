"""The CPU engine of machines where time passes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from moegraft.operators.experts.devices.interface import Waiter, Work

SEEN_MS = 0.02  # a wait that took longer has seen the job's end; a shorter one came after it


class HostTicket:
    """A job; see `CpuTicket`."""

    __slots__ = ("_ends_ms", "_engine", "_error", "_start_ms", "_waiter", "elapsed_ms")

    def __init__(self, engine: CpuEngine, start_ms: float, ends_ms: float, waiter: Waiter | None, error: Exception | None) -> None:
        self._engine = engine
        self._start_ms = start_ms
        self._ends_ms = ends_ms  # not before that time
        self._waiter = waiter
        self._error = error
        self.elapsed_ms: float | None = None

    def wait(self) -> None:
        came_ms = host_ms()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter()
        sleep_until(self._ends_ms)
        now_ms = host_ms()
        if now_ms - came_ms > SEEN_MS:
            self.elapsed_ms = now_ms - max(self._start_ms, self._engine.last_end_ms)
            self._engine.last_end_ms = now_ms
        error, self._error = self._error, None
        if error is not None:
            raise error


class CpuEngine:
    """Starts jobs at once; they queue where they run, as in `Runtime.submit`. `price_ms`: what a job takes at least."""

    def __init__(self, price_ms: Callable[[Work], float] | None = None) -> None:
        self.last_end_ms = 0.0
        self._price_ms = price_ms
        self._free_ms = 0.0

    def submit(self, function: Callable[[], Waiter | None] | None, work: Work) -> HostTicket:
        start_ms = host_ms()
        waiter: Waiter | None = None
        error: Exception | None = None
        try:
            waiter = None if function is None else function()
        except Exception as raised:  # noqa: BLE001  it is carried to the ticket's wait, whatever it is
            error = raised
        if self._price_ms is not None:
            self._free_ms = max(self._free_ms, start_ms) + self._price_ms(work)
        return HostTicket(self, start_ms, self._free_ms, waiter, error)


def host_ms() -> float:
    """The host clock."""
    return time.perf_counter() * 1e3


def sleep_until(time_ms: float) -> None:
    left_ms = time_ms - host_ms()
    if left_ms > 0:
        time.sleep(left_ms / 1e3)
