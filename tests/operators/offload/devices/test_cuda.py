"""The CUDA device without a GPU: its logic over a fake runtime library and fake streams.

Nothing here is asynchronous, so this checks calls and error reports, not the order of streams: the tests
of devices, queues and interleavings run on a real GPU where there is one.
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.transfer_harness import Harness

from moegraft.operators.offload.devices import cuda
from moegraft.operators.offload.devices.base import DeviceError, DeviceTimeoutError, OutOfDeviceMemoryError, aligned_bytes
from moegraft.operators.offload.devices.cuda import CudaDevice, RuntimeLibrary, load_runtime, loaded_paths, why_no_cuda
from moegraft.operators.offload.transfers import Urgency

SOURCE = Path(__file__).parent / "fake_cudart.c"
OUT_OF_MEMORY = 2


@pytest.fixture(scope="module", params=["cuda", "hip"])
def prefix(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def library(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp(prefix) / "libfake.so"
    subprocess.run([compiler, "-shared", "-fPIC", f"-DPREFIX={prefix}", "-o", str(path), str(SOURCE)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def runtime(library: ctypes.CDLL, prefix: str) -> RuntimeLibrary:
    return RuntimeLibrary(library, prefix)


class FakeStream:
    def __init__(self, handle: int = 77, device: object = None) -> None:
        self.cuda_stream = handle
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        return


class FakeEvent:
    """Done as soon as it is recorded, unless `pending` or `broken`."""

    broken = False
    pending = False

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert blocking, "waits must not spin"
        self.timed = enable_timing

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        if FakeEvent.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return not FakeEvent.pending

    def synchronize(self) -> None:
        self.query()

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.timed and other.timed
        return 1.5


@pytest.fixture
def device(runtime: RuntimeLibrary, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    empty, current = torch.empty, FakeStream()

    def on_the_host(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda", 0)
        if size[0] > 1 << 30:
            raise torch.OutOfMemoryError("Tried to allocate")
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", on_the_host)
    monkeypatch.setattr(torch.version, "hip", "6.4" if prefix == "hip" else None)
    for name, fake in {
        "is_available": lambda: True,
        "init": lambda: None,
        "ExternalStream": FakeStream,
        "Event": FakeEvent,
        "current_stream": lambda device: current,
        "device": lambda device: nullcontext(),
        "current_device": lambda: 0,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda, "_idle_streams", {})  # real devices must not take these
    asked = []
    monkeypatch.setattr(cuda, "load_runtime", lambda name: asked.append(name) or runtime)
    device = CudaDevice()
    assert asked == [prefix]
    yield device
    FakeEvent.broken = FakeEvent.pending = False
    device.close()


class FakeGenerator:
    def __init__(self) -> None:
        self.capturing = False

    def clone_state(self) -> FakeGenerator:
        return FakeGenerator()

    def graphsafe_set_state(self, state: FakeGenerator) -> None:
        self.capturing = state.capturing


class FakeCaptures:
    """What PyTorch changes while it captures, as CUDAGraph.cpp and CUDACachingAllocator.cpp do; `torch.cuda.graph` itself is the real one.

    Attributes:
        fault: where the next capture fails: "begin", "capture" (which its end reports, before anything is restored), "instantiate".
        uses: of each memory pool, by graphs; below 0 PyTorch ends the process where a graph is destroyed.
    """

    def __init__(self, stream: FakeStream) -> None:
        self.streams = [stream]
        self.generator = FakeGenerator()
        self.fault = ""
        self.underway: list[object] = []
        self.uses: dict[object, int] = {}
        self.replays = 0

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Without a restore where PyTorch's context is not left."""
        before = self.streams[-1]
        self.streams.append(stream)
        yield
        self.streams.append(before)

    def end(self, index: int, pool: object) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, index: int, pool: object) -> None:
        if pool not in self.uses:
            raise RuntimeError("INTERNAL ASSERT FAILED: it != graph_pools.end()")
        self.uses[pool] -= 1


@pytest.fixture
def captures(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> FakeCaptures:
    state = FakeCaptures(torch.cuda.current_stream(device.torch_device))  # type: ignore[arg-type]
    handles = iter(range(1, 100))

    class FakeGraph:
        ended = False

        def capture_begin(self, pool: object, capture_error_mode: str, **others: object) -> None:
            assert capture_error_mode == "thread_local", "transfers of other threads go on"
            assert state.streams[-1] is device.stream("capture").raw
            self._pool = pool
            state.underway.append(pool)
            state.uses[pool] = 1
            state.generator.capturing = True
            if state.fault == "begin":
                raise RuntimeError("CUDA error: cudaStreamBeginCapture")

        def capture_end(self) -> None:
            if state.fault == "capture":
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            state.end(0, self._pool)
            state.generator.capturing = False
            self.ended = True
            if state.fault == "instantiate":
                raise RuntimeError("CUDA error: out of memory")

        def pool(self) -> object:
            if not self.ended:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
            return self._pool

        def replay(self) -> None:
            if FakeEvent.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            state.replays += 1

        def reset(self) -> None:
            if self.ended:
                state.release(0, self._pool)
            self.ended = False

        __del__ = reset

    for name, fake in {
        "CUDAGraph": FakeGraph,
        "graph_pool_handle": lambda: (0, next(handles)),
        "stream": state.stream,
        "current_stream": lambda device: state.streams[-1],
        "set_stream": state.streams.append,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "default_generators": (state.generator,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name, fake in {"_cuda_endAllocateToPool": state.end, "_cuda_releasePool": state.release, "_host_emptyCache": lambda: None}.items():
        monkeypatch.setattr(torch._C, name, fake, raising=False)
    return state


def test_a_step_is_captured_by_pytorch_and_failures_are_reported(device: CudaDevice, captures: FakeCaptures) -> None:
    ran: list[str] = []
    compute, side = device.stream("compute"), device.stream("side")
    before = torch.cuda.current_stream(device.torch_device)

    def step() -> None:
        assert not gc.isenabled(), "page-locked memory that is freed now would have events in the graph"
        device.order(compute, side)
        device.launch(side, lambda: ran.append("side"))
        device.order(side, compute)

    graph = device.capture(step)
    assert torch.cuda.current_stream(device.torch_device) is before and gc.isenabled()
    graph.replay()
    assert ran == ["side"] and captures.replays == 1
    assert len(side.raw.waited) == len(device.stream("capture").raw.waited) == 1  # type: ignore[attr-defined]
    FakeEvent.broken = True
    with pytest.raises(DeviceError, match="cuda:0: CUDA error: an illegal memory access"):
        graph.replay()
    graph.release()
    assert list(captures.uses.values()) == [0], "its memory goes with it, once"


def waiting() -> None:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def interrupted() -> None:
    raise KeyboardInterrupt("Ctrl-C")


@pytest.mark.parametrize(
    ("step", "fault", "error", "says"),
    [
        # an error of Python alone: the capture ends well, and the graph has its pool
        (lambda: void(1 // 0), "", ZeroDivisionError, "by zero"),
        # ending the capture fails as well, before anything is restored, and for no reason of its own
        (waiting, "capture", DeviceError, "the step cannot be captured: CUDA error: operation not permitted"),
        (lambda: void(1 // 0), "capture", ZeroDivisionError, "by zero"),
        (interrupted, "capture", KeyboardInterrupt, "Ctrl-C"),
        (lambda: None, "capture", DeviceError, "the step cannot be captured: CUDA error: operation failed due to a previous error"),
        # the capture has ended, so that the graph releases its pool, and yet it fails
        (lambda: None, "instantiate", DeviceError, "the step cannot be captured: CUDA error: out of memory"),
        (lambda: None, "begin", DeviceError, "the step cannot be captured: CUDA error: cudaStreamBeginCapture"),
    ],
)
def test_a_failed_capture_leaves_pytorch_as_it_was(
    step: Callable[[], None], fault: str, error: type[BaseException], says: str, device: CudaDevice, captures: FakeCaptures
) -> None:
    before = torch.cuda.current_stream(device.torch_device)
    captures.fault = fault
    with pytest.raises(error, match=says):
        device.capture(step)
    gc.collect()
    assert torch.cuda.current_stream(device.torch_device) is before and gc.isenabled()
    assert not captures.underway and list(captures.uses.values()) == [0], "released once, or PyTorch ends the process"
    assert not captures.generator.capturing, "so that the next token can be sampled"
    captures.fault = ""
    device.capture(lambda: None).replay()
    assert captures.replays == 1


def void(result: object) -> None:
    """For a call whose result is of no interest."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_samples_and_allocates_after_a_failed_capture() -> None:
    device, x = CudaDevice(), torch.ones(64, device="cuda")
    before = torch.cuda.current_stream()
    try:
        for _ in range(3):
            with pytest.raises(DeviceError, match="the step cannot be captured"):
                device.capture(lambda: void((x * torch.rand_like(x)).sum().item()))
            assert torch.cuda.current_stream() == before
            assert int(torch.multinomial(x, 1)) < 64
            assert float(torch.empty(1 << 20, device="cuda").fill_(2.0).sum()) == float(2 << 20)
        captured = list[torch.Tensor]()
        graph = device.capture(lambda: captured.append(x + 1))
        graph.replay()
        torch.cuda.synchronize()
        assert captured[0].tolist() == [2.0] * 64
        graph.release()
    finally:
        device.close()


def test_streams_belong_to_the_device_and_differ(device: CudaDevice, runtime: RuntimeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's pool has 32 streams, and hands the first out again after the last."""
    handles = [device.stream(name).raw.cuda_stream for name in ("compute", "copy", "host", "capture")]
    assert len(set(handles)) == 4
    assert device.stream("copy").raw.cuda_stream == handles[1], "created once"
    monkeypatch.setattr(runtime, "create_stream", lambda: handles[2])
    with pytest.raises(AssertionError, match="has the handle"):
        device.stream("another")


def test_streams_outlive_their_device_and_are_taken_by_the_next(device: CudaDevice) -> None:
    """PyTorch records events on them when the page-locked memory of a captured step is freed, which may be after the model is gone."""
    handles = {device.stream(name).raw.cuda_stream for name in ("copy", "host", "capture")}
    device.close()
    following = CudaDevice()
    try:
        assert {following.stream(name).raw.cuda_stream for name in ("host", "copy", "capture")} == handles
        assert following.stream("more").raw.cuda_stream not in handles
    finally:
        following.close()


def test_the_runtime_copies_and_calls(runtime: RuntimeLibrary) -> None:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    runtime.copy(target.ctypes.data, source.ctypes.data, 100, 0)
    assert np.array_equal(source, target)
    seen: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    runtime.launch_host_function(0, address, 5)
    assert seen == [5]


def test_every_failure_is_reported_and_cleared(runtime: RuntimeLibrary, library: ctypes.CDLL, prefix: str) -> None:
    data = np.zeros(64, np.uint8)
    calls: list[tuple[str, Any]] = [
        ("MemcpyAsync", lambda: runtime.copy(data.ctypes.data, data.ctypes.data, 64, 0)),
        ("LaunchHostFunc", lambda: runtime.launch_host_function(0, 0, 0)),
        ("HostRegister", lambda: runtime.register(data.ctypes.data, 64, writable=True)),
        ("HostUnregister", lambda: runtime.unregister(data.ctypes.data)),
    ]
    for name, call in calls:
        library.fake_fail(OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match=f"{prefix}{name} failed with code 2: out of memory"):
            call()
        assert library.fake_last_error() == 0, "or PyTorch would meet it at its next call"


def test_a_library_without_the_calls_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(DeviceError, match="the runtime library has no otherMemcpyAsync"):
        RuntimeLibrary(library, "other")


def test_the_loaded_runtime_is_found() -> None:
    maps = "\n".join(
        [
            "7f00-7f01 r-xp 00000000 08:01 42    /opt/site packages/nvidia/cuda_runtime/lib/libcudart.so.12",
            "7f01-7f02 r--p 00001000 08:01 42    /opt/site packages/nvidia/cuda_runtime/lib/libcudart.so.12",
            "7f02-7f03 rw-p 00000000 00:00 0",
            "7f03-7f04 r-xp 00000000 08:01 43    /usr/lib/libcudart_not.txt/libc.so.6",
            "7f04-7f05 r-xp 00000000 08:01 44    /opt/rocm/lib/libamdhip64.so.6",
        ]
    )
    assert loaded_paths(maps, "cuda") == ["/opt/site packages/nvidia/cuda_runtime/lib/libcudart.so.12"]
    assert loaded_paths(maps, "hip") == ["/opt/rocm/lib/libamdhip64.so.6"]
    assert loaded_paths("", "cuda") == []


def test_a_missing_runtime_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA has the calls of the runtime in the process itself, and those of no other prefix."""
    monkeypatch.setattr(cuda, "loaded_paths", lambda maps, prefix: ["/nowhere/libcudart.so"])
    with pytest.raises(DeviceError, match=r"the other runtime that PyTorch uses was not found: /nowhere.*; .*otherMemcpyAsync"):
        load_runtime("other")


def test_why_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, reason in [(None, "was built for the CPU alone"), ("12.8", "finds no GPU that it can use")]:
        monkeypatch.setattr(torch.version, "cuda", version)
        assert reason in str(why_no_cuda())
        with pytest.raises(DeviceError, match=reason):
            CudaDevice()


def test_copies_launches_and_events(device: CudaDevice) -> None:
    target, copy = device.allocate(256), device.stream("copy")
    source = aligned_bytes(256)
    source[:] = 3
    device.copy(copy, target, 0, source, 256)
    device.copy(copy, None, 0, None, 256)
    event = copy.record()
    compute = device.stream("compute")
    compute.wait(event)
    assert compute.raw is torch.cuda.current_stream(device.torch_device)
    assert event.raw in compute.raw.waited  # type: ignore[attr-defined]
    ran: list[str] = []
    device.launch(compute, lambda: ran.append("compute"))
    device.launch(copy, lambda: ran.append("copy"))
    device.launch(copy, lambda: None)
    assert ran == ["compute", "copy"]
    assert target.tensor.tolist() == [3] * 256
    assert device.elapsed_ms(copy.record(timed=True), copy.record(timed=True)) == 1.5
    for offset, nbytes in [(1, 256), (-1, 64), (0, 257)]:
        with pytest.raises(ValueError, match="a copy of"):
            device.copy(copy, target, offset, source, nbytes)


@pytest.mark.parametrize(("current", "entered"), [(0, []), (1, [torch.device("cuda", 0)] * 2)])
def test_calls_are_made_on_the_device(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, current: int, entered: list[torch.device]
) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: seen.append(device) or nullcontext())
    target, source, copy = device.allocate(64), aligned_bytes(64), device.stream("copy")
    seen.clear()
    device.copy(copy, target, 0, source, 64)
    device.launch(device.stream("compute"), lambda: None)
    assert seen == entered


def test_memory_that_cannot_be_allocated_or_page_locked(device: CudaDevice, library: ctypes.CDLL) -> None:
    with pytest.raises(OutOfDeviceMemoryError, match="cuda:0: 2147483648 bytes: Tried to allocate"):
        device.allocate(1 << 31)
    data = np.zeros(4096, np.uint8)
    device.pin(data)
    assert library.fake_flags() == cuda.PORTABLE
    with pytest.raises(DeviceError, match="HostRegister failed with code 712: already registered"):
        device.pin(data)
    device.unpin(data)
    data.flags.writeable = False
    device.pin(data)
    device.unpin(data)
    assert library.fake_flags() == cuda.PORTABLE | cuda.READ_ONLY


def test_failures_of_the_device_become_device_errors(device: CudaDevice) -> None:
    event, reported = device.stream("copy").record(), list[DeviceError | None]()
    FakeEvent.broken = True
    assert event.done(), "`wait` raises the failure"
    with pytest.raises(DeviceError, match="cuda:0: CUDA error: an illegal memory access"):
        event.wait()
    device.notify(event, reported.append)
    device.synchronize()
    assert "illegal memory access" in str(reported[0])


def test_launches_that_the_device_refuses(device: CudaDevice) -> None:
    def raising(error: Exception) -> Any:
        def kernel() -> None:
            raise error

        return kernel

    compute = device.stream("compute")
    with pytest.raises(OutOfDeviceMemoryError, match="cuda:0: no room"):
        device.launch(compute, raising(torch.OutOfMemoryError("no room")))
    with pytest.raises(DeviceError, match="cuda:0: sticky"):
        device.launch(compute, raising(torch.AcceleratorError("sticky")))
    from_triton = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})  # which need not be installed
    for error in (
        from_triton("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: invalid argument"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):
        with pytest.raises(DeviceError, match=r"^cuda:0: "):
            device.launch(compute, raising(error))
    with pytest.raises(RuntimeError, match="expected 3 experts") as raised, device.errors():
        raise RuntimeError("expected 3 experts")
    assert not isinstance(raised.value, DeviceError), "a mistake of the caller, and of no device"
    with pytest.raises(ZeroDivisionError):
        device.launch(compute, raising(ZeroDivisionError()))


def test_waits_end_at_their_timeout(device: CudaDevice) -> None:
    event = device.stream("copy").record()
    event.wait(1.0)
    FakeEvent.pending = True
    with pytest.raises(DeviceTimeoutError, match=r"not done after 0\.01 s"):
        event.wait(0.01)
    assert not event.done()


def test_an_exception_in_a_callback_is_not_lost(device: CudaDevice) -> None:
    device.notify(device.stream("copy").record(), lambda error: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        device.synchronize()
    device.synchronize()


def test_a_queue_loads_experts(device: CudaDevice) -> None:
    """Includes the harness's readers for GPUs."""
    harness = Harness(device, (2, 2))
    assert harness.queue.source.form == "pinned"
    for step in range(40):
        layer, expert = step % 2, (step * 3) % 5
        harness.queue.request(1 - layer, (step * 2) % 5, Urgency.NEXT)
        demand = harness.queue.request(layer, expert, Urgency.DEMAND)
        assert demand is not None
        harness.compute.wait(demand.ready())
        harness.read(layer, expert, demand.slot)
        harness.queue.release(demand, harness.after())
        if step % 7 == 0:
            harness.settle()
            harness.check()
    harness.settle()
    harness.check()
    assert harness.reads == 40
    harness.close()


def test_a_refused_copy_fails_only_its_transfer(device: CudaDevice, library: ctypes.CDLL) -> None:
    harness = Harness(device, (2, 2))
    library.fake_fail(OUT_OF_MEMORY)
    demand = harness.queue.request(0, 1, Urgency.DEMAND)
    assert demand is not None
    with pytest.raises(DeviceError, match="MemcpyAsync failed with code 2"):
        demand.ready()
    harness.queue.release(demand, None)
    demand = harness.queue.request(0, 1, Urgency.DEMAND)
    assert demand is not None
    demand.wait()
    harness.queue.release(demand, None)
    harness.settle()
    harness.check()
    harness.close()
