"""Which expert is in which slot of a device.

A slot goes FREE -> LOADING -> READY -> EVICTING -> FREE; READY slots with pins cannot leave. Experts are loaded into slots of their
own and take a place only when they have landed (`commit`): the one they replace stays until then. A slot that was left is loaded
again only after its last reader, by the copy stream waiting for the event that was recorded behind that reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.experts.devices.interface import Event
from moegraft.operators.experts.transfer.arena import SlotPlan
from moegraft.operators.experts.transfer.residents import NOBODY, Admission, Priority, Residents
from moegraft.operators.experts.transfer.slot_types import Pin, Reservation, SlotState
from moegraft.operators.experts.transfer.vacancies import Vacancies

__all__ = ["Pin", "Reservation", "SlotState", "SlotTable"]


class SlotTable:
    """Slots, pins and evictions of one device. Thread-safe: `lock`, a reentrant one, guards it, and the transfer queue on top of it.

    All readers of the slots run on one stream, and they are released in its order: the event of the last one covers those before.

    Args:
        priority, admission: see `Residents`; priorities are asked for under the lock.
    """

    def __init__(self, layers: int, num_experts: int, plan: SlotPlan, priority: Priority, admission: Admission = "always") -> None:
        if not isinstance(plan.capacity, int) and len(plan.capacity) != layers:
            raise ValueError(f"capacities for {len(plan.capacity)} layers, but there are {layers}")
        if plan.staging == 0 and 0 < plan.total < layers * num_experts:
            raise ValueError("a cache that cannot hold every expert needs a staging slot to load into: staging is 0")
        self.lock = RLock()
        self.layers = layers
        self.num_experts = num_experts
        self.plan = plan
        self.evictions = 0
        self.prefetches_used = 0
        self.prefetches_wasted = 0  # left before anybody used them
        self.on_room: Callable[[], None] | None = None  # called under the lock when a slot can be had again
        self._residents = Residents(layers, num_experts, plan, priority, admission)
        self._state = [SlotState.FREE] * plan.slots
        self._generation = [0] * plan.slots
        self._pins = [0] * plan.slots
        self._unused_prefetch = [False] * plan.slots
        self._vacant = Vacancies(plan.slots)
        self._spent: dict[int, None] = {}  # LOADING, with all bytes and readers handed over
        self._loading: list[Reservation | None] = [None] * plan.slots
        self._frozen = False

    @property
    def version(self) -> int:
        """Rises with every change of the table."""
        return self._residents.version

    @property
    def table(self) -> NDArray[np.int32]:
        """(L, E): the slot of each READY expert, -1 for the others. A view that changes under the lock."""
        return self._residents.table

    def slot_of(self, layer: int) -> NDArray[np.int32]:
        """(E,): one row of `table`."""
        row: NDArray[np.int32] = self._residents.table[layer]
        return row

    def residents(self, layer: int) -> list[int]:
        with self.lock:
            return list(self._residents.members[layer])

    def holds(self, layer: int, expert: int) -> bool:
        return expert in self._residents.members[layer]

    def capacity_of(self, layer: int) -> int:
        """Of the whole pool where layers share one."""
        return self._residents.capacity_of(layer)

    def full(self, layer: int) -> bool:
        """Whether who lands in this layer pushes another out."""
        return self._residents.over(layer) >= 0

    def state(self, slot: int) -> SlotState:
        return self._state[slot]

    @property
    def available(self) -> int:
        """Slots that a demand can have now."""
        with self.lock:
            surplus = 0 if self._frozen else self._residents.surplus(self._pins)
            return len(self._vacant) + len(self._spent) + surplus

    def pin(self, layer: int, experts: Iterable[int]) -> Pin:
        """Holds those of the experts that are READY until `release`."""
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
        """Holds a slot that is being loaded, for a demand: once landed it stays until `release`."""
        with self.lock:
            slot = self._slot_of(reservation)
            self._pins[slot] += 1
            self._spent.pop(slot, None)
            if self._unused_prefetch[slot]:
                self._mark_used(slot)
            return Pin(reservation.layer, [slot], [reservation.generation])

    def release(self, pin: Pin, last_use: Event | None) -> None:
        """Lets go: after the event where there were readers, which were handed over before it was recorded."""
        with self.lock:
            assert not pin.released, "a pin is released once"
            pin.released = True
            pins, room = self._pins, False
            for slot, generation in zip(pin.slots, pin.generations, strict=True):
                if slot < 0:
                    continue
                assert self._generation[slot] == generation and pins[slot] > 0, f"slot {slot} changed under its pin"
                pins[slot] -= 1
                if last_use is not None:
                    self._vacant.used(slot, last_use)
                if pins[slot] == 0 and self._state[slot] is not SlotState.READY:
                    room |= self._let_go(slot)
            room |= self._shrink(pin.layer)
            self._residents.settle(pin.layer)
            if room:
                self._tell_room()

    def set_keep(self, layer: int, experts: Iterable[int]) -> None:
        """Experts that only a demand may push out, such as those prefetched for a layer to come; replaces the former ones."""
        with self.lock:
            self._residents.keep(layer, experts)
            if self._shrink(layer):
                self._tell_room()

    def freeze(self) -> None:
        """Nobody leaves until `thaw`: for readers that take the whole table, such as a captured decode step."""
        with self.lock:
            assert not self._frozen, "frozen already"
            self._frozen = True

    def thaw(self, last_use: Event | None) -> None:
        """Ends `freeze`; the event is after all readers in between."""
        with self.lock:
            assert self._frozen, "not frozen"
            self._frozen = False
            if last_use is not None:
                self._vacant.all_used(last_use)
            room = False
            for layer in self._residents.crowded():
                room |= self._shrink(layer)
            for layer in range(self.layers):
                self._residents.settle(layer)
            if room:
                self._tell_room()

    def reserve(self, layer: int, expert: int, *, demand: bool = False) -> Reservation | None:
        """A slot to load into; None where none can be had. A demand pushes out who is above capacity, kept or not."""
        with self.lock:
            assert not self.holds(layer, expert), f"expert {expert} of layer {layer} is there already"
            slot = self._take(demand=demand)
            if slot is None:
                return None
            self._generation[slot] += 1
            self._state[slot] = SlotState.LOADING
            self._unused_prefetch[slot] = not demand
            reservation = self._loading[slot] = Reservation(layer, expert, slot, self._generation[slot], self._vacant.pop_last_use(slot))
            return reservation

    def sent(self, reservation: Reservation) -> None:
        """All bytes of the load were handed over."""
        with self.lock:
            slot = self._slot_of(reservation)
            reservation.sent = True
            if self._pins[slot] == 0:
                self._let_go(slot)

    def commit(self, reservation: Reservation) -> None:
        """The expert has landed: it is READY unless overtaken, and where its layer is over capacity another leaves now."""
        with self.lock:
            if reservation.overtaken:
                return
            slot, layer, expert = self._slot_of(reservation), reservation.layer, reservation.expert
            self._state[slot] = SlotState.READY
            self._spent.pop(slot, None)
            self._residents.add(layer, expert, slot)
            # Who was demanded and read already (its readers wait in their stream) has had its use.
            spent = self._pins[slot] == 0 and not self._unused_prefetch[slot]
            if self._shrink(layer, protected=NOBODY if spent else expert):
                self._tell_room()

    def cancel(self, reservation: Reservation) -> None:
        """Gives the slot back. Copies into it that are under way are no danger: later ones follow on the same stream."""
        with self.lock:
            if reservation.overtaken:
                return
            slot = self._slot_of(reservation)
            self._vacant.put_back_last_use(slot, reservation.after)
            self._unused_prefetch[slot] = False
            self._spent.pop(slot, None)
            self._leave(slot)
            self._tell_room()

    def _slot_of(self, reservation: Reservation) -> int:
        slot = reservation.slot
        current = self._generation[slot] == reservation.generation and self._state[slot] is SlotState.LOADING
        assert current, f"slot {slot} is no longer this reservation's"
        return slot

    def _mark_used(self, slot: int) -> None:
        self._unused_prefetch[slot] = False
        self.prefetches_used += 1

    def _tell_room(self) -> None:
        if self.on_room is not None:
            self.on_room()

    def _shrink(self, layer: int, protected: int = NOBODY) -> bool:
        """Brings the layer, or the pool, back to its capacity as far as it can be."""
        shrunk = False
        while not self._frozen and self._residents.over(layer) > 0:
            victim = self._residents.victim(layer, self._pins, protected)
            if victim is None:
                break
            self._evict(*victim)
            shrunk = True
        return shrunk

    def _push_out(self) -> None:
        for layer in [] if self._frozen else self._residents.crowded():
            victim = self._residents.victim(layer, self._pins, spare_kept=False)
            if victim is not None:
                self._evict(*victim)
                return

    def _evict(self, layer: int, expert: int) -> None:
        slot = self._residents.remove(layer, expert)
        self.evictions += 1
        if self._unused_prefetch[slot]:
            self._unused_prefetch[slot] = False
            self.prefetches_wasted += 1
        self._leave(slot)

    def _leave(self, slot: int) -> None:
        """Out of the table; to be had again once nobody holds it."""
        self._state[slot] = SlotState.EVICTING
        self._vacant.left(slot)
        if self._pins[slot] == 0:
            self._make_room(slot)

    def _let_go(self, slot: int) -> bool:
        """Of a slot that nobody holds any more and that is not READY; whether it can be had now."""
        if self._state[slot] is SlotState.EVICTING:
            self._make_room(slot)
            return True
        loading = self._loading[slot]
        if loading is not None and loading.sent:
            self._spent[slot] = None
            return True
        return False

    def _make_room(self, slot: int) -> None:
        if self._vacant.add(slot):
            self._state[slot] = SlotState.FREE

    def _take(self, *, demand: bool) -> int | None:
        """A vacant slot. A demand has two ways more: pushing out who is above capacity, and loading behind who is being loaded."""
        if demand and not self._vacant:
            self._push_out()
        found = self._vacant.take()
        if found is not None:
            return found
        if demand and self._spent:
            slot = next((slot for slot in self._spent if not self._unused_prefetch[slot]), next(iter(self._spent)))
            del self._spent[slot]
            overtaken = self._loading[slot]
            assert overtaken is not None, "a spent slot is being loaded"
            overtaken.overtaken = True
            return slot
        return None
