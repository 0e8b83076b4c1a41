"""A CUDA device, or an AMD one through the same calls of PyTorch.

Threads: streams run on the device; one notifier thread waits for events in the order of the `notify` calls and runs their callbacks. Its
waits release the interpreter lock and sleep in the driver. Copies read host memory in place: its owner keeps it until they are done.

PyTorch does not offer, or offers slowly, a few calls of the CUDA runtime; `RuntimeLibrary` makes them through ctypes on the library that
PyTorch loaded. An NVIDIA H100 has run it, and no AMD GPU.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue

import torch

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
    check_not_forked,
)
from moegraft.operators.timeline import host_ms

LIBRARIES = {"cuda": "libcudart", "hip": "libamdhip64"}
HOST_TO_DEVICE = 1
PORTABLE = 1  # page-locked for every device
READ_ONLY = 8  # for bytes that the host cannot write, such as a file mapped for reading
NON_BLOCKING = 1  # a stream that does not wait for the default one
# Streams of closed devices, by GPU, which later devices take. None is destroyed: when page-locked memory is freed, which may be later,
# PyTorch records an event on each stream that has copied from it or to it, and on one that is gone this ends the process.
_idle_streams: dict[int, list[int]] = {}
# What PyTorch and Triton raise as a plain RuntimeError although the GPU, its driver or its libraries refused.
GPU_ERROR = re.compile(r"(CUDA|HIP|cuda|hip)( driver)? error|Triton Error|(CUBLAS|CUDNN|HIPBLAS|MIOPEN|CUSOLVER)_STATUS|cuDNN error")
CLOSE_S = 1.0
POLL_S = 0.0005  # between two polls of an event that is waited for with a timeout


def why_no_cuda() -> str | None:
    """Return why there is no CUDA device, None where there is one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch {torch.__version__} was built for the CPU alone"
    return "PyTorch finds no GPU that it can use (no driver, no device, or none visible)"


class RuntimeLibrary:
    """Checked calls of a CUDA or HIP runtime; arguments are addresses and handles, and each call raises DeviceError if it fails.

    A reported error is also cleared from the runtime: PyTorch's next call would report it again otherwise.
    """

    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

        def function(name: str, arguments: list[type], result: type = number) -> Callable[..., object]:
            try:
                found = getattr(library, prefix + name)
            except AttributeError as error:
                raise DeviceError(f"the runtime library has no {prefix}{name}: {error}") from error
            found.argtypes, found.restype = arguments, result
            return found  # type: ignore[no-any-return]

        self._prefix = prefix
        self._copy = function("MemcpyAsync", [pointer, pointer, size, number, pointer])
        self._launch = function("LaunchHostFunc", [pointer, pointer, pointer])
        self._register = function("HostRegister", [pointer, size, ctypes.c_uint])
        self._unregister = function("HostUnregister", [pointer])
        self._create_stream = function("StreamCreateWithFlags", [ctypes.POINTER(pointer), ctypes.c_uint])
        self._last_error = function("GetLastError", [])
        self._error_string = function("GetErrorString", [number], ctypes.c_char_p)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from host to device, on a stream."""
        self._check(self._copy(target, source, nbytes, HOST_TO_DEVICE, stream), "MemcpyAsync")

    def launch_host_function(self, stream: int, function: int, data: int) -> None:
        self._check(self._launch(stream, function, data), "LaunchHostFunc")

    def register(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Page-lock host memory."""
        self._check(self._register(address, nbytes, PORTABLE if writable else PORTABLE | READ_ONLY), "HostRegister")

    def unregister(self, address: int) -> None:
        self._check(self._unregister(address), "HostUnregister")

    def create_stream(self) -> int:
        """Create a stream on the current device and return its handle."""
        handle = ctypes.c_void_p()
        self._check(self._create_stream(ctypes.byref(handle), NON_BLOCKING), "StreamCreateWithFlags")
        assert handle.value is not None, "a stream that was created has a handle"
        return handle.value

    def _check(self, code: object, call: str) -> None:
        if code != 0:
            self._last_error()
            text = self._error_string(code)
            reason = text.decode(errors="replace") if isinstance(text, bytes) else "no description"
            raise DeviceError(f"{self._prefix}{call} failed with code {code}: {reason}")


def load_runtime(prefix: str) -> RuntimeLibrary:
    """Return the runtime that PyTorch has loaded (`prefix` is `cuda` or `hip`).

    Raises:
        DeviceError: it cannot be found.
    """
    tried = []
    mapped = loaded_paths(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"), prefix)
    for path in (*mapped, None):  # the last: linked into PyTorch, or loaded with global symbols
        try:
            return RuntimeLibrary(ctypes.CDLL(path), prefix)
        except (OSError, DeviceError) as error:
            tried.append(str(error))
    raise DeviceError(f"the {prefix} runtime that PyTorch uses was not found: {'; '.join(tried) or 'no such library is loaded'}")


def loaded_paths(maps: str, prefix: str) -> list[str]:
    """Return the runtime's paths among the mapped files that `/proc/self/maps` lists, each once."""
    files = (fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6)
    return list(dict.fromkeys(file for file in files if Path(file).name.startswith(LIBRARIES[prefix])))


class CudaEvent:
    """A position in a stream."""

    __slots__ = ("_device", "raw")

    def __init__(self, device: str, raw: torch.cuda.Event) -> None:
        self._device = device
        self.raw = raw

    def done(self) -> bool:
        try:
            return bool(self.raw.query())
        except RuntimeError:
            return True  # `wait` raises the failure

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            if timeout_s is None:
                self.raw.synchronize()
                return
            until_s = time.monotonic() + timeout_s
            while not self.raw.query():
                if time.monotonic() > until_s:
                    raise DeviceTimeoutError(f"{self._device}: not done after {timeout_s} s")
                time.sleep(POLL_S)
        except DeviceError:
            raise
        except RuntimeError as error:
            raise DeviceError(f"{self._device}: {error}") from error


NOTIFY_MS = 0.15  # an H100 in a virtual machine: 0.08 on an idle host, and a switch between Python's threads


class CudaStream:
    """A stream of the device. "compute" is whichever stream is current, so that experts run in order with the rest of the model.

    The others belong to the device alone. PyTorch hands out 32 streams in rotation, so two of its streams may be one.
    """

    def __init__(self, device: CudaDevice, handle: int | None) -> None:
        self._device = device
        self._raw = None if handle is None else torch.cuda.ExternalStream(handle, device.torch_device)

    @property
    def raw(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device.torch_device) if self._raw is None else self._raw

    @property
    def is_current(self) -> bool:
        return self._raw is None

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), f"{event!r} is not an event of this device"
        try:
            self.raw.wait_event(event.raw)
        except RuntimeError as error:
            raise DeviceError(f"{self._device.name}: {error}") from error

    def record(self, *, timed: bool = False) -> CudaEvent:
        try:
            raw = torch.cuda.Event(enable_timing=timed, blocking=True)
            raw.record(self.raw)
        except RuntimeError as error:  # the queue handles what a device refuses, and PyTorch's errors are no DeviceError
            raise DeviceError(f"{self._device.name}: {error}") from error
        return CudaEvent(self._device.name, raw)


class CudaBuffer:
    """A block of the device's memory."""

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


class CudaGraph:
    """A captured step, and the memory that its tensors keep."""

    def __init__(self, device: str, graph: torch.cuda.CUDAGraph) -> None:
        self._device = device
        self._graph = graph

    def replay(self) -> None:
        try:
            self._graph.replay()
        except RuntimeError as error:
            raise DeviceError(f"{self._device}: {error}") from error

    def release(self) -> None:
        self._graph.reset()


class HostTicket:
    """A job of the host's CPUs. Jobs start at once, and queue in the runtime that computes them, as with `Runtime.submit`."""

    __slots__ = ("_error", "_waiter", "elapsed_ms")

    def __init__(self, function: Callable[[], Waiter | None]) -> None:
        self.elapsed_ms: float | None = None
        self._waiter: Waiter | None = None
        self._error: Exception | None = None
        try:
            self._waiter = function()
        except Exception as error:  # noqa: BLE001  `wait` raises it, whatever it is
            self._error = error

    def wait(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self.elapsed_ms = waiter()
        error, self._error = self._error, None
        if error is not None:
            raise error


class CudaDevice:
    """GPU number `index`. Its creator closes it.

    Raises:
        DeviceError: there is none, or its runtime library cannot be found.
    """

    def __init__(self, index: int = 0) -> None:
        reason = why_no_cuda()
        if reason is not None:
            raise DeviceError(f"no CUDA device: {reason}")
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.notify_ms = NOTIFY_MS
        torch.cuda.init()
        self._runtime = load_runtime("cuda" if torch.version.hip is None else "hip")
        self._owner_pid = os.getpid()
        self._streams: dict[str, CudaStream] = {}
        self._handles: list[int] = []  # of the streams that it has created
        self._notifications: SimpleQueue[tuple[CudaEvent, Callback] | None] = SimpleQueue()
        self._callback_error: Exception | None = None
        self._closed = False
        self._notifier = threading.Thread(target=self._run_callbacks, name=f"{self.name} notifier", daemon=True)
        self._notifier.start()

    def stream(self, name: str) -> CudaStream:
        self._check_open()
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = CudaStream(self, None if name == "compute" else self._new_stream())
        return stream

    def _new_stream(self) -> int:
        idle = _idle_streams.get(self.torch_device.index)
        if idle:
            handle = idle.pop()
        else:
            with torch.cuda.device(self.torch_device):
                handle = self._runtime.create_stream()
        others = [*self._handles, torch.cuda.current_stream(self.torch_device).cuda_stream]
        assert handle not in others, f"{self.name}: a new stream has the handle {handle:#x} of another"
        self._handles.append(handle)
        return handle

    def allocate(self, nbytes: int) -> CudaBuffer:
        self._check_open()
        try:
            with self.errors():
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
                # PyTorch may hand out memory whose former readers still run on this stream; copies come on another.
                torch.cuda.current_stream(self.torch_device).synchronize()
        except OutOfDeviceMemoryError as error:
            raise OutOfDeviceMemoryError(f"{self.name}: {nbytes} bytes: {error.__cause__}") from error
        return CudaBuffer(tensor)

    def pin(self, array: Bytes) -> None:
        self._check_open()
        with torch.cuda.device(self.torch_device):
            self._runtime.register(address_of(array), array.nbytes, writable=array.flags.writeable)

    def unpin(self, array: Bytes) -> None:
        self._runtime.unregister(address_of(array))

    def copy(self, stream: Stream, target: Buffer | None, target_offset: int, source: Bytes | None, nbytes: int) -> None:
        raw = self._own(stream).raw
        if target is None or source is None:
            return
        assert isinstance(target, CudaBuffer), f"{target!r} is not memory of {self.name}"
        if not (nbytes <= source.nbytes and 0 <= target_offset <= target.nbytes - nbytes):
            raise ValueError(f"{self.name}: a copy of {nbytes} of {source.nbytes} bytes to offset {target_offset} of {target.nbytes}")
        with self._current():
            self._runtime.copy(target.address + target_offset, address_of(source), nbytes, raw.cuda_stream)

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        own = self._own(stream)
        with self.errors(), self._current() if own.is_current else torch.cuda.stream(own.raw):
            function()

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except DeviceError:
            raise
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemoryError(f"{self.name}: {error}") from error
        except Exception as error:
            from_triton = type(error).__module__.partition(".")[0] == "triton"  # such as a kernel that needs more than the GPU has
            plain = type(error) is RuntimeError and GPU_ERROR.search(str(error)) is not None
            if from_triton or plain or isinstance(error, torch.AcceleratorError):
                raise DeviceError(f"{self.name}: {error}") from error
            raise

    def launch_host(self, stream: Stream, function: int, data: int) -> None:
        raw = self._own(stream).raw
        with torch.cuda.device(self.torch_device):
            self._runtime.launch_host_function(raw.cuda_stream, function, data)

    def order(self, first: Stream, then: Stream) -> None:
        then.wait(first.record())

    def capture(self, step: Callable[[], None]) -> CudaGraph:
        self._check_open()
        try:
            return CudaGraph(self.name, capture_graph(self.torch_device, self.stream("capture").raw, step))
        except RuntimeError as error:  # DeviceError is one, as is what PyTorch raises
            raise DeviceError(f"{self.name}: the step cannot be captured: {error}") from error

    def submit_cpu(self, function: Callable[[], Waiter | None]) -> HostTicket:
        self._check_open()
        return HostTicket(function)

    def notify(self, event: Event, callback: Callback) -> None:
        self._check_open()
        assert isinstance(event, CudaEvent), f"{event!r} is not an event of {self.name}"
        self._notifications.put((event, callback))

    def now_ms(self) -> float:
        return host_ms()

    def elapsed_ms(self, first: Event, second: Event) -> float:
        assert isinstance(first, CudaEvent) and isinstance(second, CudaEvent), f"not events of {self.name}"
        return float(first.raw.elapsed_time(second.raw))

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            raise DeviceError(f"{self.name}: {error}") from error
        if not self._closed:
            notified = threading.Event()
            self._notifications.put((self.stream("compute").record(), lambda error: notified.set()))
            notified.wait()
        failure, self._callback_error = self._callback_error, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._notifications.put(None)
        self._notifier.join(CLOSE_S)
        _idle_streams.setdefault(self.torch_device.index, []).extend(self._handles)
        self._handles.clear()

    def _current(self) -> AbstractContextManager[object]:
        """Make this the current device; where it is, as with one GPU, that costs less than PyTorch's context."""
        return nullcontext() if torch.cuda.current_device() == self.torch_device.index else torch.cuda.device(self.torch_device)

    def _own(self, stream: Stream) -> CudaStream:
        self._check_open()
        assert isinstance(stream, CudaStream), f"{stream!r} is not a stream of {self.name}"
        return stream

    def _check_open(self) -> None:
        check_not_forked(self.name, self._owner_pid)
        if self._closed:
            raise DeviceError(f"{self.name} is closed")

    def _run_callbacks(self) -> None:
        while (notification := self._notifications.get()) is not None:
            event, callback = notification
            failure: DeviceError | None = None
            try:
                event.wait()
            except DeviceError as error:
                failure = error
            try:
                callback(failure)
            except Exception as error:  # noqa: BLE001  no exception leaves a worker: `synchronize` raises it
                self._callback_error = self._callback_error or error


def address_of(array: Bytes) -> int:
    """Return the address of an array's first byte, in host memory."""
    address: int = array.__array_interface__["data"][0]
    return address


# Graphs whose capture could not be ended. PyTorch's allocator of page-locked memory goes on asking them which streams they capture, and
# offers no call that ends it.
_never_ended: list[torch.cuda.CUDAGraph] = []


def capture_graph(device: torch.device, stream: torch.cuda.Stream, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture what `step` launches, on a stream of its own. Only this thread is captured: others go on copying, on other streams.

    Garbage is not collected meanwhile: page-locked memory that is freed has an event recorded on each stream that copied it, and one that
    is recorded on a captured stream can never be waited for.

    Raises:
        Exception: what `step` raised, or else PyTorch's reason.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    current = torch.cuda.current_stream(device)
    failure: BaseException | None = None
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                step()
            except BaseException as error:
                failure = error
                raise
    except BaseException as error:
        torch.cuda.set_stream(current)
        if not _release_ended(graph):
            _release_by_hand(device, pool)
            _never_ended.append(graph)
        if failure is None or failure is error:
            raise
        raise failure from None  # ending a capture that failed fails as well, and for no reason of its own
    finally:
        failure = None  # whose traceback has this frame, and so what `step` holds
        if collecting:
            gc.enable()
    return graph


def _release_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Release a graph's memory, and return whether its capture has ended: otherwise it has none that it knows of."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    finally:
        graph.reset()
    return True


def _release_by_hand(device: torch.device, pool: tuple[int, int]) -> None:
    """Restore what PyTorch leaves changed when the end of a capture fails: memory pool and random numbers."""
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with suppress(RuntimeError):  # where PyTorch has done it, or the capture did not come so far
            end(device.index, pool)
    # The generator's state still counts as being captured, and a copy of it does not.
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
