"""Failing copies, launches and jobs surface where their results are waited for, and everything works afterwards."""

from __future__ import annotations

import pytest
from support.faulty_device import EVERY, Faults
from support.transfer_harness import EMULATED, WORK, Harness, make_device
from support.virtual_device import Timed

from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.transfers import Transfer, TransferState, Urgency

pytestmark = pytest.mark.parametrize("kind", EMULATED)
DEMAND, NEXT, _, _ = Urgency


def demanded(harness: Harness, layer: int, expert: int) -> Transfer:
    transfer = harness.queue.request(layer, expert, DEMAND)
    assert transfer is not None
    return transfer


def use(harness: Harness, demand: Transfer) -> None:
    harness.compute.wait(demand.ready())
    harness.read(demand.layer, demand.expert, demand.slot)
    harness.queue.release(demand, harness.after())


def works_again(harness: Harness) -> None:
    """Every expert can be loaded, into every slot."""
    harness.settle_all()
    for layer in range(2):
        for expert in range(5):
            use(harness, demanded(harness, layer, expert))
    harness.settle()
    harness.check()
    assert harness.reads == 10
    harness.close()


@pytest.mark.parametrize("fault", ["copies", "refused_copies"])
@pytest.mark.parametrize("number", range(8))
def test_a_copy_fails(kind: str, fault: str, number: int) -> None:
    """Four chunks each of a demand and a prefetch: a failing chunk fails only its own transfer."""
    harness = Harness(make_device(kind, faults=Faults(**{fault: [number]})), (3, 3))
    demand = demanded(harness, 0, 1)
    prefetch = harness.queue.request(1, 2, NEXT)
    assert prefetch is not None
    if number < 4:
        with pytest.raises(DeviceError, match="injected: a copy of 64 bytes"):
            demand.wait()
    else:
        demand.wait()
    harness.settle_all()
    assert demand.state is (TransferState.FAILED if number < 4 else TransferState.LANDED)
    assert prefetch.state is (TransferState.FAILED if number >= 4 else TransferState.LANDED)
    assert not harness.slots.is_resident(0, 1) or number >= 4
    assert harness.queue.statistics.failed == 1
    if number < 4:
        with pytest.raises(DeviceError, match="injected"):
            demand.ready()
    harness.queue.release(demand, None)
    works_again(harness)


@pytest.mark.parametrize("number", range(4))
def test_readers_of_a_failed_copy_are_skipped_and_the_host_sees_the_error(kind: str, number: int) -> None:
    harness = Harness(make_device(kind, faults=Faults(copies=[number])), (3, 3))
    demand = demanded(harness, 0, 1)
    harness.compute.wait(demand.ready())
    harness.read(0, 1, demand.slot)
    after = harness.after()
    with pytest.raises(DeviceError, match="a copy of 64 bytes failed"):
        after.wait()
    assert harness.reads == 0
    harness.queue.release(demand, after)
    works_again(harness)


def test_every_copy_fails(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(make_device(kind, faults=Faults(copies=EVERY)), (3, 3))
    for expert in range(5):
        harness.queue.request(0, expert, NEXT)
        demand = demanded(harness, 1, expert)
        with pytest.raises(DeviceError, match="injected"):
            demand.wait()
        harness.queue.release(demand, None)
    harness.settle_all()
    harness.check()
    assert harness.queue.statistics.failed == 10
    assert [record.getMessage().split(":")[2] for record in caplog.records] == [
        " a prefetch failed; later failures of prefetches are not logged"
    ]
    assert harness.queue.available == harness.slots.plan.slots
    harness.close()


def test_a_launch_fails(kind: str) -> None:
    """A kernel's error surfaces at the next wait of its stream; the slots it would have read are unchanged."""
    harness = Harness(make_device(kind, faults=Faults(launches=[0])), (3, 3))
    demand = demanded(harness, 0, 1)
    harness.compute.wait(demand.ready())
    harness.read(0, 1, demand.slot)
    after = harness.after()
    harness.queue.release(demand, after)
    with pytest.raises(DeviceError, match="injected: a launch failed"):
        after.wait()
    harness.settle()
    assert harness.slots.is_resident(0, 1)
    works_again(harness)


def test_an_exception_in_a_launch_surfaces_at_the_next_wait(kind: str) -> None:
    harness = Harness(make_device(kind), (3, 3))

    def kernel() -> None:
        raise ZeroDivisionError("no tokens")

    harness.device.launch(harness.compute, Timed(WORK, kernel))
    after = harness.after()
    with pytest.raises(DeviceError, match="work on stream 'compute' raised ZeroDivisionError: no tokens") as raised:
        after.wait()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    works_again(harness)


def test_a_job_of_the_cpu_engine_fails(kind: str) -> None:
    harness = Harness(make_device(kind, faults=Faults(cpu_jobs=[1])), (3, 3))
    tickets = [harness.device.submit_cpu(Timed(WORK)) for _ in range(3)]
    tickets[0].wait()
    with pytest.raises(RuntimeError, match="injected: a job of the CPU engine failed"):
        tickets[1].wait()
    tickets[2].wait()
    works_again(harness)


def test_closing_while_copies_fail(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(make_device(kind, faults=Faults(copies=EVERY)), (3, 3))
    for expert in range(5):
        harness.queue.request(0, expert, NEXT)
    harness.close()
    assert harness.device.allocated_bytes == 0  # type: ignore[attr-defined]
