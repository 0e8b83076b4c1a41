"""The experts in host memory: one contiguous block an expert, read by the CPU kernel and sent to devices as it is.

The device memory of the slots: one block, as large as the device gives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from moegraft.cpu_backend import PackedExperts
from moegraft.operators.offload.devices.base import Buffer, Bytes, Device, DeviceError, Event, OutOfDeviceMemoryError, PinnedRange
from moegraft.operators.offload.devices.emulated import aligned_bytes

logger = logging.getLogger(__name__)
RING_CHUNKS = (4, 3, 2)  # page-locked chunks to ask for, the most first


class ExpertStore:
    """Every layer's experts, `(E * expert_bytes,)` uint8 a layer; a phantom store has sizes and no bytes.

    Raises:
        ValueError: layers of different sizes: those need a store, and slots, of their own.
    """

    def __init__(self, layers: Sequence[Bytes | None], num_experts: int, expert_bytes: int) -> None:
        for layer, buffer in enumerate(layers):
            if buffer is not None and buffer.nbytes != num_experts * expert_bytes:
                raise ValueError(f"layer {layer} has {buffer.nbytes} bytes, not {num_experts} experts of {expert_bytes}")
        self.layers = len(layers)
        self.num_experts = num_experts
        self.expert_bytes = expert_bytes
        self._buffers = list(layers)

    @classmethod
    def of_packed(cls, layers: Sequence[PackedExperts]) -> Self:
        """Over the packed bytes, without a copy."""
        first = layers[0]
        return cls([packed.buffer for packed in layers], first.shape.num_experts, first.expert_bytes)

    @classmethod
    def phantom(cls, layers: int, num_experts: int, expert_bytes: int) -> Self:
        """For simulations: transfers take their time and move nothing."""
        return cls([None] * layers, num_experts, expert_bytes)

    @property
    def nbytes(self) -> int:
        return self.layers * self.num_experts * self.expert_bytes

    def buffer(self, layer: int) -> Bytes | None:
        return self._buffers[layer]

    def bytes_of(self, layer: int, expert: int) -> Bytes | None:
        """`(expert_bytes,)` uint8; None in a phantom."""
        buffer = self._buffers[layer]
        return None if buffer is None else buffer[expert * self.expert_bytes : (expert + 1) * self.expert_bytes]


class HostSource:
    """Where copies read from: page-locked layers, else a ring of page-locked chunks, else memory as it is.

    The ring is filled by whoever sends a chunk, so it costs the host a copy; chunks are handed out in order and one is filled again
    only after the event of its last copy.
    """

    def __init__(self, store: ExpertStore, device: Device, chunk_bytes: int) -> None:
        self._store = store
        self._pinned: list[PinnedRange] = []
        self._ring: list[Bytes] = []
        self._ring_events: list[Event | None] = []
        self._next = 0
        self.pinned_layers, reason = self._pin_layers(device)
        if reason is not None:
            self._make_ring(device, chunk_bytes, reason)

    @property
    def form(self) -> str:
        """`pinned`, `ring` or `pageable`: of the layers that could not be page-locked, where there are any."""
        if self.pinned_layers == self._store.layers:
            return "pinned"
        return "ring" if self._ring else "pageable"

    def chunk(self, layer: int, expert: int, start: int, nbytes: int) -> Bytes | None:
        """The bytes of a chunk, which stay as they are until the event given to `sent` is done; None in a phantom."""
        block = self._store.bytes_of(layer, expert)
        if block is None:
            return None
        part = block[start : start + nbytes]
        if layer < self.pinned_layers or not self._ring:
            return part
        busy = self._ring_events[self._next]
        if busy is not None and not busy.done():
            busy.wait()
        target = self._ring[self._next][:nbytes]
        target[:] = part
        return target

    def sent(self, layer: int, event: Event) -> None:
        """The chunk last asked for is on its way until the event."""
        if layer >= self.pinned_layers and self._ring:
            self._ring_events[self._next] = event
            self._next = (self._next + 1) % len(self._ring)

    def close(self) -> None:
        """Gives page-locked memory back; whoever closes has waited for the last copy."""
        for pinned in self._pinned:
            pinned.release()
        self._pinned.clear()
        self._ring.clear()

    def _pin_layers(self, device: Device) -> tuple[int, DeviceError | None]:
        """How many layers are page-locked, and why not all of them."""
        for layer in range(self._store.layers):
            buffer = self._store.buffer(layer)
            if buffer is None:
                continue
            try:
                self._pinned.append(device.pin(buffer))
            except DeviceError as error:
                return layer, error
        return self._store.layers, None

    def _make_ring(self, device: Device, chunk_bytes: int, reason: DeviceError) -> None:
        which = f"experts of layers {self.pinned_layers} to {self._store.layers - 1}"
        for count in RING_CHUNKS:
            memory = aligned_bytes(count * chunk_bytes)
            try:
                self._pinned.append(device.pin(memory))
            except DeviceError:
                continue
            self._ring = [memory[index * chunk_bytes : (index + 1) * chunk_bytes] for index in range(count)]
            self._ring_events = [None] * count
            logger.warning("%s: %s go through %d page-locked chunks of %d bytes: %s", device.name, which, count, chunk_bytes, reason)
            return
        logger.warning("%s: %s are sent from pageable memory, which makes the host wait: %s", device.name, which, reason)


SHRINK = 0.75  # of the capacity, after each refusal: seven tries to an eighth


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """How many experts may stay on a device.

    Attributes:
        capacity: experts of each layer, or one number for a pool that all layers share.
        staging: slots on top, into which experts are loaded while those they replace are still of use.
    """

    capacity: tuple[int, ...] | int
    staging: int

    def __post_init__(self) -> None:
        parts = (self.capacity,) if isinstance(self.capacity, int) else self.capacity
        if min(parts, default=0) < 0 or self.staging < 0:
            raise ValueError(f"a plan of {self.capacity} slots and {self.staging} for staging: counts must not be negative")

    @property
    def total(self) -> int:
        """Experts that may stay."""
        return self.capacity if isinstance(self.capacity, int) else sum(self.capacity)

    @property
    def slots(self) -> int:
        return self.total + self.staging

    def shrunk(self) -> SlotPlan | None:
        """The next smaller plan: less capacity, then less staging; None below one slot."""
        if self.total > 0:
            return SlotPlan(_scaled(self.capacity, int(self.total * SHRINK)), self.staging)
        return SlotPlan(self.capacity, self.staging // 2) if self.staging > 1 else None


def even_plan(layers: int, total: int, staging: int) -> SlotPlan:
    """`total` experts spread over the layers, the first ones taking what does not divide."""
    share, rest = divmod(total, layers)
    return SlotPlan(tuple(share + (layer < rest) for layer in range(layers)), staging)


def allocate_arena(device: Device, plan: SlotPlan, expert_bytes: int) -> tuple[SlotPlan, Buffer | None]:
    """Memory for a plan, or for the largest smaller one that the device has room for; no buffer: not even for one slot."""
    smaller: SlotPlan | None = plan
    while smaller is not None and smaller.slots > 0:
        try:
            buffer = device.allocate(smaller.slots * expert_bytes)
        except OutOfDeviceMemoryError as error:
            reason, smaller = error, smaller.shrunk()
            continue
        if smaller is not plan:
            logger.warning("%s: %d expert slots instead of %d: %s", device.name, smaller.slots, plan.slots, reason)
        return smaller, buffer
    if plan.slots > 0:
        logger.warning("%s: no memory for a single expert slot, all experts run on the CPU: %s", device.name, reason)
    return SlotPlan(0 if isinstance(plan.capacity, int) else (0,) * len(plan.capacity), 0), None


def _scaled(capacity: tuple[int, ...] | int, total: int) -> tuple[int, ...] | int:
    """Each layer's share of a smaller total, what rounding leaves going to the first layers that have lost most."""
    if isinstance(capacity, int):
        return total
    shares = [count * total // sum(capacity) for count in capacity]
    by_loss = sorted(range(len(capacity)), key=lambda layer: (shares[layer] - capacity[layer], layer))
    for layer in by_loss[: total - sum(shares)]:
        shares[layer] += 1
    return tuple(shares)
