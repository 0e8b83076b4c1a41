"""Which expert is in which slot of a device.

A slot goes FREE -> LOADING -> READY -> EVICTING -> FREE; READY slots with pins cannot leave. Experts are loaded into slots of their
own and take a place only when they have landed (`commit`): the one they replace stays until then. A slot that was left is loaded
again only after its last reader, by the copy stream waiting for the event that was recorded behind that reader.

What a slot can be, who holds it, and what is being loaded into it.

Slots that nobody holds, and their last readers, which must be done before another expert is loaded into one.

Which experts have a slot, how many may, and who leaves first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from threading import RLock
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.devices.base import Event
from moegraft.operators.offload.store import SlotPlan

__all__ = ["Pin", "Reservation", "SlotState", "SlotTable"]


Priority = Callable[[int], NDArray[np.float64]]
Admission = Literal["always", "bypass"]
NOBODY = -1


class ResidentSet:
    """The READY experts of each layer. Not thread-safe: the slot table's lock guards it.

    A layer, or the pool that all share, may hold more than its capacity for a while: who has just landed does not push out pinned
    or kept experts. It is then crowded.

    Args:
        priority: of a layer, (E,) float64, larger stays; comparable between layers where they share a pool.
        admission: of those who landed since a layer's readers last let go. `always`: they leave last. `bypass`: like everybody, by
            priority; while one is held that would leave, nobody leaves in its place.
    """

    def __init__(self, layers: int, num_experts: int, plan: SlotPlan, priority: Priority, admission: Admission) -> None:
        self.table = np.full((layers, num_experts), -1, np.int32)
        self.members: list[dict[int, int]] = [{} for _ in range(layers)]  # expert: slot
        self.version = 0
        self._pool = plan.capacity if isinstance(plan.capacity, int) else None
        self._capacity = [] if isinstance(plan.capacity, int) else list(plan.capacity)
        self._priority = priority
        self._bypass = admission == "bypass"
        self._count = 0
        self._crowded: set[int] = set()  # layers; of a pool, all count as the first
        self._keep: list[frozenset[int]] = [frozenset()] * layers
        self._fresh: list[set[int]] = [set() for _ in range(layers)]

    def capacity_of(self, layer: int) -> int:
        return self._capacity[layer] if self._pool is None else self._pool

    def add(self, layer: int, expert: int, slot: int) -> None:
        members = self.members[layer]
        assert expert not in members, f"expert {expert} of layer {layer} has two slots"
        members[expert] = slot
        self.table[layer, expert] = slot
        self._count += 1
        self._fresh[layer].add(expert)
        self._changed(layer)

    def remove(self, layer: int, expert: int) -> int:
        """The slot it had."""
        slot = self.members[layer].pop(expert)
        self.table[layer, expert] = -1
        self._count -= 1
        self._fresh[layer].discard(expert)
        self._changed(layer)
        return slot

    def keep(self, layer: int, experts: Iterable[int]) -> None:
        self._keep[layer] = frozenset(experts)

    def settle(self, layer: int) -> None:
        """Who has landed in this layer is like the others from now on."""
        if self._fresh[layer]:
            self._fresh[layer].clear()

    def over(self, layer: int) -> int:
        """Experts above the capacity of the layer, or of the pool."""
        return len(self.members[layer]) - self._capacity[layer] if self._pool is None else self._count - self._pool

    def crowded(self) -> list[int]:
        """A layer of each set of experts that is above its capacity."""
        return sorted(self._crowded)

    def surplus(self, pins: Sequence[int]) -> int:
        """Experts above capacity that nothing holds; `pins` of each slot."""
        total = 0
        for layer in self._crowded:
            idle = sum(not pins[slot] for each in self._shared_with(layer) for slot in self.members[each].values())
            total += min(self.over(layer), idle)
        return total

    def victim(self, layer: int, pins: Sequence[int], protected: int = NOBODY, *, spare_kept: bool = True) -> tuple[int, int] | None:
        """Layer and expert of who leaves when this layer is over capacity: not pinned, not `protected`, kept ones only if not spared."""
        best: tuple[bool, float, int, int] | None = None
        for lowest, each in self._by_lowest(layer):
            if best is not None and not best[0] and lowest > best[1]:
                break  # nor has any after it one who ranks as low
            found = self._lowest(each, pins, protected if each == layer else NOBODY, spare_kept=spare_kept)
            if found is not None and (best is None or found < best):
                best = found
        return None if best is None else best[2:]

    def _by_lowest(self, layer: int) -> Iterable[tuple[float, int]]:
        """The layers that share slots with this one, by the lowest rank that any of their experts has."""
        if self._pool is None:
            return ((-np.inf, layer),)
        layers = range(len(self.members))
        ranks = np.where(self.table >= 0, np.concatenate([self._priority(each) for each in layers]).reshape(self.table.shape), np.inf)
        return sorted(zip(ranks.min(axis=1).tolist(), layers, strict=True))

    def _lowest(self, layer: int, pins: Sequence[int], protected: int, *, spare_kept: bool) -> tuple[bool, float, int, int] | None:
        members, keep, fresh = self.members[layer], self._keep[layer], self._fresh[layer]
        idle = [expert for expert, slot in members.items() if not pins[slot] and expert != protected]
        if keep and spare_kept:
            idle = [expert for expert in idle if expert not in keep]
        last = keep if self._bypass else keep | fresh
        plain = [expert for expert in idle if expert not in last] if last else idle
        candidates = plain or idle
        if not candidates:
            return None
        values = self._priority(layer)
        expert = min(candidates, key=values.__getitem__)
        if self._bypass and spare_kept and any(pins[members[each]] and values[each] < values[expert] for each in fresh):
            return None
        return (not plain, float(values[expert]), layer, expert)

    def _shared_with(self, layer: int) -> Sequence[int]:
        return (layer,) if self._pool is None else range(len(self.members))

    def _changed(self, layer: int) -> None:
        self.version += 1
        crowd = layer if self._pool is None else 0
        if self.over(crowd) > 0:
            self._crowded.add(crowd)
        else:
            self._crowded.discard(crowd)


class SlotState(IntEnum):
    FREE = 0
    LOADING = 1
    READY = 2
    EVICTING = 3  # left, but held, or read by work that may still run


class Pin:
    """Slots that stay as they are until released; -1 where the expert was not READY."""

    __slots__ = ("generations", "layer", "released", "slots")

    def __init__(self, layer: int, slots: list[int], generations: list[int]) -> None:
        self.layer = layer
        self.slots = slots
        self.generations = generations
        self.released = False


class Reservation:
    """A slot that an expert is being loaded into. The copy stream waits for `after`, its last reader, before the first byte.

    Attributes:
        sent: all of its bytes were handed over.
        overtaken: nobody held it after that, and the next load was handed over behind it and its readers: it never gets READY.
    """

    __slots__ = ("after", "expert", "generation", "layer", "overtaken", "sent", "slot")

    def __init__(self, layer: int, expert: int, slot: int, generation: int, after: Event | None) -> None:
        self.layer = layer
        self.expert = expert
        self.slot = slot
        self.generation = generation
        self.after = after
        self.sent = False
        self.overtaken = False


class FreeList:
    """Which slots can be had, and behind what. Not thread-safe: the slot table's lock guards it.

    Attributes:
        free: their readers are done.
        evicting: were left, and may be read still.
    """

    def __init__(self, slots: int) -> None:
        self.free = deque(range(slots))
        self.evicting: deque[int] = deque()
        self._last_use: list[Event | None] = [None] * slots
        self._use_epoch = [0] * slots
        self._epoch = 0  # of readers of all slots
        self._epoch_use: Event | None = None

    def __len__(self) -> int:
        return len(self.free) + len(self.evicting)

    def used(self, slot: int, last_use: Event) -> None:
        """A slot was read, up to the event."""
        self._last_use[slot] = last_use
        self._use_epoch[slot] = self._epoch

    def all_used(self, last_use: Event) -> None:
        """All slots were read, up to the event; those that are left from now on are loaded behind it."""
        self._epoch += 1
        self._epoch_use = last_use

    def left(self, slot: int) -> None:
        """Its expert is out of the table."""
        if self._use_epoch[slot] < self._epoch:
            self._last_use[slot] = self._epoch_use

    def pop_last_use(self, slot: int) -> Event | None:
        """What the next load into it waits for."""
        last_use, self._last_use[slot] = self._last_use[slot], None
        return last_use

    def put_back_last_use(self, slot: int, last_use: Event | None) -> None:
        """Of a load that was cancelled: whoever is next waits for the same, unless it was read meanwhile."""
        if self._last_use[slot] is None:
            self._last_use[slot] = last_use

    def add(self, slot: int) -> bool:
        """A slot that nobody holds; whether its readers are done."""
        if self._over(slot):
            self.free.append(slot)
            return True
        self.evicting.append(slot)
        return False

    def take(self) -> int | None:
        """A free slot, else one that was left: with its last reader done if there is one, else the first."""
        if self.free:
            return self.free.popleft()
        for position, slot in enumerate(self.evicting):
            if self._over(slot):
                del self.evicting[position]
                return slot
        return self.evicting.popleft() if self.evicting else None

    def _over(self, slot: int) -> bool:
        last_use = self._last_use[slot]
        if last_use is None or last_use.done():
            self._last_use[slot] = None
            return True
        return False


class SlotTable:
    """Slots, pins and evictions of one device. Thread-safe: `lock`, a reentrant one, guards it, and the transfer queue on top of it.

    All readers of the slots run on one stream, and they are released in its order: the event of the last one covers those before.

    Args:
        priority, admission: see `ResidentSet`; priorities are asked for under the lock.
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
        self._residents = ResidentSet(layers, num_experts, plan, priority, admission)
        self._state = [SlotState.FREE] * plan.slots
        self._generation = [0] * plan.slots
        self._pins = [0] * plan.slots
        self._unused_prefetch = [False] * plan.slots
        self._vacant = FreeList(plan.slots)
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
