"""The transfer queue: experts go to the device in chunks, the most urgent first.

Priority lives here and not on the device: at most two chunks of demands are handed to the copy stream ahead of need, and one of anything
else, so a demand waits for one chunk of what is loaded ahead, and what was not handed over can be dropped. Only what a stream waits for
(`Transfer.ready`) is handed over whole.

Threads: calls may come from any thread; the device's notifier sends the next chunk when one has landed. One lock, the slot table's,
guards everything; nothing blocks under it but a ring of page-locked chunks that is full.

The transfers of a queue that are under way: who they are, and what becomes of them.

A device's slots and queue, with every fallback on the way from page-locked memory to the CPU alone.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass

from moegraft.operators.offload.devices.base import Buffer, Device, DeviceError, DeviceTimeoutError, Event, OnSpan
from moegraft.operators.offload.devices.process import ProcessGuard
from moegraft.operators.offload.slots import Admission, Priority, SlotTable
from moegraft.operators.offload.store import ExpertStore, HostSource, SlotPlan, allocate_arena
from moegraft.operators.offload.transfers import (
    ArrivalEstimates,
    ChunkSender,
    OnTransfer,
    PendingQueue,
    Transfer,
    TransferState,
    TransferStatistics,
    Urgency,
    default_chunk_bytes,
)

logger = logging.getLogger(__name__)


class InFlightTransfers:
    """Keeps transfers, their slots and the counts in step; the queue's lock guards it.

    Attributes:
        unsent: those with bytes left to send, in the order in which they go.
    """

    def __init__(self, device: str, store: ExpertStore, slots: SlotTable, statistics: TransferStatistics) -> None:
        self.unsent = PendingQueue()
        self._device = device
        self._expert_bytes = store.expert_bytes
        self._slots = slots
        self._statistics = statistics
        self._live: list[dict[int, Transfer]] = [{} for _ in range(store.layers)]
        self._prefetch_failed = False

    def find(self, layer: int, expert: int) -> Transfer | None:
        """The transfer of an expert, unless its slot was given to another behind it."""
        transfer = self._live[layer].get(expert)
        return None if transfer is None or transfer.overtaken else transfer

    def running(self, layer: int) -> dict[int, Transfer]:
        """Those with bytes on the way, by expert."""
        live = self._live[layer].items()
        return {expert: each for expert, each in live if each.state is TransferState.RUNNING and not each.overtaken}

    def enter(self, transfer: Transfer) -> Transfer:
        self._live[transfer.layer][transfer.expert] = transfer
        self.unsent.add(transfer)
        return transfer

    def upgrade(self, transfer: Transfer, urgency: Urgency) -> None:
        """Makes it more urgent; it never gets less so."""
        if urgency < transfer.urgency:
            self._statistics.upgraded += 1
            self.unsent.upgrade(transfer, urgency)

    def sent(self, transfer: Transfer) -> None:
        """Its last byte was handed over."""
        assert transfer.reservation is not None, "it was sent somewhere"
        self.unsent.remove(transfer)
        self._slots.sent(transfer.reservation)

    def land(self, transfer: Transfer) -> None:
        """Its last byte is there."""
        assert transfer.reservation is not None, "it was loaded somewhere"
        transfer.state = TransferState.LANDED
        self._forget(transfer)
        self._statistics.landed += 1
        self._statistics.landed_bytes += self._expert_bytes
        self._slots.commit(transfer.reservation)

    def fail(self, transfer: Transfer, error: DeviceError) -> None:
        """A chunk of it was refused, or lost."""
        transfer.error = error
        self._statistics.failed += 1
        if not transfer.pins and not self._prefetch_failed:
            self._prefetch_failed = True
            logger.warning("%s: a prefetch has failed, and others that fail will not be mentioned: %s", self._device, error)
        self._drop(transfer, TransferState.FAILED)

    def cancel(self, transfer: Transfer) -> bool:
        """Drops what was not handed over yet. False: all of it was, and it will land; or it is done."""
        if transfer.done or transfer.sent_bytes >= self._expert_bytes:
            return False
        self._drop(transfer, TransferState.CANCELLED)
        self._statistics.cancelled += 1
        self._statistics.cancelled_bytes += transfer.sent_bytes
        return True

    def _drop(self, transfer: Transfer, state: TransferState) -> None:
        transfer.state = state
        self._forget(transfer)
        if transfer.sent_bytes < self._expert_bytes:
            self.unsent.remove(transfer)
        if transfer.reservation is not None:
            self._slots.cancel(transfer.reservation)

    def _forget(self, transfer: Transfer) -> None:
        live = self._live[transfer.layer]
        if live.get(transfer.expert) is transfer:  # else it was overtaken, and asked for again
            del live[transfer.expert]


DEPTH = 2  # chunks of demands handed over ahead of need: one runs, one follows without a gap
# Of what is loaded ahead: a gap of the link's matters less than a demand that waits. Modelled decode of four models gains 1 to 2 %.
AHEAD_DEPTH = 1
CLOSE_S = 1.0


class TransferQueue:
    """Loads experts of `store` into slots of `slots` through the stream "copy" of `device`.

    Args:
        arena: the slots' memory, slot after slot; None moves nothing (simulations).
        source: where the bytes are read; page-locks the store where none is given.
        on_span: told of every chunk, for a timeline.
        on_transfer: told of bytes and ms of every chunk that nothing but the link held up, for a cost model.
    """

    def __init__(
        self,
        device: Device,
        store: ExpertStore,
        slots: SlotTable,
        arena: Buffer | None,
        *,
        chunk_bytes: int | None = None,
        source: HostSource | None = None,
        on_span: OnSpan | None = None,
        on_transfer: OnTransfer | None = None,
    ) -> None:
        self.device = device
        self.store = store
        self.slots = slots
        self.chunk_bytes = default_chunk_bytes(store.expert_bytes) if chunk_bytes is None else chunk_bytes
        self.source = HostSource(store, device, self.chunk_bytes) if source is None else source
        self.statistics = TransferStatistics()
        self._guard = ProcessGuard(f"the transfer queue of {device.name}")
        self._lock = slots.lock
        self._copy = device.stream("copy")
        self._past = self._copy.record()  # done before anything is sent
        self._underway = InFlightTransfers(device.name, store, slots, self.statistics)
        self._unsent = self._underway.unsent
        self._sender = ChunkSender(
            device,
            store,
            self.source,
            arena,
            slots.lock,
            chunk_bytes=self.chunk_bytes,
            statistics=self.statistics,
            on_told=self._told,
            on_span=on_span,
            on_transfer=on_transfer,
        )
        self.link = self._sender.link
        self._arrivals = ArrivalEstimates(self.link, self._unsent, store.expert_bytes)
        self._sending = False
        self._closed = False
        slots.on_room = self._pump

    def request(self, layer: int, expert: int, urgency: Urgency) -> Transfer | None:
        """Asks for an expert; joins it if it is on its way, and makes it more urgent if need be.

        A demand holds its slot until `release`; of an expert that is there already it gets a transfer that has landed.
        None: no slot can be had for a demand, unless one is released first, which need not have landed; or nothing is to be done for
        a prefetch.

        Raises:
            DeviceError: the queue is closed.
            RuntimeError: in a forked child.
        """
        self._guard.check()
        with self._lock:
            if self._closed:
                raise DeviceError(f"the transfer queue of {self.device.name} is closed")
            self.statistics.requested += 1
            transfer = self._underway.find(layer, expert)
            if urgency is Urgency.DEMAND:
                self.statistics.demanded += 1
                return self._demand(layer, expert, transfer)
            if transfer is not None:
                self.statistics.joined += 1
                self._underway.upgrade(transfer, urgency)
            elif not self.slots.holds(layer, expert) and self.slots.capacity_of(layer) > 0:
                transfer = self._underway.enter(Transfer(self, layer, expert, urgency))
            self._pump()
            return transfer

    def release(self, transfer: Transfer, last_use: Event | None) -> None:
        """Ends a demand: its reader was handed over before the event, or there was none. Once for every demand."""
        with self._lock:
            self.slots.release(transfer.pins.pop(), last_use)

    def cancel(self, transfer: Transfer) -> bool:
        """Drops what was not handed over yet. False: all of it was, and it will land; or it is done."""
        with self._lock:
            cancelled = self._underway.cancel(transfer)
            if cancelled:
                self._pump()
            return cancelled

    def replan(self, keep: Container[tuple[int, int]] = (), *, started: bool = False) -> int:
        """Drops prefetches, all but those of the `(layer, expert)` to keep, that have not started, or were suspended; how many."""
        with self._lock:
            waiting = self._unsent.prefetches()
            chosen = [each for each in waiting if (started or each.sent_bytes == 0) and (each.layer, each.expert) not in keep]
            return sum(self.cancel(transfer) for transfer in chosen)

    def in_flight(self, layer: int) -> dict[int, float]:
        """Experts of a layer with bytes on the way, and in how many ms each would be there if demanded now."""
        with self._lock:
            return {expert: self.arrival_ms(each) for expert, each in self._underway.running(layer).items()}

    def arrival_ms(self, transfer: Transfer) -> float:
        """See `Transfer.arrival_ms`."""
        with self._lock:
            return self._arrivals.of(transfer, self.device.now_ms())

    def busy_ms(self) -> float:
        """How long until a new demand would start: what is under way, and the demands before it."""
        with self._lock:
            return self._arrivals.busy_ms(self.device.now_ms())

    def transfer_ms(self) -> float:
        """What one expert takes on a free link."""
        return self.link.ms(self.store.expert_bytes)

    @property
    def idle(self) -> bool:
        """Whether nothing is on the way or waiting."""
        return self._sender.enqueued == 0 and not self._unsent

    @property
    def available(self) -> int:
        """Demands that could be met with a slot now, those of prefetches under way included."""
        with self._lock:
            return self.slots.available + sum(each.reservation is not None for each in self._unsent.prefetches())

    def hand_over(self, transfer: Transfer) -> Event:
        """See `Transfer.ready`."""
        with self._lock:
            if transfer.state is TransferState.LANDED:
                return self._past
            if transfer.state is TransferState.FAILED:
                assert transfer.error is not None, "a failure has its error"
                raise transfer.error
            if transfer.state is TransferState.CANCELLED:
                raise ValueError(f"expert {transfer.expert} of layer {transfer.layer} was cancelled: nothing is to be waited for")
            if transfer.reservation is None and not self._find_slot(transfer, demand=True):
                raise ValueError(f"expert {transfer.expert} of layer {transfer.layer} has no slot: demand it before waiting for it")
            self._sending = True  # waiting for a ring's chunk lets the notifier in
            try:
                while transfer.sent_bytes < self.store.expert_bytes and not transfer.done:
                    self._send(transfer)
            finally:
                self._sending = False
            self._pump()
            if transfer.error is not None:
                raise transfer.error
            return self._past if transfer.done else transfer.events[-1]

    def close(self) -> None:
        """Drops what was not handed over, lets the rest land, and gives page-locked memory back. Takes a second at most.

        Raises:
            DeviceTimeoutError: the copies under way did not end.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.slots.on_room = None
            for transfer in list(self._unsent):
                self._underway.cancel(transfer)
            last = self._copy.record()
        try:
            last.wait(CLOSE_S)
        except DeviceTimeoutError:
            raise  # and memory that the device still reads stays page-locked
        except DeviceError as error:
            logger.warning("%s: a copy failed while the queue was closed: %s", self.device.name, error)
        self.source.close()

    # Under the lock from here on.

    def _demand(self, layer: int, expert: int, transfer: Transfer | None) -> Transfer | None:
        if transfer is None and self.slots.holds(layer, expert):
            landed = Transfer(self, layer, expert, Urgency.DEMAND)
            landed.state = TransferState.LANDED
            landed.pins.append(self.slots.pin(layer, (expert,)))
            return landed
        joins = transfer is not None
        transfer = transfer or Transfer(self, layer, expert, Urgency.DEMAND)
        if transfer.reservation is None and not self._find_slot(transfer, demand=True):
            self.statistics.refused += 1
            return None
        assert transfer.reservation is not None, "it was just found"
        transfer.pins.append(self.slots.pin_loading(transfer.reservation))
        if joins:
            self.statistics.joined += 1
            self._underway.upgrade(transfer, Urgency.DEMAND)
        else:
            self._underway.enter(transfer)
        self._pump()
        return transfer

    def _find_slot(self, transfer: Transfer, *, demand: bool) -> bool:
        """Reserves one; for a demand, if need be, that of the least urgent prefetch under way, which is dropped."""
        transfer.reservation = self.slots.reserve(transfer.layer, transfer.expert, demand=demand)
        if transfer.reservation is None and demand:
            with_slots = [each for each in self._unsent.prefetches() if each.reservation is not None]
            if with_slots:
                sending, self._sending = self._sending, True  # or another prefetch takes the slot
                self.cancel(with_slots[-1])
                self._sending = sending
                transfer.reservation = self.slots.reserve(transfer.layer, transfer.expert, demand=True)
        return transfer.reservation is not None

    def _pump(self) -> None:
        if self._sending or self._closed:
            return
        self._sending = True
        try:
            while self._sender.enqueued < DEPTH:
                transfer = self._next()
                if transfer is None:
                    break
                self._send(transfer)
        finally:
            self._sending = False

    def _next(self) -> Transfer | None:
        """The most urgent that has a slot or can have one, and may go now."""
        room, demands_alone = True, self._sender.enqueued >= AHEAD_DEPTH
        for transfer in self._unsent:
            if demands_alone and transfer.urgency is not Urgency.DEMAND:
                return None
            if transfer.reservation is not None:
                return transfer
            room = room and self._find_slot(transfer, demand=False)
            if room:
                return transfer
        return None

    def _send(self, transfer: Transfer) -> None:
        """The next chunk; a refused one fails the transfer."""
        try:
            self._sender.send(transfer)
        except DeviceError as error:
            self._underway.fail(transfer, error)
            return
        if transfer.sent_bytes == self.store.expert_bytes:
            self._underway.sent(transfer)

    def _told(self, transfer: Transfer, error: DeviceError | None) -> None:
        """A chunk has landed, or failed: on the notifier."""
        if error is not None and not transfer.done:
            self._underway.fail(transfer, error)
        elif transfer.state is TransferState.RUNNING and transfer.told_bytes == self.store.expert_bytes:
            self._underway.land(transfer)
        self._pump()


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """How experts are loaded.

    Attributes:
        plan: slots wanted; the device may give fewer.
        admission: see `ResidentSet`.
        chunk_bytes: None for `default_chunk_bytes`.
    """

    plan: SlotPlan
    admission: Admission = "always"
    chunk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """The slots of a device, their memory, and the queue that fills them."""

    slots: SlotTable
    arena: Buffer
    queue: TransferQueue

    def close(self) -> None:
        """Ends the queue and frees the memory; the last readers of the slots are done.

        Raises:
            DeviceTimeoutError: copies did not end within a second; their memory is not touched.
        """
        self.queue.close()
        self.arena.free()


def open_loading(
    device: Device,
    store: ExpertStore,
    priority: Priority,
    options: LoadingOptions,
    *,
    on_span: OnSpan | None = None,
    on_transfer: OnTransfer | None = None,
) -> Loading | None:
    """None where the device has no room for a slot or cannot be copied to: all experts run on the CPU, which was said."""
    chunk_bytes = options.chunk_bytes or default_chunk_bytes(store.expert_bytes)
    plan, arena = allocate_arena(device, options.plan, store.expert_bytes)
    if arena is None:
        return None
    source = HostSource(store, device, chunk_bytes)
    try:
        _try_a_copy(device, store, source, arena)
    except DeviceError as error:
        source.close()
        arena.free()
        logger.warning("%s: experts cannot be copied to it, all of them run on the CPU: %s", device.name, error)
        return None
    slots = SlotTable(store.layers, store.num_experts, plan, priority, options.admission)
    queue = TransferQueue(device, store, slots, arena, chunk_bytes=chunk_bytes, source=source, on_span=on_span, on_transfer=on_transfer)
    return Loading(slots, arena, queue)


def _try_a_copy(device: Device, store: ExpertStore, source: HostSource, arena: Buffer) -> None:
    """The last of the fallbacks, memory as it is, is not sure to work."""
    if source.form == "pageable" and store.buffer(0) is not None:
        copy = device.stream("copy")
        device.copy(copy, arena, 0, source.chunk(0, 0, 0, 64), 64)
        copy.record().wait()
