"""A CUDA device, or an AMD one through the same calls of PyTorch.

Threads: streams run on the device; one notifier thread waits for events, one after another in the order in which `notify` was called,
and runs the callbacks. Its waits give up the interpreter and sleep in the driver.

Copies read host memory in place: whoever owns it keeps it until they are done. Transfers go on, from other threads, while `capture` runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from moegraft.operators.experts.devices.cpu_engine import CpuEngine, HostTicket, host_ms
from moegraft.operators.experts.devices.cuda_graph import CudaGraph
from moegraft.operators.experts.devices.cuda_runtime import RuntimeLibrary, load_runtime
from moegraft.operators.experts.devices.interface import (
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
from moegraft.operators.experts.devices.process import ProcessGuard

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
