"""The device interface: order within a stream, waits between streams, copies, callbacks, CPU jobs and closing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.faulty_device import Faults
from support.transfer_harness import DEVICES, EMULATED, advance, make_device
from support.virtual_device import Timed, Work

from moegraft.operators.offload.devices.base import Device, DeviceError, OutOfDeviceMemoryError, Waiter, aligned_bytes
from moegraft.operators.offload.devices.cuda import HostTicket

WORK = Work(cost_ms=0.2)
LONG = Work(cost_ms=20.0)


def ones(nbytes: int, value: int = 1) -> np.ndarray:
    source = aligned_bytes(nbytes)
    source[:] = value
    return source


def test_a_copy_moves_its_bytes(device: Device) -> None:
    target, copy = device.allocate(300), device.stream("copy")
    device.copy(copy, target, 0, ones(300, 7), 300)
    device.copy(copy, target, 100, ones(100, 9), 50)
    copy.record().wait()
    found = target.tensor.cpu().numpy()
    assert found.tolist() == [7] * 100 + [9] * 50 + [7] * 150
    assert target.tensor.dtype is torch.uint8
    assert target.tensor.device.type == device.torch_device.type
    assert target.tensor.data_ptr() % 64 == 0
    target.free()
    with pytest.raises(DeviceError, match="freed"):
        _ = target.tensor


def test_a_copy_that_leaves_its_buffers_is_refused(device: Device) -> None:
    target, copy = device.allocate(128), device.stream("copy")
    for offset, source, nbytes in [(100, 64, 64), (0, 64, 65), (-1, 64, 64)]:
        with pytest.raises(ValueError, match="a copy of"):
            device.copy(copy, target, offset, ones(source), nbytes)


def test_a_stream_is_in_order_and_waits_for_events_of_others(device: Device) -> None:
    done: list[str] = []
    first, second = device.stream("compute"), device.stream("other")
    assert device.stream("compute") is first
    target = device.allocate(1 << 16)

    def add(name: str) -> Callable[[], None]:
        return lambda: done.append(name)

    device.launch(first, Timed(LONG, add("a")))
    device.launch(first, Timed(WORK, add("b")))
    device.copy(first, target, 0, ones(1 << 16, 5), 1 << 16)
    event = first.record()
    second.wait(event)
    device.launch(second, Timed(WORK, add("c")))
    last = second.record()
    last.wait()
    assert event.done()
    assert last.done()
    assert done == ["a", "b", "c"]


def test_streams_overlap() -> None:
    for kind in EMULATED:
        device = make_device(kind)
        start_ms = device.now_ms()
        events = []
        for name in ("compute", "copy"):
            device.launch(device.stream(name), Timed(Work(cost_ms=200.0)))
            events.append(device.stream(name).record())
        for event in events:
            event.wait()
        assert 199 < device.now_ms() - start_ms < 390, "one after the other they take 400"
        device.close()


def test_callbacks_run_in_order_and_never_within_the_call(device: Device) -> None:
    stream, reported = device.stream("copy"), list[tuple[int, object]]()
    done = stream.record()
    done.wait()
    device.notify(done, lambda error: reported.append((0, error)))
    assert not reported or device.name != "emulated:0", "not within the call"
    for number in range(1, 6):
        device.launch(stream, Timed(WORK))
        device.notify(stream.record(), lambda error, number=number: reported.append((number, error)))  # type: ignore[misc]
    device.synchronize()
    assert reported == [(number, None) for number in range(6)]


def test_callbacks_may_submit_work(device: Device) -> None:
    stream, left, over = device.stream("copy"), [20], threading.Event()

    def again(error: DeviceError | None) -> None:
        left[0] -= 1
        if left[0] > 0:
            device.launch(stream, Timed(WORK))
            device.notify(stream.record(), again)
        else:
            over.set()

    device.notify(stream.record(), again)
    while not over.is_set():
        advance(device, 1.0)
    assert left == [0]


def test_an_exception_in_a_callback_is_not_lost() -> None:
    device = make_device("threaded")
    device.notify(device.stream("copy").record(), lambda error: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        device.synchronize()
    device.synchronize()
    device.close()


def test_timed_events(device: Device) -> None:
    stream = device.stream("compute")
    device.launch(stream, Timed(WORK))
    first = stream.record(timed=True)
    device.launch(stream, Timed(LONG))
    second = stream.record(timed=True)
    second.wait()
    elapsed_ms = device.elapsed_ms(first, second)
    if device.torch_device.type == "cuda":
        assert elapsed_ms >= 0
    else:
        assert 19 < elapsed_ms < 1000
    if device.torch_device.type == "cpu":
        device.launch(stream, Timed(LONG))
        with pytest.raises(ValueError, match="is known when both are done"):
            device.elapsed_ms(second, stream.record(timed=True))


def test_jobs_of_the_cpu(device: Device) -> None:
    """A function does the job, or starts it and returns a function that waits for it."""
    seen: list[str] = []

    def job() -> None:
        seen.append("done")

    def start() -> Callable[[], None]:
        seen.append("started")
        return lambda: seen.append("waited")

    def broken() -> None:
        raise KeyError("expert")

    def broken_later() -> Callable[[], None]:
        def wait() -> None:
            raise OverflowError("tokens")

        return wait

    tickets = [device.submit_cpu(Timed(Work(cost_ms=1.0), function)) for function in (job, start, broken, broken_later, lambda: None)]
    tickets[0].wait()
    tickets[1].wait()
    assert seen == ["done", "started", "waited"]
    with pytest.raises(KeyError, match="expert"):
        tickets[2].wait()
    with pytest.raises(OverflowError, match="tokens"):
        tickets[3].wait()
    tickets[4].wait()


def test_host_functions_run_in_their_stream(device: Device) -> None:
    seen: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(data: int) -> None:
        seen.append(data)

    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    stream = device.stream("compute")
    device.launch(stream, Timed(WORK))
    device.launch_host(stream, address, 42)
    device.launch_host(stream, address, 43)
    stream.record().wait()
    assert seen == [42, 43]


def test_memory_is_page_locked_and_released(device: Device) -> None:
    source = np.zeros(1 << 16, np.uint8)
    device.pin(source)
    target = device.allocate(1 << 16)
    device.copy(device.stream("copy"), target, 0, source, 1 << 16)
    device.synchronize()
    device.unpin(source)
    device.pin(source)
    device.unpin(source)


@pytest.mark.parametrize("kind", EMULATED)
def test_memory_runs_out(kind: str) -> None:
    device = make_device(kind, memory_bytes=1000)
    first = device.allocate(600)
    with pytest.raises(OutOfDeviceMemoryError, match="emulated:0: 401 bytes requested, 400 of 1000 free"):
        device.allocate(401)
    second = device.allocate(400)
    first.free()
    first.free()
    device.allocate(600)
    second.free()
    with pytest.raises(ValueError, match="0 bytes"):
        device.allocate(0)
    device.close()


@pytest.mark.parametrize("kind", EMULATED)
def test_each_failure_is_reported_once_and_to_dependent_streams(kind: str) -> None:
    device = make_device(kind, faults=Faults(copies=[1]))
    copy, compute = device.stream("copy"), device.stream("compute")
    target, ran, reported = device.allocate(64), list[str](), list[DeviceError | None]()
    events = []
    for number in range(3):
        device.copy(copy, target, 0, ones(64, number), 64)
        events.append(copy.record())
        device.notify(events[-1], reported.append)
    compute.wait(events[1])
    device.launch(compute, Timed(WORK, lambda: ran.append("reads a failed copy")))
    skipped = compute.record()
    device.launch(compute, Timed(WORK, lambda: ran.append("after")))
    compute.record().wait()
    events[0].wait()
    with pytest.raises(DeviceError, match="injected: a copy of 64 bytes failed"):
        events[1].wait()
    events[2].wait()
    with pytest.raises(DeviceError, match="injected"):
        skipped.wait()
    device.synchronize()
    assert ran == ["after"]
    assert [error is None for error in reported] == [True, False, True]
    device.close()


@pytest.mark.parametrize("kind", DEVICES)
def test_closed_devices_refuse(kind: str) -> None:
    device = make_device(kind)
    stream = device.stream("copy")
    device.launch(stream, Timed(WORK))
    device.synchronize()
    device.close()
    device.close()
    for misuse in (lambda: device.allocate(64), lambda: device.stream("new"), lambda: device.launch(stream, Timed(WORK))):
        with pytest.raises(DeviceError, match="is closed"):
            misuse()


def test_a_job_has_its_own_time_whenever_it_is_waited_for() -> None:
    known, unknown = HostTicket(lambda: lambda: 3.5), HostTicket(lambda: None)
    assert known.elapsed_ms is None
    known.wait()
    unknown.wait()
    assert (known.elapsed_ms, unknown.elapsed_ms) == (3.5, None)


def test_a_job_that_cannot_start_fails_where_it_is_waited_for() -> None:
    def start() -> Waiter:
        raise ValueError("no such expert")

    ticket = HostTicket(start)
    with pytest.raises(ValueError, match="no such expert"):
        ticket.wait()
