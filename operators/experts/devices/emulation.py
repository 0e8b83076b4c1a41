"""What emulated devices share: device memory that is host memory with a budget, injected faults, prices of work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from moegraft.operators.experts.devices.interface import Bytes, DeviceError, Neurons, OutOfDeviceMemoryError, Work
from moegraft.operators.experts.devices.profiles import INT4_BITS, MachineProfile

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
EVERY = range(1 << 62)
"""All calls of a kind, for `Faults`."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Which calls fail, by their number from 0 within their kind.

    Attributes:
        copies: fail in the stream, after half of their bytes.
        refused_copies: raise when they are handed over.
        cpu_jobs: raise in the CPU engine.
    """

    allocations: Container[int] = ()
    pins: Container[int] = ()
    copies: Container[int] = ()
    refused_copies: Container[int] = ()
    launches: Container[int] = ()
    cpu_jobs: Container[int] = ()


class FaultCounter:
    """Counts the calls of each kind and says which fail."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._none = faults == Faults()
        self._calls = dict.fromkeys(Faults.__slots__, 0)

    def fails(self, kind: str) -> bool:
        if self._none:
            return False
        number = self._calls[kind]
        self._calls[kind] = number + 1
        return number in getattr(self._faults, kind)


class HostBuffer:
    """Emulated device memory; its pages are taken when they are first asked for, so buffers that are only counted cost nothing."""

    def __init__(self, nbytes: int, memory: HostMemory) -> None:
        self.nbytes = nbytes
        self._memory = memory
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
        import torch  # here, since a simulation needs none

        return torch.from_numpy(self.array)

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._array = None
            self._memory.taken_bytes -= self.nbytes


class HostMemory:
    """A budget of emulated device memory, None for no limit."""

    def __init__(self, name: str, budget_bytes: int | None, faults: FaultCounter) -> None:
        self._name = name
        self._budget_bytes = budget_bytes
        self._faults = faults
        self.taken_bytes = 0

    def allocate(self, nbytes: int) -> HostBuffer:
        if nbytes < 1:
            raise ValueError(f"{self._name}: {nbytes} bytes cannot be allocated")
        if self._faults.fails("allocations"):
            raise OutOfDeviceMemoryError(f"{self._name}: injected: {nbytes} bytes refused")
        if self._budget_bytes is not None and self.taken_bytes + nbytes > self._budget_bytes:
            free = self._budget_bytes - self.taken_bytes
            raise OutOfDeviceMemoryError(f"{self._name}: {nbytes} bytes asked for, {free} of {self._budget_bytes} free")
        self.taken_bytes += nbytes
        return HostBuffer(nbytes, self)


class HostRange:
    """Host bytes that count as page-locked."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.released = False

    def release(self) -> None:
        self.released = True


def aligned_bytes(nbytes: int) -> Bytes:
    """Uninitialised `(nbytes,)` uint8 that starts at a multiple of 64, as `PackedExperts` wants its buffer."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def check_copy(name: str, target: HostBuffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
    """Raises ValueError for a copy that would leave its buffers: a caller's mistake that CUDA might not notice."""
    if nbytes < 1 or target_offset < 0:
        raise ValueError(f"{name}: a copy of {nbytes} bytes to offset {target_offset}")
    if target is not None and target_offset + nbytes > target.nbytes:
        raise ValueError(f"{name}: a copy of {nbytes} bytes to offset {target_offset} of a buffer of {target.nbytes}")
    if source is not None and source.nbytes < nbytes:
        raise ValueError(f"{name}: a copy of {nbytes} bytes from {source.nbytes}")


def host_function(address: int, data: int) -> Callable[[], None]:
    """A call of the C function `void (*)(void*)` at `address` on `data`."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    return lambda: function(data)


class Prices:
    """What work costs in ms on a modelled machine; without a profile only what carries its own price costs anything."""

    def __init__(self, profile: MachineProfile | None, bits_per_weight: float = INT4_BITS) -> None:
        self._profile = profile
        self._bits_per_weight = bits_per_weight
        self._gpu_ms = lru_cache(4096)(self._priced_gpu_ms)
        self._cpu_ms = lru_cache(4096)(self._priced_cpu_ms)

    def gpu_ms(self, work: Work) -> float:
        return self._gpu_ms(work.loads, work.expert_bytes, work.neurons) if work.cost_ms is None else work.cost_ms

    def cpu_ms(self, work: Work) -> float:
        return self._cpu_ms(work.loads, work.expert_bytes, work.neurons) if work.cost_ms is None else work.cost_ms

    def copy_ms(self, nbytes: int) -> float:
        return 0.0 if self._profile is None else self._profile.transfer_ms(nbytes)

    def _priced_gpu_ms(self, loads: tuple[int, ...], expert_bytes: int, neurons: Neurons | None) -> float:
        if self._profile is None:
            return 0.0
        return float(self._profile.gpu_ms(loads, expert_bytes, self._bits_per_weight, neurons).sum())

    def _priced_cpu_ms(self, loads: tuple[int, ...], expert_bytes: int, neurons: Neurons | None) -> float:
        if self._profile is None or not any(loads):
            return 0.0
        every = self._profile.cpu_ms(loads, expert_bytes, self._bits_per_weight, neurons).sum()
        return float(every) + self._profile.first_cpu_ms(expert_bytes, neurons)
