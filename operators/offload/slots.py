"""The slot table of a device: which expert is in which slot, which slots are pinned, and which expert is evicted next.

A slot goes FREE -> LOADING -> READY -> EVICTING -> FREE, and a READY slot with pins stays. An expert is loaded into a slot of its own and
enters the table only when it has landed (`commit`): the expert that it replaces is resident until then. An evicted slot is loaded again
only after its last reader: the copy stream waits for the event that was recorded behind that reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from threading import RLock
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.devices.base import Event
from moegraft.operators.offload.store import SlotPlan

Priority = Callable[[int], NDArray[np.float64]]
Admission = Literal["always", "bypass"]
NO_EXPERT = -1


class SlotState(IntEnum):
    FREE = 0
    LOADING = 1
    READY = 2
    EVICTING = 3  # out of the table, but pinned, or read by work that may still run


@dataclass(eq=False, slots=True)
class Pin:
    """Slots that keep their experts until released; -1 where the expert was not READY."""

    layer: int
    slots: list[int]
    generations: list[int]
    released: bool = False


@dataclass(eq=False, slots=True)
class Reservation:
    """A slot that an expert is being loaded into.

    Attributes:
        after: the slot's last reader, which the copy stream waits for before the first byte.
        sent: all bytes were submitted.
        superseded: the slot was unpinned after that, and the next load was submitted behind it and its readers: it never becomes READY.
    """

    layer: int
    expert: int
    slot: int
    generation: int
    after: Event | None
    sent: bool = False
    superseded: bool = False


class ResidentSet:
    """The READY experts of each layer, and which of them is evicted next. Not thread-safe: the slot table's lock guards it.

    A layer may be over its capacity for a while: an expert that lands cannot evict pinned or protected ones.

    Args:
        priority: returns (E,) float64 for a layer, larger: keep.
        admission: of experts that landed since a pin of their layer was last released. `always`: they are evicted last. `bypass`: by
            priority, as all others; while the lowest of them is pinned, nothing of a higher priority is evicted in its place.
    """

    def __init__(self, layers: int, num_experts: int, plan: SlotPlan, priority: Priority, admission: Admission) -> None:
        self.table = np.full((layers, num_experts), -1, np.int32)
        self.members: list[dict[int, int]] = [{} for _ in range(layers)]  # expert: slot
        self.version = 0
        self.capacity = plan.capacity
        self._priority = priority
        self._bypass = admission == "bypass"
        self.over_capacity: set[int] = set()  # layers
        self._protected: list[frozenset[int]] = [frozenset()] * layers
        self._new: list[set[int]] = [set() for _ in range(layers)]

    def add(self, layer: int, expert: int, slot: int) -> None:
        members = self.members[layer]
        assert expert not in members, f"expert {expert} of layer {layer} has two slots"
        members[expert] = slot
        self.table[layer, expert] = slot
        self._new[layer].add(expert)
        self._changed(layer)

    def remove(self, layer: int, expert: int) -> int:
        """Remove an expert and return its slot."""
        slot = self.members[layer].pop(expert)
        self.table[layer, expert] = -1
        self._new[layer].discard(expert)
        self._changed(layer)
        return slot

    def protect(self, layer: int, experts: Iterable[int]) -> None:
        self._protected[layer] = frozenset(experts)

    def end_admission(self, layer: int) -> None:
        """Treat the layer's new experts as all others from now on."""
        if self._new[layer]:
            self._new[layer].clear()

    def excess(self, layer: int) -> int:
        """Return the number of experts above the layer's capacity."""
        return len(self.members[layer]) - self.capacity[layer]

    def evictable_excess(self, pins: Sequence[int]) -> int:
        """Return how many of the experts above capacity are not pinned; `pins` of each slot."""
        total = 0
        for layer in self.over_capacity:
            total += min(self.excess(layer), sum(not pins[slot] for slot in self.members[layer].values()))
        return total

    def victim(self, layer: int, pins: Sequence[int], landed: int = NO_EXPERT, *, spare_protected: bool = True) -> int | None:
        """Return the layer's next expert to evict: not pinned, not `landed`, not spared; None if there is none."""
        members, protected, new = self.members[layer], self._protected[layer], self._new[layer]
        unpinned = [expert for expert, slot in members.items() if not pins[slot] and expert != landed]
        if protected and spare_protected:
            unpinned = [expert for expert in unpinned if expert not in protected]
        last = protected if self._bypass else protected | new
        ordinary = [expert for expert in unpinned if expert not in last] if last else unpinned
        candidates = ordinary or unpinned
        if not candidates:
            return None
        values = self._priority(layer)
        expert = min(candidates, key=values.__getitem__)
        if self._bypass and spare_protected and any(pins[members[each]] and values[each] < values[expert] for each in new):
            return None
        return expert

    def _changed(self, layer: int) -> None:
        self.version += 1
        if self.excess(layer) > 0:
            self.over_capacity.add(layer)
        else:
            self.over_capacity.discard(layer)


class FreeList:
    """Unpinned slots without an expert, and each slot's last reader. Not thread-safe: the slot table's lock guards it.

    Readers run on one stream, so that their events are done in the order in which they are recorded: to find a slot whose readers are
    done, only the earliest event is asked for, which is a call of the driver.

    Attributes:
        free: slots whose readers are done.
        evicting: evicted slots that may still be read.
    """

    def __init__(self, slots: int) -> None:
        self.free = deque(range(slots))
        self.evicting: list[int] = []
        self._last_use: list[Event | None] = [None] * slots
        self._used_at = [0] * slots  # the numbers of these events
        self._uses = 0
        self._use: Event | None = None  # the latest event
        self._all_used_at = 0  # of readers of all slots
        self._use_of_all: Event | None = None

    def __len__(self) -> int:
        return len(self.free) + len(self.evicting)

    def record_use(self, slot: int, last_use: Event) -> None:
        """Record that a slot was read, up to the event."""
        self._last_use[slot] = last_use
        self._used_at[slot] = self._number(last_use)

    def record_use_of_all(self, last_use: Event) -> None:
        """Record that all slots were read, up to the event; slots evicted from now on are loaded behind it."""
        self._use_of_all, self._all_used_at = last_use, self._number(last_use)

    def _number(self, last_use: Event) -> int:
        """Return the place of an event in the order of the readers; many slots are read up to the same one."""
        if last_use is not self._use:
            self._use = last_use
            self._uses += 1
        return self._uses

    def on_evicted(self, slot: int) -> None:
        """Let the slot's next load wait for the last reader of all slots where that is later than its own."""
        if self._used_at[slot] < self._all_used_at:
            self._last_use[slot], self._used_at[slot] = self._use_of_all, self._all_used_at

    def pop_last_use(self, slot: int) -> Event | None:
        """Return and forget the event that the next load into the slot waits for."""
        last_use, self._last_use[slot] = self._last_use[slot], None
        return last_use

    def restore_last_use(self, slot: int, last_use: Event | None) -> None:
        """Undo `pop_last_use` for a cancelled load, unless the slot was read meanwhile."""
        if self._last_use[slot] is None:
            self._last_use[slot] = last_use

    def add(self, slot: int) -> bool:
        """Add an unpinned slot and return whether its readers are done."""
        if self._readers_done(slot):
            self.free.append(slot)
            return True
        self.evicting.append(slot)
        return False

    def take(self) -> int | None:
        """Return a free slot, else the evicted one whose readers are done first; None where there is neither."""
        if self.free:
            return self.free.popleft()
        if not self.evicting:
            return None
        slot = min(self.evicting, key=self._used_at.__getitem__)
        self.evicting.remove(slot)
        self._readers_done(slot)
        return slot

    def _readers_done(self, slot: int) -> bool:
        last_use = self._last_use[slot]
        if last_use is None or last_use.done():
            self._last_use[slot] = None
            return True
        return False


class SlotTable:
    """Slots, pins and evictions of one device. Thread-safe: `lock`, a reentrant one, guards it and the transfer queue on top of it.

    All readers of the slots run on one stream and are released in its order: the event of the last one covers those before.

    Args:
        priority, admission: see `ResidentSet`; `priority` is called under the lock.

    Attributes:
        prefetches_wasted: prefetched experts that were evicted before their first use.
        on_available: called under the lock when a slot becomes available.
    """

    def __init__(self, layers: int, num_experts: int, plan: SlotPlan, priority: Priority, admission: Admission = "always") -> None:
        if len(plan.capacity) != layers:
            raise ValueError(f"capacities for {len(plan.capacity)} layers, but there are {layers}")
        if plan.staging == 0 and 0 < plan.total < layers * num_experts:
            raise ValueError("a cache that cannot hold every expert needs a staging slot to load into: staging is 0")
        self.lock = RLock()
        self.layers = layers
        self.num_experts = num_experts
        self.plan = plan
        self.evictions = 0
        self.prefetches_used = 0
        self.prefetches_wasted = 0
        self.on_available: Callable[[], None] | None = None
        self._residents = ResidentSet(layers, num_experts, plan, priority, admission)
        self._free_list = FreeList(plan.slots)
        self._state = [SlotState.FREE] * plan.slots
        self._generation = [0] * plan.slots
        self._pins = [0] * plan.slots
        self._unused_prefetch = [False] * plan.slots
        self._loading: list[Reservation | None] = [None] * plan.slots
        self._supersedable: dict[int, None] = {}  # LOADING and unpinned, with all bytes and readers submitted
        self._frozen = False

    @property
    def version(self) -> int:
        """A number that rises with every change of the table."""
        return self._residents.version

    @property
    def table(self) -> NDArray[np.int32]:
        """(L, E): the slot of each READY expert, -1 for the others. A view that changes under the lock."""
        return self._residents.table

    def slot_of(self, layer: int) -> NDArray[np.int32]:
        """Return (E,): one row of `table`."""
        row: NDArray[np.int32] = self._residents.table[layer]
        return row

    def residents(self, layer: int) -> list[int]:
        with self.lock:
            return list(self._residents.members[layer])

    def is_resident(self, layer: int, expert: int) -> bool:
        return expert in self._residents.members[layer]

    def capacity_of(self, layer: int) -> int:
        return self._residents.capacity[layer]

    def full(self, layer: int) -> bool:
        """Return whether an expert that lands in this layer causes an eviction."""
        return self._residents.excess(layer) >= 0

    def state(self, slot: int) -> SlotState:
        return self._state[slot]

    @property
    def available(self) -> int:
        """The number of slots that demands can have now."""
        with self.lock:
            excess = 0 if self._frozen else self._residents.evictable_excess(self._pins)
            return len(self._free_list) + len(self._supersedable) + excess

    def pin(self, layer: int, experts: Iterable[int]) -> Pin:
        """Pin those of the experts that are READY until `release`."""
        with self.lock:
            find, pins, unused = self._residents.members[layer].get, self._pins, self._unused_prefetch
            slots = [find(expert, -1) for expert in experts]
            for slot in slots:
                if slot >= 0:
                    pins[slot] += 1
                    if unused[slot]:
                        self._mark_used(slot)
            generation = self._generation
            return Pin(layer, slots, [generation[slot] if slot >= 0 else 0 for slot in slots])

    def pin_loading(self, reservation: Reservation) -> Pin:
        """Pin a slot that is being loaded, for a demand: once landed the expert stays until `release`."""
        with self.lock:
            slot = self._slot_of(reservation)
            self._pins[slot] += 1
            self._supersedable.pop(slot, None)
            if self._unused_prefetch[slot]:
                self._mark_used(slot)
            return Pin(reservation.layer, [slot], [reservation.generation])

    def release(self, pin: Pin, last_use: Event | None) -> None:
        """Release a pin; `last_use` is the event behind its readers, None if there were none."""
        with self.lock:
            assert not pin.released, "a pin is released once"
            pin.released = True
            pins, available = self._pins, False
            for slot, generation in zip(pin.slots, pin.generations, strict=True):
                if slot < 0:
                    continue
                assert self._generation[slot] == generation and pins[slot] > 0, f"slot {slot} changed under its pin"
                pins[slot] -= 1
                if last_use is not None:
                    self._free_list.record_use(slot, last_use)
                if pins[slot] == 0 and self._state[slot] is not SlotState.READY:
                    available |= self._reclaim(slot)
            available |= self._shrink(pin.layer)
            self._residents.end_admission(pin.layer)
            if available:
                self._notify_available()

    def protect(self, layer: int, experts: Iterable[int]) -> None:
        """Set the layer's experts that only a demand may evict, such as those prefetched for a later layer."""
        with self.lock:
            self._residents.protect(layer, experts)
            if self._shrink(layer):
                self._notify_available()

    def freeze(self) -> None:
        """Evict nothing until `thaw`: for readers of the whole table, such as a captured decode step."""
        with self.lock:
            assert not self._frozen, "frozen already"
            self._frozen = True

    def thaw(self, last_use: Event | None) -> None:
        """End `freeze`; the event is behind all readers in between."""
        with self.lock:
            assert self._frozen, "not frozen"
            self._frozen = False
            if last_use is not None:
                self._free_list.record_use_of_all(last_use)
            available = False
            for layer in sorted(self._residents.over_capacity):
                available |= self._shrink(layer)
            for layer in range(self.layers):
                self._residents.end_admission(layer)
            if available:
                self._notify_available()

    def reserve(self, layer: int, expert: int, *, demand: bool = False) -> Reservation | None:
        """Reserve a slot to load into; None if none is available.

        A demand has two more ways to a slot: it evicts an expert above capacity, protected or not, and it supersedes another load.
        """
        with self.lock:
            assert not self.is_resident(layer, expert), f"expert {expert} of layer {layer} is already resident"
            if demand and not self._free_list and not self._frozen:
                for crowded in sorted(self._residents.over_capacity):
                    victim = self._residents.victim(crowded, self._pins, spare_protected=False)
                    if victim is not None:
                        self._evict(crowded, victim)
                        break
            slot = self._free_list.take()
            if slot is None and demand and self._supersedable:
                slot = next((slot for slot in self._supersedable if not self._unused_prefetch[slot]), next(iter(self._supersedable)))
                del self._supersedable[slot]
                superseded = self._loading[slot]
                assert superseded is not None, "a supersedable slot is being loaded"
                superseded.superseded = True
            if slot is None:
                return None
            self._generation[slot] += 1
            self._state[slot] = SlotState.LOADING
            self._unused_prefetch[slot] = not demand
            after = self._free_list.pop_last_use(slot)
            reservation = self._loading[slot] = Reservation(layer, expert, slot, self._generation[slot], after)
            return reservation

    def mark_sent(self, reservation: Reservation) -> None:
        """Record that all bytes of the load were submitted."""
        with self.lock:
            slot = self._slot_of(reservation)
            reservation.sent = True
            if self._pins[slot] == 0:
                self._reclaim(slot)

    def commit(self, reservation: Reservation) -> None:
        """Make a landed expert READY unless it was superseded, and evict another where its layer is over capacity."""
        with self.lock:
            if reservation.superseded:
                return
            slot, layer, expert = self._slot_of(reservation), reservation.layer, reservation.expert
            self._state[slot] = SlotState.READY
            self._supersedable.pop(slot, None)
            self._residents.add(layer, expert, slot)
            # An expert whose demand was already released (its readers wait in their stream) has served its purpose.
            used = self._pins[slot] == 0 and not self._unused_prefetch[slot]
            if self._shrink(layer, landed=NO_EXPERT if used else expert):
                self._notify_available()

    def cancel(self, reservation: Reservation) -> None:
        """Give the slot back. Copies into it that are in flight do no harm: later ones follow on the same stream."""
        with self.lock:
            if reservation.superseded:
                return
            slot = self._slot_of(reservation)
            self._free_list.restore_last_use(slot, reservation.after)
            self._unused_prefetch[slot] = False
            self._supersedable.pop(slot, None)
            self._vacate(slot)
            self._notify_available()

    def _slot_of(self, reservation: Reservation) -> int:
        slot = reservation.slot
        current = self._generation[slot] == reservation.generation and self._state[slot] is SlotState.LOADING
        assert current, f"slot {slot} no longer belongs to this reservation"
        return slot

    def _mark_used(self, slot: int) -> None:
        self._unused_prefetch[slot] = False
        self.prefetches_used += 1

    def _notify_available(self) -> None:
        if self.on_available is not None:
            self.on_available()

    def _shrink(self, layer: int, landed: int = NO_EXPERT) -> bool:
        """Evict down to the layer's capacity as far as possible; return whether anything was evicted."""
        evicted = False
        while not self._frozen and self._residents.excess(layer) > 0:
            victim = self._residents.victim(layer, self._pins, landed)
            if victim is None:
                break
            self._evict(layer, victim)
            evicted = True
        return evicted

    def _evict(self, layer: int, expert: int) -> None:
        slot = self._residents.remove(layer, expert)
        self.evictions += 1
        if self._unused_prefetch[slot]:
            self._unused_prefetch[slot] = False
            self.prefetches_wasted += 1
        self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        """Mark a slot without a valid expert; it is reclaimed once its pins are released."""
        self._state[slot] = SlotState.EVICTING
        self._free_list.on_evicted(slot)
        if self._pins[slot] == 0:
            self._reclaim(slot)

    def _reclaim(self, slot: int) -> bool:
        """Make an unpinned slot that is not READY available if possible, and return whether it is."""
        if self._state[slot] is SlotState.EVICTING:
            if self._free_list.add(slot):
                self._state[slot] = SlotState.FREE
            return True
        loading = self._loading[slot]
        if loading is not None and loading.sent:
            self._supersedable[slot] = None
            return True
        return False
