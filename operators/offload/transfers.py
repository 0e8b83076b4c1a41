"""A transfer: one expert in flight to a device, sent in chunks over a link whose bandwidth is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

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
        events: behind its chunks in flight.
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
        return self.queue.ready([self])[-1]

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
    """Submits chunks to the stream "copy" of a device in runs: one event and one notification for all chunks of a run.

    An event costs the host as much as a copy, and its notification a switch between threads. Not thread-safe: `lock` guards it.

    Args:
        arena: the slots' memory, slot after slot.
        on_landed: called under the lock, on the notifier thread, with each run's transfers and failure.
        on_span, on_transfer: see `TransferQueue`.
    """

    def __init__(
        self,
        device: Device,
        store: ExpertStore,
        source: HostSource,
        arena: Buffer,
        lock: RLock,
        *,
        chunk_bytes: int,
        on_landed: Callable[[Sequence[Transfer], DeviceError | None], None],
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
        self._run: list[_Chunk] = []  # without an event so far
        self._waited: list[Event] = []  # what the run comes after
        self._before: Event | None = None  # the run's first copy, where its time can be measured
        self._last: Event | None = None  # of the last run

    def add(self, transfer: Transfer) -> None:
        """Submit the next chunk of a transfer that has a slot, as the last one of the run; raises DeviceError where it is refused."""
        reservation = transfer.reservation
        assert reservation is not None, "a transfer has a slot before its first byte"
        start = transfer.sent_bytes
        nbytes = min(self._chunk_bytes, self._expert_bytes - start)
        after = [reservation.after] if start == 0 and reservation.after is not None else []
        # So that the last chunk's event reports the failures of all.
        earlier = transfer.events if start + nbytes == self._expert_bytes else []
        source = self._source.chunk(transfer.layer, transfer.expert, start, nbytes)
        if transfer.error is not None:  # an earlier chunk failed while the host waited for one of a ring
            raise transfer.error
        waits = self._wait(after)
        # The host learns of a copy's end some time later, which is not the link's: the device's own clock measures it.
        if not self._run:
            last = self._last
            self._before = last if not after and last is not None and not last.done() else self._copy.record(timed=True)
        elif waits:
            self._before = None  # the run's time is not the link's alone
        self._wait(earlier)  # behind `before`, an event, which would report their failure in place of the run's
        self._device.copy(self._copy, self._arena, reservation.slot * self._expert_bytes + start, source, nbytes)
        now_ms = self._device.now_ms()
        transfer.state = TransferState.RUNNING
        transfer.sent_bytes += nbytes
        transfer.link_mark = self.link.send(nbytes, now_ms)
        self.chunks_in_flight += 1
        self._run.append(_Chunk(transfer, nbytes, now_ms))

    def _wait(self, events: Sequence[Event]) -> bool:
        """Let the run come after events; return whether it did not already."""
        new = [event for event in events if event not in self._waited]
        for event in new:
            self._copy.wait(event)
        self._waited += new
        return bool(new)

    @property
    def run_length(self) -> int:
        return len(self._run)

    @property
    def in_run(self) -> list[Transfer]:
        return transfers_of(self._run)

    def end_run(self) -> None:
        """Put an event behind the chunks that were added since the last one; raises DeviceError where it is refused, and forgets them."""
        run, before, self._run = self._run, self._before, []
        self._waited.clear()
        if not run:
            return
        try:
            event = self._last = self._copy.record(timed=True)
        except DeviceError:
            self.chunks_in_flight -= len(run)
            self.link.land(sum(chunk.nbytes for chunk in run), run[0].sent_ms, self._device.now_ms(), None)
            raise
        self._source.mark_sent(run[-1].transfer.layer, event)
        for transfer in transfers_of(run):
            transfer.events.append(event)
            transfer.link_mark = self.link.sent_bytes  # the host learns of the run as a whole
        self._device.notify(event, partial(self._run_done, run, before, event))

    def _run_done(self, run: Sequence[_Chunk], before: Event | None, event: Event, error: DeviceError | None) -> None:
        """Handle chunks that have landed, or failed; their copies ran from `before` to `event`."""
        with self._lock:
            now_ms, copy_ms = self._device.now_ms(), None
            if error is None and before is not None:
                with suppress(RuntimeError):  # a device that fails by now reports it with its next work
                    copy_ms = self._device.elapsed_ms(before, event)
            total = sum(chunk.nbytes for chunk in run)
            start_ms = self.link.land(total, run[0].sent_ms, now_ms, copy_ms)
            self.chunks_in_flight -= len(run)
            for transfer, nbytes, _ in run:
                transfer.landed_bytes += nbytes
                if self._on_span is not None:
                    part, end_ms = f"{transfer.landed_bytes * 100 // self._expert_bytes}%", start_ms + (now_ms - start_ms) * nbytes / total
                    self._on_span("link", f"layer {transfer.layer} expert {transfer.expert} {part}", start_ms, end_ms)
                    start_ms, total = end_ms, total - nbytes
            if self._on_transfer is not None and copy_ms:
                self._on_transfer(sum(chunk.nbytes for chunk in run), copy_ms)
            landed = transfers_of(run)
            for transfer in landed:
                transfer.events.remove(event)
            self._on_landed(landed, error)


class _Chunk(NamedTuple):
    transfer: Transfer
    nbytes: int
    sent_ms: float


def transfers_of(run: Sequence[_Chunk]) -> list[Transfer]:
    """Return the transfers of a run's chunks, each once."""
    return list(dict.fromkeys(chunk.transfer for chunk in run))
