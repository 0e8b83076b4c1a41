"""Slots that nobody holds, and their last readers, which must be done before another expert is loaded into one."""

from __future__ import annotations

from collections import deque

from moegraft.operators.experts.devices.interface import Event


class Vacancies:
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
