"""One expert on its way to a device, and what a queue counts.

Sends the chunks of transfers, one at a time, and hears when they have landed.

How fast the link is, and how long what is on it will take.

When transfers will have landed: what goes before them, at the measured speed of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain, takewhile
from math import inf
from threading import RLock
from typing import Protocol

from moegraft.operators.offload.devices.base import Buffer, Device, DeviceError, Event, OnSpan
from moegraft.operators.offload.slots import Pin, Reservation
from moegraft.operators.offload.store import ExpertStore, HostSource


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


class PendingQueue:
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


SHARE = 0.1  # of a new measurement in the average: a copy that the host disturbed counts little
START_GB_S = 12.0  # PCIe 3.0 x16, until the first copies are measured


class BandwidthEstimate:
    """Bytes sent and landed in order, and a moving average of the time they take."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.landed_bytes = 0
        self.measured = 0
        self._ms_per_byte = 1 / START_GB_S / 1e6
        self._since_ms = 0.0  # what is under way began then: at the last landing, or when the idle link was given work

    @property
    def gb_s(self) -> float:
        return 1 / self._ms_per_byte / 1e6

    def ms(self, nbytes: int) -> float:
        """What a transfer of that size takes by itself."""
        return nbytes * self._ms_per_byte

    def send(self, nbytes: int, now_ms: float) -> int:
        """Counts bytes that were handed over; their mark on the way."""
        if self.sent_bytes == self.landed_bytes:
            self._since_ms = now_ms
        self.sent_bytes += nbytes
        return self.sent_bytes

    def land(self, nbytes: int, sent_ms: float, now_ms: float, *, counts: bool) -> float:
        """Counts bytes that landed, as a measurement only if nothing but the link held them up; when they were started."""
        start_ms = max(sent_ms, self._since_ms)
        self.landed_bytes += nbytes
        self._since_ms = now_ms
        if counts and now_ms > start_ms:
            ms_per_byte = (now_ms - start_ms) / nbytes
            share = SHARE if self.measured else 1.0
            self._ms_per_byte += share * (ms_per_byte - self._ms_per_byte)
            self.measured += 1
        return start_ms

    def until_ms(self, bytes_ahead: int, now_ms: float) -> float:
        """How long until so many bytes, those under way first, have landed."""
        if bytes_ahead <= 0:
            return 0.0
        under_way = self.sent_bytes - self.landed_bytes
        spent_ms = now_ms - self._since_ms if under_way > 0 else 0.0
        # What is under way may be all but there; it is not there before it is told.
        return self.ms(bytes_ahead) - min(max(0.0, spent_ms), self.ms(min(bytes_ahead, under_way)))


MOST_CHUNKS = 64  # of an expert
CHUNK_BYTES = 2_500_000  # 0.1 ms at 24 GB/s: a demand waits for two, and below it the host's part of a chunk shows

OnTold = Callable[[Transfer, DeviceError | None], None]
OnTransfer = Callable[[int, float], None]


def default_chunk_bytes(expert_bytes: int) -> int:
    """Chunks of about 2.5 MB; a multiple of 64."""
    chunks = min(MOST_CHUNKS, max(1, round(expert_bytes / CHUNK_BYTES)))
    return -(-expert_bytes // chunks // 64) * 64


class ChunkSender:
    """Hands chunks to the stream "copy" of a device. The queue's lock guards it; `on_told` is called under it, on the notifier.

    Args:
        arena: the slots' memory, slot after slot; None moves nothing (simulations).
        on_span, on_transfer: see `TransferQueue`.
    """

    def __init__(
        self,
        device: Device,
        store: ExpertStore,
        source: HostSource,
        arena: Buffer | None,
        lock: RLock,
        *,
        chunk_bytes: int,
        statistics: TransferStatistics,
        on_told: OnTold,
        on_span: OnSpan | None,
        on_transfer: OnTransfer | None,
    ) -> None:
        self.link = BandwidthEstimate()
        self.enqueued = 0  # chunks
        self._device = device
        self._size = store.expert_bytes
        self._source = source
        self._arena = arena
        self._lock = lock
        self._chunk_bytes = chunk_bytes
        self._statistics = statistics
        self._on_told = on_told
        self._on_span = on_span
        self._on_transfer = on_transfer
        self._copy = device.stream("copy")
        self._previous: Transfer | None = None

    def send(self, transfer: Transfer) -> None:
        """The next chunk of a transfer that has a slot; raises DeviceError where it is refused."""
        reservation = transfer.reservation
        assert reservation is not None, "it has a slot before its first byte"
        start = transfer.sent_bytes
        nbytes = min(self._chunk_bytes, self._size - start)
        after = reservation.after if start == 0 else None
        if after is not None:
            self._copy.wait(after)
        if start + nbytes == self._size:
            for event in transfer.events:  # so that the last chunk's event has the failures of all
                self._copy.wait(event)
        source = self._source.chunk(transfer.layer, transfer.expert, start, nbytes)
        self._device.copy(self._copy, self._arena, reservation.slot * self._size + start, source, nbytes)
        event = self._copy.record()
        self._source.sent(transfer.layer, event)
        self._count_suspension(transfer)
        now_ms = self._device.now_ms()
        transfer.state = TransferState.RUNNING
        transfer.sent_bytes += nbytes
        transfer.way_mark = self.link.send(nbytes, now_ms)
        transfer.events.append(event)
        self.enqueued += 1
        self._device.notify(event, partial(self._told, transfer, event, nbytes, now_ms, after is None))

    def _told(self, transfer: Transfer, event: Event, nbytes: int, sent_ms: float, counts: bool, error: DeviceError | None) -> None:
        """A chunk has landed, or failed; `counts` unless something but the link held it up."""
        with self._lock:
            now_ms = self._device.now_ms()
            counts = counts and error is None
            start_ms = self.link.land(nbytes, sent_ms, now_ms, counts=counts)
            self.enqueued -= 1
            transfer.events.remove(event)
            transfer.told_bytes += nbytes
            if self._on_span is not None:
                part = f"{transfer.told_bytes * 100 // self._size}%"
                self._on_span("link", f"layer {transfer.layer} expert {transfer.expert} {part}", start_ms, now_ms)
            if self._on_transfer is not None and counts:
                self._on_transfer(nbytes, now_ms - start_ms)
            self._on_told(transfer, error)

    def _count_suspension(self, transfer: Transfer) -> None:
        previous, self._previous = self._previous, transfer
        if previous is not None and previous is not transfer and not previous.done and 0 < previous.sent_bytes < self._size:
            self._statistics.suspended += 1


class ArrivalEstimates:
    """Estimates, in ms from now; the queue's lock guards what they look at."""

    def __init__(self, link: BandwidthEstimate, unsent: PendingQueue, expert_bytes: int) -> None:
        self._link = link
        self._unsent = unsent
        self._expert_bytes = expert_bytes

    def of(self, transfer: Transfer, now_ms: float) -> float:
        """Of a transfer if it were demanded now; infinite for one that failed or was dropped."""
        if transfer.done:
            return 0.0 if transfer.state is TransferState.LANDED else inf
        left = self._expert_bytes - transfer.sent_bytes
        ahead = transfer.way_mark - self._link.landed_bytes if left == 0 else self._bytes_before(transfer) + left
        return self._link.until_ms(ahead, now_ms)

    def busy_ms(self, now_ms: float) -> float:
        """Until the first byte of a new demand."""
        return self._link.until_ms(self._bytes_before(None), now_ms)

    def _bytes_before(self, transfer: Transfer | None) -> int:
        """What lands before a demand starts, or goes on: what is under way, and the demands before it; None: a new one."""
        waiting = sum(self._expert_bytes - each.sent_bytes for each in self._unsent.demands_before(transfer))
        return self._link.sent_bytes - self._link.landed_bytes + waiting
