"""A device's slots and queue, with every fallback on the way from page-locked memory to the CPU alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from moegraft.operators.experts.devices.interface import Buffer, Device, DeviceError, OnSpan
from moegraft.operators.experts.transfer.arena import SlotPlan, allocate_arena
from moegraft.operators.experts.transfer.queue import TransferQueue
from moegraft.operators.experts.transfer.residents import Admission, Priority
from moegraft.operators.experts.transfer.sender import OnTransfer, default_chunk_bytes
from moegraft.operators.experts.transfer.slots import SlotTable
from moegraft.operators.experts.transfer.store import ExpertStore, HostSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """How experts are loaded.

    Attributes:
        plan: slots wanted; the device may give fewer.
        admission: see `Residents`.
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
