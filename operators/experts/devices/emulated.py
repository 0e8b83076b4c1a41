"""The part of a device that the virtual clock and the threads share: memory, faults, prices, and what a copy and a launch are."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

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
from moegraft.operators.experts.devices.interface import Buffer, Bytes, DeviceError, Event, Stream, Work
from moegraft.operators.experts.devices.profiles import INT4_BITS, MachineProfile

if TYPE_CHECKING:
    import torch

    from moegraft.operators.experts.devices.graphs import EmulatedGraph, StepRecorder

Step = Callable[[], None]


class EmulatedStream(Protocol):
    """A stream of an emulated device."""

    @property
    def name(self) -> str: ...
    def wait(self, event: Event) -> None: ...
    def record(self, *, timed: bool = False) -> Event: ...
    def put_copy(self, ms: float, first_half: Step, second_half: Step) -> None:
        """Work that moves half of its bytes as it starts and half as it ends."""
        ...

    def put_launch(self, ms: float, function: Step | None) -> None:
        """Work that is skipped when what it waited for has failed."""
        ...


class EmulatedDevice(ABC):
    """Device memory is host memory; see `VirtualDevice` and `ThreadedDevice`.

    Args:
        profile: the machine that is emulated; None: only work that carries its own `cost_ms` takes any time.
        memory_bytes: the device memory there is, None for no limit.
    """

    def __init__(
        self,
        profile: MachineProfile | None,
        *,
        index: int = 0,
        memory_bytes: int | None = None,
        bits_per_weight: float = INT4_BITS,
        faults: Faults | None = None,
    ) -> None:
        self.name = f"emulated:{index}"
        self._prices = Prices(profile, bits_per_weight)
        self._faults = FaultCounter(faults or Faults())
        self._memory = HostMemory(self.name, memory_bytes, self._faults)
        self._recorder: StepRecorder | None = None  # while a step is captured

    @property
    def torch_device(self) -> torch.device:
        import torch  # here, since an emulation needs none

        return torch.device("cpu")

    @property
    def taken_bytes(self) -> int:
        """Device memory in use."""
        return self._memory.taken_bytes

    @abstractmethod
    def check_open(self) -> None:
        """Raises DeviceError once the device is closed."""

    @abstractmethod
    def stream(self, name: str) -> EmulatedStream:
        """See `Device`."""

    def allocate(self, nbytes: int) -> HostBuffer:
        self.check_open()
        return self._memory.allocate(nbytes)

    def pin(self, array: Bytes) -> HostRange:
        self.check_open()
        if self._faults.fails("pins"):
            raise DeviceError(f"{self.name}: injected: {array.nbytes} bytes cannot be page-locked")
        return HostRange(array.nbytes)

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        assert target is None or isinstance(target, HostBuffer), f"{target!r} is not memory of {self.name}"
        check_copy(self.name, target, target_offset, source, nbytes)
        if self._faults.fails("refused_copies"):
            raise DeviceError(f"{self.name}: injected: a copy of {nbytes} bytes refused")
        fails = self._faults.fails("copies")
        half = nbytes // 2

        def move(start: int, stop: int) -> None:
            if target is not None and source is not None:
                target.array[target_offset + start : target_offset + stop] = source[start:stop]

        def second_half() -> None:
            if fails:
                raise DeviceError(f"{self.name}: injected: a copy of {nbytes} bytes failed")
            move(half, nbytes)

        self._own(stream).put_copy(self._prices.copy_ms(nbytes), lambda: move(0, half), second_half)

    def launch(self, stream: Stream, function: Step | None, work: Work) -> None:
        if self._captures(partial(self.launch, stream, function, work)):
            return
        if self._faults.fails("launches"):

            def function() -> None:
                raise DeviceError(f"{self.name}: injected: a launch failed")

        self._own(stream).put_launch(self._prices.gpu_ms(work), function)

    def launch_host(self, stream: Stream, function: int, data: int, work: Work) -> None:
        self.launch(stream, host_function(function, data), work)

    def order(self, first: Stream, then: Stream) -> None:
        if not self._captures(partial(self.order, first, then)):
            then.wait(first.record())

    def capture(self, step: Step) -> EmulatedGraph:
        from moegraft.operators.experts.devices.graphs import EmulatedGraph, StepRecorder  # an emulation of copies needs no torch

        assert self._recorder is None, "one step is captured at a time"
        self._recorder = recorder = StepRecorder(self.name)
        try:
            with recorder:
                step()
        finally:
            self._recorder = None
        return EmulatedGraph(self, recorder.items)

    def _captures(self, hand_over: Step) -> bool:
        """Whether this call belongs to a step that is captured, which keeps it for its replays."""
        if self._recorder is None or self._recorder.thread != threading.get_ident():
            return False
        self._recorder.keep(hand_over)
        return True

    @abstractmethod
    def _own(self, stream: Stream) -> EmulatedStream:
        """The stream as one of this device's."""


def as_device_error(device: str, stream: str, error: Exception) -> DeviceError:
    """What work on a stream raised, as it surfaces at the host's wait."""
    if isinstance(error, DeviceError):
        return error
    failure = DeviceError(f"{device}: work on stream {stream!r} raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
