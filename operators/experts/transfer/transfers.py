"""One expert on its way to a device, and what a queue counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, takewhile
from typing import Protocol

from moegraft.operators.experts.devices.interface import DeviceError, Event
from moegraft.operators.experts.transfer.slot_types import Pin, Reservation


class Urgency(IntEnum):
    """What a transfer is for; a smaller number goes first."""

    DEMAND = 0
    NEXT = 1
    DEEPER = 2
    PROMOTION = 3


class TransferState(IntEnum):
    WAITING = 0  # no byte sent
    RUNNING = 1  # sent in part, or in whole and not landed; suspended where a more urgent one runs
    LANDED = 2
    CANCELLED = 3
    FAILED = 4


class _Queue(Protocol):
    def hand_over(self, transfer: Transfer) -> Event: ...
    def arrival_ms(self, transfer: Transfer) -> float: ...


class Transfer:
    """An expert that is asked for; made by `TransferQueue.request`.

    Attributes:
        pins: of the demands that joined, each released once through `TransferQueue.release`.
        events: of its chunks that were sent and are not told yet.
    """

    __slots__ = (
        "_queue",
        "error",
        "events",
        "expert",
        "layer",
        "pins",
        "reservation",
        "sent_bytes",
        "state",
        "told_bytes",
        "urgency",
        "way_mark",
    )

    def __init__(self, queue: _Queue, layer: int, expert: int, urgency: Urgency) -> None:
        self._queue = queue
        self.layer = layer
        self.expert = expert
        self.urgency = urgency
        self.state = TransferState.WAITING
        self.reservation: Reservation | None = None
        self.pins: list[Pin] = []
        self.sent_bytes = 0
        self.told_bytes = 0
        self.way_mark = 0  # of its last byte sent, on the link's clock
        self.events: list[Event] = []
        self.error: DeviceError | None = None

    @property
    def slot(self) -> int:
        """Where it goes, -1 while that is open: a demand always has a slot."""
        if self.pins:
            return self.pins[0].slots[0]
        return -1 if self.reservation is None else self.reservation.slot

    @property
    def done(self) -> bool:
        """Whether it has landed, failed or was cancelled."""
        return self.state >= TransferState.LANDED

    @property
    def overtaken(self) -> bool:
        """Whether its slot was given to another behind it: it will land and not stay."""
        return self.reservation is not None and self.reservation.overtaken

    @property
    def arrival_ms(self) -> float:
        """Estimated from now: what goes before it and itself, at the measured speed."""
        return self._queue.arrival_ms(self)

    def ready(self) -> Event:
        """The event after its last byte, for a stream to wait for; what is left of it is handed over now, before anything else.

        Raises:
            DeviceError: it has failed; failures to come surface behind the event.
            ValueError: it was cancelled.
        """
        return self._queue.hand_over(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until it is on the device; raises what `ready` and its event raise."""
        self.ready().wait(timeout_s)


class Unsent:
    """Transfers with bytes left to send, in the order in which they go."""

    def __init__(self) -> None:
        self._lines: tuple[list[Transfer], ...] = tuple([] for _ in Urgency)

    def __iter__(self) -> Iterator[Transfer]:
        return chain.from_iterable(self._lines)

    def __bool__(self) -> bool:
        return any(self._lines)

    def add(self, transfer: Transfer) -> None:
        self._lines[transfer.urgency].append(transfer)

    def remove(self, transfer: Transfer) -> None:
        self._lines[transfer.urgency].remove(transfer)

    def upgrade(self, transfer: Transfer, urgency: Urgency) -> None:
        """Also one that is not here any more."""
        line = self._lines[transfer.urgency]
        if transfer in line:
            line.remove(transfer)
            self._lines[urgency].append(transfer)
        transfer.urgency = urgency

    def prefetches(self) -> list[Transfer]:
        return [*chain.from_iterable(self._lines[Urgency.NEXT :])]

    def demands_before(self, transfer: Transfer | None) -> Iterator[Transfer]:
        return takewhile(lambda each: each is not transfer, self._lines[Urgency.DEMAND])


@dataclass(slots=True)
class TransferStatistics:
    """Counts since the queue was made.

    Attributes:
        joined: requests for an expert on its way; `upgraded` where that made it more urgent.
        cancelled: before their last byte was sent; `cancelled_bytes` had been sent for nothing.
        suspended: times that a transfer sent in part gave way to another.
        refused: demands for which no slot was left.
    """

    requested: int = 0
    demanded: int = 0
    joined: int = 0
    upgraded: int = 0
    refused: int = 0
    landed: int = 0
    landed_bytes: int = 0
    cancelled: int = 0
    cancelled_bytes: int = 0
    suspended: int = 0
    failed: int = 0
