"""Sends the chunks of transfers, one at a time, and hears when they have landed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock

from moegraft.operators.experts.devices.interface import Buffer, Device, DeviceError, Event, OnSpan
from moegraft.operators.experts.transfer.link import LinkClock
from moegraft.operators.experts.transfer.store import ExpertStore, HostSource
from moegraft.operators.experts.transfer.transfers import Transfer, TransferState, TransferStatistics

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
        self.link = LinkClock()
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
