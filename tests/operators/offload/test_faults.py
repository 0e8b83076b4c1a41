"""Copies, launches and callbacks that fail: each surfaces where its result is waited for, and everything works afterwards."""

from __future__ import annotations

import pytest
from support.loading_rig import EMULATED, WORK, Rig, make_device

from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.devices.emulated import EVERY, Faults
from moegraft.operators.offload.transfers import Transfer, TransferState, Urgency

pytestmark = pytest.mark.parametrize("kind", EMULATED)
DEMAND, NEXT, _, _ = Urgency


def demanded(rig: Rig, layer: int, expert: int) -> Transfer:
    transfer = rig.queue.request(layer, expert, DEMAND)
    assert transfer is not None
    return transfer


def use(rig: Rig, demand: Transfer) -> None:
    rig.compute.wait(demand.ready())
    rig.read(demand.layer, demand.expert, demand.slot)
    rig.queue.release(demand, rig.after())


def works_again(rig: Rig) -> None:
    """Every expert can be had, in every slot."""
    rig.settle_all()
    for layer in range(2):
        for expert in range(5):
            use(rig, demanded(rig, layer, expert))
    rig.settle()
    rig.check()
    assert rig.reads == 10
    rig.close()


@pytest.mark.parametrize("fault", ["copies", "refused_copies"])
@pytest.mark.parametrize("number", range(8))
def test_a_copy_fails(kind: str, fault: str, number: int) -> None:
    """A demand's and a prefetch's four chunks each: whichever fails, only its own transfer does."""
    rig = Rig(make_device(kind, faults=Faults(**{fault: [number]})), (3, 3))
    demand = demanded(rig, 0, 1)
    prefetch = rig.queue.request(1, 2, NEXT)
    assert prefetch is not None
    if number < 4:
        with pytest.raises(DeviceError, match="injected: a copy of 64 bytes"):
            demand.wait()
    else:
        demand.wait()
    rig.settle_all()
    assert demand.state is (TransferState.FAILED if number < 4 else TransferState.LANDED)
    assert prefetch.state is (TransferState.FAILED if number >= 4 else TransferState.LANDED)
    assert not rig.slots.holds(0, 1) or number >= 4
    assert rig.queue.statistics.failed == 1
    if number < 4:
        with pytest.raises(DeviceError, match="injected"):
            demand.ready()
    rig.queue.release(demand, None)
    works_again(rig)


@pytest.mark.parametrize("number", range(4))
def test_readers_of_a_failed_copy_are_skipped_and_the_host_is_told(kind: str, number: int) -> None:
    rig = Rig(make_device(kind, faults=Faults(copies=[number])), (3, 3))
    demand = demanded(rig, 0, 1)
    rig.compute.wait(demand.ready())
    rig.read(0, 1, demand.slot)
    after = rig.after()
    with pytest.raises(DeviceError, match="a copy of 64 bytes failed"):
        after.wait()
    assert rig.reads == 0
    rig.queue.release(demand, after)
    works_again(rig)


def test_every_copy_fails(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(make_device(kind, faults=Faults(copies=EVERY)), (3, 3))
    for expert in range(5):
        rig.queue.request(0, expert, NEXT)
        demand = demanded(rig, 1, expert)
        with pytest.raises(DeviceError, match="injected"):
            demand.wait()
        rig.queue.release(demand, None)
    rig.settle_all()
    rig.check()
    assert rig.queue.statistics.failed == 10
    assert [record.getMessage().split(":")[2] for record in caplog.records] == [
        " a prefetch has failed, and others that fail will not be mentioned"
    ]
    assert rig.queue.available == rig.slots.plan.slots
    rig.close()


def test_a_launch_fails(kind: str) -> None:
    """What a kernel raises surfaces at the next wait of its stream; the slots it would have read are as they were."""
    rig = Rig(make_device(kind, faults=Faults(launches=[0])), (3, 3))
    demand = demanded(rig, 0, 1)
    rig.compute.wait(demand.ready())
    rig.read(0, 1, demand.slot)
    after = rig.after()
    rig.queue.release(demand, after)
    with pytest.raises(DeviceError, match="injected: a launch failed"):
        after.wait()
    rig.settle()
    assert rig.slots.holds(0, 1)
    works_again(rig)


def test_what_a_launch_raises_surfaces_at_the_next_wait(kind: str) -> None:
    rig = Rig(make_device(kind), (3, 3))

    def kernel() -> None:
        raise ZeroDivisionError("no tokens")

    rig.device.launch(rig.compute, kernel, WORK)
    after = rig.after()
    with pytest.raises(DeviceError, match="work on stream 'compute' raised ZeroDivisionError: no tokens") as raised:
        after.wait()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    works_again(rig)


def test_a_job_of_the_cpu_engine_fails(kind: str) -> None:
    rig = Rig(make_device(kind, faults=Faults(cpu_jobs=[1])), (3, 3))
    tickets = [rig.device.submit_cpu(None, WORK) for _ in range(3)]
    tickets[0].wait()
    with pytest.raises(RuntimeError, match="injected: a job of the CPU engine failed"):
        tickets[1].wait()
    tickets[2].wait()
    works_again(rig)


def test_closing_while_copies_fail(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(make_device(kind, faults=Faults(copies=EVERY)), (3, 3))
    for expert in range(5):
        rig.queue.request(0, expert, NEXT)
    rig.close()
    assert rig.device.taken_bytes == 0  # type: ignore[attr-defined]
