"""Which experts have a slot, how many may, and who leaves first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.experts.transfer.arena import SlotPlan

Priority = Callable[[int], NDArray[np.float64]]
Admission = Literal["always", "bypass"]
NOBODY = -1


class Residents:
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
