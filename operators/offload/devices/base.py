"""The device interface that the slots, the transfer queue and the engine are written against.

Work is submitted to streams and runs in their order; an event marks a position in a stream. A stream may only wait for work that was
submitted before: on CUDA, waiting for an event that is not recorded yet is waiting for nothing.

A failure in a stream surfaces at the next event recorded on it: the event's `wait` raises it, its `notify` callback receives it, and a
stream that waits for the event skips its launches up to its own next event, which raises the same. Afterwards the stream is usable again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from moegraft.operators.offload.executors import EngineLayers

Bytes = NDArray[np.uint8]
Waiter = Callable[[], float | None]
"""Blocks until a job is done, and returns the ms that it took where that is known."""
ALIGNMENT = 64


class DeviceError(RuntimeError):
    """Work on a device failed; the message names it."""


class OutOfDeviceMemoryError(DeviceError):
    """The device has no room for an allocation."""


class DeviceTimeoutError(DeviceError):
    """Work did not finish within the given time."""


Callback = Callable[[DeviceError | None], None]
OnSpan = Callable[[str, str, float, float], None]
"""A timeline's hook: `on_span(lane, name, start_ms, end_ms)` in the device's host clock."""


class Event(Protocol):
    """A position in a stream, reached once."""

    def done(self) -> bool:
        """Return whether everything before it is done, failed work included. Never blocks."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until it is done.

        Raises:
            DeviceError: work before it failed; each failure is reported by one event.
            DeviceTimeoutError: it is not done after that time.
        """


class Stream(Protocol):
    """A queue of work that runs in order."""

    def wait(self, event: Event) -> None:
        """Make work submitted after this start after the event. Does not block the host."""

    def record(self, *, timed: bool = False) -> Event:
        """Return an event after all work submitted so far; `elapsed_ms` accepts only `timed` ones."""


class Buffer(Protocol):
    """Bytes in device memory, at an address that is a multiple of 64."""

    @property
    def nbytes(self) -> int: ...
    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a `(nbytes,)` uint8 tensor on the device."""

    def free(self) -> None:
        """Release the memory; the caller has waited for its last use."""


class Graph(Protocol):
    """A step that was captured once and is replayed as a whole."""

    def replay(self) -> None:
        """Submit the step; it reads its tensors when the compute stream reaches it."""

    def release(self) -> None:
        """Release its memory; the last replay is done."""


class CpuTicket(Protocol):
    """A job of the CPU engine."""

    @property
    def elapsed_ms(self) -> float | None:
        """The job's duration, after `wait`, without jobs before it; None where it is not known."""

    def wait(self) -> None:
        """Block until the job is done and raise what it raised."""


class Device(Protocol):
    """A GPU, or what stands for one in tests. One host thread submits work at a time; notifier callbacks may submit work too."""

    @property
    def name(self) -> str:
        """`cuda:0`."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of its launches are."""

    @property
    def notify_ms(self) -> float:
        """About how long after an event its callback has run: the link needs work for that long."""

    def stream(self, name: str) -> Stream:
        """Return the stream of that name ("compute", "copy"), created by the first call."""

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate device memory.

        Raises:
            OutOfDeviceMemoryError: there is not enough.
        """

    def pin(self, array: Bytes) -> None:
        """Page-lock host bytes, so that copies from them run asynchronously. The caller keeps the array until `unpin`.

        Raises:
            DeviceError: they cannot be page-locked; the message has the reason.
        """

    def unpin(self, array: Bytes) -> None:
        """End `pin`; copies from the array are done."""

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        """Copy host bytes to the device when the stream gets there; without target or source it takes its time and moves nothing.

        Raises:
            DeviceError: the copy was refused at once.
        """

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        """Submit GPU work: CUDA calls `function` now, under the stream, to launch kernels.

        Raises:
            DeviceError: the device refused it at once: for lack of memory (`OutOfDeviceMemoryError`), after an earlier failure, or
                because a kernel needs more than the device has.
        """

    def errors(self) -> AbstractContextManager[None]:
        """Make errors of PyTorch, Triton and the driver in the body DeviceErrors where they come from the device; others pass."""

    def launch_host(self, stream: Stream, function: int, data: int) -> None:
        """Call the C function `void (*)(void*)` at address `function` on `data` when the stream gets there; it must make no CUDA call."""

    def order(self, first: Stream, then: Stream) -> None:
        """Make work submitted to `then` from now on start after what `first` has so far. Inside `capture`, as part of the step."""

    def capture(self, step: Callable[[], None]) -> Graph:
        """Record what `step` submits by `launch`, `launch_host`, `order` and PyTorch calls on the current stream, without running it.

        Its tensors keep their addresses, and streams that it forked are joined when it returns.

        Raises:
            DeviceError: the step waits for the device, or does something else that cannot be captured. PyTorch's stream, memory and random
                numbers are as before.
        """

    def submit_cpu(self, function: Callable[[], Waiter | None]) -> CpuTicket:
        """Start a job of the CPU engine. Jobs run one after another.

        Args:
            function: starts the job and returns a function that blocks until it is done, as `Runtime.submit` and `Runtime.wait` do; or
                does the job and returns None.
        """

    def notify(self, event: Event, callback: Callback) -> None:
        """Call back with the event's failure or None when it is done: on the notifier thread, never from within this call.

        A callback must not wait or raise; callbacks for events of one stream come in their order.
        """

    def now_ms(self) -> float:
        """Return the host clock."""

    def elapsed_ms(self, first: Event, second: Event) -> float:
        """Return the device time between two timed events that are done."""

    def synchronize(self) -> None:
        """Wait for all streams and for the callbacks of their events. Raises the first failure that was not reported yet."""

    def close(self) -> None:
        """Let running work end, within a second, drop the rest and end the device's threads; later use raises DeviceError."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device: `open` takes a number, and `engine_layers` computes experts from its slots."""

    open: Callable[[int], Device]
    engine_layers: type[EngineLayers]


DEVICE_KINDS: dict[str, DeviceKind] = {}
"""Kinds beside CUDA, by the name that `gpu:` gives them. The rest of the model is on the CPU, wherever they compute its experts."""


def check_not_forked(name: str, owner_pid: int) -> None:
    """Raise RuntimeError in a process forked from `owner_pid`: threads, streams and page-locked memory stay behind in the parent."""
    if os.getpid() != owner_pid:
        raise RuntimeError(f"{name} was created by process {owner_pid} and cannot be used after a fork; start processes by spawn")


def aligned_bytes(nbytes: int) -> Bytes:
    """Return uninitialised `(nbytes,)` uint8 at an address that is a multiple of 64, as `PackedExperts` requires of its buffer."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]
