"""The part of a device that the virtual clock and the threads share: memory, faults, prices, and what a copy and a launch are.

What emulated devices share: device memory that is host memory with a budget, injected faults, prices of work.

A CUDA graph's stand-in on emulated devices: the operations of a step, noted once and done again on the same tensors.

As in a real capture nothing happens to anybody's tensors while a step is noted, addresses and shapes are fixed, and Python code runs once
alone: what a step should decide anew each time, and does in Python, shows as a wrong result here as well. What was noted is handed to the
device's streams at each replay, so forks and joins run side by side as far as the device lets them.

The CPU engine of machines where time passes by itself.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moegraft.operators.offload.devices.base import Buffer, Bytes, DeviceError, Event, Neurons, OutOfDeviceMemoryError, Stream, Waiter, Work
from moegraft.operators.offload.devices.profiles import INT4_BITS, MachineProfile

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


# What has to wait for the device, since the host reads a value or a shape depends on one.
WAITING = frozenset(
    {
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "nonzero",
        "nonzero_numpy",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
    }
)


class Operation:
    """One operation on tensors; done again, its results go to where the first ones are."""

    __slots__ = ("_arguments", "_function", "_named", "_results")

    def __init__(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any], results: Any) -> None:
        self._function = function
        self._arguments = arguments
        self._named = named
        self._results = _tensors(results)

    def again(self) -> None:
        found = _tensors(self._function(*self._arguments, **self._named))
        for kept, new in zip(self._results, found, strict=bool(self._results)):
            kept.copy_(new)


class StepRecorder(TorchDispatchMode):
    """Notes operations, and the device's own calls between them.

    Attributes:
        items: in their order; operations with nothing between them together.
        thread: the one that captures.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.items: list[Step | list[Operation]] = []
        self.thread = threading.get_ident()
        self._device = device

    def keep(self, hand_over: Step) -> None:
        self.items.append(hand_over)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.overloadpacket.__name__ in WAITING or _selects(func, args):
            raise DeviceError(f"{self._device}: {func} waits for the device, which a captured step cannot")
        with self:  # under inference mode operations come whole that are others put together
            whole = func.decompose(*args, **named)
        if whole is not NotImplemented:
            return whole
        written = [result.alias_info for result in func._schema.returns if result.alias_info is not None]
        if func._schema.is_mutable:
            self._note(Operation(func, args, named, None))
            return _written(func, args, named)
        results = func(*args, **named)
        if not written:  # views are made once
            self._note(Operation(func, args, named, results))
        return results

    def _note(self, operation: Operation) -> None:
        if not self.items or not isinstance(self.items[-1], list):
            self.items.append([])
        last = self.items[-1]
        assert isinstance(last, list), "it was just put there"
        last.append(operation)


class EmulatedGraph:
    """What a recorder noted, for the streams of its device."""

    def __init__(self, device: EmulatedDevice, items: Sequence[Step | list[Operation]]) -> None:
        self._device = device
        self._items = items

    def replay(self) -> None:
        compute = self._device.stream("compute")
        for item in self._items:
            if isinstance(item, list):
                self._device.launch(compute, partial(_all_again, item), Work("dense"))
            else:
                item()

    def release(self) -> None:
        self._items = ()


@torch.inference_mode()
def _all_again(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.again()


def _selects(func: Any, args: Sequence[Any]) -> bool:
    """Whether an index says which places are meant, so that the shape depends on values."""
    if func.overloadpacket.__name__ not in ("index", "index_put", "index_put_"):
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _tensors(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What an operation that writes into its arguments returns: those arguments."""
    given = dict(_given(func, args, named))
    places = {argument.alias_info: argument.name for argument in func._schema.arguments if argument.alias_info is not None}
    names = [_place_of(result, func, places) for result in func._schema.returns]
    found = [given[name] for name in names]
    return found[0] if len(found) == 1 else tuple(found) or None


def _given(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument.name, value
    yield from named.items()


def _place_of(result: Any, func: Any, places: Mapping[Any, str]) -> str:
    for alias, name in places.items():
        if result.alias_info is not None and alias.before_set & result.alias_info.before_set:
            return name
    raise DeviceError(f"{func} writes into what it is given and makes new tensors: an emulated device cannot capture it")


SEEN_MS = 0.02  # a wait that took longer has seen the job's end; a shorter one came after it


class HostTicket:
    """A job; see `CpuTicket`."""

    __slots__ = ("_ends_ms", "_engine", "_error", "_start_ms", "_waiter", "elapsed_ms")

    def __init__(self, engine: CpuEngine, start_ms: float, ends_ms: float, waiter: Waiter | None, error: Exception | None) -> None:
        self._engine = engine
        self._start_ms = start_ms
        self._ends_ms = ends_ms  # not before that time
        self._waiter = waiter
        self._error = error
        self.elapsed_ms: float | None = None

    def wait(self) -> None:
        came_ms = host_ms()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter()
        sleep_until(self._ends_ms)
        now_ms = host_ms()
        if now_ms - came_ms > SEEN_MS:
            self.elapsed_ms = now_ms - max(self._start_ms, self._engine.last_end_ms)
            self._engine.last_end_ms = now_ms
        error, self._error = self._error, None
        if error is not None:
            raise error


class CpuEngine:
    """Starts jobs at once; they queue where they run, as in `Runtime.submit`. `price_ms`: what a job takes at least."""

    def __init__(self, price_ms: Callable[[Work], float] | None = None) -> None:
        self.last_end_ms = 0.0
        self._price_ms = price_ms
        self._free_ms = 0.0

    def submit(self, function: Callable[[], Waiter | None] | None, work: Work) -> HostTicket:
        start_ms = host_ms()
        waiter: Waiter | None = None
        error: Exception | None = None
        try:
            waiter = None if function is None else function()
        except Exception as raised:  # noqa: BLE001  it is carried to the ticket's wait, whatever it is
            error = raised
        if self._price_ms is not None:
            self._free_ms = max(self._free_ms, start_ms) + self._price_ms(work)
        return HostTicket(self, start_ms, self._free_ms, waiter, error)


def host_ms() -> float:
    """The host clock."""
    return time.perf_counter() * 1e3


def sleep_until(time_ms: float) -> None:
    left_ms = time_ms - host_ms()
    if left_ms > 0:
        time.sleep(left_ms / 1e3)
