"""The threaded device: throttling, closing, and computing with the C++ kernel; and the delay of Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from support.threaded_device import ThreadedDevice

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime
from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.interrupts import Uninterrupted
from moegraft.operators.offload.devices.base import DeviceError, DeviceTimeoutError, Work, aligned_bytes

SLOW = MachineProfile("slow", 1, 1, 1, 1, link_gb_s=0.01)  # 10 bytes a microsecond


def device_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("emulated")]


def test_threads_start_with_streams_and_end_with_the_device() -> None:
    device = ThreadedDevice(index=7)
    device.stream("copy")
    assert sorted(device_threads()) == ["emulated:7 copy", "emulated:7 notifier"]
    device.close()
    assert device_threads() == []


def test_copies_take_their_time_in_the_long_run() -> None:
    """20 chunks of 5 ms: when one oversleeps, the next is shorter."""
    device = ThreadedDevice(SLOW)
    target, source = device.allocate(50_000), aligned_bytes(50_000)
    start_ms = device.now_ms()
    for _ in range(20):
        device.copy(device.stream("copy"), target, 0, source, 50_000)
    device.stream("copy").record().wait()
    assert 95 < device.now_ms() - start_ms < 400
    device.close()


def test_launches_and_jobs_of_the_cpu_take_their_time() -> None:
    device = ThreadedDevice(SLOW)
    start_ms = device.now_ms()
    device.launch(device.stream("compute"), None, Work("dense", cost_ms=30.0))
    ticket = device.submit_cpu(None, Work("experts", cost_ms=40.0))
    ticket.wait()
    assert ticket.elapsed_ms is not None
    assert 39 < ticket.elapsed_ms < 400
    device.stream("compute").record().wait()
    assert device.now_ms() - start_ms > 39
    late = device.submit_cpu(None, Work("experts", cost_ms=1.0))
    time.sleep(0.01)
    late.wait()
    assert late.elapsed_ms is None, "the host came later and did not observe its end"
    device.close()


def test_closing_interrupts_a_throttled_copy() -> None:
    device = ThreadedDevice(MachineProfile("hanging", 1, 1, 1, 1, link_gb_s=1e-9))
    device.copy(device.stream("copy"), None, 0, None, 1000)
    event = device.stream("copy").record()
    with pytest.raises(DeviceTimeoutError, match=r"not done after 0\.05 s"):
        event.wait(0.05)
    start_s = time.monotonic()
    device.close()
    assert time.monotonic() - start_s < 1.0
    assert device_threads() == []
    with pytest.raises(DeviceError, match="was closed before this work began"):
        event.wait()


def test_a_stream_that_waits_for_another_ends_too() -> None:
    device = ThreadedDevice(MachineProfile("hanging", 1, 1, 1, 1, link_gb_s=1e-9))
    device.copy(device.stream("copy"), None, 0, None, 1000)
    device.stream("compute").wait(device.stream("copy").record())
    device.launch(device.stream("compute"), lambda: None, Work("dense"))
    device.close()
    assert device_threads() == []


def make_experts(experts: int, buffer: np.ndarray | None = None) -> PackedExperts:
    return PackedExperts(ExpertsShape(experts, 32, 32), GateSpec("silu"), "float32", buffer)


def test_experts_in_slots_compute_what_experts_in_the_store_do() -> None:
    """The C++ kernel on slot memory replaces the GPU: slot numbers instead of expert numbers, the same bytes, the same result."""
    random = np.random.default_rng(0)
    store = make_experts(4)
    for expert in range(4):
        for part in ("gate", "up", "down"):
            store.pack(expert, part, random.standard_normal((32, 32)).astype(np.float32))
    device, runtime = ThreadedDevice(SLOW), Runtime(threads=1)
    arena = device.allocate(2 * store.expert_bytes)
    slots = make_experts(2, arena.array)
    slots.buffer[:] = 0
    for slot, expert in enumerate([1, 3]):
        block = store.buffer[expert * store.expert_bytes : (expert + 1) * store.expert_bytes]
        device.copy(device.stream("copy"), arena, slot * store.expert_bytes, block, store.expert_bytes)
    tokens = random.standard_normal((5, 32)).astype(np.float32)
    in_store, in_slots = np.array([[1, 3]] * 5), np.array([[0, 1]] * 5)  # the same order: experts are summed by number
    weights = random.random((5, 2)).astype(np.float32)
    expected, found = np.empty_like(tokens), np.empty_like(tokens)

    def submit() -> object:
        number = runtime.submit(store, tokens, in_store, weights, expected)
        return lambda: runtime.wait(number)

    ticket = device.submit_cpu(submit, Work("experts", (5, 5), store.expert_bytes))  # type: ignore[arg-type]
    compute = device.stream("compute")
    compute.wait(device.stream("copy").record())
    read_only = make_experts(2, np.frombuffer(memoryview(arena.array).toreadonly(), np.uint8))
    device.launch(compute, lambda: runtime.forward(read_only, tokens, in_slots, weights, found), Work("experts", (5, 5)))
    compute.record().wait()
    ticket.wait()
    assert np.array_equal(expected, found)
    assert np.abs(expected).max() > 0
    device.close()


def test_ctrl_c_is_delayed_and_a_second_one_is_not() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("first")
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Uninterrupted():
        pass
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
    worker = threading.Thread(target=Uninterrupted().__enter__)
    worker.start()
    worker.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
