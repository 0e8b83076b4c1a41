"""Emulated devices whose calls can be made to fail."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from moegraft.operators.offload.devices.base import Buffer, Bytes, DeviceError, OutOfDeviceMemoryError, Stream, Waiter
from support.virtual_device import HostBuffer, Timed, VirtualDevice, work_of

EVERY = range(1 << 62)
"""All calls of a kind, for `Faults`."""


class Countdown(Container[int]):
    """The one call of a kind that is the `left`-th from now on; none until `left` is set."""

    def __init__(self, left: int = 0) -> None:
        self.left = left

    def __contains__(self, number: object) -> bool:
        self.left -= 1
        return self.left == 0


@dataclass(frozen=True, slots=True)
class Faults:
    """Which calls fail, by their number from 0 within their kind.

    Attributes:
        copies: fail in the stream, after half of their bytes.
        refused_copies: raise when they are submitted.
        cpu_jobs: raise in the CPU engine.
    """

    allocations: Container[int] = ()
    pins: Container[int] = ()
    copies: Container[int] = ()
    refused_copies: Container[int] = ()
    launches: Container[int] = ()
    cpu_jobs: Container[int] = ()


class FaultyDevice(VirtualDevice):
    """A virtual device that fails the calls of `faults`."""

    def __init__(self, *args: Any, faults: Faults | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._faults = faults
        self._calls = dict.fromkeys(Faults.__slots__, 0)

    def allocate(self, nbytes: int) -> HostBuffer:
        if self._fails("allocations"):
            raise OutOfDeviceMemoryError(f"{self.name}: injected: {nbytes} bytes refused")
        return super().allocate(nbytes)

    def pin(self, array: Bytes) -> None:
        super().pin(array)
        if self._fails("pins"):
            raise DeviceError(f"{self.name}: injected: {array.nbytes} bytes cannot be page-locked")

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        if self._fails("refused_copies"):
            raise DeviceError(f"{self.name}: injected: a copy of {nbytes} bytes refused")
        if not self._fails("copies"):
            super().copy(stream, target, target_offset, source, nbytes)
            return

        def first_half() -> None:
            if isinstance(target, HostBuffer) and source is not None:
                target.array[target_offset : target_offset + nbytes // 2] = source[: nbytes // 2]

        def fail() -> None:
            raise DeviceError(f"{self.name}: injected: a copy of {nbytes} bytes failed")

        self._own(stream).put_copy(self._prices.copy_ms(nbytes), first_half, fail)

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        def fail() -> None:
            raise DeviceError(f"{self.name}: injected: a launch failed")

        # A launch that is captured counts when it is replayed.
        super().launch(stream, Timed(work_of(function), fail) if self._recorder is None and self._fails("launches") else function)

    def submit_cpu(self, function: Callable[[], Waiter | None]) -> Any:
        def fail() -> None:
            raise RuntimeError(f"{self.name}: injected: a job of the CPU engine failed")

        return super().submit_cpu(Timed(work_of(function), fail) if self._fails("cpu_jobs") else function)

    def _fails(self, kind: str) -> bool:
        """Count a call of that kind and return whether it is to fail."""
        number = self._calls[kind]
        self._calls[kind] = number + 1
        return self._faults is not None and number in getattr(self._faults, kind)
