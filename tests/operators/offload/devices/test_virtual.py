"""The virtual clock: modelled times, when it moves, and determinism by seed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.model_shapes import MODELS
from support.virtual_device import PROFILES, VirtualDevice

from moegraft.operators.offload.devices.base import DeviceError, DeviceTimeoutError, Work, aligned_bytes

MS = Work("dense", cost_ms=1.0)


def test_no_time_passes_but_the_clock_moves() -> None:
    device, start_s = VirtualDevice(), time.monotonic()
    device.launch(device.stream("compute"), None, Work("dense", cost_ms=1e9))
    assert device.now_ms() == 0.0, "submitting takes no time"
    device.advance(5.0)
    assert device.now_ms() == 5.0
    device.stream("compute").record().wait()
    assert device.now_ms() == 1e9
    assert time.monotonic() - start_s < 1.0
    with pytest.raises(ValueError, match="cannot go back by 1 ms"):
        device.advance(-1)


def test_work_is_priced_by_the_profile() -> None:
    profile, model = PROFILES["a6000_10core"], MODELS["qwen2-57b-a14b"]
    device, size = VirtualDevice(profile), model.expert_bytes()
    loads = (1, 3, 1)
    work = Work("experts", loads, size)
    device.launch(device.stream("compute"), None, work)
    device.stream("compute").record().wait()
    assert device.now_ms() == pytest.approx(profile.gpu_ms(loads, size).sum())
    ticket = device.submit_cpu(None, work)
    ticket.wait()
    assert ticket.elapsed_ms == pytest.approx(profile.cpu_ms(loads, size).sum() + profile.first_cpu_ms(size))
    start_ms = device.now_ms()
    device.copy(device.stream("copy"), None, 0, None, size)
    device.stream("copy").record().wait()
    assert device.now_ms() - start_ms == pytest.approx(profile.transfer_ms(size))
    assert device.busy_ms("copy") == pytest.approx(profile.transfer_ms(size))
    assert device.busy_ms("cpu") == pytest.approx(ticket.elapsed_ms)


def test_streams_overlap_and_cpu_jobs_queue() -> None:
    device = VirtualDevice()
    device.launch(device.stream("compute"), None, Work("dense", cost_ms=10.0))
    tickets = [device.submit_cpu(None, Work("experts", cost_ms=3.0)) for _ in range(2)]
    tickets[1].wait()
    assert device.now_ms() == 6.0
    assert tickets[1].elapsed_ms == 3.0
    device.stream("compute").record().wait()
    assert device.now_ms() == 10.0


def test_a_reader_that_does_not_wait_reads_torn_bytes() -> None:
    """The first half lands as a copy starts, the second as it ends."""
    device = VirtualDevice(PROFILES["a6000_10core"])
    target, source = device.allocate(1 << 20), aligned_bytes(1 << 20)
    target.array[:] = 0
    source[:] = 1
    device.copy(device.stream("copy"), target, 0, source, 1 << 20)
    device.advance(0.01)
    assert (target.array[0], target.array[-1]) == (1, 0)
    device.stream("copy").record().wait()
    assert target.array.all()


def test_launches_read_early_and_late() -> None:
    device, seen = VirtualDevice(seed=1), []
    for _ in range(50):
        start_ms = device.now_ms()
        device.launch(device.stream("compute"), lambda start_ms=start_ms: seen.append(device.now_ms() - start_ms), MS)  # type: ignore[misc]
        device.stream("compute").record().wait()
    assert 10 < sum(np.isclose(seen, 1.0)) < 40
    assert sum(np.isclose(seen, 0.0)) + sum(np.isclose(seen, 1.0)) == 50


def times(seed: int, jitter: float) -> list[float]:
    device, reported = VirtualDevice(seed=seed, jitter=jitter, notify_ms=0.1), []
    for number in range(20):
        stream = device.stream("compute" if number % 3 else "copy")
        device.launch(stream, None, MS)
        device.notify(stream.record(), lambda error: reported.append(device.now_ms()))
    device.synchronize()
    assert len(reported) == 20
    return reported


def test_the_seed_decides_the_times() -> None:
    assert times(1, 0.5) == times(1, 0.5) != times(2, 0.5)
    assert times(1, 0.0) == times(2, 0.0)
    assert times(1, 0.5) == sorted(times(1, 0.5)), "callbacks do not overtake each other"


def test_jitter_is_bounded() -> None:
    device, durations = VirtualDevice(jitter=0.7), []
    for _ in range(200):
        start_ms = device.now_ms()
        device.launch(device.stream("compute"), None, MS)
        device.stream("compute").record().wait()
        durations.append(device.now_ms() - start_ms)
    assert np.exp(-0.7) <= min(durations) < 0.6
    assert 1.7 < max(durations) <= np.exp(0.7)


def test_a_wait_that_nothing_can_end_raises() -> None:
    device, other = VirtualDevice(), VirtualDevice(index=1)
    other.launch(other.stream("compute"), None, MS)
    device.stream("compute").wait(other.stream("compute").record())
    with pytest.raises(DeviceError, match="emulated:0: the host waits for an event that no submitted work reaches"):
        device.stream("compute").record().wait()


def test_a_wait_with_a_timeout() -> None:
    device = VirtualDevice()
    device.launch(device.stream("compute"), None, Work("dense", cost_ms=50.0))
    event = device.stream("compute").record()
    with pytest.raises(DeviceTimeoutError, match="not done after 20 ms"):
        event.wait(0.02)
    assert device.now_ms() == 20.0
    event.wait(0.05)
    assert device.now_ms() == 50.0


def test_closing_drops_what_has_not_begun() -> None:
    device, ran = VirtualDevice(), list[int]()
    events = []
    for number in range(3):
        device.launch(device.stream("compute"), lambda number=number: ran.append(number), MS)  # type: ignore[misc]
        events.append(device.stream("compute").record())
    device.close()
    assert ran == [0]
    events[0].wait() if events[0].error is None else None
    for event in events[1:]:
        with pytest.raises(DeviceError, match="was closed before this work began"):
            event.wait()


def test_two_devices_are_independent() -> None:
    first, second = VirtualDevice(index=0, memory_bytes=100), VirtualDevice(index=1)
    first.allocate(100)
    second.allocate(1000)
    second.advance(3.0)
    assert (first.name, second.name, first.now_ms()) == ("emulated:0", "emulated:1", 0.0)
    assert (first.allocated_bytes, second.allocated_bytes) == (100, 1000)
