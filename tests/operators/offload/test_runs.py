"""Runs of chunks whose events are refused or fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.faulty_device import Faults
from support.transfer_harness import Harness, advance, make_device
from support.virtual_device import VirtualEvent, VirtualStream

from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.devices.cuda import CudaStream
from moegraft.operators.offload.transfers import Urgency


def refuse_event_behind_copy(monkeypatch: pytest.MonkeyPatch, device: Any, number: int) -> None:
    record, copy, copies, armed = VirtualStream.record, device.copy, [0], [False]

    def counted(*arguments: Any) -> None:
        copy(*arguments)
        copies[0] += 1
        armed[0] = copies[0] == number

    def refused(self: VirtualStream, *, timed: bool = False) -> VirtualEvent:
        if self.name == "copy" and armed[0]:
            armed[0] = False
            raise DeviceError("injected: an event refused")
        return record(self, timed=timed)

    monkeypatch.setattr(device, "copy", counted)
    monkeypatch.setattr(VirtualStream, "record", refused)


@pytest.mark.parametrize("pins", [(), range(1), range(1, 2)])  # pinned; a ring; a ring for layer 1
@pytest.mark.parametrize("number", range(1, 7))
def test_an_event_is_refused(pins: range, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_device("virtual", notify_ms=1.0, faults=Faults(pins=pins))
    harness = Harness(device, (3, 3), 5, expert_bytes=128)
    refuse_event_behind_copy(monkeypatch, device, number)
    wanted = [(0, 0), (1, 0), (1, 1)]
    harness.queue.prefetch(wanted, Urgency.NEXT)
    harness.settle_all()
    assert not any(harness.queue._in_flight)
    for layer, expert in wanted:
        demand = harness.queue.request(layer, expert, Urgency.DEMAND)
        assert demand is not None
        harness.compute.wait(demand.ready())
        harness.read(layer, expert, demand.slot)
        harness.queue.release(demand, harness.after())
    harness.settle_all()
    harness.check()
    assert harness.reads == len(wanted)
    harness.close()


def test_the_last_event_reports_a_failure_that_the_host_has_not_learnt_of() -> None:
    device = make_device("virtual", notify_ms=1.0, faults=Faults(copies=[0]))
    device.notify_ms = 0.0
    harness = Harness(device, (3, 3), 5, expert_bytes=128)
    harness.queue.request(0, 1, Urgency.NEXT)
    advance(device, 0.1)
    demand = harness.queue.request(0, 1, Urgency.DEMAND)
    assert demand is not None
    with pytest.raises(DeviceError, match="injected"):
        demand.wait()
    harness.queue.release(demand, None)
    harness.close()


def test_a_chunk_fails_while_a_later_one_waits_for_the_ring() -> None:
    device = make_device("virtual", faults=Faults(pins=range(1), copies=[0]))
    harness = Harness(device, (3, 3), 5, expert_bytes=8 * 64)
    demand = harness.queue.request(0, 1, Urgency.DEMAND)
    assert demand is not None
    with pytest.raises(DeviceError, match="injected"):
        demand.wait()
    harness.queue.release(demand, None)
    harness.settle_all()
    harness.check()
    harness.close()


def test_a_transfer_arrives_with_its_run() -> None:
    device = make_device("virtual", notify_ms=0.3)
    harness = Harness(device, (5, 5), 2, expert_bytes=64)
    first = harness.queue.request(1, 0, Urgency.DEMAND)
    assert first is not None
    first.wait()
    device.synchronize()
    harness.queue.release(first, None)
    demands, start_ms = harness.queue.demand(0, range(5)), device.now_ms()
    estimated = [harness.queue.arrival_ms(demand) for demand in demands]
    for demand, ms in zip(demands, estimated, strict=True):
        demand.wait()
        assert device.now_ms() - start_ms == pytest.approx(ms)
        harness.queue.release(demand, None)
    harness.close()


def test_a_stream_reports_the_errors_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __init__(self, **options: bool) -> None:
            pass

        def record(self, stream: object) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "Event", Refused)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    stream = CudaStream(SimpleNamespace(name="cuda:0", torch_device="cuda:0"), None)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="illegal memory access"):
        stream.record()
