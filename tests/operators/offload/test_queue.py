"""What the queue promises: who goes first, who joins whom, what can be dropped, and how long it will take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.loading_devices import DEVICES
from support.loading_rig import Rig, chunk_order, make_device

from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.queue import AHEAD_DEPTH, DEPTH
from moegraft.operators.offload.transfers import Transfer, TransferState, Urgency, default_chunk_bytes

DEMAND, NEXT, DEEPER, PROMOTION = Urgency
WAITING, RUNNING, LANDED, CANCELLED, FAILED = TransferState
CHUNK, EXPERT = 64, 256


@pytest.fixture(params=DEVICES)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def rig(kind: str) -> Iterator[Rig]:
    """Two layers of five experts, three of which may stay, and two slots to load into."""
    rig = Rig(make_device(kind), (3, 3))
    yield rig
    rig.close()


def asked(transfer: Transfer | None) -> Transfer:
    assert transfer is not None
    return transfer


def load(rig: Rig, layer: int, *experts: int) -> None:
    for expert in experts:
        rig.queue.request(layer, expert, PROMOTION)
    rig.settle_all()


def use(rig: Rig, demand: Transfer) -> None:
    """Reads what was demanded and lets go."""
    rig.compute.wait(demand.ready())
    rig.read(demand.layer, demand.expert, demand.slot)
    rig.queue.release(demand, rig.after())


def test_a_demand_lands_and_is_read(rig: Rig) -> None:
    demand = asked(rig.queue.request(1, 4, DEMAND))
    assert demand.slot >= 0
    assert not rig.slots.holds(1, 4), "not before it has landed"
    use(rig, demand)
    rig.settle()
    assert demand.state is LANDED
    assert rig.slots.slot_of(1).tolist() == [-1, -1, -1, -1, demand.slot]
    assert rig.reads == 1
    rig.check()


def test_the_host_can_wait_for_a_transfer(rig: Rig) -> None:
    transfer = asked(rig.queue.request(0, 2, NEXT))
    transfer.wait()
    assert rig.bytes_in(transfer.slot) == bytes([3]) * EXPERT


def test_a_demand_joins_a_running_prefetch(rig: Rig) -> None:
    with rig.standstill():
        prefetch = asked(rig.queue.request(0, 1, DEEPER))
        assert prefetch.state is RUNNING
        demand = asked(rig.queue.request(0, 1, DEMAND))
    assert demand is prefetch
    assert demand.urgency is DEMAND
    use(rig, demand)
    rig.settle()
    rig.check()
    assert chunk_order(rig.spans) == [(0, 1)] * 4, "every byte went once"
    statistics = rig.queue.statistics
    assert (statistics.joined, statistics.upgraded, statistics.landed_bytes) == (1, 1, EXPERT)
    assert rig.slots.prefetches_used == 1


def test_a_demand_of_who_is_there_has_landed(rig: Rig) -> None:
    load(rig, 0, 3)
    demand = asked(rig.queue.request(0, 3, DEMAND))
    assert demand.state is LANDED
    assert demand.arrival_ms == 0.0
    use(rig, demand)
    rig.settle()
    rig.check()
    assert len(rig.spans) == 4
    assert rig.queue.request(0, 3, NEXT) is None, "and a prefetch has nothing to do"


def test_two_demands_of_one_expert_hold_it_twice(rig: Rig) -> None:
    with rig.standstill():
        first, second = asked(rig.queue.request(0, 3, DEMAND)), asked(rig.queue.request(0, 3, DEMAND))
    assert first is second
    use(rig, first)
    assert len(second.pins) == 1
    use(rig, second)
    rig.settle()
    rig.check()


def test_the_most_urgent_goes_first(rig: Rig) -> None:
    with rig.standstill():
        rig.queue.request(0, 0, PROMOTION)  # its first chunk has the link already
        for expert, urgency in [(1, PROMOTION), (2, DEEPER), (3, NEXT)]:
            rig.queue.request(0, expert, urgency)
        demand = asked(rig.queue.request(1, 4, DEMAND))
    use(rig, demand)
    rig.settle_all()
    order = [(0, 0)] + [(1, 4)] * 4 + [(0, 3)] * 4 + [(0, 2)] * 4 + [(0, 0)] * 3 + [(0, 1)] * 4
    assert chunk_order(rig.spans) == order
    assert rig.queue.statistics.suspended == 1


@pytest.mark.parametrize(("urgency", "depth"), [(NEXT, AHEAD_DEPTH), (PROMOTION, AHEAD_DEPTH), (DEMAND, DEPTH)])
def test_one_chunk_at_most_is_handed_over_and_of_demands_two(rig: Rig, urgency: Urgency, depth: int) -> None:
    link = rig.queue.link
    with rig.standstill():
        transfers = [rig.queue.request(0, expert, urgency) for expert in range(3)]
        assert link.sent_bytes - link.landed_bytes == depth * CHUNK
    while not rig.queue.idle:
        with rig.slots.lock:
            assert link.sent_bytes - link.landed_bytes <= depth * CHUNK
        rig.device.advance(0.01)
    for transfer in transfers if urgency is DEMAND else ():
        rig.queue.release(asked(transfer), None)


@pytest.mark.parametrize("chunks", range(8))
def test_a_flood_delays_a_demand_by_one_chunk_at_most(rig: Rig, chunks: int) -> None:
    for expert in range(5):
        rig.queue.request(0, expert, NEXT)
    wait_for_chunks(rig, chunks)
    with rig.slots.lock:  # so that nothing lands between the count and the request
        landed = len(rig.spans)
        demand = asked(rig.queue.request(1, 2, DEMAND))
    use(rig, demand)
    rig.settle_all()
    rig.check()
    order = chunk_order(rig.spans)
    assert order.index((1, 2)) - landed <= AHEAD_DEPTH, (landed, order)
    start = order.index((1, 2))
    assert order[start : start + 4] == [(1, 2)] * 4, "and nothing comes between its own"


def wait_for_chunks(rig: Rig, count: int) -> None:
    """Until so many have landed."""
    while len(rig.spans) < count:
        rig.device.advance(0.01)


@pytest.mark.parametrize("chunks", range(6))
def test_a_suspended_prefetch_goes_on_where_it_stopped(rig: Rig, chunks: int) -> None:
    prefetch = asked(rig.queue.request(0, 1, NEXT))
    wait_for_chunks(rig, min(chunks, 4))
    use(rig, asked(rig.queue.request(1, 0, DEMAND)))
    use(rig, asked(rig.queue.request(0, 1, DEMAND)))
    rig.settle()
    rig.check()
    assert sorted(chunk_order(rig.spans)) == [(0, 1)] * 4 + [(1, 0)] * 4, "no byte twice"
    assert prefetch.state is LANDED
    assert rig.queue.statistics.suspended <= 1


@pytest.mark.parametrize("chunks", range(5))
def test_cancelled_after_every_chunk(rig: Rig, chunks: int) -> None:
    prefetch = asked(rig.queue.request(0, 1, NEXT))
    wait_for_chunks(rig, chunks)
    sent = prefetch.sent_bytes
    cancelled = rig.queue.cancel(prefetch)
    rig.settle()
    assert cancelled == (prefetch.state is CANCELLED)
    if cancelled:
        assert sent < EXPERT
        assert rig.queue.link.sent_bytes <= EXPERT
        assert not rig.slots.holds(0, 1)
        with pytest.raises(ValueError, match="expert 1 of layer 0 was cancelled"):
            prefetch.ready()
    else:
        assert rig.slots.holds(0, 1), "what is on the way whole arrives"
    rig.check()
    use(rig, asked(rig.queue.request(0, 1, DEMAND)))
    use(rig, asked(rig.queue.request(0, 2, DEMAND)))
    rig.settle()
    rig.check()
    assert rig.reads == 2


def test_cancelling_twice_and_after_landing_does_nothing(rig: Rig) -> None:
    with rig.standstill():
        rig.queue.request(1, 0, NEXT)
        waiting = asked(rig.queue.request(0, 1, NEXT))
        assert waiting.state is WAITING
        assert rig.queue.cancel(waiting)
        assert not rig.queue.cancel(waiting)
    landed = asked(rig.queue.request(0, 2, NEXT))
    rig.settle_all()
    assert not rig.queue.cancel(landed)
    assert rig.queue.statistics.cancelled == 1


def test_replanning_drops_what_has_not_started(rig: Rig) -> None:
    with rig.standstill():
        transfers = [asked(rig.queue.request(0, expert, NEXT)) for expert in range(5)]
        assert rig.queue.replan({(0, 3)}) == 3
        assert [each.state for each in transfers] == [RUNNING, CANCELLED, CANCELLED, WAITING, CANCELLED]
        assert rig.queue.replan(started=True) == 2, "the one that runs, and the one that waits"
    rig.settle()
    rig.check()
    assert rig.queue.statistics.cancelled_bytes == AHEAD_DEPTH * CHUNK


@pytest.mark.parametrize(
    ("capacity", "staging"),
    [
        (0, 1),  # nothing stays: experts stream through one slot
        (1, 1),
        (2, 2),  # fewer than are chosen
        (3, 3),  # as many
        (5, 0),  # all: nobody ever leaves, so nothing is staged
    ],
)
def test_capacities(kind: str, capacity: int, staging: int) -> None:
    rig = Rig(make_device(kind), (capacity, capacity), staging)
    for step in range(12):
        layer, chosen = step % 2, [(step * 2 + shift) % 5 for shift in range(3)]
        pin = rig.slots.pin(layer, chosen)
        for expert, slot in zip(chosen, pin.slots, strict=True):
            if slot >= 0:
                rig.read(layer, expert, slot)
        for expert, slot in zip(chosen, pin.slots, strict=True):
            if slot < 0:
                demand = rig.queue.request(layer, expert, DEMAND)
                if demand is not None:
                    use(rig, demand)
        rig.slots.release(pin, rig.after())
        rig.settle()
        rig.check()
        assert all(len(rig.slots.residents(each)) <= max(capacity, 0) + (capacity == 0) for each in range(2))
    assert rig.reads >= 12
    if capacity == 5:
        assert rig.slots.evictions == 0
        assert rig.queue.statistics.landed == 10
    rig.close()


def test_without_capacity_nothing_is_prefetched(kind: str) -> None:
    rig = Rig(make_device(kind), (0, 3))
    assert rig.queue.request(0, 1, NEXT) is None
    assert rig.queue.request(1, 1, NEXT) is not None
    rig.settle()
    rig.close()


def test_a_demand_without_a_slot_is_refused_until_one_is_let_go(rig: Rig) -> None:
    load(rig, 0, 0, 1, 2)
    load(rig, 1, 0, 1, 2)
    held = rig.slots.pin(0, [0, 1, 2]), rig.slots.pin(1, [0, 1, 2])
    demands = [asked(rig.queue.request(0, expert, DEMAND)) for expert in (3, 4)]
    assert rig.queue.available == 0
    assert rig.queue.request(1, 4, DEMAND) is None
    assert rig.queue.statistics.refused == 1
    use(rig, demands[0])
    rig.slots.release(held[0], rig.after())
    rig.settle()
    use(rig, asked(rig.queue.request(1, 4, DEMAND)))
    use(rig, demands[1])
    rig.slots.release(held[1], None)
    rig.settle()
    rig.check()
    assert [len(rig.slots.residents(layer)) for layer in range(2)] == [3, 3]


def test_a_demand_takes_the_slot_of_a_prefetch(rig: Rig) -> None:
    load(rig, 0, 0, 1, 2)
    load(rig, 1, 0, 1, 2)
    with rig.standstill():
        started, waiting = asked(rig.queue.request(0, 3, DEEPER)), asked(rig.queue.request(0, 4, NEXT))
        demands = [asked(rig.queue.request(1, 3, DEMAND))]
        assert rig.queue.available == 1
        demands.append(asked(rig.queue.request(1, 4, DEMAND)))
        assert (started.state, waiting.state) == (CANCELLED, WAITING)
        assert demands[1].slot == started.slot
    for demand in demands:
        use(rig, demand)
    rig.settle_all()
    rig.check()
    assert rig.reads == 2


def test_the_victim_stays_until_the_newcomer_has_landed(rig: Rig) -> None:
    load(rig, 0, 2, 3, 4)
    with rig.standstill():
        newcomer = asked(rig.queue.request(0, 1, NEXT))
        assert newcomer.slot not in rig.slots.slot_of(0)
        pin = rig.slots.pin(0, [2])
        rig.read(0, 2, pin.slots[0])
        rig.slots.release(pin, rig.after())
    rig.settle()
    rig.check()
    assert sorted(rig.slots.residents(0)) == [1, 3, 4], "the lowest priority but for the newcomer's left"


def test_estimates_on_a_known_link() -> None:
    """The virtual link takes 0.064 ms a chunk."""
    rig = Rig(make_device("virtual"), (3, 3))
    load(rig, 0, 0)
    assert rig.queue.transfer_ms() == pytest.approx(0.256)
    assert rig.queue.busy_ms() == 0.0
    prefetch, waiting = asked(rig.queue.request(0, 1, NEXT)), asked(rig.queue.request(0, 2, NEXT))
    assert rig.queue.in_flight(0) == {1: pytest.approx(0.256)}, "what waits can be had no sooner than a new demand"
    assert waiting.arrival_ms == pytest.approx(0.064 + 0.256), "if it were demanded now"
    rig.device.advance(0.1)
    assert prefetch.arrival_ms == pytest.approx(0.156)
    assert rig.queue.busy_ms() == pytest.approx(0.028)
    demand = asked(rig.queue.request(1, 0, DEMAND))
    assert demand.arrival_ms == pytest.approx(0.028 + 0.256)
    assert rig.queue.busy_ms() == pytest.approx(0.028 + 0.256)
    start_ms = rig.device.now_ms()
    expected_ms = demand.arrival_ms
    demand.wait()
    assert rig.device.now_ms() - start_ms == pytest.approx(expected_ms)
    rig.queue.release(demand, None)
    rig.settle()
    assert rig.queue.link.gb_s == pytest.approx(0.001)
    assert {nbytes for nbytes, _ in rig.measured} == {CHUNK}
    assert all(ms == pytest.approx(0.064) for _, ms in rig.measured)
    rig.close()


def test_what_waits_for_a_reader_does_not_count_as_a_slow_link() -> None:
    rig = Rig(make_device("virtual"), (1, 1), staging=1)
    load(rig, 0, 0)
    pin = rig.slots.pin(0, [0])
    for _ in range(20):
        rig.read(0, 0, pin.slots[0])  # 2 ms
    rig.slots.release(pin, rig.after())
    demands = []
    for expert in (3, 4):
        demands.append(asked(rig.queue.request(0, expert, DEMAND)))
        use(rig, demands[-1])
    rig.settle()
    rig.check()
    assert rig.queue.link.gb_s == pytest.approx(0.001)
    rig.close()


def test_spans_follow_each_other() -> None:
    rig = Rig(make_device("virtual"), (3, 3))
    load(rig, 0, 0, 1)
    assert [name for name, _, _ in rig.spans[:4]] == [f"layer 0 expert 0 {part}%" for part in (25, 50, 75, 100)]
    for (_, _, end), (_, start, _) in zip(rig.spans, rig.spans[1:], strict=False):
        assert start == pytest.approx(end)
    rig.close()


def test_closed_it_refuses(kind: str) -> None:
    rig = Rig(make_device(kind), (3, 3))
    flood = [asked(rig.queue.request(0, expert, NEXT)) for expert in range(5)]
    rig.close()
    assert {each.state for each in flood} <= {LANDED, CANCELLED, RUNNING}
    with pytest.raises(DeviceError, match="closed"):
        rig.queue.request(0, 0, DEMAND)
    rig.close()


@pytest.mark.parametrize(
    ("expert_bytes", "chunks"),
    [(4_866_048, 2), (15_482_880, 6), (99_090_432, 40), (64, 1), (1_000_000_000, 64)],  # DeepSeek-V2-Lite, Qwen2-57B, Mixtral in int4
)
def test_chunks_of_real_experts(expert_bytes: int, chunks: int) -> None:
    chunk = default_chunk_bytes(expert_bytes)
    assert -(-expert_bytes // chunk) == chunks
    assert chunk % 64 == 0
