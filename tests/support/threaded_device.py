"""A device of real threads: one for each stream and one notifier. Device memory is host memory; copies are as slow as is asked for.

Streams and events of real threads, and the hub where they meet.

Threads: a stream's thread blocks for work and for events of other streams; the notifier blocks for events that somebody wants to be
told of, and runs the callbacks. One condition variable guards the queues and announces every change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from moegraft.operators.offload.devices.base import DeviceError, DeviceTimeoutError, Event, Stream, Waiter, Work
from moegraft.operators.offload.devices.emulated import CpuEngine, EmulatedDevice, Faults, HostTicket, Step, as_device_error, host_ms
from moegraft.operators.offload.devices.process import ProcessGuard
from moegraft.operators.offload.devices.profiles import INT4_BITS, MachineProfile

logger = logging.getLogger(__name__)
CLOSE_S = 1.0
NAP_S = 0.05  # a throttled thread looks this often whether the device is closed

Callback = Callable[[DeviceError | None], None]


class Hub:
    """The condition variable, the notifier, and whether all is over."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changed = threading.Condition()
        self.closed = False
        self.streams: dict[str, ThreadedStream] = {}
        self._guard = ProcessGuard(name)
        self._notices: deque[tuple[Callback, DeviceError | None]] = deque()
        self._telling = False
        self._callback_error: Exception | None = None
        self._notifier = threading.Thread(target=self._serve, name=f"{name} notifier", daemon=True)
        self._notifier.start()

    def check_open(self) -> None:
        self._guard.check()
        if self.closed:
            raise DeviceError(f"{self.name} is closed")

    def reach(self, event: ThreadedEvent, error: DeviceError | None) -> None:
        """The event's place in its stream is reached; called under the condition."""
        event.error, event.time_ms = error, host_ms()
        event.reached = True  # last: `wait` looks without the lock
        for callback in event.callbacks:
            self._notices.append((callback, error))
        event.callbacks.clear()
        self.changed.notify_all()

    def notify(self, event: ThreadedEvent, callback: Callback) -> None:
        with self.changed:
            self.check_open()
            if event.reached:
                self._notices.append((callback, event.error))
                self.changed.notify_all()
            else:
                event.callbacks.append(callback)

    def drain(self) -> None:
        """Waits for the notifier, and raises what a callback raised."""
        with self.changed:
            self.changed.wait_for(lambda: not self._notices and not self._telling)
            error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    def close(self) -> None:
        with self.changed:
            if self.closed:
                return
            self.closed = True
            reason = DeviceError(f"{self.name} was closed before this began")
            for stream in self.streams.values():
                stream.drop(reason)
            self.changed.notify_all()
        until_s = time.monotonic() + CLOSE_S
        for thread in [*(stream.thread for stream in self.streams.values()), self._notifier]:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s: thread %r has not ended within %g s", self.name, thread.name, CLOSE_S)

    def _serve(self) -> None:
        while True:
            with self.changed:
                self._telling = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._notices or self.closed)
                if not self._notices:
                    return
                callback, error = self._notices.popleft()
                self._telling = True
            try:
                callback(error)
            except Exception as raised:  # noqa: BLE001  no exception leaves a worker: `drain` raises it
                self._callback_error = self._callback_error or raised


class ThreadedEvent:
    """A place in a stream."""

    __slots__ = ("_hub", "callbacks", "error", "reached", "time_ms")

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.reached = False
        self.error: DeviceError | None = None
        self.time_ms = 0.0
        self.callbacks: list[Callback] = []

    def done(self) -> bool:
        return self.reached

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.reached:
            with self._hub.changed:
                if not self._hub.changed.wait_for(lambda: self.reached, timeout_s):
                    raise DeviceTimeoutError(f"{self._hub.name}: not done after {timeout_s} s")
        if self.error is not None:
            raise self.error


class _Run:
    __slots__ = ("is_launch", "ms", "step")

    def __init__(self, ms: float, step: Step | None, *, is_launch: bool = False) -> None:
        self.ms = ms
        self.step = step
        self.is_launch = is_launch


class _Wait:
    __slots__ = ("event",)

    def __init__(self, event: ThreadedEvent) -> None:
        self.event = event


class ThreadedStream:
    """A FIFO and the thread that works it off."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.name = name
        self._hub = hub
        self._items: deque[_Run | _Wait | ThreadedEvent] = deque()
        self._error: DeviceError | None = None  # told by the next event
        self._free_ms = 0.0  # when the work so far is over, were there no delays
        self.thread = threading.Thread(target=self._serve, name=f"{hub.name} {name}", daemon=True)
        self.thread.start()

    def wait(self, event: Event) -> None:
        assert isinstance(event, ThreadedEvent), f"{event!r} is not an event of this device"
        if not event.reached or event.error is not None:
            self._put(_Wait(event))

    def record(self, *, timed: bool = False) -> ThreadedEvent:
        event = ThreadedEvent(self._hub)
        self._put(event)
        return event

    def put_copy(self, ms: float, first_half: Step, second_half: Step) -> None:
        def step() -> None:
            first_half()
            self._nap_until(host_ms() + ms / 2)
            second_half()

        self._put(_Run(ms, step))

    def put_launch(self, ms: float, function: Step | None) -> None:
        self._put(_Run(ms, function, is_launch=True))

    def _put(self, item: _Run | _Wait | ThreadedEvent) -> None:
        hub = self._hub
        with hub.changed:
            hub.check_open()
            self._items.append(item)
            hub.changed.notify_all()

    def drop(self, reason: DeviceError) -> None:
        """Ends everything that has not started; called under the condition."""
        items, self._items = self._items, deque()
        for item in items:
            if isinstance(item, ThreadedEvent):
                self._hub.reach(item, reason)

    def _nap_until(self, time_ms: float) -> None:
        while (left_s := (time_ms - host_ms()) / 1e3) > 0 and not self._hub.closed:
            time.sleep(min(left_s, NAP_S))

    def _serve(self) -> None:
        hub = self._hub
        while True:
            with hub.changed:
                hub.changed.wait_for(lambda: self._items or hub.closed)
                if not self._items:
                    return
                item = self._items.popleft()
                if isinstance(item, ThreadedEvent):
                    error, self._error = self._error, None
                    hub.reach(item, error)
                    continue
                if isinstance(item, _Wait):
                    self._await(item.event)
                    continue
            self._work(item)

    def _await(self, event: ThreadedEvent) -> None:
        self._hub.changed.wait_for(lambda: event.reached or self._hub.closed)
        self._error = self._error or event.error

    def _work(self, run: _Run) -> None:
        if run.is_launch and self._error is not None:
            return  # what it would read never came
        self._free_ms = max(self._free_ms, host_ms()) + run.ms
        try:
            if run.step is not None:
                run.step()
        except Exception as error:  # noqa: BLE001  no exception leaves a worker: it is carried to the host's wait
            self._error = self._error or as_device_error(self._hub.name, self.name, error)
        self._nap_until(self._free_ms)


class ThreadedDevice(EmulatedDevice):
    """Whoever makes one closes it: its threads end then. With a profile, work takes at least what it would take there.

    Args: see `EmulatedDevice`.
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
        self._hub = Hub(self.name)
        self._cpu = CpuEngine(None if profile is None else self._prices.cpu_ms)

    def stream(self, name: str) -> ThreadedStream:
        with self._hub.changed:
            self.check_open()
            stream = self._hub.streams.get(name)
            if stream is None:
                stream = self._hub.streams[name] = ThreadedStream(self._hub, name)
            return stream

    def submit_cpu(self, function: Callable[[], Waiter | None] | None, work: Work) -> HostTicket:
        self.check_open()
        if self._faults.fails("cpu_jobs"):

            def function() -> Waiter | None:
                raise RuntimeError(f"{self.name}: injected: a job of the CPU engine failed")

        return self._cpu.submit(function, work)

    def notify(self, event: Event, callback: Callback) -> None:
        assert isinstance(event, ThreadedEvent), f"{event!r} is not an event of {self.name}"
        self._hub.notify(event, callback)

    def now_ms(self) -> float:
        return host_ms()

    def advance(self, ms: float) -> None:
        return  # time passes by itself

    def elapsed_ms(self, first: Event, second: Event) -> float:
        assert isinstance(first, ThreadedEvent) and isinstance(second, ThreadedEvent), f"not events of {self.name}"
        if not (first.reached and second.reached):
            raise ValueError(f"{self.name}: time between events is known when both are done")
        return second.time_ms - first.time_ms

    def synchronize(self) -> None:
        last = [stream.record() for stream in list(self._hub.streams.values())]
        for event in last:
            event.wait()
        self._hub.drain()

    def close(self) -> None:
        self._hub.close()

    def check_open(self) -> None:
        self._hub.check_open()

    def _own(self, stream: Stream) -> ThreadedStream:
        assert isinstance(stream, ThreadedStream), f"{stream!r} is not a stream of {self.name}"
        return stream
