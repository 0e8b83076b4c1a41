"""A device on a seeded virtual clock: the same calls in the same order give the same times, and no real time passes.

Discrete events in one thread. Streams are FIFO and overlap; the first half of a copy's bytes moves when the clock reaches its start and the
second half at its end, and a launch reads either at its start or at its end, so that a reader that does not wait sees torn bytes. The clock
moves while the host waits or reports being busy (`advance`). Device memory is host memory with a budget.
"""

from __future__ import annotations

import ctypes
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from math import exp, inf
from typing import Any

import torch

from moegraft.operators.experts.forecast import INT4_BITS, MachineProfile, Neurons
from moegraft.operators.offload.devices.base import (
    Buffer,
    Bytes,
    Callback,
    DeviceError,
    DeviceTimeoutError,
    Event,
    OutOfDeviceMemoryError,
    Stream,
    Waiter,
    aligned_bytes,
)
from support.emulated_graph import EmulatedGraph, NumberGuard, Step, StepRecorder

# Assumptions, not measurements.
PROFILES = {
    profile.name: profile
    for profile in (
        #                              CPU GB/s, GFLOP/s; GPU GB/s, TFLOP/s; link GB/s
        MachineProfile("a6000_10core", 60, 350, 540, 60, 24),
        MachineProfile("rtx4090_8core", 50, 400, 700, 90, 24),
        MachineProfile("a100_amx36", 200, 5000, 1100, 150, 24),
        MachineProfile("rtx5090_6core", 45, 250, 1200, 120, 50),
    )
}


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch or a CPU job takes time for.

    Attributes:
        loads: tokens of each expert that is computed.
        expert_bytes: packed bytes of one of these experts.
        cost_ms: the modelled time where given; otherwise it is derived from `loads`.
        neurons: the part of each expert that a token needs; None: all of it.
    """

    loads: tuple[int, ...] = ()
    expert_bytes: int = 0
    cost_ms: float | None = None
    neurons: Neurons | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """A launch or a CPU job that takes a virtual device the time of its work; any other takes none."""

    work: Work
    function: Callable[[], Any] = lambda: None

    def __call__(self) -> Any:
        return self.function()


def work_of(function: object) -> Work:
    """Return what a launch or a CPU job takes time for."""
    return function.work if isinstance(function, Timed) else Work()


class HostBuffer:
    """Emulated device memory. Its pages are allocated at first use, so buffers that are only counted cost nothing."""

    def __init__(self, nbytes: int, device: VirtualDevice) -> None:
        self.nbytes = nbytes
        self._device = device
        self._array: Bytes | None = None
        self._freed = False

    @property
    def array(self) -> Bytes:
        if self._freed:
            raise DeviceError("this buffer was freed")
        if self._array is None:
            self._array = aligned_bytes(self.nbytes)
        return self._array

    @property
    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.array)

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._array = None
            self._device.allocated_bytes -= self.nbytes


class Clock:
    """The schedule of events. Equal times keep the order in which they were scheduled; with `jitter` above 0 the seed decides."""

    def __init__(self, name: str, seed: int, jitter: float, notify_ms: float) -> None:
        self.name = name
        self.now_ms = 0.0
        self.closed = False
        self.random = random.Random(seed)
        self._jitter = jitter
        self._notify_ms = notify_ms
        self._last_callback_ms = 0.0
        self._heap: list[tuple[float, float, int, Step]] = []
        self._scheduled = 0

    def jittered(self, ms: float) -> float:
        return ms * exp(self.random.uniform(-self._jitter, self._jitter)) if self._jitter > 0 else ms

    def schedule(self, ms: float, step: Step) -> None:
        """Call `step` in that time."""
        self._push(self.now_ms + ms, self.random.random() if self._jitter > 0 else 0.0, step)

    def complete(self, event: VirtualEvent, error: DeviceError | None) -> None:
        event.time_ms, event.error = self.now_ms, error
        for stream in event.waiting:
            self.schedule(0.0, stream.proceed)
        for callback in event.callbacks:
            self.notify(callback, error)
        event.waiting.clear()
        event.callbacks.clear()

    def notify(self, callback: Callback, error: DeviceError | None) -> None:
        """Schedule a callback; as with one notifier thread, callbacks never overtake each other."""
        self._last_callback_ms = max(self._last_callback_ms, self.now_ms + self.jittered(self._notify_ms))
        self._push(self._last_callback_ms, 0.0, lambda: callback(error))

    def advance(self, ms: float) -> None:
        until_ms = self.now_ms + ms
        while self._heap and self._heap[0][0] <= until_ms:
            self._run_next()
        self.now_ms = until_ms

    def run_until(self, event: VirtualEvent, timeout_ms: float) -> None:
        """Advance to the time the event is done; not at all if it is."""
        until_ms = self.now_ms + timeout_ms
        while event.time_ms is None:
            if not self._heap:
                raise DeviceError(f"{self.name}: the host waits for an event that no submitted work reaches")
            if self._heap[0][0] > until_ms:
                self.now_ms = until_ms
                raise DeviceTimeoutError(f"{self.name}: not done after {timeout_ms:g} ms")
            self._run_next()

    def run_all(self) -> None:
        while self._heap:
            self._run_next()

    def check_open(self) -> None:
        if self.closed:
            raise DeviceError(f"{self.name} is closed")

    def _push(self, time_ms: float, tie: float, step: Step) -> None:
        self._scheduled += 1
        heapq.heappush(self._heap, (time_ms, tie, self._scheduled, step))

    def _run_next(self) -> None:
        time_ms, _, _, step = heapq.heappop(self._heap)
        self.now_ms = max(self.now_ms, time_ms)
        step()


class VirtualEvent:
    """A position in a stream; `time_ms` is set once it is reached."""

    __slots__ = ("_clock", "callbacks", "error", "time_ms", "waiting")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.time_ms: float | None = None
        self.error: DeviceError | None = None
        self.waiting: list[VirtualStream] = []
        self.callbacks: list[Callback] = []

    def done(self) -> bool:
        return self.time_ms is not None

    def wait(self, timeout_s: float | None = None) -> None:
        self._clock.run_until(self, inf if timeout_s is None else timeout_s * 1e3)
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class _Run:
    """Work on a stream: functions that are called as it starts and as it ends, `ms` apart."""

    ms: float
    begin: Step | None
    end: Step | None
    is_launch: bool = False


@dataclass(slots=True)
class _Wait:
    event: VirtualEvent


class VirtualStream:
    """A stream, or the CPU engine. `busy_ms` is the time it has spent on work."""

    __slots__ = ("_clock", "_error", "_items", "_running", "busy_ms", "name")

    def __init__(self, clock: Clock, name: str) -> None:
        self.name = name
        self.busy_ms = 0.0
        self._clock = clock
        self._items: deque[_Run | _Wait | VirtualEvent] = deque()
        self._running: _Run | None = None
        self._error: DeviceError | None = None  # reported by the next event

    @property
    def busy(self) -> bool:
        """Whether it works now."""
        return self._running is not None

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
        """Submit work that reads and writes either at its start or at its end, and is skipped if what it waited for has failed."""
        early = self._clock.random.random() < 0.5
        self._put(_Run(ms, function if early else None, None if early else function, is_launch=True))

    def put_job(self, ms: float, function: Step) -> None:
        self._put(_Run(ms, function, None))

    def proceed(self) -> None:
        """Process items that take no time and start the next that does; called while the stream is idle."""
        items = self._items
        while items and self._running is None:
            item = items[0]
            if isinstance(item, _Wait):
                if item.event.time_ms is None:
                    item.event.waiting.append(self)
                    return
                self._error = self._error or item.event.error
                items.popleft()
            elif isinstance(item, VirtualEvent):
                items.popleft()
                error, self._error = self._error, None
                self._clock.complete(item, error)
            else:
                items.popleft()
                if not (item.is_launch and self._error is not None):  # else its inputs never came
                    self._start(item)

    def drop(self, reason: DeviceError) -> None:
        """Drop everything that has not started; its events fail."""
        items, self._items = self._items, deque()
        for item in items:
            if isinstance(item, VirtualEvent):
                self._clock.complete(item, reason)

    def _put(self, item: _Run | _Wait | VirtualEvent) -> None:
        self._clock.check_open()
        self._items.append(item)
        if self._running is None and len(self._items) == 1:  # otherwise the first item waits, and will resume the stream
            self.proceed()

    def _start(self, run: _Run) -> None:
        self._running = run
        self._call(run.begin)
        ms = self._clock.jittered(run.ms)
        self.busy_ms += ms
        self._clock.schedule(ms, self._finish)

    def _finish(self) -> None:
        run, self._running = self._running, None
        assert run is not None, "a stream finishes what it has started"
        self._call(run.end)
        self.proceed()

    def _call(self, step: Step | None) -> None:
        if step is None:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001  the host's wait raises it, as it would a worker's exception
            self._error = self._error or as_device_error(self._clock.name, self.name, error)


class VirtualTicket:
    """A job of the CPU engine, which ends at `event`."""

    __slots__ = ("error", "event", "started_ms")

    def __init__(self) -> None:
        self.event: VirtualEvent | None = None
        self.error: BaseException | None = None
        self.started_ms = 0.0

    @property
    def elapsed_ms(self) -> float | None:
        end = None if self.event is None else self.event.time_ms
        return None if end is None else end - self.started_ms

    def wait(self) -> None:
        assert self.event is not None, "a submitted job has its event"
        self.event.wait()
        if self.error is not None:
            raise self.error


class Prices:
    """Modelled times of work on a machine; without a profile only work with its own `cost_ms` takes any time."""

    def __init__(self, profile: MachineProfile | None, bits_per_weight: float) -> None:
        self._profile = profile
        self._bits_per_weight = bits_per_weight
        self._gpu_ms = lru_cache(4096)(self._modelled_gpu_ms)
        self._cpu_ms = lru_cache(4096)(self._modelled_cpu_ms)

    def gpu_ms(self, work: Work) -> float:
        return self._gpu_ms(work.loads, work.expert_bytes, work.neurons) if work.cost_ms is None else work.cost_ms

    def cpu_ms(self, work: Work, *, busy: bool = False) -> float:
        """Return the time of a job; one behind another has its threads awake, and pays for the first expert no more than its overhead."""
        return self._cpu_ms(work.loads, work.expert_bytes, work.neurons, busy) if work.cost_ms is None else work.cost_ms

    def copy_ms(self, nbytes: int) -> float:
        return 0.0 if self._profile is None else self._profile.transfer_ms(nbytes)

    def _modelled_gpu_ms(self, loads: tuple[int, ...], expert_bytes: int, neurons: Neurons | None) -> float:
        if self._profile is None:
            return 0.0
        return float(self._profile.gpu_ms(loads, expert_bytes, self._bits_per_weight, neurons).sum())

    def _modelled_cpu_ms(self, loads: tuple[int, ...], expert_bytes: int, neurons: Neurons | None, busy: bool) -> float:
        if self._profile is None or not any(loads):
            return 0.0
        total = self._profile.cpu_ms(loads, expert_bytes, self._bits_per_weight, neurons).sum()
        first_ms = self._profile.first_cpu_overhead_ms if busy else self._profile.first_cpu_ms(expert_bytes, neurons)
        return float(total) + first_ms


class VirtualDevice:
    """An emulated GPU; see the module.

    Args:
        profile: the machine to emulate; None: only work that carries its own `cost_ms` takes any time.
        seed: of the jitter, of ties, and of when launches read.
        jitter: durations are multiplied by `exp(u)`, u uniform in [-jitter, jitter]; above 0, simultaneous events happen in random order.
        notify_ms: from an event to its callbacks.
        memory_bytes: size of the device memory, None for no limit.
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
    ) -> None:
        self.name = f"emulated:{index}"
        self.notify_ms = notify_ms
        self.torch_device = torch.device("cpu")
        self.allocated_bytes = 0
        self._memory_bytes = memory_bytes
        self._prices = Prices(profile, bits_per_weight)
        self._clock = Clock(self.name, seed, jitter, notify_ms)
        self._streams: dict[str, VirtualStream] = {}
        self._cpu = VirtualStream(self._clock, "cpu")
        self._recorder: StepRecorder | None = None  # while a step is captured

    def busy_ms(self, name: str) -> float:
        """Return the time that a stream, or "cpu", has spent on work."""
        return self._cpu.busy_ms if name == "cpu" else self._streams[name].busy_ms

    def stream(self, name: str) -> VirtualStream:
        self.check_open()
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = VirtualStream(self._clock, name)
        return stream

    def allocate(self, nbytes: int) -> HostBuffer:
        self.check_open()
        if nbytes < 1:
            raise ValueError(f"{self.name}: cannot allocate {nbytes} bytes")
        if self._memory_bytes is not None and self.allocated_bytes + nbytes > self._memory_bytes:
            free = self._memory_bytes - self.allocated_bytes
            raise OutOfDeviceMemoryError(f"{self.name}: {nbytes} bytes requested, {free} of {self._memory_bytes} free")
        self.allocated_bytes += nbytes
        return HostBuffer(nbytes, self)

    def pin(self, array: Bytes) -> None:
        self.check_open()

    def unpin(self, array: Bytes) -> None:
        return

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        assert target is None or isinstance(target, HostBuffer), f"{target!r} is not memory of {self.name}"
        # CUDA might not notice these mistakes.
        if nbytes < 1 or target_offset < 0:
            raise ValueError(f"{self.name}: a copy of {nbytes} bytes to offset {target_offset}")
        if target is not None and target_offset + nbytes > target.nbytes:
            raise ValueError(f"{self.name}: a copy of {nbytes} bytes to offset {target_offset} of a buffer of {target.nbytes}")
        if source is not None and source.nbytes < nbytes:
            raise ValueError(f"{self.name}: a copy of {nbytes} bytes from {source.nbytes}")
        half = nbytes // 2

        def move(start: int, stop: int) -> None:
            if target is not None and source is not None:
                target.array[target_offset + start : target_offset + stop] = source[start:stop]

        self._own(stream).put_copy(self._prices.copy_ms(nbytes), lambda: move(0, half), lambda: move(half, nbytes))

    def launch(self, stream: Stream, function: Step) -> None:
        work = work_of(function)
        if self._recorder is not None:  # a replay writes whatever it was captured with, as on a GPU
            function = Timed(work, torch.inference_mode()(function))
        if not self._captured(partial(self.launch, stream, function)):
            self._own(stream).put_launch(self._prices.gpu_ms(work), function)

    def errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def launch_host(self, stream: Stream, function: int, data: int) -> None:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.launch(stream, lambda: call(data))

    def order(self, first: Stream, then: Stream) -> None:
        if not self._captured(partial(self.order, first, then)):
            then.wait(first.record())

    def capture(self, step: Step) -> EmulatedGraph:
        assert self._recorder is None, "one step is captured at a time"
        self._recorder = recorder = StepRecorder(self.name)
        try:
            with NumberGuard(self.name), recorder:
                step()
        finally:
            self._recorder = None
        return EmulatedGraph(self, recorder.items)

    def submit_cpu(self, function: Callable[[], Waiter | None]) -> VirtualTicket:
        ticket = VirtualTicket()

        def begin() -> None:
            ticket.started_ms = self._clock.now_ms
            try:
                waiter = function()
                if waiter is not None:
                    waiter()
            except Exception as error:  # noqa: BLE001  the ticket's `wait` raises it, whatever it is
                ticket.error = error

        self._cpu.put_job(self._prices.cpu_ms(work_of(function), busy=self._cpu.busy), begin)
        ticket.event = self._cpu.record()
        return ticket

    def notify(self, event: Event, callback: Callback) -> None:
        assert isinstance(event, VirtualEvent), f"{event!r} is not an event of {self.name}"
        self.check_open()
        if event.time_ms is None:
            event.callbacks.append(callback)
        else:
            self._clock.notify(callback, event.error)

    def now_ms(self) -> float:
        return self._clock.now_ms

    def advance(self, ms: float) -> None:
        """Move the clock: the host is busy for that long."""
        if ms < 0:
            raise ValueError(f"{self.name}: the clock cannot go back by {-ms} ms")
        self._clock.advance(ms)

    def elapsed_ms(self, first: Event, second: Event) -> float:
        assert isinstance(first, VirtualEvent) and isinstance(second, VirtualEvent), f"not events of {self.name}"
        if first.time_ms is None or second.time_ms is None:
            raise ValueError(f"{self.name}: the time between two events is known when both are done")
        return second.time_ms - first.time_ms

    def synchronize(self) -> None:
        last = [stream.record() for stream in [*self._streams.values(), self._cpu]]
        self._clock.run_all()
        for event in last:
            event.wait()

    def close(self) -> None:
        if self._clock.closed:
            return
        self._clock.closed = True
        reason = DeviceError(f"{self.name} was closed before this work began")
        for stream in [*self._streams.values(), self._cpu]:
            stream.drop(reason)
        self._clock.run_all()

    def check_open(self) -> None:
        """Raise DeviceError once the device is closed."""
        self._clock.check_open()

    def _own(self, stream: Stream) -> VirtualStream:
        assert isinstance(stream, VirtualStream), f"{stream!r} is not a stream of {self.name}"
        return stream

    def _captured(self, call: Step) -> bool:
        """Record a call for the replays if it belongs to a step that is being captured; return whether it does."""
        if self._recorder is None or self._recorder.thread != threading.get_ident():
            return False
        self._recorder.items.append(call)
        return True


def as_device_error(device: str, stream: str, error: Exception) -> DeviceError:
    """Return what work on a stream raised, as the host's wait raises it."""
    if isinstance(error, DeviceError):
        return error
    failure = DeviceError(f"{device}: work on stream {stream!r} raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
