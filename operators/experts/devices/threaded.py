"""A device of real threads: one for each stream and one notifier. Device memory is host memory; copies are as slow as is asked for."""

from __future__ import annotations

from collections.abc import Callable

from moegraft.operators.experts.devices.cpu_engine import CpuEngine, HostTicket, host_ms
from moegraft.operators.experts.devices.emulated import EmulatedDevice
from moegraft.operators.experts.devices.emulation import Faults
from moegraft.operators.experts.devices.interface import Event, Stream, Waiter, Work
from moegraft.operators.experts.devices.profiles import INT4_BITS, MachineProfile
from moegraft.operators.experts.devices.threaded_streams import Callback, Hub, ThreadedEvent, ThreadedStream


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
