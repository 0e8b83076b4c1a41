"""A device on a seeded virtual clock: the same calls in the same order give the same times, and no time passes.

Discrete events in one thread. Streams are FIFO and run side by side; bytes move when the clock reaches their copy, the first half as
it starts and the second as it ends, and a launch reads either as it starts or as it ends, so that who does not wait sees torn bytes.
The clock moves while the host waits or says it is busy (`advance`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moegraft.operators.experts.devices.emulation import (
    FaultCounter,
    Faults,
    HostBuffer,
    HostMemory,
    HostRange,
    Prices,
    check_copy,
    host_function,
)
from moegraft.operators.experts.devices.interface import Buffer, Bytes, DeviceError, Event, Stream, Waiter, Work
from moegraft.operators.experts.devices.profiles import INT4_BITS, MachineProfile
from moegraft.operators.experts.devices.virtual_clock import Callback, Clock, Run, Step, VirtualEvent, VirtualLane

if TYPE_CHECKING:
    import torch


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

    def done(self) -> bool:
        return self._event is not None and self._event.done()

    def wait(self) -> None:
        assert self._event is not None, "a ticket is given out with its event"
        self._event.wait()
        if self.error is not None:
            raise self.error


class VirtualDevice:
    """See the module.

    Args:
        profile: prices copies, launches and CPU jobs; without one only what carries its own `cost_ms` takes time.
        seed: of the jitter, of ties, and of when launches read.
        jitter: durations are multiplied by `exp(u)`, u uniform in [-jitter, jitter]; above 0, what happens at the same time happens
            in a random order.
        notify_ms: from an event to its callbacks.
        memory_bytes: the device memory there is, None for no limit.
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
        self.name = f"emulated:{index}"
        self._clock = Clock(self.name, seed, jitter, notify_ms)
        self._prices = Prices(profile, bits_per_weight)
        self._faults = FaultCounter(faults or Faults())
        self._memory = HostMemory(self.name, memory_bytes, self._faults)
        self._lanes: dict[str, VirtualLane] = {}
        self._cpu = VirtualLane(self._clock, "cpu")

    @property
    def torch_device(self) -> torch.device:
        import torch  # here, since a simulation needs none

        return torch.device("cpu")

    @property
    def taken_bytes(self) -> int:
        """Device memory in use."""
        return self._memory.taken_bytes

    def busy_ms(self, lane: str) -> float:
        """Time that a stream, or "cpu", has spent on work."""
        return self._cpu.busy_ms if lane == "cpu" else self._lanes[lane].busy_ms

    def stream(self, name: str) -> VirtualLane:
        self._clock.check_open()
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = VirtualLane(self._clock, name)
        return lane

    def allocate(self, nbytes: int) -> HostBuffer:
        self._clock.check_open()
        return self._memory.allocate(nbytes)

    def pin(self, array: Bytes) -> HostRange:
        self._clock.check_open()
        if self._faults.fails("pins"):
            raise DeviceError(f"{self.name}: injected: {array.nbytes} bytes cannot be page-locked")
        return HostRange(array.nbytes)

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        assert isinstance(stream, VirtualLane) and (target is None or isinstance(target, HostBuffer)), "of this device"
        check_copy(self.name, target, target_offset, source, nbytes)
        if self._faults.fails("refused_copies"):
            raise DeviceError(f"{self.name}: injected: a copy of {nbytes} bytes refused")
        fails = self._faults.fails("copies")
        half = nbytes // 2

        def move(start: int, stop: int) -> None:
            if target is not None and source is not None:
                target.array[target_offset + start : target_offset + stop] = source[start:stop]

        def end() -> None:
            if fails:
                raise DeviceError(f"{self.name}: injected: a copy of {nbytes} bytes failed")
            move(half, nbytes)

        stream.put(Run("copies", self._prices.copy_ms(nbytes), lambda: move(0, half), end))

    def launch(self, stream: Stream, function: Step | None, work: Work) -> None:
        assert isinstance(stream, VirtualLane), "of this device"
        if self._faults.fails("launches"):

            def function() -> None:
                raise DeviceError(f"{self.name}: injected: a launch failed")

        early = self._clock.coin()
        stream.put(Run("launches", self._prices.gpu_ms(work), function if early else None, None if early else function))

    def launch_host(self, stream: Stream, function: int, data: int, work: Work) -> None:
        self.launch(stream, host_function(function, data), work)

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

        self._cpu.put(Run("cpu_jobs", self._prices.cpu_ms(work), begin, None))
        ticket.ends_with(self._cpu.record())
        return ticket

    def notify(self, event: Event, callback: Callback) -> None:
        assert isinstance(event, VirtualEvent), f"{event!r} is not an event of {self.name}"
        self._clock.check_open()
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
