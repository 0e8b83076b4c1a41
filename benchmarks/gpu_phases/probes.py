"""What a device and its link do, measured through the calls that the engine makes: the numbers behind its estimates.

Emulated devices run the same calls at small sizes, and what only CUDA has is skipped there.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gpu_day import Case, Row, Session, SkippedError
from harness.rounds import percentiles, seconds
from support.virtual_device import VirtualDevice

from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.devices.base import Bytes, Device, DeviceError
from moegraft.operators.offload.devices.cuda import CudaDevice

PAGE = mmap.PAGESIZE
KIB, MIB = 1 << 10, 1 << 20
CHUNKS = (64 * KIB, 256 * KIB, MIB, 2560 * KIB, 4 * MIB, 16 * MIB, 64 * MIB)
NAMES = 40  # streams: more than the 32 that PyTorch hands out from its pool


def probes(session: Session) -> list[Case]:
    whole = MIB if session.emulated else 1 << 30
    cases: dict[str, Callable[[Device], Iterator[Row]]] = {
        "streams": streams,
        "latencies": partial(latencies, rounds=5 if session.emulated else 200),
        "pin anonymous": partial(pin, nbytes=whole, form="anonymous"),
        "pin mapped": partial(pin, nbytes=whole, form="mapped"),
        "pin mapped for reading": partial(pin, nbytes=whole, form="mapped for reading"),
        "link to the device": partial(link_to_device, nbytes=whole // 2, pinned=True),
        "link to the device, pageable": partial(link_to_device, nbytes=whole // 4, pinned=False),
        "link to the host": partial(link_to_host, nbytes=whole // 2),
        "link both ways": partial(link_both_ways, nbytes=whole // 2),
        "host nodes": partial(host_nodes, rounds=3 if session.emulated else 50),
        "triton launches": partial(triton_launches, rounds=3 if session.emulated else 300),
        "failed capture": failed_capture,
        "allocator": partial(allocator, nbytes=whole),
    }
    return [Case(name, partial(on_device, session, run)) for name, run in cases.items()]


def on_device(session: Session, run: Callable[[Device], Iterator[Row]]) -> Iterator[Row]:
    profile = MachineProfile("probe", 1, 1, 1, 1, link_gb_s=1.0)
    with closing(VirtualDevice(profile) if session.gpu == "emulated" else CudaDevice()) as device:
        yield from run(device)


def call_us(call: Callable[[], object], rounds: int) -> dict[str, float]:
    """Return the percentiles of a call's microseconds by the host's clock."""
    return percentiles([1e6 * seconds(call) for _ in range(rounds)], "us", 3)


def cuda_only(device: Device) -> None:
    if device.torch_device.type != "cuda":
        raise SkippedError("an emulated device has no such call")


@contextmanager
def host_bytes(nbytes: int, form: str = "anonymous") -> Iterator[Bytes]:
    """Host memory of whole pages that were touched."""
    nbytes = -(-nbytes // PAGE) * PAGE
    if form == "anonymous":
        held = mmap.mmap(-1, nbytes)
        array = np.frombuffer(held, np.uint8)
        array[::PAGE] = 1
        yield array
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\1" * nbytes)
        file.flush()
        mapped = np.memmap(file.name, np.uint8, mode="r" if form == "mapped for reading" else "c")
        int(mapped[::PAGE].sum())
        yield mapped


def pin(device: Device, nbytes: int, form: str) -> Iterator[Row]:
    """Page-lock memory a quarter at a time, and release it."""
    with host_bytes(nbytes, form) as array:
        quarter = array.nbytes // 4 // PAGE * PAGE
        for part in (array[at : at + quarter] for at in range(0, 4 * quarter, quarter)):
            try:
                pin_s = seconds(partial(device.pin, part))
            except DeviceError as error:
                yield {"bytes": part.nbytes, "refused": str(error)}
                return
            unpin_s = seconds(partial(device.unpin, part))
            yield {"bytes": part.nbytes, "pin_ms": round(1e3 * pin_s, 3), "unpin_ms": round(1e3 * unpin_s, 3)}


def link_to_device(device: Device, nbytes: int, *, pinned: bool) -> Iterator[Row]:
    """Copies as the transfer queue submits them, by the size of a chunk."""
    stream, buffer = device.stream("copy"), device.allocate(nbytes)
    with host_bytes(nbytes) as array:
        if pinned:
            device.pin(array)
        try:
            for chunk in (size for size in CHUNKS if size <= nbytes):
                rates, calls_us = [], []
                for _ in range(4):
                    first, start = stream.record(timed=True), time.perf_counter()
                    for at in range(0, nbytes - chunk + 1, chunk):
                        device.copy(stream, buffer, at, array[at : at + chunk], chunk)
                    calls_us.append(1e6 * (time.perf_counter() - start) / (nbytes // chunk))
                    last = stream.record(timed=True)
                    last.wait()
                    rates.append(nbytes // chunk * chunk / device.elapsed_ms(first, last) / 1e6)
                best, median = round(max(rates[1:]), 2), round(statistics.median(rates[1:]), 2)
                yield {"chunk": chunk, "gb_s": best, "p50_gb_s": median, **percentiles(calls_us, "call_us", 3)}
        finally:
            device.synchronize()
            if pinned:
                device.unpin(array)
            buffer.free()


def link_to_host(device: Device, nbytes: int) -> Iterator[Row]:
    cuda_only(device)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    for chunk in (4 * KIB, *CHUNKS):
        rates = []
        for _ in range(4):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            count = min(nbytes // chunk, 2000)
            first.record()
            for at in range(0, count * chunk, chunk):
                target[at : at + chunk].copy_(source[at : at + chunk], non_blocking=True)
            last.record()
            last.synchronize()
            rates.append(count * chunk / first.elapsed_time(last) / 1e6)
        yield {"chunk": chunk, "gb_s": round(max(rates[1:]), 2), "us_a_copy": round(chunk / max(rates[1:]) / 1e3, 2)}


def link_both_ways(device: Device, nbytes: int) -> Iterator[Row]:
    """Both directions at once, on streams of their own."""
    cuda_only(device)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    on_gpu = [torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
    on_host = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.cuda.stream(up):
            on_gpu[0].copy_(on_host[0], non_blocking=True)
        with torch.cuda.stream(down):
            on_host[1].copy_(on_gpu[1], non_blocking=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    yield {"streams_differ": up.cuda_stream != down.cuda_stream, "gb_s_both_together": round(2 * nbytes / seconds / 1e9, 2)}


def latencies(device: Device, rounds: int) -> Iterator[Row]:
    """Host time of the calls that a layer makes, and from an event to the host that waits for it."""
    stream, other = device.stream("compute"), device.stream("copy")
    calls: dict[str, Callable[[], object]] = {
        "record": stream.record,
        "record, timed": partial(stream.record, timed=True),
        "record and wait": lambda: stream.record().wait(),
        "order two streams": lambda: other.wait(stream.record()),
        "launch nothing": lambda: device.launch(stream, lambda: None),
    }
    if device.torch_device.type == "cuda":
        spinning, small = torch.cuda.Event(), torch.zeros(8, device=device.torch_device)
        pinned = torch.zeros(64, 8, pin_memory=True)
        calls |= {
            "spin for an event": lambda: (spinning.record(), [None for _ in iter(spinning.query, True)]),
            "small kernel": lambda: small.add_(1),
            "small kernel and synchronize": lambda: (small.add_(1), torch.cuda.current_stream().synchronize()),
            "number to the host": lambda: float(small[0]),
            "copy 32 bytes to the host": lambda: pinned[0].copy_(small, non_blocking=True),
            "scalar tensor from Python": lambda: torch.tensor(1.0, device=device.torch_device),
        }
    for name, call in calls.items():
        call()
        device.synchronize()
        yield {"operation": name, **call_us(call, rounds)}
        device.synchronize()
    notified: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        device.notify(stream.record(), lambda error, start=start: notified.append(1e6 * (time.perf_counter() - start)))  # type: ignore[misc]
        device.synchronize()
    yield {"operation": "from an event to its callback", **percentiles(notified, "us", 3)}


def streams(device: Device) -> Iterator[Row]:
    """Whether streams of different names are different streams, however many there are."""
    named: list[Any] = [device.stream(name) for name in ("compute", "copy", "host", *(f"probe {number}" for number in range(NAMES)))]
    cuda = device.torch_device.type == "cuda"
    handles = [stream.raw.cuda_stream if cuda else id(stream) for stream in named]
    yield {"streams": len(named), "distinct": len(set(handles)), "copy_and_host_differ": handles[1] != handles[2]}
    if cuda:
        pooled = [torch.cuda.Stream().cuda_stream for _ in range(64)]
        yield {"pooled": 64, "distinct": len(set(pooled)), "shared_with_named": len(set(pooled) & set(handles))}


def host_nodes(device: Device, rounds: int) -> Iterator[Row]:
    """What a host function costs within a captured step, by graphs with and without some."""
    function = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value  # takes what it is given, and returns at once
    assert function is not None, "libc has getpid"
    compute, held = device.stream("compute"), torch.zeros(64, device=device.torch_device)
    medians = {}
    for nodes in (0, 1, 8, 32):

        def step(nodes: int = nodes) -> None:
            held.add_(1)
            for _ in range(nodes):
                device.launch_host(compute, function, 0)
                held.add_(1)

        step() if device.torch_device.type == "cuda" else None
        device.synchronize()
        graph = device.capture(step)
        replay: Callable[[], object] = lambda graph=graph: (graph.replay(), device.synchronize())  # type: ignore[misc]  # noqa: E731
        call_us(replay, 2)
        taken = call_us(replay, rounds)
        graph.release()
        medians[nodes] = taken["p50_us"]
        yield {"host_nodes": nodes, **taken, "us_a_node": round((medians[nodes] - medians[0]) / max(nodes, 1), 3)}


def triton_launches(device: Device, rounds: int) -> Iterator[Row]:
    """Host time of a launch through Triton's launcher, and device time of one in a replayed graph."""
    try:
        from moegraft.operators.kernels.routing import combine
    except ImportError as error:
        raise SkippedError(f"Triton is not installed: {error}") from error
    on = device.torch_device
    rows, out = torch.ones(8, 64, device=on), torch.empty(4, 64, device=on)
    ids, weights = torch.zeros(4, 2, dtype=torch.int32, device=on), torch.ones(4, 2, device=on)
    launch = partial(combine, rows, ids, weights, out)
    yield {"first_launch_ms": round(1e3 * seconds(lambda: (launch(), device.synchronize())), 2)}
    assert bool((out == 2).all()), "the kernel added two rows of ones"
    yield {"operation": "launch", **call_us(launch, rounds)}
    device.synchronize()
    if on.type == "cuda":
        from gpu_phases.kernels import measure

        many = measure([launch] * 100, on)
        yield {"operation": "launch in a graph", **percentiles([1e3 * ms for ms in many], "us", 3)}


def failed_capture(device: Device) -> Iterator[Row]:
    """After a step that cannot be captured, sampling and a good capture work, on the stream that was current before."""
    on = device.torch_device
    before = torch.cuda.current_stream().cuda_stream if on.type == "cuda" else None
    held = torch.ones(4, device=on)

    def bad() -> None:
        held.add_(1)
        if on.type == "cuda":
            torch.cuda.synchronize()  # not allowed while capturing
        else:
            raise DeviceError("a step that waits")

    try:
        device.capture(bad)
        yield {"refused": False}
    except DeviceError as error:
        yield {"refused": True, "reason": str(error)[:300]}
    if on.type == "cuda":
        same = torch.cuda.current_stream().cuda_stream == before
        yield {"same_stream_as_before": same, "capturing": torch.cuda.is_current_stream_capturing()}
    drawn = torch.multinomial(torch.ones(2, 16, device=on), 1)
    yield {"sampled": drawn.flatten().tolist(), "seeded": torch.rand(2, device=on, generator=torch.Generator(on).manual_seed(1)).tolist()}
    held.zero_()
    device.synchronize()

    def good() -> None:
        held.add_(1)

    graph = device.capture(good)
    graph.replay()
    graph.replay()
    device.synchronize()
    yield {"captured_after": held.tolist() == [2.0] * 4, "held": held.tolist()}
    graph.release()


def allocator(device: Device, nbytes: int) -> Iterator[Row]:
    """What allocations take, and whether memory comes back, also after a failed capture."""
    times_ms = []
    for _ in range(3):
        start = time.perf_counter()
        buffer = device.allocate(nbytes)
        times_ms.append(1e3 * (time.perf_counter() - start))
        buffer.free()
    yield {"bytes": nbytes, "first_ms": round(times_ms[0], 3), "again_ms": round(times_ms[-1], 3)}
    cuda_only(device)
    del buffer
    torch.cuda.empty_cache()
    kept = [torch.cuda.memory_reserved()]
    for fails in (False, True, False):

        def step(fails: bool = fails) -> None:
            torch.empty(64 * MIB, dtype=torch.uint8, device=device.torch_device).zero_()
            if fails:
                raise DeviceError("on purpose")

        with suppress(DeviceError):
            device.capture(step).release()
        torch.cuda.empty_cache()
        kept.append(torch.cuda.memory_reserved())
    free, total = torch.cuda.mem_get_info()
    yield {"reserved_before": kept[0], "grown_by": [after - before for before, after in pairwise(kept)], "free": free, "total": total}
