"""The threaded device: throttling, closing, and computing with the C++ kernel; and the delay of Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from support.threaded_device import ThreadedDevice

from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.interrupts import Uninterrupted
from moegraft.operators.offload.devices.base import DeviceError, DeviceTimeoutError, Work

SLOW = MachineProfile("slow", 1, 1, 1, 1, link_gb_s=0.01)  # 10 bytes a microsecond


def device_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("emulated")]


def test_threads_start_with_streams_and_end_with_the_device() -> None:
    device = ThreadedDevice(index=7)
    device.stream("copy")
    assert sorted(device_threads()) == ["emulated:7 copy", "emulated:7 notifier"]
    device.close()
    assert device_threads() == []


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
