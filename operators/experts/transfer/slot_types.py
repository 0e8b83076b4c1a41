"""What a slot can be, who holds it, and what is being loaded into it."""

from __future__ import annotations

from enum import IntEnum

from moegraft.operators.experts.devices.interface import Event


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
