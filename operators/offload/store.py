"""The experts in host memory, one contiguous block per expert, and the device memory of the slots, one block for all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from moegraft.cpu_backend import PackedExperts
from moegraft.operators.offload.devices.base import Buffer, Bytes, Device, DeviceError, Event, OutOfDeviceMemoryError, aligned_bytes

logger = logging.getLogger(__name__)
RING_CHUNKS = (4, 3, 2)  # page-locked chunks to try, the largest ring first
SHRINK = 0.75  # of the capacity, after each refusal: seven attempts to an eighth


class ExpertStore:
    """Every layer's experts, `(E * expert_bytes,)` uint8 per layer; the CPU kernel reads them in place and copies send them as they are.

    Experts in frames are copied from these, into which they are read from their files first where they are not there.

    Args:
        packed: what has frames, by layer.

    Raises:
        ValueError: layers have different sizes; each size needs its own store and slots.
    """

    def __init__(self, layers: Sequence[Bytes | None], num_experts: int, expert_bytes: int, packed: Sequence[PackedExperts] = ()) -> None:
        for layer, buffer in enumerate(layers):
            if buffer is not None and buffer.nbytes != num_experts * expert_bytes:
                raise ValueError(f"layer {layer} has {buffer.nbytes} bytes, not {num_experts} experts of {expert_bytes}")
        self.layers = len(layers)
        self.num_experts = num_experts
        self.expert_bytes = expert_bytes
        self._buffers = list(layers)
        self._framed = {layer: each for layer, each in enumerate(packed) if each.frames is not None}

    @classmethod
    def of_packed(cls, layers: Sequence[PackedExperts]) -> Self:
        """Create a store over the packed bytes, without a copy."""
        first = layers[0]
        return cls([packed.buffer for packed in layers], first.shape.num_experts, first.expert_bytes, layers)

    @classmethod
    def phantom(cls, layers: int, num_experts: int, expert_bytes: int) -> Self:
        """Create a store with sizes and no bytes, for simulations: transfers take their time and move nothing."""
        return cls([None] * layers, num_experts, expert_bytes)

    @property
    def nbytes(self) -> int:
        return self.layers * self.num_experts * self.expert_bytes

    def buffer(self, layer: int) -> Bytes | None:
        return self._buffers[layer]

    def in_frames(self, layer: int) -> bool:
        """Return whether the bytes of a layer's experts move in memory, and come from files."""
        return layer in self._framed

    def in_memory(self, layer: int, expert: int) -> bool:
        """Return whether an expert can be copied without a read from its file."""
        framed = self._framed.get(layer)
        return framed is None or (framed.frames is not None and framed.frames.in_memory(framed.layer_in_frames, expert))

    def ask(self, layer: int, expert: int) -> None:
        """Ask for an expert of frames, without waiting for it."""
        framed = self._framed.get(layer)
        if framed is not None and framed.frames is not None:
            framed.frames.ask(framed.layer_in_frames, (expert,))

    @contextmanager
    def in_reach(self, layer: int, expert: int) -> Iterator[None]:
        """Keep an expert in memory during the body, so that a copy reads no file. One that cannot be read fails when it is copied."""
        framed = self._framed.get(layer)
        if framed is None or framed.frames is None:
            yield
            return
        try:
            framed.frames.pin(framed.layer_in_frames, expert)
        except RuntimeError:
            yield
            return
        try:
            yield
        finally:
            framed.frames.unpin(framed.layer_in_frames, expert)

    def copy(self, layer: int, expert: int, start: int, target: Bytes) -> None:
        """Copy an expert's bytes from `start` on.

        Raises:
            DeviceError: they cannot be read from their file; the message names it.
        """
        framed = self._framed.get(layer)
        if framed is None:
            block = self.bytes_of(layer, expert)
            assert block is not None, "a phantom has no bytes"
            target[:] = block[start : start + len(target)]
        else:
            assert framed.frames is not None, "as `in_frames` states"
            try:
                framed.frames.copy(framed.layer_in_frames, expert, start, target)
            except RuntimeError as error:
                raise DeviceError(str(error)) from error

    def bytes_of(self, layer: int, expert: int) -> Bytes | None:
        """Return an expert's `(expert_bytes,)` uint8; None in a phantom."""
        buffer = self._buffers[layer]
        return None if buffer is None else buffer[expert * self.expert_bytes : (expert + 1) * self.expert_bytes]


class HostSource:
    """Where copies read from: page-locked layers; where that fails, a ring of page-locked chunks; else pageable memory.

    The sender fills the ring, which costs the host a copy. Chunks are used in order, and one is refilled only after the event of its last
    copy.
    """

    def __init__(self, store: ExpertStore, device: Device, chunk_bytes: int) -> None:
        self._store = store
        self._device = device
        self._pinned: list[Bytes] = []
        self._ring: list[Bytes] = []
        self._ring_events: list[Event | None] = []
        self._next = 0
        self.pinned_layers = store.layers
        for layer in range(store.layers):
            buffer = store.buffer(layer)
            if buffer is None:
                continue
            if store.in_frames(layer):
                self.pinned_layers = layer
                self._create_ring(chunk_bytes, None)
                break
            try:
                self._pin(buffer)
            except DeviceError as error:
                self.pinned_layers = layer
                self._create_ring(chunk_bytes, error)
                break

    @property
    def form(self) -> str:
        """`pinned`, or, for the layers that could not be page-locked, `ring` or `pageable`."""
        if self.pinned_layers == self._store.layers:
            return "pinned"
        return "ring" if self._ring else "pageable"

    def chunk(self, layer: int, expert: int, start: int, nbytes: int) -> Bytes | None:
        """Return the bytes of a chunk, which do not change until the event given to `mark_sent` is done; None in a phantom."""
        block = self._store.bytes_of(layer, expert)
        if block is None:
            return None
        part = block[start : start + nbytes]
        if not self.reused(layer):
            return part
        busy = self._ring_events[self._next]
        if busy is not None and not busy.done():
            busy.wait()
        target = self._ring[self._next][:nbytes]
        self._store.copy(layer, expert, start, target)
        return target

    def reused(self, layer: int) -> bool:
        """Return whether the memory of a layer's chunks is filled again once the event given to `mark_sent` is done."""
        return layer >= self.pinned_layers and bool(self._ring)

    def mark_sent(self, layer: int, event: Event) -> None:
        """Record the event behind the copy of the chunk that was last returned."""
        if self.reused(layer):
            self._ring_events[self._next] = event
            self._next = (self._next + 1) % len(self._ring)

    def close(self) -> None:
        """Release page-locked memory; the last copy is done."""
        for array in self._pinned:
            self._device.unpin(array)
        self._pinned.clear()
        self._ring.clear()

    def _pin(self, array: Bytes) -> None:
        self._device.pin(array)
        self._pinned.append(array)

    def _create_ring(self, chunk_bytes: int, reason: DeviceError | None) -> None:
        name, layers = self._device.name, f"experts of layers {self.pinned_layers} to {self._store.layers - 1}"
        for count in RING_CHUNKS:
            memory = aligned_bytes(count * chunk_bytes)
            try:
                self._pin(memory)
            except DeviceError:
                continue
            self._ring = [memory[index * chunk_bytes : (index + 1) * chunk_bytes] for index in range(count)]
            self._ring_events = [None] * count
            if reason is not None:
                logger.warning("%s: %s are copied through %d page-locked chunks of %d bytes: %s", name, layers, count, chunk_bytes, reason)
            return
        why = reason or "no memory can be page-locked"
        logger.warning("%s: %s are copied from pageable memory, which blocks the host: %s", name, layers, why)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The number of experts that may be resident on a device.

    Attributes:
        capacity: experts of each layer.
        staging: slots on top, into which experts are loaded while those they replace are still in use.
    """

    capacity: tuple[int, ...]
    staging: int

    def __post_init__(self) -> None:
        if min(self.capacity, default=0) < 0 or self.staging < 0:
            raise ValueError(f"a plan of {self.capacity} slots and {self.staging} for staging: counts must not be negative")

    @property
    def total(self) -> int:
        """Experts that may be resident."""
        return sum(self.capacity)

    @property
    def slots(self) -> int:
        return self.total + self.staging

    def shrunk(self) -> SlotPlan | None:
        """Return the next smaller plan: less capacity, then less staging; None below one slot."""
        total = int(self.total * SHRINK)
        if self.total == 0:
            return SlotPlan(self.capacity, self.staging // 2) if self.staging > 1 else None
        shares = [count * total // self.total for count in self.capacity]
        # What rounding leaves goes to the layers that have lost most.
        by_loss = sorted(range(len(shares)), key=lambda layer: (shares[layer] - self.capacity[layer], layer))
        for layer in by_loss[: total - sum(shares)]:
            shares[layer] += 1
        return SlotPlan(tuple(shares), self.staging)


def even_plan(layers: int, total: int, staging: int) -> SlotPlan:
    """Spread `total` experts over the layers; the first ones take the remainder."""
    share, rest = divmod(total, layers)
    return SlotPlan(tuple(share + (layer < rest) for layer in range(layers)), staging)


def allocate_arena(device: Device, plan: SlotPlan, expert_bytes: int) -> tuple[SlotPlan, Buffer | None]:
    """Allocate memory for a plan, or for the largest smaller one that the device has room for; no buffer if not even for one slot."""
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
    return SlotPlan((0,) * len(plan.capacity), 0), None
