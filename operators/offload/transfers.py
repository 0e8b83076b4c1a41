"""A transfer: one expert in flight to a device, sent in chunks over a link whose bandwidth is measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING

from moegraft.operators.offload.devices.base import Buffer, Device, DeviceError, Event, OnSpan
from moegraft.operators.offload.slots import Pin, Reservation
from moegraft.operators.offload.store import ExpertStore, HostSource

if TYPE_CHECKING:
    from moegraft.operators.offload.queue import TransferQueue

MAX_CHUNKS = 64  # of an expert
CHUNK_BYTES = 2_500_000  # 0.1 ms at 24 GB/s: a demand waits for two, and below it the host's part of a chunk shows
MEASUREMENT_WEIGHT = 0.1  # of a new measurement in the average: a copy that others disturbed counts little
INITIAL_GB_S = 12.0  # PCIe 3.0 x16, until the first copies are measured

OnTransfer = Callable[[int, float], None]


class Urgency(IntEnum):
    """What a transfer is for; a smaller number goes first."""

    DEMAND = 0
    NEXT = 1
    DEEPER = 2
    PROMOTION = 3


class TransferState(IntEnum):
    WAITING = 0  # no byte sent
    RUNNING = 1  # sent in part, or in whole and not landed; suspended while a more urgent one runs
    LANDED = 2
    CANCELLED = 3
    FAILED = 4


@dataclass(eq=False, slots=True)
class Transfer:
    """A requested expert; created by `TransferQueue.request`.

    Attributes:
        pins: of the demands that joined, each released once through `TransferQueue.release`.
        link_mark: the link's count of sent bytes after this transfer's last chunk.
        events: of its chunks in flight.
    """

    queue: TransferQueue
    layer: int
    expert: int
    urgency: Urgency
    state: TransferState = TransferState.WAITING
    reservation: Reservation | None = None
    pins: list[Pin] = field(default_factory=list)
    sent_bytes: int = 0
    landed_bytes: int = 0
    link_mark: int = 0
    events: list[Event] = field(default_factory=list)
    error: DeviceError | None = None

    @property
    def slot(self) -> int:
        """Its slot, -1 while it has none: a demand always has one."""
        if self.pins:
            return self.pins[0].slots[0]
        return -1 if self.reservation is None else self.reservation.slot

    @property
    def done(self) -> bool:
        """Whether it has landed, failed or was cancelled."""
        return self.state >= TransferState.LANDED

    @property
    def superseded(self) -> bool:
        """Whether its slot was given to a later load: it will land and not become resident."""
        return self.reservation is not None and self.reservation.superseded

    def ready(self) -> Event:
        """Submit its remaining chunks before any other and return the event behind the last one, for a stream to wait for.

        Raises:
            DeviceError: it has failed; later failures surface behind the event.
            ValueError: it was cancelled.
        """
        return self.queue.submit_rest(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until it is on the device; raises what `ready` and its event raise."""
        self.ready().wait(timeout_s)


class BandwidthEstimate:
    """Counts of bytes sent and landed in order over a link, and a moving average of the time they take."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.landed_bytes = 0
        self._measured = False
        self._ms_per_byte = 1 / INITIAL_GB_S / 1e6
        self._start_ms = 0.0  # of what is in flight: the last landing, or when the idle link was given work

    def ms(self, nbytes: int) -> float:
        """Return the estimated time of a transfer by itself."""
        return nbytes * self._ms_per_byte

    def send(self, nbytes: int, now_ms: float) -> int:
        """Count bytes that were submitted and return the total so far."""
        if self.sent_bytes == self.landed_bytes:
            self._start_ms = now_ms
        self.sent_bytes += nbytes
        return self.sent_bytes

    def land(self, nbytes: int, sent_ms: float, now_ms: float, copy_ms: float | None) -> float:
        """Count bytes that landed, and what their copy took if that was measured; return when it started by the host's clock."""
        start_ms = max(sent_ms, self._start_ms)
        self.landed_bytes += nbytes
        self._start_ms = now_ms
        if copy_ms:
            ms_per_byte = copy_ms / nbytes
            self._ms_per_byte += (MEASUREMENT_WEIGHT if self._measured else 1.0) * (ms_per_byte - self._ms_per_byte)
            self._measured = True
        return start_ms

    def until_ms(self, bytes_ahead: int, now_ms: float) -> float:
        """Return the estimated time until so many bytes, those in flight first, have landed."""
        if bytes_ahead <= 0:
            return 0.0
        in_flight = self.sent_bytes - self.landed_bytes
        elapsed_ms = now_ms - self._start_ms if in_flight > 0 else 0.0
        # However late, bytes in flight have not landed before their event is reported.
        return self.ms(bytes_ahead) - min(max(0.0, elapsed_ms), self.ms(min(bytes_ahead, in_flight)))


def default_chunk_bytes(expert_bytes: int) -> int:
    """Return the size of chunks of about 2.5 MB; a multiple of 64."""
    chunks = min(MAX_CHUNKS, max(1, round(expert_bytes / CHUNK_BYTES)))
    return -(-expert_bytes // chunks // 64) * 64


class ChunkSender:
    """Submits chunks to the stream "copy" of a device. Not thread-safe: `lock` guards it.

    Args:
        arena: the slots' memory, slot after slot; None moves nothing (simulations).
        on_landed: called under the lock, on the notifier thread, with each chunk's transfer and failure.
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
        on_landed: Callable[[Transfer, DeviceError | None], None],
        on_span: OnSpan | None,
        on_transfer: OnTransfer | None,
    ) -> None:
        self.link = BandwidthEstimate()
        self.chunks_in_flight = 0
        self._device = device
        self._expert_bytes = store.expert_bytes
        self._source = source
        self._arena = arena
        self._lock = lock
        self._chunk_bytes = chunk_bytes
        self._on_landed = on_landed
        self._on_span = on_span
        self._on_transfer = on_transfer
        self._copy = device.stream("copy")
        self._last: Event | None = None  # of the last chunk

    def send(self, transfer: Transfer) -> None:
        """Submit the next chunk of a transfer that has a slot; raises DeviceError where it is refused."""
        reservation = transfer.reservation
        assert reservation is not None, "a transfer has a slot before its first byte"
        start = transfer.sent_bytes
        nbytes = min(self._chunk_bytes, self._expert_bytes - start)
        after = reservation.after if start == 0 else None
        if after is not None:
            self._copy.wait(after)
        if start + nbytes == self._expert_bytes:
            for event in transfer.events:  # so that the last chunk's event reports the failures of all
                self._copy.wait(event)
        source = self._source.chunk(transfer.layer, transfer.expert, start, nbytes)
        # The host learns of a copy's end some time later, which is not the link's: the device's own clock measures it.
        last = self._last
        before = last if after is None and last is not None and not last.done() else self._copy.record(timed=True)
        self._device.copy(self._copy, self._arena, reservation.slot * self._expert_bytes + start, source, nbytes)
        event = self._last = self._copy.record(timed=True)
        self._source.mark_sent(transfer.layer, event)
        now_ms = self._device.now_ms()
        transfer.state = TransferState.RUNNING
        transfer.sent_bytes += nbytes
        transfer.link_mark = self.link.send(nbytes, now_ms)
        transfer.events.append(event)
        self.chunks_in_flight += 1
        self._device.notify(event, partial(self._chunk_done, transfer, before, event, nbytes, now_ms))

    def _chunk_done(self, transfer: Transfer, before: Event, event: Event, nbytes: int, sent_ms: float, error: DeviceError | None) -> None:
        """Handle a chunk that has landed, or failed; its copy ran from `before` to `event`."""
        with self._lock:
            now_ms, copy_ms = self._device.now_ms(), None
            if error is None:
                with suppress(RuntimeError):  # a device that fails by now reports it with its next work
                    copy_ms = self._device.elapsed_ms(before, event)
            start_ms = self.link.land(nbytes, sent_ms, now_ms, copy_ms)
            self.chunks_in_flight -= 1
            transfer.events.remove(event)
            transfer.landed_bytes += nbytes
            if self._on_span is not None:
                part = f"{transfer.landed_bytes * 100 // self._expert_bytes}%"
                self._on_span("link", f"layer {transfer.layer} expert {transfer.expert} {part}", start_ms, now_ms)
            if self._on_transfer is not None and copy_ms:
                self._on_transfer(nbytes, copy_ms)
            self._on_landed(transfer, error)
