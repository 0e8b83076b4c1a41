"""A CUDA device, or an AMD one through the same calls of PyTorch.

Threads: streams run on the device; one notifier thread waits for events, one after another in the order in which `notify` was called,
and runs the callbacks. Its waits give up the interpreter and sleep in the driver.

Copies read host memory in place: whoever owns it keeps it until they are done. Transfers go on, from other threads, while `capture` runs.

A step captured into a CUDA graph. No GPU has run this yet: tests go through stand-ins for PyTorch's calls.

The few calls of the CUDA runtime that PyTorch does not offer, or offers slowly, through ctypes on the library that PyTorch loaded.

HIP has the same calls under its own prefix. Every return code is checked, and an error that was reported is taken out of the runtime's
memory: it would else come up again at PyTorch's next call.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import torch

from moegraft.operators.offload.devices.base import (
    Buffer,
    Bytes,
    DeviceError,
    DeviceTimeoutError,
    Event,
    OutOfDeviceMemoryError,
    Stream,
    Waiter,
    Work,
)
from moegraft.operators.offload.devices.emulated import CpuEngine, HostTicket, host_ms
from moegraft.operators.offload.devices.process import ProcessGuard


class CudaGraph:
    """A graph of the current device, and the memory that its tensors keep.

    Only this thread's calls are watched while it is captured: experts on their way to the GPU go on landing, for other threads hand them
    over, on a stream that is not captured.

    Raises:
        DeviceError: the step cannot be captured, or the device refused.
    """

    def __init__(self, device: str, step: Callable[[], None]) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:  # DeviceError is one, as is what PyTorch raises
            raise DeviceError(f"{device}: the step cannot be captured: {error}") from error

    def replay(self) -> None:
        try:
            self._graph.replay()
        except RuntimeError as error:
            raise DeviceError(f"{self._device}: {error}") from error

    def release(self) -> None:
        self._graph.reset()


LIBRARIES = {"cuda": ("libcudart", "cudart64"), "hip": ("libamdhip64", "amdhip64")}
HOST_TO_DEVICE = 1
PORTABLE = 1  # page-locked for every device
READ_ONLY = 8  # of bytes that the host cannot write, such as a file mapped for reading


class _Function(Protocol):
    argtypes: list[type]
    restype: type

    def __call__(self, *arguments: object) -> int: ...


class RuntimeLibrary:
    """Checked calls of a CUDA or HIP runtime."""

    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._prefix = prefix
        self._copy = self._function(library, "MemcpyAsync", [pointer, pointer, size, number, pointer])
        self._launch = self._function(library, "LaunchHostFunc", [pointer, pointer, pointer])
        self._register = self._function(library, "HostRegister", [pointer, size, ctypes.c_uint])
        self._unregister = self._function(library, "HostUnregister", [pointer])
        self._last_error = self._function(library, "GetLastError", [])
        self._error_string = self._function(library, "GetErrorString", [number], ctypes.c_char_p)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Host to device, on a stream. All are addresses or handles; raises DeviceError, as the others do."""
        self._check(self._copy(target, source, nbytes, HOST_TO_DEVICE, stream), "MemcpyAsync")

    def launch_host_function(self, stream: int, function: int, data: int) -> None:
        self._check(self._launch(stream, function, data), "LaunchHostFunc")

    def register(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Page-locks host memory."""
        self._check(self._register(address, nbytes, PORTABLE if writable else PORTABLE | READ_ONLY), "HostRegister")

    def unregister(self, address: int) -> None:
        self._check(self._unregister(address), "HostUnregister")

    def _function(self, library: ctypes.CDLL, name: str, arguments: list[type], result: type = ctypes.c_int) -> _Function:
        try:
            function: _Function = getattr(library, self._prefix + name)
        except AttributeError as error:
            raise DeviceError(f"the runtime library has no {self._prefix}{name}: {error}") from error
        function.argtypes, function.restype = arguments, result
        return function

    def _check(self, code: int, call: str) -> None:
        if code != 0:
            self._last_error()
            text = self._error_string(code)
            reason = text.decode(errors="replace") if isinstance(text, bytes) else "no description"
            raise DeviceError(f"{self._prefix}{call} failed with code {code}: {reason}")


def load_runtime(prefix: str) -> RuntimeLibrary:
    """The runtime that PyTorch has loaded; `prefix` is `cuda` or `hip`.

    Raises:
        DeviceError: it cannot be found.
    """
    tried = []
    for path in _candidates(prefix):
        try:
            return RuntimeLibrary(ctypes.CDLL(path), prefix)
        except (OSError, DeviceError) as error:
            tried.append(str(error))
    raise DeviceError(f"the {prefix} runtime that PyTorch uses was not found: {'; '.join(tried) or 'no such library is loaded'}")


def loaded_paths(maps: str, prefix: str) -> list[str]:
    """Paths of the runtime among the mapped files that `/proc/self/maps` lists, each once."""
    names = LIBRARIES[prefix]
    files = (line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6)
    return list(dict.fromkeys(file for file in files if Path(file).name.startswith(names)))


def _candidates(prefix: str) -> Iterator[str | None]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        yield from loaded_paths(maps.read_text(encoding="utf-8", errors="replace"), prefix)
    if sys.platform == "win32":
        import torch

        folder = Path(torch.__file__).parent / "lib"
        yield from (str(path) for name in LIBRARIES[prefix] for path in folder.glob(f"{name}*.dll"))
    else:
        yield None  # linked into PyTorch, or loaded for all to see


CLOSE_S = 1.0
POLL_S = 0.0005  # between two looks at an event that is waited for with a timeout

Callback = Callable[[DeviceError | None], None]


def why_no_cuda() -> str | None:
    """Why there is no CUDA device, None where there is one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch {torch.__version__} was built for the CPU alone"
    return "PyTorch finds no GPU that it can use (no driver, no device, or none visible)"


class CudaEvent:
    """A place in a stream."""

    __slots__ = ("_device", "raw")

    def __init__(self, device: CudaDevice, raw: torch.cuda.Event) -> None:
        self._device = device
        self.raw = raw

    def done(self) -> bool:
        try:
            return bool(self.raw.query())
        except RuntimeError:
            return True  # the failure is for `wait` to tell

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            if timeout_s is None:
                self.raw.synchronize()
                return
            until_s = time.monotonic() + timeout_s
            while not self.raw.query():
                if time.monotonic() > until_s:
                    raise DeviceTimeoutError(f"{self._device.name}: not done after {timeout_s} s")
                time.sleep(POLL_S)
        except DeviceError:
            raise
        except RuntimeError as error:
            raise DeviceError(f"{self._device.name}: {error}") from error


class CudaStream:
    """A stream of the device. The one called "compute" is whichever is current, so that experts are in order with the model."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._raw = None if name == "compute" else torch.cuda.Stream(device.torch_device)

    @property
    def raw(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device.torch_device) if self._raw is None else self._raw

    @property
    def is_current(self) -> bool:
        return self._raw is None

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), f"{event!r} is not an event of this device"
        self.raw.wait_event(event.raw)

    def record(self, *, timed: bool = False) -> CudaEvent:
        raw = torch.cuda.Event(enable_timing=timed, blocking=True)
        raw.record(self.raw)
        return CudaEvent(self._device, raw)


class CudaBuffer:
    """A block of the device's memory."""

    array: Bytes | None = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.address = tensor.data_ptr()
        self.nbytes = tensor.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise DeviceError("this buffer was freed")
        return self._tensor

    def free(self) -> None:
        self._tensor = None


class CudaPinned:
    """Registered host memory."""

    def __init__(self, runtime: RuntimeLibrary, array: Bytes) -> None:
        self._runtime = runtime
        self._array: Bytes | None = array  # stays mapped while it is registered

    def release(self) -> None:
        array, self._array = self._array, None
        if array is not None:
            self._runtime.unregister(address_of(array))


class CudaDevice:
    """GPU number `index`. Whoever makes one closes it.

    Raises:
        DeviceError: there is none, or its runtime library cannot be found.
    """

    def __init__(self, index: int = 0) -> None:
        reason = why_no_cuda()
        if reason is not None:
            raise DeviceError(f"no CUDA device: {reason}")
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        torch.cuda.init()
        self._runtime = load_runtime("cuda" if torch.version.hip is None else "hip")
        self._guard = ProcessGuard(self.name)
        self._cpu = CpuEngine()
        self._streams: dict[str, CudaStream] = {}
        self._notices: SimpleQueue[tuple[CudaEvent, Callback] | None] = SimpleQueue()
        self._callback_error: Exception | None = None
        self._closed = False
        self._notifier = threading.Thread(target=self._tell, name=f"{self.name} notifier", daemon=True)
        self._notifier.start()

    def stream(self, name: str) -> CudaStream:
        self._check_open()
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = CudaStream(self, name)
        return stream

    def allocate(self, nbytes: int) -> CudaBuffer:
        self._check_open()
        try:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
            # PyTorch may hand out memory whose former readers still run on this stream; copies come on another.
            torch.cuda.current_stream(self.torch_device).synchronize()
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemoryError(f"{self.name}: {nbytes} bytes: {error}") from error
        return CudaBuffer(tensor)

    def pin(self, array: Bytes) -> CudaPinned:
        self._check_open()
        with torch.cuda.device(self.torch_device):
            self._runtime.register(address_of(array), array.nbytes, writable=array.flags.writeable)
        return CudaPinned(self._runtime, array)

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        self._check_open()
        assert isinstance(stream, CudaStream), f"{stream!r} is not a stream of {self.name}"
        if target is None or source is None:
            return
        assert isinstance(target, CudaBuffer), f"{target!r} is not memory of {self.name}"
        if not (nbytes <= source.nbytes and 0 <= target_offset <= target.nbytes - nbytes):
            raise ValueError(f"{self.name}: a copy of {nbytes} of {source.nbytes} bytes to offset {target_offset} of {target.nbytes}")
        with torch.cuda.device(self.torch_device):
            self._runtime.copy(target.address + target_offset, address_of(source), nbytes, stream.raw.cuda_stream)

    def launch(self, stream: Stream, function: Callable[[], None] | None, work: Work) -> None:
        self._check_open()
        assert isinstance(stream, CudaStream), f"{stream!r} is not a stream of {self.name}"
        if function is None:
            return
        context = torch.cuda.device(self.torch_device) if stream.is_current else torch.cuda.stream(stream.raw)
        try:
            with context:
                function()
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemoryError(f"{self.name}: {error}") from error
        except torch.AcceleratorError as error:
            raise DeviceError(f"{self.name}: {error}") from error

    def launch_host(self, stream: Stream, function: int, data: int, work: Work) -> None:
        self._check_open()
        assert isinstance(stream, CudaStream), f"{stream!r} is not a stream of {self.name}"
        with torch.cuda.device(self.torch_device):
            self._runtime.launch_host_function(stream.raw.cuda_stream, function, data)

    def order(self, first: Stream, then: Stream) -> None:
        then.wait(first.record())

    def capture(self, step: Callable[[], None]) -> CudaGraph:
        self._check_open()
        with torch.cuda.device(self.torch_device):
            return CudaGraph(self.name, step)

    def submit_cpu(self, function: Callable[[], Waiter | None] | None, work: Work) -> HostTicket:
        self._check_open()
        return self._cpu.submit(function, work)

    def notify(self, event: Event, callback: Callback) -> None:
        self._check_open()
        assert isinstance(event, CudaEvent), f"{event!r} is not an event of {self.name}"
        self._notices.put((event, callback))

    def now_ms(self) -> float:
        return host_ms()

    def advance(self, ms: float) -> None:
        return  # time passes by itself

    def elapsed_ms(self, first: Event, second: Event) -> float:
        assert isinstance(first, CudaEvent) and isinstance(second, CudaEvent), f"not events of {self.name}"
        return float(first.raw.elapsed_time(second.raw))

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            raise DeviceError(f"{self.name}: {error}") from error
        if not self._closed:
            told = threading.Event()
            self._notices.put((self.stream("compute").record(), lambda error: told.set()))
            told.wait()
        failure, self._callback_error = self._callback_error, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._notices.put(None)
        self._notifier.join(CLOSE_S)

    def _check_open(self) -> None:
        self._guard.check()
        if self._closed:
            raise DeviceError(f"{self.name} is closed")

    def _tell(self) -> None:
        while (notice := self._notices.get()) is not None:
            event, callback = notice
            error: DeviceError | None = None
            try:
                event.wait()
            except DeviceError as raised:
                error = raised
            try:
                callback(error)
            except Exception as raised:  # noqa: BLE001  no exception leaves a worker: `synchronize` raises it
                self._callback_error = self._callback_error or raised


def address_of(array: Bytes) -> int:
    """Where an array's bytes begin, in host memory."""
    address: int = array.__array_interface__["data"][0]
    return address
