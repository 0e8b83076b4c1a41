"""The slot table: residents, evictions, and that a slot is loaded again only after its last reader."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from moegraft.operators.offload.slots import Admission, Reservation, SlotState, SlotTable
from moegraft.operators.offload.store import SlotPlan

FREE, LOADING, READY, EVICTING = SlotState
EXPERTS = 6


class FakeEvent:
    """An event whose state the test sets."""

    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        raise AssertionError("a slot table never waits")


class Table:
    """A slot table whose priorities are the experts' numbers."""

    def __init__(self, plan: SlotPlan, layers: int = 2, admission: Admission = "always") -> None:
        self.values: NDArray[np.float64] = np.tile(np.arange(EXPERTS, dtype=np.float64), (layers, 1))
        self.slots = SlotTable(layers, EXPERTS, plan, lambda layer: self.values[layer], admission)

    def load(self, layer: int, *experts: int) -> None:
        for expert in experts:
            self.slots.commit(self.reserve(layer, expert))

    def reserve(self, layer: int, expert: int, *, demand: bool = False) -> Reservation:
        reservation = self.slots.reserve(layer, expert, demand=demand)
        assert reservation is not None
        return reservation

    def resident(self, layer: int) -> list[int]:
        return sorted(self.slots.residents(layer))


def test_the_life_of_a_slot() -> None:
    table = Table(SlotPlan((1, 1), 1))
    slots = table.slots
    reservation = table.reserve(0, 4)
    slot = reservation.slot
    assert slots.state(slot) is LOADING
    assert (slots.slot_of(0) == -1).all()
    slots.commit(reservation)
    assert slots.state(slot) is READY
    assert slots.slot_of(0).tolist() == [-1, -1, -1, -1, slot, -1]
    pin = slots.pin(0, [4, 5])
    assert pin.slots == [slot, -1]
    table.load(0, 5)
    assert table.resident(0) == [4, 5], "pinned ones cannot leave: the layer is over capacity"
    last_use = FakeEvent()
    slots.release(pin, last_use)
    assert table.resident(0) == [5]
    assert slots.state(slot) is EVICTING
    table.load(1, 0)
    again = table.reserve(1, 1)
    assert (again.slot, again.after) == (slot, last_use), "no other slot is free, so the copy waits for the reader"
    assert again.generation == reservation.generation + 1
    slots.cancel(again)
    last_use.is_done = True
    assert table.reserve(1, 2).after is None


def test_a_slot_whose_reader_is_done_goes_first() -> None:
    table = Table(SlotPlan((2, 2), 2))
    table.load(0, 2, 3)
    table.load(1, 2, 3)
    pin = table.slots.pin(0, [2, 3])
    busy, done = FakeEvent(), FakeEvent()
    table.slots.release(table.slots.pin(0, [3]), done)
    table.slots.release(table.slots.pin(0, [2]), busy)
    table.slots.release(pin, None)
    left = pin.slots
    table.load(0, 4, 5)
    assert [table.slots.state(slot) for slot in left] == [EVICTING, EVICTING]
    done.is_done = True
    first = table.reserve(1, 0)
    assert (first.slot, first.after) == (left[1], None)
    second = table.reserve(1, 1)
    assert (second.slot, second.after) == (left[0], busy)
    assert table.slots.reserve(1, 4) is None


def test_the_lowest_priority_is_evicted_and_the_new_expert_stays() -> None:
    table = Table(SlotPlan((3, 3), 1))
    table.load(0, 3, 4, 5)
    table.values[0] = [9, 9, 9, 2, 1, 3]
    table.load(0, 0)
    assert table.resident(0) == [0, 3, 5]
    table.values[0, 0] = 0
    table.slots.release(table.slots.pin(0, [3]), None)
    table.load(0, 1)
    assert table.resident(0) == [1, 3, 5], "an earlier arrival is treated as all others"
    assert table.slots.evictions == 2


@pytest.mark.parametrize(("admission", "stay"), [("always", [0, 5]), ("bypass", [4, 5])])
def test_admission_of_a_demand_with_the_lowest_priority(admission: Admission, stay: list[int]) -> None:
    table = Table(SlotPlan((2, 2), 2), admission=admission)
    table.load(0, 4, 5)
    reservation = table.reserve(0, 0, demand=True)
    pin = table.slots.pin_loading(reservation)
    held = table.slots.pin(0, [4, 5])
    table.slots.commit(reservation)
    assert table.resident(0) == [0, 4, 5]
    table.slots.release(held, None)
    table.slots.release(pin, None)
    assert table.resident(0) == stay


@pytest.mark.parametrize("admission", ["always", "bypass"])
def test_a_demand_read_before_it_landed(admission: Admission) -> None:
    """Its readers wait in their stream, so it is released before it is READY, and its last use counts nevertheless."""
    table = Table(SlotPlan((0, 0), 1), admission=admission)
    reservation = table.reserve(0, 3, demand=True)
    last_use = FakeEvent()
    table.slots.release(table.slots.pin_loading(reservation), last_use)
    table.slots.commit(reservation)
    assert table.resident(0) == [], "there is no room for an expert that was used already"
    assert table.reserve(1, 0, demand=True).after is last_use


def test_a_failed_load_frees_its_slot_when_the_demand_is_released() -> None:
    table = Table(SlotPlan((1, 1), 1))
    reservation = table.reserve(0, 3, demand=True)
    pin = table.slots.pin_loading(reservation)
    table.load(0, 1)
    table.load(1, 1)
    table.slots.cancel(reservation)
    assert table.slots.state(reservation.slot) is EVICTING
    assert table.slots.reserve(1, 2) is None
    table.slots.release(pin, None)
    assert table.slots.state(reservation.slot) is FREE
    assert table.reserve(1, 2).slot == reservation.slot


def test_protected_experts_are_evicted_only_for_a_demand() -> None:
    table = Table(SlotPlan((1, 1), 2))
    table.slots.protect(0, [1, 2])
    table.load(0, 1)
    table.load(0, 2)
    assert table.resident(0) == [1, 2], "kept: the layer is over capacity"
    assert table.slots.available == 3, "a free one, one never filled in layer 1, and the one over capacity"
    table.load(1, 5)
    table.reserve(1, 0)
    assert table.slots.reserve(1, 3) is None
    table.reserve(1, 3, demand=True)
    assert table.resident(0) == [2], "the lower one left"
    table.slots.protect(0, [])
    assert table.resident(0) == [2]


def test_a_frozen_table_evicts_nothing() -> None:
    table = Table(SlotPlan((1, 1), 2))
    table.load(0, 4)
    version = table.slots.version
    table.slots.freeze()
    snapshot = table.slots.table.copy()
    table.load(0, 5)
    assert table.slots.version > version
    assert table.resident(0) == [4, 5]
    slot = int(snapshot[0, 4])
    last_use = FakeEvent()
    table.slots.thaw(last_use)
    assert table.resident(0) == [5]
    assert table.slots.state(slot) is EVICTING
    assert [table.reserve(1, expert).after for expert in (0, 1, 2)] == [None, None, last_use]


def test_the_later_of_two_last_uses_counts() -> None:
    table = Table(SlotPlan((2, 2), 1))
    table.load(0, 1, 2)
    frozen, own = FakeEvent(), FakeEvent()
    table.slots.freeze()
    table.slots.thaw(frozen)
    table.slots.release(table.slots.pin(0, [1]), own)  # after the thaw
    table.load(0, 5)
    table.load(0, 4)
    reserved = [table.reserve(1, expert).after for expert in range(3)]
    assert sorted(map(str, reserved), key=len)[0] == "None" and set(reserved) == {None, frozen, own}


def test_used_and_wasted_prefetches_are_counted() -> None:
    table = Table(SlotPlan((2, 2), 1))
    table.load(0, 1, 2)
    table.slots.release(table.slots.pin(0, [2]), None)
    table.slots.release(table.slots.pin(0, [2]), None)
    table.load(0, 3)
    table.load(0, 4)
    slots = table.slots
    assert (slots.prefetches_used, slots.prefetches_wasted, slots.evictions) == (1, 1, 2)
    slots.pin_loading(table.reserve(1, 3))
    assert slots.prefetches_used == 2, "a demand joined it"


def test_misuse_is_caught() -> None:
    table = Table(SlotPlan((1, 1), 1))
    reservation = table.reserve(0, 1)
    table.slots.commit(reservation)
    for misuse, message in [
        (lambda: table.slots.commit(reservation), "no longer belongs to this reservation"),
        (lambda: table.slots.cancel(reservation), "no longer belongs to this reservation"),
        (lambda: table.slots.reserve(0, 1), "expert 1 of layer 0 is already resident"),
        (lambda: table.slots.thaw(None), "not frozen"),
    ]:
        with pytest.raises(AssertionError, match=re.escape(message)):
            misuse()
    pin = table.slots.pin(0, [1])
    table.slots.release(pin, None)
    with pytest.raises(AssertionError, match="released once"):
        table.slots.release(pin, None)


def test_impossible_plans_are_rejected() -> None:
    with pytest.raises(ValueError, match="staging is 0"):
        SlotTable(2, EXPERTS, SlotPlan((3, 3), 0), lambda layer: np.zeros(EXPERTS))
    with pytest.raises(ValueError, match="capacities for 1 layers, but there are 2"):
        SlotTable(2, EXPERTS, SlotPlan((3,), 1), lambda layer: np.zeros(EXPERTS))
    with pytest.raises(ValueError, match="must not be negative"):
        SlotPlan((3, -1), 1)
    SlotTable(2, EXPERTS, SlotPlan((EXPERTS, EXPERTS), 0), lambda layer: np.zeros(EXPERTS))
    nothing = SlotTable(2, EXPERTS, SlotPlan((0, 0), 0), lambda layer: np.zeros(EXPERTS))
    assert nothing.reserve(0, 0, demand=True) is None
    assert nothing.pin(0, [1, 2]).slots == [-1, -1]


def test_a_load_whose_readers_were_all_submitted_can_be_superseded() -> None:
    """More experts stream through a slot than the host has seen landing: the streams keep them in order."""
    table = Table(SlotPlan((0, 0), 1))
    first, read = table.reserve(0, 0, demand=True), FakeEvent()
    pin = table.slots.pin_loading(first)
    table.slots.mark_sent(first)
    assert table.slots.reserve(0, 1, demand=True) is None, "it is pinned"
    table.slots.release(pin, read)
    assert table.slots.available == 1
    assert table.slots.reserve(0, 1) is None, "not for a prefetch"
    second = table.reserve(0, 1, demand=True)
    assert (second.slot, second.after, first.superseded) == (first.slot, read, True)
    table.slots.commit(first)
    assert table.resident(0) == [], "where it has landed another one is in flight"
    table.slots.cancel(first)
    table.slots.commit(second)
    assert not second.superseded


def test_a_load_that_is_demanded_again_keeps_its_slot() -> None:
    table = Table(SlotPlan((0, 0), 1))
    first = table.reserve(0, 0, demand=True)
    table.slots.mark_sent(first)
    table.slots.release(table.slots.pin_loading(first), FakeEvent())
    again = table.slots.pin_loading(first)
    assert table.slots.reserve(0, 1, demand=True) is None
    table.slots.release(again, None)
    assert table.reserve(0, 1, demand=True).after is not None, "the first reader counts"


def test_a_demand_supersedes_a_prefetch_last() -> None:
    table = Table(SlotPlan((0, 0), 2))
    prefetch, demand = table.reserve(0, 0), table.reserve(0, 1, demand=True)
    pin = table.slots.pin_loading(demand)
    table.slots.mark_sent(prefetch)
    table.slots.mark_sent(demand)
    table.slots.release(pin, None)
    assert [table.reserve(0, expert, demand=True).slot for expert in (2, 3)] == [demand.slot, prefetch.slot]
    assert table.slots.reserve(0, 4, demand=True) is None, "these are not sent"
