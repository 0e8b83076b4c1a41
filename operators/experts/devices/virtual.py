"""A device on a seeded virtual clock: the same calls in the same order give the same times, and no time passes.

Discrete events in one thread. Streams are FIFO and run side by side; bytes move when the clock reaches their copy, the first half as
it starts and the second as it ends, and a launch reads either as it starts or as it ends, so that who does not wait sees torn bytes.
The clock moves while the host waits or says it is busy (`advance`).
"""

from __future__ import annotations

from collections.abc import Callable

from moegraft.operators.experts.devices.emulated import EmulatedDevice
from moegraft.operators.experts.devices.emulation import Faults
from moegraft.operators.experts.devices.interface import DeviceError, Event, Stream, Waiter, Work
from moegraft.operators.experts.devices.profiles import INT4_BITS, MachineProfile
from moegraft.operators.experts.devices.virtual_clock import Callback, Clock, VirtualEvent, VirtualLane


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
