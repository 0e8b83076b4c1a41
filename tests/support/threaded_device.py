"""An emulated device on real threads: one per stream and one notifier. Copies are as slow as in a profile.

A stream's thread blocks for work and for events of other streams; the notifier blocks for events with callbacks, and runs these. One
condition variable guards the queues and announces every change.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from moegraft.operators.experts.forecast import INT4_BITS, MachineProfile
from moegraft.operators.offload.devices.base import Callback, DeviceError, DeviceTimeoutError, Event, Stream, Waiter, check_not_forked
from moegraft.operators.offload.devices.cuda import HostTicket
from moegraft.operators.timeline import host_ms
from support.emulated_graph import Step
from support.faulty_device import Faults, FaultyDevice
from support.virtual_device import as_device_error, work_of

logger = logging.getLogger(__name__)
CLOSE_S = 1.0
POLL_S = 0.05  # a throttled thread checks this often whether the device is closed


class Notifier:
    """The condition variable, the thread that runs callbacks, and the flag of a closed device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = threading.Condition()
        self.closed = False
        self._owner_pid = os.getpid()
        self._notifications: deque[tuple[Callback, DeviceError | None]] = deque()
        self._running = False
        self._callback_error: Exception | None = None
        self.thread = threading.Thread(target=self._run_callbacks, name=f"{name} notifier", daemon=True)
        self.thread.start()

    def check_open(self) -> None:
        check_not_forked(self.name, self._owner_pid)
        if self.closed:
            raise DeviceError(f"{self.name} is closed")

    def complete(self, event: ThreadedEvent, error: DeviceError | None) -> None:
        """Mark the event as reached in its stream; called under the condition."""
        event.error, event.time_ms = error, host_ms()
        event.reached = True  # last, because `wait` reads it without the lock
        for callback in event.callbacks:
            self._notifications.append((callback, error))
        event.callbacks.clear()
        self.changed.notify_all()

    def notify(self, event: ThreadedEvent, callback: Callback) -> None:
        with self.changed:
            self.check_open()
            if event.reached:
                self._notifications.append((callback, event.error))
                self.changed.notify_all()
            else:
                event.callbacks.append(callback)

    def drain(self) -> None:
        """Wait until no callback is left, and raise a callback's error."""
        with self.changed:
            self.changed.wait_for(lambda: not self._notifications and not self._running)
            error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    def _run_callbacks(self) -> None:
        while True:
            with self.changed:
                self._running = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._notifications or self.closed)
                if not self._notifications:
                    return
                callback, error = self._notifications.popleft()
                self._running = True
            try:
                callback(error)
            except Exception as raised:  # noqa: BLE001  no exception leaves a worker: `drain` raises it
                self._callback_error = self._callback_error or raised


class ThreadedEvent:
    """A position in a stream."""

    __slots__ = ("_notifier", "callbacks", "error", "reached", "time_ms")

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self.reached = False
        self.error: DeviceError | None = None
        self.time_ms = 0.0
        self.callbacks: list[Callback] = []

    def done(self) -> bool:
        return self.reached

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.reached:
            with self._notifier.changed:
                if not self._notifier.changed.wait_for(lambda: self.reached, timeout_s):
                    raise DeviceTimeoutError(f"{self._notifier.name}: not done after {timeout_s} s")
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class _Run:
    ms: float
    step: Step | None
    is_launch: bool = False


@dataclass(slots=True)
class _Wait:
    event: ThreadedEvent


class ThreadedStream:
    """A FIFO and the thread that processes it."""

    def __init__(self, notifier: Notifier, name: str) -> None:
        self.name = name
        self._notifier = notifier
        self._items: deque[_Run | _Wait | ThreadedEvent] = deque()
        self._error: DeviceError | None = None  # reported by the next event
        self._free_ms = 0.0  # end of the work so far, without delays
        self.thread = threading.Thread(target=self._process, name=f"{notifier.name} {name}", daemon=True)
        self.thread.start()

    def wait(self, event: Event) -> None:
        assert isinstance(event, ThreadedEvent), f"{event!r} is not an event of this device"
        if not event.reached or event.error is not None:
            self._put(_Wait(event))

    def record(self, *, timed: bool = False) -> ThreadedEvent:
        event = ThreadedEvent(self._notifier)
        self._put(event)
        return event

    def put_copy(self, ms: float, first_half: Step, second_half: Step) -> None:
        def step() -> None:
            first_half()
            self._sleep_until(host_ms() + ms / 2)
            second_half()

        self._put(_Run(ms, step))

    def put_launch(self, ms: float, function: Step | None) -> None:
        self._put(_Run(ms, function, is_launch=True))

    def drop(self, reason: DeviceError) -> None:
        """Drop all work that has not started; called under the condition."""
        items, self._items = self._items, deque()
        for item in items:
            if isinstance(item, ThreadedEvent):
                self._notifier.complete(item, reason)

    def _put(self, item: _Run | _Wait | ThreadedEvent) -> None:
        with self._notifier.changed:
            self._notifier.check_open()
            self._items.append(item)
            self._notifier.changed.notify_all()

    def _sleep_until(self, time_ms: float) -> None:
        while (left_s := (time_ms - host_ms()) / 1e3) > 0 and not self._notifier.closed:
            time.sleep(min(left_s, POLL_S))

    def _process(self) -> None:
        notifier = self._notifier
        while True:
            with notifier.changed:
                notifier.changed.wait_for(lambda: self._items or notifier.closed)
                if not self._items:
                    return
                item = self._items.popleft()
                if isinstance(item, ThreadedEvent):
                    error, self._error = self._error, None
                    notifier.complete(item, error)
                    continue
                if isinstance(item, _Wait):
                    event = item.event
                    notifier.changed.wait_for(lambda event=event: event.reached or notifier.closed)  # type: ignore[misc]
                    self._error = self._error or event.error
                    continue
            if item.is_launch and self._error is not None:
                continue  # its inputs never arrived
            self._free_ms = max(self._free_ms, host_ms()) + item.ms
            try:
                if item.step is not None:
                    item.step()
            except Exception as error:  # noqa: BLE001  no exception leaves a worker: the host's wait raises it
                self._error = self._error or as_device_error(notifier.name, self.name, error)
            self._sleep_until(self._free_ms)


class ThreadedDevice(FaultyDevice):
    """The memory and the faults of a `FaultyDevice`, with threads in place of its clock. Its creator closes it, which ends its threads.

    With a profile, work takes at least as long as on that machine.
    """

    def __init__(
        self,
        profile: MachineProfile | None = None,
        *,
        index: int = 0,
        memory_bytes: int | None = None,
        bits_per_weight: float = INT4_BITS,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(profile, index=index, memory_bytes=memory_bytes, bits_per_weight=bits_per_weight, faults=faults)
        self._notifier = Notifier(self.name)
        self._threads: dict[str, ThreadedStream] = {}
        self._throttle = profile is not None
        self._cpu_free_ms = 0.0

    def stream(self, name: str) -> ThreadedStream:  # type: ignore[override]
        with self._notifier.changed:
            self.check_open()
            stream = self._threads.get(name)
            if stream is None:
                stream = self._threads[name] = ThreadedStream(self._notifier, name)
            return stream

    def submit_cpu(self, function: Callable[[], Waiter | None]) -> HostTicket:  # type: ignore[override]
        self.check_open()
        fails = self._fails("cpu_jobs")
        job_ms = self._prices.cpu_ms(work_of(function)) if self._throttle else None
        if job_ms is not None:
            self._cpu_free_ms = max(self._cpu_free_ms, host_ms()) + job_ms
        ends_ms = self._cpu_free_ms

        def start() -> Waiter:
            if fails:
                raise RuntimeError(f"{self.name}: injected: a job of the CPU engine failed")
            waiter = function()

            def wait() -> float | None:
                took_ms = None if waiter is None else waiter()
                left_ms = ends_ms - host_ms()
                if left_ms > 0:
                    time.sleep(left_ms / 1e3)
                return took_ms if job_ms is None else job_ms

            return wait

        return HostTicket(start)

    def notify(self, event: Event, callback: Callback) -> None:
        assert isinstance(event, ThreadedEvent), f"{event!r} is not an event of {self.name}"
        self._notifier.notify(event, callback)

    def now_ms(self) -> float:
        return host_ms()

    def advance(self, ms: float) -> None:
        return  # time passes by itself

    def elapsed_ms(self, first: Event, second: Event) -> float:
        assert isinstance(first, ThreadedEvent) and isinstance(second, ThreadedEvent), f"not events of {self.name}"
        if not (first.reached and second.reached):
            raise ValueError(f"{self.name}: the time between two events is known when both are done")
        return second.time_ms - first.time_ms

    def synchronize(self) -> None:
        last = [stream.record() for stream in list(self._threads.values())]
        for event in last:
            event.wait()
        self._notifier.drain()

    def close(self) -> None:
        notifier = self._notifier
        with notifier.changed:
            if notifier.closed:
                return
            notifier.closed = True
            reason = DeviceError(f"{self.name} was closed before this work began")
            for stream in self._threads.values():
                stream.drop(reason)
            notifier.changed.notify_all()
        until_s = time.monotonic() + CLOSE_S
        for thread in [*(stream.thread for stream in self._threads.values()), notifier.thread]:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s: thread %r has not ended within %g s", self.name, thread.name, CLOSE_S)

    def check_open(self) -> None:
        self._notifier.check_open()

    def _own(self, stream: Stream) -> ThreadedStream:  # type: ignore[override]
        assert isinstance(stream, ThreadedStream), f"{stream!r} is not a stream of {self.name}"
        return stream
