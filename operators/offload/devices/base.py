"""The device as the scheduler, the slots, the transfer queue and the engine see it.

Work is handed to streams and runs in their order; an event marks a place in a stream. An event that waits for work that was not yet
handed over would wait for nothing on CUDA, so there is no such event: what a stream is to wait for is handed over first.

What fails in a stream surfaces at the next event that is recorded on it: its `wait` raises, its `notify` callback is told, and a stream
that waits for it skips its launches up to its own next event, which raises the same. After that the stream is as good as new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


Bytes = NDArray[np.uint8]
Waiter = Callable[[], None]
OnSpan = Callable[[str, str, float, float], None]
"""A timeline's hook: `on_span(lane, name, start_ms, end_ms)` in the device's host clock."""


class DeviceError(RuntimeError):
    """Work on a device failed; the message says which."""


class OutOfDeviceMemoryError(DeviceError):
    """The device has no room for an allocation."""


@dataclass(frozen=True, slots=True)
class Neurons:
    """What a token needs of an expert where neurons are left out.

    Attributes:
        active: share of the neurons.
        judged: share of an expert's weights that says which they are, and is always read: the gates.
    """

    active: float
    judged: float

    @classmethod
    def without(cls, left_out: float, *, gated: bool) -> Self:
        """Of experts whose gate is one of three matrices, or whose up, of two, is judged where they have none."""
        return cls(1.0 - left_out, 1 / 3 if gated else 1 / 2)


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch or a CPU job is, for devices that price it instead of measuring it.

    Attributes:
        loads: tokens of each expert that is computed.
        expert_bytes: packed bytes of one of these experts.
        cost_ms: charged as it is where given; `loads` is then not priced.
        neurons: what a token needs of each expert; None: all of it.
    """

    kind: Literal["experts", "dense", "host"]
    loads: tuple[int, ...] = ()
    expert_bytes: int = 0
    cost_ms: float | None = None
    neurons: Neurons | None = None


class DeviceTimeoutError(DeviceError):
    """Work was not done in the time that was given to it."""


class Event(Protocol):
    """A place in a stream, reached once."""

    def done(self) -> bool:
        """Whether everything before it is done, failed work included. Never blocks."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until it is done.

        Raises:
            DeviceError: work before it failed, each failure told by one event.
            DeviceTimeoutError: it is not done after that time.
        """
        ...


class Stream(Protocol):
    """Work in order."""

    @property
    def name(self) -> str: ...
    def wait(self, event: Event) -> None:
        """Work handed over after this starts after the event. Does not block the host."""
        ...

    def record(self, *, timed: bool = False) -> Event:
        """An event after all work handed over so far; `timed` ones can be given to `elapsed_ms`."""
        ...


class Buffer(Protocol):
    """Bytes in device memory, from an address that is a multiple of 64."""

    @property
    def nbytes(self) -> int: ...
    @property
    def array(self) -> Bytes | None:
        """The bytes where device memory is host memory, as on emulated devices; else None."""
        ...

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a `(nbytes,)` uint8 tensor on the device."""
        ...

    def free(self) -> None:
        """Gives the memory back; whoever frees has waited for its last use."""
        ...


class PinnedRange(Protocol):
    """Host bytes that are page-locked until released."""

    def release(self) -> None: ...


class Graph(Protocol):
    """A step that was captured once, to be handed over again and again as one piece."""

    def replay(self) -> None:
        """Hands the step over: it works on what its tensors hold when the compute stream gets there."""
        ...

    def release(self) -> None:
        """Gives its memory back; the last replay is done."""
        ...


class CpuTicket(Protocol):
    """A job of the CPU engine."""

    @property
    def elapsed_ms(self) -> float | None:
        """What the job took, after `wait`; None where its end was not seen because the host came to wait later."""
        ...

    def wait(self) -> None:
        """Blocks until it is done and raises what it raised."""
        ...


class Device(Protocol):
    """A GPU, or what stands for one. One host thread hands work over at a time; callbacks may do so too, from the notifier."""

    @property
    def name(self) -> str:
        """`cuda:0`, `emulated:0`."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of its launches live: the CPU for emulated devices."""
        ...

    def stream(self, name: str) -> Stream:
        """The stream of that name ("compute", "copy"), made at the first call."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Device memory.

        Raises:
            OutOfDeviceMemoryError: there is no such room.
        """
        ...

    def pin(self, array: Bytes) -> PinnedRange:
        """Page-locks host bytes, so that copies from them run beside the host.

        Raises:
            DeviceError: they cannot be page-locked; the message has the reason.
        """
        ...

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        """Copies host bytes to the device when the stream gets there; without target or source it takes its time and moves nothing.

        Raises:
            DeviceError: the copy was refused at once.
        """
        ...

    def launch(self, stream: Stream, function: Callable[[], None] | None, work: Work) -> None:
        """GPU work: CUDA runs `function` now, under the stream, to launch kernels; emulated devices run it when the stream gets there.

        Raises:
            DeviceError: the device refused it at once, for want of memory (`OutOfDeviceMemoryError`) or after an earlier failure.
        """
        ...

    def launch_host(self, stream: Stream, function: int, data: int, work: Work) -> None:
        """Runs the C function `void (*)(void*)` at address `function` on `data` when the stream gets there; it must make no CUDA call."""
        ...

    def order(self, first: Stream, then: Stream) -> None:
        """What is handed to `then` from now on starts after what `first` has so far. Inside of `capture`, as part of the step."""
        ...

    def capture(self, step: Callable[[], None]) -> Graph:
        """Notes what `step` hands over, by `launch`, `launch_host`, `order` and PyTorch's own calls on the current stream; nothing of it
        is done. Its tensors stay where they are, and streams that it forked off have been joined when it returns.

        Raises:
            DeviceError: the step waits for the device, or does what cannot be captured.
        """
        ...

    def submit_cpu(self, function: Callable[[], Waiter | None] | None, work: Work) -> CpuTicket:
        """Starts a job of the CPU engine. Jobs run one after another.

        Args:
            function: starts the job and returns what blocks until it is done, as `Runtime.submit` and `Runtime.wait` do; or does the job
                and returns None. Real machines call it now; the virtual clock when the CPU is free, and charges `work`.
        """
        ...

    def notify(self, event: Event, callback: Callable[[DeviceError | None], None]) -> None:
        """Calls back when the event is done, with its failure: on the notifier thread, never from within this call.

        A callback must not wait and must not raise; events of one stream are told in their order.
        """
        ...

    def now_ms(self) -> float:
        """The host clock."""
        ...

    def advance(self, ms: float) -> None:
        """The host is busy for that long: moves the virtual clock, nothing on real machines, where time passes by itself."""
        ...

    def elapsed_ms(self, first: Event, second: Event) -> float:
        """Device time between two timed events that are done."""
        ...

    def synchronize(self) -> None:
        """Waits for all streams; callbacks of their events have run afterwards. Raises the first failure not told yet."""
        ...

    def close(self) -> None:
        """Lets running work end, within a second, drops the rest and ends the device's threads; later use raises DeviceError."""
        ...
