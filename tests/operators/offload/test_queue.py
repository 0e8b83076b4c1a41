"""The transfer queue: the order of transfers, joins, cancellations and estimates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.transfer_harness import DEVICES, LINK, Harness, advance, chunk_order, make_device
from support.virtual_device import Timed, VirtualDevice, Work

from moegraft.operators.offload.devices.base import Bytes, Callback, DeviceError, Event
from moegraft.operators.offload.queue import DEMAND_DEPTH, PREFETCH_DEPTH, open_expert_cache
from moegraft.operators.offload.store import ExpertStore, SlotPlan
from moegraft.operators.offload.transfers import Transfer, TransferState, Urgency, default_chunk_bytes

DEMAND, NEXT, DEEPER, PROMOTION = Urgency
WAITING, RUNNING, LANDED, CANCELLED, FAILED = TransferState
CHUNK, EXPERT = 64, 256


@pytest.fixture(params=DEVICES)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def harness(kind: str) -> Iterator[Harness]:
    """Two layers of five experts, three of which may be resident, and two staging slots."""
    harness = Harness(make_device(kind), (3, 3))
    yield harness
    harness.close()


def requested(transfer: Transfer | None) -> Transfer:
    assert transfer is not None
    return transfer


def load(harness: Harness, layer: int, *experts: int) -> None:
    for expert in experts:
        harness.queue.request(layer, expert, PROMOTION)
    harness.settle_all()


def use(harness: Harness, demand: Transfer) -> None:
    """Read the demanded expert and release it."""
    harness.compute.wait(demand.ready())
    harness.read(demand.layer, demand.expert, demand.slot)
    harness.queue.release(demand, harness.after())


@pytest.mark.parametrize("together", [False, True])
def test_several_prefetches_are_requested_at_once_as_one_by_one(harness: Harness, together: bool) -> None:
    """One is resident, one in flight and less urgent, and one comes twice."""
    load(harness, 0, 3)
    wanted = [(1, 4), (0, 3), (0, 1), (1, 0), (1, 4)]
    with harness.link_held():
        joined = requested(harness.queue.request(0, 1, DEEPER))
        if together:
            harness.queue.prefetch(wanted, NEXT)
        else:
            for layer, expert in wanted:
                harness.queue.request(layer, expert, NEXT)
        assert joined.urgency is NEXT
    harness.settle_all()
    harness.check()
    assert list(dict.fromkeys(chunk_order(harness.spans)))[1:] == [(0, 1), (1, 4), (1, 0)]
    statistics = harness.queue.statistics
    assert (statistics.requested, statistics.joined, statistics.landed) == (7, 2, 4)


def test_prefetches_of_a_closed_queue(harness: Harness) -> None:
    harness.queue.close()
    with pytest.raises(DeviceError, match="is closed"):
        harness.queue.prefetch([(0, 1)], NEXT)


def test_a_demand_lands_and_is_read(harness: Harness) -> None:
    demand = requested(harness.queue.request(1, 4, DEMAND))
    assert demand.slot >= 0
    assert not harness.slots.is_resident(1, 4), "not before it has landed"
    use(harness, demand)
    harness.settle()
    assert demand.state is LANDED
    assert harness.slots.slot_of(1).tolist() == [-1, -1, -1, -1, demand.slot]
    assert harness.reads == 1
    harness.check()


def test_the_host_can_wait_for_a_transfer(harness: Harness) -> None:
    transfer = requested(harness.queue.request(0, 2, NEXT))
    transfer.wait()
    assert harness.bytes_in(transfer.slot) == bytes([3]) * EXPERT


def test_a_demand_joins_a_running_prefetch(harness: Harness) -> None:
    with harness.link_held():
        prefetch = requested(harness.queue.request(0, 1, DEEPER))
        assert prefetch.state is RUNNING
        demand = requested(harness.queue.request(0, 1, DEMAND))
    assert demand is prefetch
    assert demand.urgency is DEMAND
    use(harness, demand)
    harness.settle()
    harness.check()
    assert chunk_order(harness.spans) == [(0, 1)] * 4, "every byte went once"
    statistics = harness.queue.statistics
    assert (statistics.joined, statistics.landed) == (1, 1)
    assert harness.slots.prefetches_used == 1


def test_a_demand_of_a_resident_expert_has_landed(harness: Harness) -> None:
    load(harness, 0, 3)
    demand = requested(harness.queue.request(0, 3, DEMAND))
    assert demand.state is LANDED
    assert demand.queue.arrival_ms(demand) == 0.0
    use(harness, demand)
    harness.settle()
    harness.check()
    assert len(harness.spans) == 4
    assert harness.queue.request(0, 3, NEXT) is None, "and a prefetch has nothing to do"


def test_two_demands_of_one_expert_pin_it_twice(harness: Harness) -> None:
    with harness.link_held():
        first, second = requested(harness.queue.request(0, 3, DEMAND)), requested(harness.queue.request(0, 3, DEMAND))
    assert first is second
    use(harness, first)
    assert len(second.pins) == 1
    use(harness, second)
    harness.settle()
    harness.check()


def test_the_most_urgent_goes_first(harness: Harness) -> None:
    with harness.link_held():
        harness.queue.request(0, 0, PROMOTION)  # its first chunk has the link already
        for expert, urgency in [(1, PROMOTION), (2, DEEPER), (3, NEXT)]:
            harness.queue.request(0, expert, urgency)
        demand = requested(harness.queue.request(1, 4, DEMAND))
    use(harness, demand)
    harness.settle_all()
    order = [(0, 0)] + [(1, 4)] * 4 + [(0, 3)] * 4 + [(0, 2)] * 4 + [(0, 0)] * 3 + [(0, 1)] * 4
    assert chunk_order(harness.spans) == order


@pytest.mark.parametrize(("urgency", "depth"), [(NEXT, PREFETCH_DEPTH), (PROMOTION, PREFETCH_DEPTH), (DEMAND, DEMAND_DEPTH)])
def test_at_most_one_chunk_is_in_flight_and_two_of_demands(harness: Harness, urgency: Urgency, depth: int) -> None:
    link = harness.queue.link
    with harness.link_held():
        transfers = [harness.queue.request(0, expert, urgency) for expert in range(3)]
        assert link.sent_bytes - link.landed_bytes == depth * CHUNK
    while not harness.queue.idle:
        with harness.slots.lock:
            assert link.sent_bytes - link.landed_bytes <= depth * CHUNK
        advance(harness.device, 0.01)
    for transfer in transfers if urgency is DEMAND else ():
        harness.queue.release(requested(transfer), None)


@pytest.mark.parametrize(("urgency", "depth"), [(NEXT, 3), (DEMAND, 6)])
def test_more_chunks_are_in_flight_where_the_host_learns_late(urgency: Urgency, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs, of which the host is notified once: it learns of a chunk when the link could have copied almost two more."""
    device = make_device("virtual", notify_ms=1.8 * CHUNK / 1000)  # a byte takes the link a microsecond
    harness = Harness(device, (3, 3), 5)
    load(harness, 1, 0)  # so that the link is measured
    notified: list[Event] = []
    notify = device.notify
    monkeypatch.setattr(device, "notify", lambda event, callback: (notified.append(event), notify(event, callback)))
    link = harness.queue.link
    with harness.link_held():
        demands = harness.queue.demand(0, [0, 1, 2]) if urgency is DEMAND else []
        harness.queue.prefetch([(0, expert) for expert in range(3)], urgency)
        assert link.sent_bytes - link.landed_bytes == depth * CHUNK
        assert len(notified) == 2
    for demand in demands:
        harness.queue.release(demand, None)
    harness.settle_all()
    harness.check()
    assert sorted(chunk_order(harness.spans)[4:]) == [(0, expert) for expert in range(3) for _ in range(4)], "every byte went once"
    assert len(notified) <= 8, "not once for each chunk"
    harness.close()


def test_demands_end_with_the_first_that_has_no_slot(harness: Harness) -> None:
    load(harness, 0, 0, 1, 2)
    load(harness, 1, 0, 1, 2)
    held = harness.slots.pin(0, [0, 1, 2]), harness.slots.pin(1, [0, 1, 2])
    with harness.link_held():
        demands = harness.queue.demand(0, [3, 4])
        assert [each.expert for each in demands] == [3, 4]
        assert harness.queue.demand(1, [3, 4]) == []
        assert harness.queue.statistics.refused == 1
    events = harness.queue.ready(demands)
    for event in events:
        harness.compute.wait(event)
    for demand in demands:
        harness.read(0, demand.expert, demand.slot)
        harness.queue.release(demand, harness.after())
    for pin in held:
        harness.slots.release(pin, None)
    harness.settle_all()
    harness.check()
    assert harness.reads == 2
    assert harness.queue.ready(demands), "of what has landed: an event that is done"


@pytest.mark.parametrize("chunks", range(8))
def test_a_flood_delays_a_demand_by_one_chunk_at_most(harness: Harness, chunks: int) -> None:
    for expert in range(5):
        harness.queue.request(0, expert, NEXT)
    wait_for_chunks(harness, chunks)
    with harness.slots.lock:  # so that nothing lands between the count and the request
        landed = len(harness.spans)
        demand = requested(harness.queue.request(1, 2, DEMAND))
    use(harness, demand)
    harness.settle_all()
    harness.check()
    order = chunk_order(harness.spans)
    assert order.index((1, 2)) - landed <= PREFETCH_DEPTH, (landed, order)
    start = order.index((1, 2))
    assert order[start : start + 4] == [(1, 2)] * 4, "and nothing comes between its own"


def wait_for_chunks(harness: Harness, count: int) -> None:
    """Wait until so many have landed."""
    while len(harness.spans) < count:
        advance(harness.device, 0.01)


@pytest.mark.parametrize("chunks", range(6))
def test_a_suspended_prefetch_resumes_where_it_stopped(harness: Harness, chunks: int) -> None:
    prefetch = requested(harness.queue.request(0, 1, NEXT))
    wait_for_chunks(harness, min(chunks, 4))
    use(harness, requested(harness.queue.request(1, 0, DEMAND)))
    use(harness, requested(harness.queue.request(0, 1, DEMAND)))
    harness.settle()
    harness.check()
    assert sorted(chunk_order(harness.spans)) == [(0, 1)] * 4 + [(1, 0)] * 4, "no byte twice"
    assert prefetch.state is LANDED


@pytest.mark.parametrize("chunks", range(5))
def test_cancelled_after_every_chunk(harness: Harness, chunks: int) -> None:
    prefetch = requested(harness.queue.request(0, 1, NEXT))
    wait_for_chunks(harness, chunks)
    sent = prefetch.sent_bytes
    cancelled = harness.queue.cancel(prefetch)
    harness.settle()
    assert cancelled == (prefetch.state is CANCELLED)
    if cancelled:
        assert sent < EXPERT
        assert harness.queue.link.sent_bytes <= EXPERT
        assert not harness.slots.is_resident(0, 1)
        with pytest.raises(ValueError, match="the transfer of expert 1 of layer 0 was cancelled"):
            prefetch.ready()
    else:
        assert harness.slots.is_resident(0, 1), "what was sent whole lands"
    harness.check()
    use(harness, requested(harness.queue.request(0, 1, DEMAND)))
    use(harness, requested(harness.queue.request(0, 2, DEMAND)))
    harness.settle()
    harness.check()
    assert harness.reads == 2


def test_cancelling_twice_and_after_landing_does_nothing(harness: Harness) -> None:
    with harness.link_held():
        harness.queue.request(1, 0, NEXT)
        waiting = requested(harness.queue.request(0, 1, NEXT))
        assert waiting.state is WAITING
        assert harness.queue.cancel(waiting)
        assert not harness.queue.cancel(waiting)
    landed = requested(harness.queue.request(0, 2, NEXT))
    harness.settle_all()
    assert not harness.queue.cancel(landed)
    assert harness.queue.statistics.cancelled == 1


def test_replanning_drops_what_has_not_started(harness: Harness) -> None:
    with harness.link_held():
        transfers = [requested(harness.queue.request(0, expert, NEXT)) for expert in range(5)]
        assert harness.queue.replan({(0, 3)}) == 3
        assert [each.state for each in transfers] == [RUNNING, CANCELLED, CANCELLED, WAITING, CANCELLED]
        assert harness.queue.replan(started=True) == 2, "the one that runs, and the one that waits"
    harness.settle()
    harness.check()
    assert sum(each.sent_bytes for each in transfers) == PREFETCH_DEPTH * CHUNK


@pytest.mark.parametrize(
    ("capacity", "staging"),
    [
        (0, 1),  # nothing is resident: experts stream through one slot
        (1, 1),
        (2, 2),  # fewer than are chosen
        (3, 3),  # as many
        (5, 0),  # all: nothing is ever evicted, so nothing is staged
    ],
)
def test_capacities(kind: str, capacity: int, staging: int) -> None:
    harness = Harness(make_device(kind), (capacity, capacity), staging)
    for step in range(12):
        layer, chosen = step % 2, [(step * 2 + shift) % 5 for shift in range(3)]
        pin = harness.slots.pin(layer, chosen)
        for expert, slot in zip(chosen, pin.slots, strict=True):
            if slot >= 0:
                harness.read(layer, expert, slot)
        for expert, slot in zip(chosen, pin.slots, strict=True):
            if slot < 0:
                demand = harness.queue.request(layer, expert, DEMAND)
                if demand is not None:
                    use(harness, demand)
        harness.slots.release(pin, harness.after())
        harness.settle()
        harness.check()
        assert all(len(harness.slots.residents(each)) <= max(capacity, 0) + (capacity == 0) for each in range(2))
    assert harness.reads >= 12
    if capacity == 5:
        assert harness.slots.evictions == 0
        assert harness.queue.statistics.landed == 10
    harness.close()


def test_without_capacity_nothing_is_prefetched(kind: str) -> None:
    harness = Harness(make_device(kind), (0, 3))
    assert harness.queue.request(0, 1, NEXT) is None
    assert harness.queue.request(1, 1, NEXT) is not None
    harness.settle()
    harness.close()


def test_a_demand_without_a_slot_is_refused_until_one_is_released(harness: Harness) -> None:
    load(harness, 0, 0, 1, 2)
    load(harness, 1, 0, 1, 2)
    held = harness.slots.pin(0, [0, 1, 2]), harness.slots.pin(1, [0, 1, 2])
    demands = [requested(harness.queue.request(0, expert, DEMAND)) for expert in (3, 4)]
    assert harness.queue.available == 0
    assert harness.queue.request(1, 4, DEMAND) is None
    assert harness.queue.statistics.refused == 1
    use(harness, demands[0])
    harness.slots.release(held[0], harness.after())
    harness.settle()
    use(harness, requested(harness.queue.request(1, 4, DEMAND)))
    use(harness, demands[1])
    harness.slots.release(held[1], None)
    harness.settle()
    harness.check()
    assert [len(harness.slots.residents(layer)) for layer in range(2)] == [3, 3]


def test_a_demand_takes_the_slot_of_a_prefetch(harness: Harness) -> None:
    load(harness, 0, 0, 1, 2)
    load(harness, 1, 0, 1, 2)
    with harness.link_held():
        started, waiting = requested(harness.queue.request(0, 3, DEEPER)), requested(harness.queue.request(0, 4, NEXT))
        demands = [requested(harness.queue.request(1, 3, DEMAND))]
        assert harness.queue.available == 1
        demands.append(requested(harness.queue.request(1, 4, DEMAND)))
        assert (started.state, waiting.state) == (CANCELLED, WAITING)
        assert demands[1].slot == started.slot
    for demand in demands:
        use(harness, demand)
    harness.settle_all()
    harness.check()
    assert harness.reads == 2


def test_the_victim_stays_until_the_new_expert_has_landed(harness: Harness) -> None:
    load(harness, 0, 2, 3, 4)
    with harness.link_held():
        new = requested(harness.queue.request(0, 1, NEXT))
        assert new.slot not in harness.slots.slot_of(0)
        pin = harness.slots.pin(0, [2])
        harness.read(0, 2, pin.slots[0])
        harness.slots.release(pin, harness.after())
    harness.settle()
    harness.check()
    assert sorted(harness.slots.residents(0)) == [1, 3, 4], "the lowest priority but for the new's left"


class LateNotices(VirtualDevice):
    """A device whose host learns of each event 0.05 ms later, as one whose thread has to wake up."""

    def notify(self, event: Event, callback: Callback) -> None:
        late = self.stream("late")
        late.wait(event)
        self.launch(late, Timed(Work(cost_ms=0.05)))
        super().notify(late.record(), callback)


def test_a_late_notice_of_the_host_is_no_time_of_the_link() -> None:
    """One chunk by itself, chunks of prefetches with the host's delay in between, and two of a demand in direct succession."""
    harness = Harness(LateNotices(LINK), (3, 3))
    load(harness, 0, 0)
    assert harness.queue.link.ms(EXPERT) == pytest.approx(0.256)
    demand = requested(harness.queue.request(1, 2, DEMAND))
    use(harness, demand)
    harness.settle()
    harness.check()
    assert len(harness.measured) == 8
    assert all(measured == (CHUNK, pytest.approx(0.064)) for measured in harness.measured)
    harness.close()


def test_estimates_on_a_known_link() -> None:
    """The virtual link takes 0.064 ms per chunk."""
    harness = Harness(make_device("virtual"), (3, 3))
    load(harness, 0, 0)
    assert harness.queue.link.ms(EXPERT) == pytest.approx(0.256)
    assert harness.queue.busy_ms() == 0.0
    prefetch, waiting = requested(harness.queue.request(0, 1, NEXT)), requested(harness.queue.request(0, 2, NEXT))
    assert harness.queue.in_flight(0) == {1: pytest.approx(0.256)}, "a waiting transfer lands no sooner than a new demand"
    assert waiting.queue.arrival_ms(waiting) == pytest.approx(0.064 + 0.256), "if it were demanded now"
    advance(harness.device, 0.1)
    assert prefetch.queue.arrival_ms(prefetch) == pytest.approx(0.156)
    assert harness.queue.busy_ms() == pytest.approx(0.028)
    demand = requested(harness.queue.request(1, 0, DEMAND))
    assert demand.queue.arrival_ms(demand) == pytest.approx(0.028 + 0.256)
    assert harness.queue.busy_ms() == pytest.approx(0.028 + 0.256)
    start_ms = harness.device.now_ms()
    expected_ms = demand.queue.arrival_ms(demand)
    demand.wait()
    assert harness.device.now_ms() - start_ms == pytest.approx(expected_ms)
    harness.queue.release(demand, None)
    harness.settle()
    assert harness.queue.link.ms(EXPERT) == pytest.approx(0.256)
    assert {nbytes for nbytes, _ in harness.measured} == {CHUNK, 2 * CHUNK}, "the rest of the demand went in two runs"
    assert all(ms == pytest.approx(0.001 * nbytes) for nbytes, ms in harness.measured)
    harness.close()


def test_waiting_for_a_reader_does_not_count_as_a_slow_link() -> None:
    harness = Harness(make_device("virtual"), (1, 1), staging=1)
    load(harness, 0, 0)
    pin = harness.slots.pin(0, [0])
    for _ in range(20):
        harness.read(0, 0, pin.slots[0])  # 2 ms
    harness.slots.release(pin, harness.after())
    demands = []
    for expert in (3, 4):
        demands.append(requested(harness.queue.request(0, expert, DEMAND)))
        use(harness, demands[-1])
    harness.settle()
    harness.check()
    assert harness.queue.link.ms(EXPERT) == pytest.approx(0.256)
    harness.close()


def test_spans_follow_each_other() -> None:
    harness = Harness(make_device("virtual"), (3, 3))
    load(harness, 0, 0, 1)
    assert [name for name, _, _ in harness.spans[:4]] == [f"layer 0 expert 0 {part}%" for part in (25, 50, 75, 100)]
    for (_, _, end), (_, start, _) in zip(harness.spans, harness.spans[1:], strict=False):
        assert start == pytest.approx(end)
    harness.close()


def test_a_closed_queue_refuses_requests(kind: str) -> None:
    harness = Harness(make_device(kind), (3, 3))
    flood = [requested(harness.queue.request(0, expert, NEXT)) for expert in range(5)]
    harness.close()
    assert {each.state for each in flood} <= {LANDED, CANCELLED, RUNNING}
    with pytest.raises(DeviceError, match="closed"):
        harness.queue.request(0, 0, DEMAND)
    harness.close()


@pytest.mark.parametrize(
    ("expert_bytes", "chunks"),
    [(4_866_048, 2), (15_482_880, 6), (99_090_432, 40), (64, 1), (1_000_000_000, 64)],  # DeepSeek-V2-Lite, Qwen2-57B, Mixtral in int4
)
def test_chunks_of_real_experts(expert_bytes: int, chunks: int) -> None:
    chunk = default_chunk_bytes(expert_bytes)
    assert -(-expert_bytes // chunk) == chunks
    assert chunk % 64 == 0


class StoreOfFiles(ExpertStore):
    """Experts are in memory once they were brought there; whoever waits for that must not hold the queue's lock."""

    def __init__(self) -> None:
        memory = np.repeat(np.arange(5, dtype=np.uint8), 64)
        super().__init__([memory], 5, 64)
        self.there: set[int] = set()
        self.asked: list[int] = []
        self.lock: Any = None

    def in_frames(self, layer: int) -> bool:
        return True

    def in_memory(self, layer: int, expert: int) -> bool:
        return expert in self.there

    def ask(self, layer: int, expert: int) -> None:
        self.asked.append(expert)

    @contextmanager
    def in_reach(self, layer: int, expert: int) -> Iterator[None]:
        free: list[bool] = []
        thread = threading.Thread(target=lambda: free.append(self.lock.acquire(timeout=5)) or self.lock.release())
        thread.start()
        thread.join()
        assert free == [True], "another thread can use the queue meanwhile"
        before, self.there = self.there, self.there | {expert}
        yield
        self.there = before  # its frame may be another's now

    def copy(self, layer: int, expert: int, start: int, target: Bytes) -> None:
        assert expert in self.there, "a read under the lock"
        super().copy(layer, expert, start, target)


def test_files_are_read_before_the_lock_is_taken() -> None:
    store, device = StoreOfFiles(), make_device("virtual")
    cache = open_expert_cache(device, store, SlotPlan((4,), 2), lambda layer: np.arange(5.0), chunk_bytes=32)
    assert cache is not None
    queue, store.lock = cache.queue, cache.slots.lock
    first, second = (requested(queue.request(0, expert, Urgency.NEXT)) for expert in (1, 2))
    assert set(store.asked) == {1, 2} and first.state is second.state is WAITING, "a prefetch waits for no file"
    store.there.add(2)
    transfers = queue.demand(0, [3, 4])
    assert second.state is RUNNING, "it is sent once it is in memory"
    for event in queue.ready(transfers):
        event.wait()
    second.wait()
    assert first.state is WAITING
    first.wait()
    device.synchronize()
    for transfer in (first, second, *transfers):
        assert transfer.state is LANDED
        found = cache.arena.array[64 * transfer.slot : 64 * transfer.slot + 64]  # type: ignore[attr-defined]
        assert (found == transfer.expert).all()
    queue.release_all(transfers, None)
    cache.close()
