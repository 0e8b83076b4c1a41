"""Missing device or host memory: fewer slots, slower copies, and finally the CPU alone, each logged once."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from support.faulty_device import EVERY, Faults, FaultyDevice
from support.transfer_harness import DEVICES, EMULATED, LINK, Harness, make_device, sentinel_store
from support.virtual_device import VirtualDevice

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts
from moegraft.operators.offload.queue import open_expert_cache
from moegraft.operators.offload.store import ExpertStore, HostSource, SlotPlan, allocate_arena, even_plan
from moegraft.operators.offload.transfers import Urgency


def load_everything(harness: Harness) -> None:
    for layer in range(2):
        for expert in range(5):
            demand = harness.queue.request(layer, expert, Urgency.DEMAND)
            assert demand is not None
            harness.compute.wait(demand.ready())
            harness.read(layer, expert, demand.slot)
            harness.queue.release(demand, harness.after())
    harness.settle()
    harness.check()
    assert harness.reads == 10
    harness.close()


@pytest.mark.parametrize("refused", range(12))
def test_the_cache_shrinks_with_every_refused_allocation(refused: int, caplog: pytest.LogCaptureFixture) -> None:
    device = FaultyDevice(LINK, faults=Faults(allocations=range(refused)))
    plan, arena = allocate_arena(device, SlotPlan((10, 20, 2), 2), 1000)
    totals = [32, 24, 18, 13, 9, 6, 4, 3, 2, 1, 0]
    assert (plan.total, plan.staging) == ((totals[refused], 2) if refused < 11 else (0, 1))
    assert arena is not None
    assert arena.nbytes == device.allocated_bytes == 1000 * plan.slots
    assert len(caplog.records) == (1 if refused else 0), "logged once"


def test_without_any_memory_all_experts_run_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    device = FaultyDevice(LINK, faults=Faults(allocations=EVERY))
    store = sentinel_store(2, 5, 256)
    assert open_expert_cache(device, store, SlotPlan((2, 2), 2), lambda layer: np.zeros(5)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "emulated:0: no memory for a single expert slot, all experts run on the CPU: emulated:0: injected: 256 bytes refused"
    ]


def test_a_plan_without_slots_needs_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    device = FaultyDevice(LINK, faults=Faults(allocations=EVERY))
    assert allocate_arena(device, SlotPlan((0, 0), 0), 1000) == (SlotPlan((0, 0), 0), None)
    assert not caplog.records


@pytest.mark.parametrize("kind", EMULATED)
def test_slots_shrink_to_the_free_memory(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(make_device(kind, memory_bytes=5 * 256), (4, 2), staging=1)
    assert harness.slots.plan == SlotPlan((3, 1), 1)
    assert "5 expert slots instead of 7: emulated:0: 1792 bytes requested, 1280 of 1280 free" in caplog.text
    load_everything(harness)


def test_shrinking_takes_from_every_layer() -> None:
    plan: SlotPlan | None = SlotPlan((8, 8, 8, 1), 1)
    seen = []
    while plan is not None:
        seen.append(plan.capacity)
        plan = plan.shrunk()
    assert seen[:4] == [(8, 8, 8, 1), (6, 6, 6, 0), (5, 4, 4, 0), (4, 3, 2, 0)]
    assert even_plan(4, 10, 2) == SlotPlan((3, 3, 2, 2), 2)


@pytest.mark.parametrize("kind", EMULATED)
@pytest.mark.parametrize(
    ("refused", "form", "message"),
    [
        ((), "pinned", ""),
        (
            [0],
            "ring",
            "experts of layers 0 to 1 are copied through 4 page-locked chunks of 64 bytes: emulated:0: injected: 1280 bytes cannot be",
        ),
        ([1], "ring", "experts of layers 1 to 1 are copied through 4 page-locked chunks of 64 bytes"),
        ([1, 2, 3], "ring", "experts of layers 1 to 1 are copied through 2 page-locked chunks of 64 bytes"),
        (EVERY, "pageable", "experts of layers 0 to 1 are copied from pageable memory, which blocks the host: emulated:0: injected"),
    ],
)
def test_host_memory_that_cannot_be_page_locked(
    kind: str, refused: list[int], form: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(make_device(kind, faults=Faults(pins=refused)), (3, 3))
    assert harness.queue.source.form == form
    assert message in caplog.text
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == (1 if message else 0)
    load_everything(harness)


@pytest.mark.parametrize("kind", EMULATED)
def test_a_ring_is_not_filled_before_its_copy_is_done(kind: str) -> None:
    """A whole expert submitted at once has more chunks than the ring."""
    harness = Harness(make_device(kind, faults=Faults(pins=[0])), (3, 3), expert_bytes=1024)
    for expert in range(4):
        harness.queue.request(0, expert, Urgency.NEXT)
    load_everything(harness)


def test_a_device_that_cannot_be_copied_to(caplog: pytest.LogCaptureFixture) -> None:
    device = FaultyDevice(LINK, faults=Faults(pins=EVERY, copies=EVERY))
    assert open_expert_cache(device, sentinel_store(2, 5, 256), SlotPlan((2, 2), 1), lambda layer: np.zeros(5)) is None
    assert "experts cannot be copied to it, all of them run on the CPU: emulated:0: injected: a copy of 64 bytes failed" in caplog.text
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("kind", DEVICES)
def test_all_memory_is_released(kind: str) -> None:
    device = make_device(kind)
    for _ in range(3):
        cache = open_expert_cache(device, sentinel_store(2, 5, 4096), SlotPlan((2, 2), 1), lambda layer: np.zeros(5))
        assert cache is not None
        transfer = cache.queue.request(0, 1, Urgency.NEXT)
        assert transfer is not None
        cache.close()
    if kind != "cuda":
        assert device.allocated_bytes == 0  # type: ignore[attr-defined]
    device.close()


def test_the_store_shares_the_bytes_of_the_cpu_kernel() -> None:
    layers = [PackedExperts(ExpertsShape(3, 32, 32), GateSpec("silu"), "int8") for _ in range(2)]
    values = np.ones((32, 32), np.float32)
    for packed in layers:
        for expert in range(3):
            for part in ("gate", "up", "down"):
                packed.pack(expert, part, values * (expert + 1))
    store = ExpertStore.of_packed(layers)
    assert (store.layers, store.num_experts, store.nbytes) == (2, 3, layers[0].nbytes * 2)
    block = store.bytes_of(1, 2)
    assert block is not None
    assert block.nbytes == store.expert_bytes == layers[0].expert_bytes
    assert np.shares_memory(block, layers[1].buffer)
    assert block.ctypes.data % 64 == 0
    other = PackedExperts(ExpertsShape(3, 64, 32), GateSpec("silu"), "int8")
    with pytest.raises(ValueError, match="layer 1 has"):
        ExpertStore.of_packed([layers[0], other])


def test_a_phantom_store_takes_time_and_moves_nothing() -> None:
    device = VirtualDevice(LINK)
    store = ExpertStore.phantom(60, 512, 100_000_000)
    assert HostSource(store, device, 64).form == "pinned"
    cache = open_expert_cache(device, store, even_plan(60, 60 * 128, 4), lambda layer: np.zeros(512))
    assert cache is not None
    transfer = cache.queue.request(59, 511, Urgency.DEMAND)
    assert transfer is not None
    transfer.wait()
    assert device.now_ms() == pytest.approx(100_000)
    assert transfer.slot >= 0
