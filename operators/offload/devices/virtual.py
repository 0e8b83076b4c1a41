"""A device on a seeded virtual clock: the same calls in the same order give the same times, and no time passes.

Discrete events in one thread. Streams are FIFO and run side by side; bytes move when the clock reaches their copy, the first half as
it starts and the second as it ends, and a launch reads either as it starts or as it ends, so that who does not wait sees torn bytes.
The clock moves while the host waits or says it is busy (`advance`).

The virtual clock: discrete events in one thread, and the lanes (streams, the CPU engine) that live on it.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from math import exp, inf

from moegraft.operators.offload.devices.base import DeviceError, DeviceTimeoutError, Event, Stream, Waiter, Work
from moegraft.operators.offload.devices.emulated import EmulatedDevice, Faults, Step, as_device_error
from moegraft.operators.offload.devices.profiles import INT4_BITS, MachineProfile

Callback = Callable[[DeviceError | None], None]


class Clock:
    """What happens when. At equal times, what was scheduled first comes first; with `jitter` above 0 the seed decides."""

    def __init__(self, name: str, seed: int, jitter: float, notify_ms: float) -> None:
        self.name = name
        self.now_ms = 0.0
        self.closed = False
        self._random = random.Random(seed)
        self._jitter = jitter
        self._notify_ms = notify_ms
        self._last_notice_ms = 0.0
        self._heap: list[tuple[float, float, int, Step]] = []
        self._scheduled = 0

    def coin(self) -> bool:
        return self._random.random() < 0.5

    def jittered(self, ms: float) -> float:
        return ms * exp(self._random.uniform(-self._jitter, self._jitter)) if self._jitter > 0 else ms

    def schedule(self, ms: float, step: Step) -> None:
        """Does `step` in that time."""
        self._push(self.now_ms + ms, self._random.random() if self._jitter > 0 else 0.0, step)

    def complete(self, event: VirtualEvent, error: DeviceError | None) -> None:
        event.time_ms, event.error = self.now_ms, error
        for lane in event.lanes:
            self.schedule(0.0, lane.proceed)
        for callback in event.callbacks:
            self.tell(callback, error)
        event.lanes.clear()
        event.callbacks.clear()

    def tell(self, callback: Callback, error: DeviceError | None) -> None:
        """One notifier: later callbacks never overtake earlier ones."""
        self._last_notice_ms = max(self._last_notice_ms, self.now_ms + self.jittered(self._notify_ms))
        self._push(self._last_notice_ms, 0.0, lambda: callback(error))

    def advance(self, ms: float) -> None:
        until_ms = self.now_ms + ms
        while self._heap and self._heap[0][0] <= until_ms:
            self._step()
        self.now_ms = until_ms

    def run_until(self, event: VirtualEvent, timeout_ms: float) -> None:
        """Moves on to where the event is done; not at all if it is."""
        until_ms = self.now_ms + timeout_ms
        while event.time_ms is None:
            if not self._heap:
                raise DeviceError(f"{self.name}: the host waits for what no work leads to")
            if self._heap[0][0] > until_ms:
                self.now_ms = until_ms
                raise DeviceTimeoutError(f"{self.name}: not done after {timeout_ms:g} ms")
            self._step()

    def run_all(self) -> None:
        while self._heap:
            self._step()

    def check_open(self) -> None:
        if self.closed:
            raise DeviceError(f"{self.name} is closed")

    def _push(self, time_ms: float, tie: float, step: Step) -> None:
        self._scheduled += 1
        heapq.heappush(self._heap, (time_ms, tie, self._scheduled, step))

    def _step(self) -> None:
        time_ms, _, _, step = heapq.heappop(self._heap)
        self.now_ms = max(self.now_ms, time_ms)
        step()


class VirtualEvent:
    """A place in a lane; `time_ms` once it is reached."""

    __slots__ = ("_clock", "callbacks", "error", "lanes", "time_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.time_ms: float | None = None
        self.error: DeviceError | None = None
        self.lanes: list[VirtualLane] = []  # that wait for it
        self.callbacks: list[Callback] = []

    def done(self) -> bool:
        return self.time_ms is not None

    def wait(self, timeout_s: float | None = None) -> None:
        self._clock.run_until(self, inf if timeout_s is None else timeout_s * 1e3)
        if self.error is not None:
            raise self.error


class _Run:
    """Work of a lane: what happens as it starts and as it ends, `ms` apart."""

    __slots__ = ("begin", "end", "is_launch", "ms")

    def __init__(self, ms: float, begin: Step | None, end: Step | None, *, is_launch: bool = False) -> None:
        self.ms = ms
        self.begin = begin
        self.end = end
        self.is_launch = is_launch


class _Wait:
    __slots__ = ("event",)

    def __init__(self, event: VirtualEvent) -> None:
        self.event = event


class VirtualLane:
    """A stream, or the CPU engine. `busy_ms` is the time it has spent on work."""

    __slots__ = ("_clock", "_error", "_items", "_running", "busy_ms", "name")

    def __init__(self, clock: Clock, name: str) -> None:
        self.name = name
        self.busy_ms = 0.0
        self._clock = clock
        self._items: deque[_Run | _Wait | VirtualEvent] = deque()
        self._running: _Run | None = None
        self._error: DeviceError | None = None  # told by the next event

    def wait(self, event: Event) -> None:
        assert isinstance(event, VirtualEvent), f"{event!r} is not an event of this device"
        self._put(_Wait(event))

    def record(self, *, timed: bool = False) -> VirtualEvent:
        event = VirtualEvent(self._clock)
        self._put(event)
        return event

    def put_copy(self, ms: float, first_half: Step, second_half: Step) -> None:
        self._put(_Run(ms, first_half, second_half))

    def put_launch(self, ms: float, function: Step | None) -> None:
        """Reads, and writes, at one of its ends."""
        early = self._clock.coin()
        self._put(_Run(ms, function if early else None, None if early else function, is_launch=True))

    def put_job(self, ms: float, function: Step) -> None:
        self._put(_Run(ms, function, None))

    def _put(self, item: _Run | _Wait | VirtualEvent) -> None:
        self._clock.check_open()
        self._items.append(item)
        if self._running is None and len(self._items) == 1:  # else its first item waits, and is waked
            self.proceed()

    def proceed(self) -> None:
        """Does what takes no time and starts what does; called when the lane is idle."""
        items = self._items
        while items and self._running is None:
            item = items[0]
            if isinstance(item, _Wait):
                if item.event.time_ms is None:
                    item.event.lanes.append(self)
                    return
                self._error = self._error or item.event.error
                items.popleft()
            elif isinstance(item, VirtualEvent):
                items.popleft()
                error, self._error = self._error, None
                self._clock.complete(item, error)
            else:
                items.popleft()
                self._start(item)

    def drop(self, reason: DeviceError) -> None:
        """Ends everything that has not started; its events fail."""
        items, self._items = self._items, deque()
        for item in items:
            if isinstance(item, VirtualEvent):
                self._clock.complete(item, reason)

    def _start(self, run: _Run) -> None:
        if run.is_launch and self._error is not None:
            return  # what it would read never came
        self._running = run
        self._step(run.begin)
        ms = self._clock.jittered(run.ms)
        self.busy_ms += ms
        self._clock.schedule(ms, self._finish)

    def _finish(self) -> None:
        run, self._running = self._running, None
        assert run is not None, "a lane finishes what it has started"
        self._step(run.end)
        self.proceed()

    def _step(self, step: Step | None) -> None:
        if step is None:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001  it is carried to the host's wait, as a worker's exception is
            self._error = self._error or as_device_error(self._clock.name, self.name, error)


class VirtualTicket:
    """A job of the CPU lane."""

    __slots__ = ("_event", "error", "started_ms")

    def __init__(self) -> None:
        self._event: VirtualEvent | None = None
        self.error: BaseException | None = None
        self.started_ms = 0.0

    def ends_with(self, event: VirtualEvent) -> None:
        self._event = event

    @property
    def elapsed_ms(self) -> float | None:
        end = None if self._event is None else self._event.time_ms
        return None if end is None else end - self.started_ms

    def wait(self) -> None:
        assert self._event is not None, "a ticket is given out with its event"
        self._event.wait()
        if self.error is not None:
            raise self.error


class VirtualDevice(EmulatedDevice):
    """See the module.

    Args:
        seed: of the jitter, of ties, and of when launches read.
        jitter: durations are multiplied by `exp(u)`, u uniform in [-jitter, jitter]; above 0, what happens at the same time happens
            in a random order.
        notify_ms: from an event to its callbacks.
        the others: see `EmulatedDevice`.
    """

    def __init__(
        self,
        profile: MachineProfile | None = None,
        *,
        index: int = 0,
        seed: int = 0,
        jitter: float = 0.0,
        notify_ms: float = 0.0,
        memory_bytes: int | None = None,
        bits_per_weight: float = INT4_BITS,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(profile, index=index, memory_bytes=memory_bytes, bits_per_weight=bits_per_weight, faults=faults)
        self._clock = Clock(self.name, seed, jitter, notify_ms)
        self._lanes: dict[str, VirtualLane] = {}
        self._cpu = VirtualLane(self._clock, "cpu")

    def busy_ms(self, lane: str) -> float:
        """Time that a stream, or "cpu", has spent on work."""
        return self._cpu.busy_ms if lane == "cpu" else self._lanes[lane].busy_ms

    def stream(self, name: str) -> VirtualLane:
        self.check_open()
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = VirtualLane(self._clock, name)
        return lane

    def submit_cpu(self, function: Callable[[], Waiter | None] | None, work: Work) -> VirtualTicket:
        ticket = VirtualTicket()
        fails = self._faults.fails("cpu_jobs")

        def begin() -> None:
            ticket.started_ms = self._clock.now_ms
            try:
                if fails:
                    raise RuntimeError(f"{self.name}: injected: a job of the CPU engine failed")
                waiter = None if function is None else function()
                if waiter is not None:
                    waiter()
            except Exception as error:  # noqa: BLE001  it is carried to the ticket's wait, whatever it is
                ticket.error = error

        self._cpu.put_job(self._prices.cpu_ms(work), begin)
        ticket.ends_with(self._cpu.record())
        return ticket

    def notify(self, event: Event, callback: Callback) -> None:
        assert isinstance(event, VirtualEvent), f"{event!r} is not an event of {self.name}"
        self.check_open()
        if event.time_ms is None:
            event.callbacks.append(callback)
        else:
            self._clock.tell(callback, event.error)

    def now_ms(self) -> float:
        return self._clock.now_ms

    def advance(self, ms: float) -> None:
        if ms < 0:
            raise ValueError(f"{self.name}: the clock cannot go back by {-ms} ms")
        self._clock.advance(ms)

    def elapsed_ms(self, first: Event, second: Event) -> float:
        assert isinstance(first, VirtualEvent) and isinstance(second, VirtualEvent), f"not events of {self.name}"
        if first.time_ms is None or second.time_ms is None:
            raise ValueError(f"{self.name}: time between events is known when both are done")
        return second.time_ms - first.time_ms

    def synchronize(self) -> None:
        last = [lane.record() for lane in [*self._lanes.values(), self._cpu]]
        self._clock.run_all()
        for event in last:
            event.wait()

    def close(self) -> None:
        if self._clock.closed:
            return
        self._clock.closed = True
        reason = DeviceError(f"{self.name} was closed before this began")
        for lane in [*self._lanes.values(), self._cpu]:
            lane.drop(reason)
        self._clock.run_all()

    def check_open(self) -> None:
        self._clock.check_open()

    def _own(self, stream: Stream) -> VirtualLane:
        assert isinstance(stream, VirtualLane), f"{stream!r} is not a stream of {self.name}"
        return stream
