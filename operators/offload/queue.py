"""The transfer queue: experts go to the device in chunks, the most urgent first.

Priorities are applied here and not on the device: at most two chunks of demands are submitted to the copy stream ahead of need, and one of
anything else, so a demand waits for one chunk of a prefetch, and chunks that were not submitted can be dropped. Where the host learns of a
chunk only after others could have been copied, as with CUDA, it is as many more as keep the link busy until then. Only a transfer that a
stream waits for (`ready`) is submitted whole.

Threads: calls may come from any thread; the device's notifier submits the next chunk when one has landed. One lock, the slot table's,
guards everything; nothing blocks under it except a ring of page-locked chunks that is full. An expert of frames is sent while it is in
memory; `ready` brings it there before it takes the lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from math import ceil, inf

from moegraft.operators.offload.devices.base import Buffer, Device, DeviceError, DeviceTimeoutError, Event, OnSpan, check_not_forked
from moegraft.operators.offload.slots import Admission, Priority, SlotTable
from moegraft.operators.offload.store import ExpertStore, HostSource, SlotPlan, allocate_arena
from moegraft.operators.offload.transfers import ChunkSender, OnTransfer, Transfer, TransferState, Urgency, default_chunk_bytes

logger = logging.getLogger(__name__)
DEMAND_DEPTH = 2  # chunks of demands submitted ahead of need: one runs, one follows without a gap
# Of prefetches: a gap on the link matters less than a demand that waits. Modelled decode of four models gains 1 to 2 %.
PREFETCH_DEPTH = 1
MOST_AHEAD = 15  # chunks on top while the host does not know of those that have landed
CLOSE_S = 1.0


@dataclass(slots=True)
class TransferStatistics:
    """Counts since the queue was created.

    Attributes:
        joined: requests for an expert in flight.
        cancelled: before their last byte was sent.
        refused: demands for which no slot was available.
    """

    requested: int = 0
    joined: int = 0
    refused: int = 0
    landed: int = 0
    cancelled: int = 0
    failed: int = 0


class PendingQueue:
    """Transfers with bytes left to send, the most urgent first and in order of request."""

    def __init__(self) -> None:
        self._transfers: tuple[list[Transfer], ...] = tuple([] for _ in Urgency)

    def __iter__(self) -> Iterator[Transfer]:
        return chain.from_iterable(self._transfers)

    def __bool__(self) -> bool:
        return any(self._transfers)

    def add(self, transfer: Transfer) -> None:
        self._transfers[transfer.urgency].append(transfer)

    def remove(self, transfer: Transfer) -> None:
        self._transfers[transfer.urgency].remove(transfer)

    def upgrade(self, transfer: Transfer, urgency: Urgency) -> None:
        """Make a transfer, which need not be pending any more, more urgent."""
        same = self._transfers[transfer.urgency]
        if transfer in same:
            same.remove(transfer)
            self._transfers[urgency].append(transfer)
        transfer.urgency = urgency

    def prefetches(self) -> list[Transfer]:
        return [*chain.from_iterable(self._transfers[Urgency.NEXT :])]

    def demands_before(self, transfer: Transfer | None) -> Iterator[Transfer]:
        return takewhile(lambda each: each is not transfer, self._transfers[Urgency.DEMAND])


class TransferQueue:
    """Loads experts of `store` into slots of `slots` through the stream "copy" of `device`.

    Args:
        arena: the slots' memory, slot after slot.
        source: where the bytes are read.
        on_span: called for every chunk, for a timeline.
        on_transfer: called with bytes and device time in ms of the chunks that were timed together, for a cost model.
    """

    def __init__(
        self,
        device: Device,
        store: ExpertStore,
        slots: SlotTable,
        arena: Buffer,
        source: HostSource,
        *,
        chunk_bytes: int,
        on_span: OnSpan | None,
        on_transfer: OnTransfer | None,
    ) -> None:
        self.device = device
        self.store = store
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.source = source
        self.statistics = TransferStatistics()
        self._owner_pid = os.getpid()
        self._lock = slots.lock
        self._copy = device.stream("copy")
        self._past = self._copy.record()  # done before anything is sent
        self._in_flight: list[dict[int, Transfer]] = [{} for _ in range(store.layers)]  # by expert, waiting ones included
        self._pending = PendingQueue()
        self._sender = ChunkSender(
            device,
            store,
            source,
            arena,
            slots.lock,
            chunk_bytes=chunk_bytes,
            on_landed=self._run_landed,
            on_span=on_span,
            on_transfer=on_transfer,
        )
        self.link = self._sender.link
        self._sending = False
        self._closed = False
        self._prefetch_failed = False
        slots.on_available = self._send_chunks

    def request(self, layer: int, expert: int, urgency: Urgency) -> Transfer | None:
        """Request an expert: join its transfer if it is in flight, making it more urgent where needed, or start one.

        A demand pins its slot until `release`; a demand of a resident expert returns a transfer that has landed.

        Returns:
            None where no slot is available for a demand until another is released, which need not have landed; or where a prefetch has
            nothing to do.

        Raises:
            DeviceError: the queue is closed.
            RuntimeError: in a forked child.
        """
        with self._lock:
            self._check_open()
            transfer = self._demand(layer, expert) if urgency is Urgency.DEMAND else self._prefetch(layer, expert, urgency)
            self._send_chunks()
            return transfer

    def demand(self, layer: int, experts: Sequence[int]) -> list[Transfer]:
        """`request` experts in this order until none can have a slot; returns those that have one. Cheaper than one by one."""
        found: list[Transfer] = []
        with self._lock:
            self._check_open()
            run = 1 + self._ahead
            for expert in experts:
                transfer = self._demand(layer, expert)
                if transfer is None:
                    break
                found.append(transfer)
                if len(found) % run == 0:
                    self._send_chunks()  # the link begins before the last one has its slot
            self._send_chunks()
        return found

    def prefetch(self, wanted: Sequence[tuple[int, int]], urgency: Urgency) -> None:
        """`request` each `(layer, expert)` in this order; raises what it raises. Cheaper for the host than one by one."""
        with self._lock:
            self._check_open()
            for layer, expert in wanted:
                self._prefetch(layer, expert, urgency)
            self._send_chunks()

    def release(self, transfer: Transfer, last_use: Event | None) -> None:
        """End a demand, once for each: `last_use` is the event behind its reader, None if there was none."""
        self.release_all([transfer], last_use)

    def release_all(self, transfers: Sequence[Transfer], last_use: Event | None) -> None:
        """`release` each; what waits for their slots is sent together, in runs, which is cheaper for the host than one by one."""
        with self._lock:
            sending, self._sending = self._sending, True
            try:
                for transfer in transfers:
                    self.slots.release(transfer.pins.pop(), last_use)
            finally:
                self._sending = sending
            self._send_chunks()

    def cancel(self, transfer: Transfer) -> bool:
        """Drop the chunks that were not submitted. Return False if all were, and it will land; or if it is done."""
        with self._lock:
            if transfer.done or transfer.sent_bytes >= self.store.expert_bytes:
                return False
            self._drop(transfer, TransferState.CANCELLED)
            self.statistics.cancelled += 1
            self._send_chunks()
            return True

    def replan(self, keep: Container[tuple[int, int]] = (), *, started: bool = False) -> int:
        """Cancel pending prefetches except the `(layer, expert)` to keep, with `started` those sent in part too; return how many."""
        with self._lock:
            pending = self._pending.prefetches()
            chosen = [each for each in pending if (started or each.sent_bytes == 0) and (each.layer, each.expert) not in keep]
            return sum(self.cancel(transfer) for transfer in chosen)

    def in_flight(self, layer: int) -> dict[int, float]:
        """Return the experts of a layer with bytes in flight, and the ms until each would be resident if demanded now."""
        with self._lock:
            transfers = self._in_flight[layer].items()
            running = {expert: each for expert, each in transfers if each.state is TransferState.RUNNING and not each.superseded}
            return {expert: self.arrival_ms(each) for expert, each in running.items()}

    def arrival_ms(self, transfer: Transfer) -> float:
        """Return the estimated ms until a transfer lands if it were demanded now; infinite for one that failed or was cancelled."""
        with self._lock:
            if transfer.done:
                return 0.0 if transfer.state is TransferState.LANDED else inf
            left = self.store.expert_bytes - transfer.sent_bytes
            ahead = transfer.link_mark - self.link.landed_bytes if left == 0 else self._bytes_before(transfer) + left
            return self.link.until_ms(ahead, self.device.now_ms())

    def busy_ms(self) -> float:
        """Return the estimated ms until a new demand would start."""
        with self._lock:
            return self.link.until_ms(self._bytes_before(None), self.device.now_ms())

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight or pending."""
        return self._sender.chunks_in_flight == 0 and not self._pending

    @property
    def available(self) -> int:
        """The number of demands that could have a slot now, those of pending prefetches included."""
        with self._lock:
            return self.slots.available + sum(each.reservation is not None for each in self._pending.prefetches())

    def ready(self, transfers: Sequence[Transfer]) -> list[Event]:
        """Submit the remaining chunks of transfers before any others, and return the events behind them, at least one.

        Raises:
            DeviceError: one of them has failed; later failures surface behind the events.
            ValueError: one was cancelled.
        """
        for each in transfers:
            if self.store.in_frames(each.layer) and each.sent_bytes < self.store.expert_bytes and not each.done:
                with self.store.in_reach(each.layer, each.expert), self._lock:
                    self._send_rest([each])
        with self._lock:
            self._send_rest(transfers)
            self._send_chunks()
            for transfer in transfers:
                if transfer.error is not None:
                    raise transfer.error
            return list(dict.fromkeys(each.events[-1] for each in transfers if not each.done)) or [self._past]

    def _send_rest(self, transfers: Sequence[Transfer]) -> None:
        """Submit the remaining chunks of transfers, under the lock."""
        left = sum(self.store.expert_bytes - each.sent_bytes for each in transfers)
        run = max(1 + self._ahead, ceil(left / self.chunk_bytes / 2))  # of two halves: the host learns of the first during the second
        self._sending = True  # waiting for a ring's chunk lets the notifier in
        try:
            for transfer in transfers:
                self._check_sendable(transfer)
                while transfer.sent_bytes < self.store.expert_bytes and not transfer.done:
                    self._send(transfer)
                    if self._sender.run_length >= run:
                        self._end_run()
        finally:
            self._end_run()
            self._sending = False

    def _check_sendable(self, transfer: Transfer) -> None:
        if transfer.state is TransferState.FAILED:
            assert transfer.error is not None, "a failed transfer has its error"
            raise transfer.error
        if transfer.state is TransferState.CANCELLED:
            raise ValueError(f"the transfer of expert {transfer.expert} of layer {transfer.layer} was cancelled: request it again")
        if not transfer.done and transfer.reservation is None and not self._reserve(transfer, demand=True):
            raise ValueError(f"expert {transfer.expert} of layer {transfer.layer} has no slot: demand it before waiting for it")

    def close(self) -> None:
        """Drop the chunks that were not submitted, let the others land, and release page-locked memory. Takes at most a second.

        Raises:
            DeviceTimeoutError: the copies in flight did not end; the memory that the device still reads stays page-locked.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.slots.on_available = None
            for transfer in list(self._pending):
                self.cancel(transfer)
            last = self._copy.record()
        try:
            last.wait(CLOSE_S)
        except DeviceTimeoutError:
            raise
        except DeviceError as error:
            logger.warning("%s: a copy failed while the queue was closed: %s", self.device.name, error)
        self.source.close()

    # All methods below are called under the lock.

    def _check_open(self) -> None:
        check_not_forked(f"the transfer queue of {self.device.name}", self._owner_pid)
        if self._closed:
            raise DeviceError(f"the transfer queue of {self.device.name} is closed")

    def _loading(self, layer: int, expert: int) -> Transfer | None:
        """Return the transfer of an expert in flight that will become resident."""
        transfer = self._in_flight[layer].get(expert)
        return None if transfer is None or transfer.superseded else transfer

    def _prefetch(self, layer: int, expert: int, urgency: Urgency) -> Transfer | None:
        self.statistics.requested += 1
        transfer = self._loading(layer, expert)
        if transfer is not None:
            self._join(transfer, urgency)
        elif not self.slots.is_resident(layer, expert) and self.slots.capacity_of(layer) > 0:
            transfer = self._add(Transfer(self, layer, expert, urgency))
        return transfer

    def _demand(self, layer: int, expert: int) -> Transfer | None:
        self.statistics.requested += 1
        transfer = self._loading(layer, expert)
        if transfer is None and self.slots.is_resident(layer, expert):
            pin = self.slots.pin(layer, (expert,))
            return Transfer(self, layer, expert, Urgency.DEMAND, TransferState.LANDED, pins=[pin])
        joined = transfer is not None
        transfer = transfer or Transfer(self, layer, expert, Urgency.DEMAND)
        if transfer.reservation is None and not self._reserve(transfer, demand=True):
            self.statistics.refused += 1
            return None
        assert transfer.reservation is not None, "it was just reserved"
        transfer.pins.append(self.slots.pin_loading(transfer.reservation))
        if joined:
            self._join(transfer, Urgency.DEMAND)
        else:
            self._add(transfer)
        return transfer

    def _join(self, transfer: Transfer, urgency: Urgency) -> None:
        """Join a transfer, which never becomes less urgent."""
        self.statistics.joined += 1
        if urgency < transfer.urgency:
            self._pending.upgrade(transfer, urgency)

    def _add(self, transfer: Transfer) -> Transfer:
        self._in_flight[transfer.layer][transfer.expert] = transfer
        self._pending.add(transfer)
        return transfer

    def _reserve(self, transfer: Transfer, *, demand: bool) -> bool:
        """Reserve a slot; for a demand, if necessary, that of the least urgent pending prefetch, which is cancelled."""
        transfer.reservation = self.slots.reserve(transfer.layer, transfer.expert, demand=demand)
        if transfer.reservation is None and demand:
            with_slots = [each for each in self._pending.prefetches() if each.reservation is not None]
            if with_slots:
                sending, self._sending = self._sending, True  # or another prefetch takes the slot
                self.cancel(with_slots[-1])
                self._sending = sending
                transfer.reservation = self.slots.reserve(transfer.layer, transfer.expert, demand=True)
        return transfer.reservation is not None

    @property
    def _ahead(self) -> int:
        """The chunks that the link copies while the host does not know of them."""
        return min(MOST_AHEAD, ceil(self.device.notify_ms / self._sender.link.ms(self.chunk_bytes)))

    def _send_chunks(self) -> None:
        """Submit runs of chunks, the most urgent first, until as many are in flight as their urgency allows."""
        if self._sending or self._closed:
            return
        self._sending = True
        try:
            ahead = self._ahead
            while (transfer := self._most_urgent(ahead)) is not None:
                # Two runs are in flight: while the second is copied, the host learns of the first.
                most = 1 + ahead if transfer.urgency is Urgency.DEMAND else PREFETCH_DEPTH + ahead // 2
                while transfer is not None and self._sender.run_length < most:
                    self._send(transfer)
                    transfer = self._most_urgent(ahead)
                self._end_run()
        finally:
            self._end_run()
            self._sending = False

    def _most_urgent(self, ahead: int) -> Transfer | None:
        """Return the first transfer that has a slot or can have one, and may be sent now."""
        in_flight = self._sender.chunks_in_flight
        if in_flight >= DEMAND_DEPTH * (1 + ahead):
            return None
        available, demands_only = True, in_flight >= PREFETCH_DEPTH + ahead
        for transfer in self._pending:
            if demands_only and transfer.urgency is not Urgency.DEMAND:
                return None
            if not self.store.in_memory(transfer.layer, transfer.expert):  # it is sent once it is there, or waited for
                self.store.ask(transfer.layer, transfer.expert)
                continue
            if transfer.reservation is not None:
                return transfer
            available = available and self._reserve(transfer, demand=False)
            if available:
                return transfer
        return None

    def _send(self, transfer: Transfer) -> None:
        """Add the next chunk to the run; a refused one fails the transfer."""
        try:
            self._sender.add(transfer)
        except DeviceError as error:
            if not transfer.done:
                self._fail(transfer, error)
            return
        if transfer.sent_bytes == self.store.expert_bytes:
            assert transfer.reservation is not None, "it was sent to a slot"
            self._pending.remove(transfer)
            self.slots.mark_sent(transfer.reservation)
        if self.source.reused(transfer.layer):  # its next use waits for this run's event
            self._end_run()

    def _end_run(self) -> None:
        """End the run of chunks; where its event is refused, its transfers fail."""
        transfers = self._sender.in_run
        try:
            self._sender.end_run()
        except DeviceError as error:
            for transfer in transfers:
                if not transfer.done:
                    self._fail(transfer, error)

    def _run_landed(self, transfers: Sequence[Transfer], error: DeviceError | None) -> None:
        """Handle a run that has landed or failed, on the notifier thread."""
        for transfer in transfers:
            if error is not None and not transfer.done:
                self._fail(transfer, error)
            elif transfer.state is TransferState.RUNNING and transfer.landed_bytes == self.store.expert_bytes:
                assert transfer.reservation is not None, "it was sent to a slot"
                transfer.state = TransferState.LANDED
                self._forget(transfer)
                self.statistics.landed += 1
                self.slots.commit(transfer.reservation)
        self._send_chunks()

    def _fail(self, transfer: Transfer, error: DeviceError) -> None:
        transfer.error = error
        self.statistics.failed += 1
        if not transfer.pins and not self._prefetch_failed:
            self._prefetch_failed = True
            logger.warning("%s: a prefetch failed; later failures of prefetches are not logged: %s", self.device.name, error)
        self._drop(transfer, TransferState.FAILED)

    def _drop(self, transfer: Transfer, state: TransferState) -> None:
        transfer.state = state
        self._forget(transfer)
        if transfer.sent_bytes < self.store.expert_bytes:
            self._pending.remove(transfer)
        if transfer.reservation is not None:
            self.slots.cancel(transfer.reservation)

    def _forget(self, transfer: Transfer) -> None:
        transfers = self._in_flight[transfer.layer]
        if transfers.get(transfer.expert) is transfer:  # otherwise it was superseded and requested again
            del transfers[transfer.expert]

    def _bytes_before(self, transfer: Transfer | None) -> int:
        """Return the bytes that land before a demand's remaining ones: those in flight and of earlier demands; None: a new demand."""
        pending = sum(self.store.expert_bytes - each.sent_bytes for each in self._pending.demands_before(transfer))
        return self.link.sent_bytes - self.link.landed_bytes + pending


@dataclass(frozen=True, slots=True)
class ExpertCache:
    """The expert cache of a device: its slots, their memory, and the queue that fills them."""

    slots: SlotTable
    arena: Buffer
    queue: TransferQueue

    def close(self) -> None:
        """Close the queue and free the memory; the last readers of the slots are done.

        Raises:
            DeviceTimeoutError: copies did not end within a second; their memory is left alone.
        """
        self.queue.close()
        self.arena.free()


def open_expert_cache(
    device: Device,
    store: ExpertStore,
    plan: SlotPlan,
    priority: Priority,
    admission: Admission = "always",
    *,
    chunk_bytes: int | None = None,
    on_span: OnSpan | None = None,
    on_transfer: OnTransfer | None = None,
) -> ExpertCache | None:
    """Allocate the slots of a plan, or as many as the device has room for, and open the queue that fills them.

    Returns:
        None where the device has no room for a slot or cannot be copied to: all experts run on the CPU, and a warning gives the reason.
    """
    chunk_bytes = chunk_bytes or default_chunk_bytes(store.expert_bytes)
    plan, arena = allocate_arena(device, plan, store.expert_bytes)
    if arena is None:
        return None
    source = HostSource(store, device, chunk_bytes)
    try:
        if source.form == "pageable" and store.buffer(0) is not None:  # the last fallback may not work either: try it
            copy = device.stream("copy")
            device.copy(copy, arena, 0, source.chunk(0, 0, 0, 64), 64)
            copy.record().wait()
    except DeviceError as error:
        source.close()
        arena.free()
        logger.warning("%s: experts cannot be copied to it, all of them run on the CPU: %s", device.name, error)
        return None
    slots = SlotTable(store.layers, store.num_experts, plan, priority, admission)
    queue = TransferQueue(device, store, slots, arena, source, chunk_bytes=chunk_bytes, on_span=on_span, on_transfer=on_transfer)
    return ExpertCache(slots, arena, queue)
