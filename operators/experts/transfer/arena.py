"""The device memory of the slots: one block, as large as the device gives."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from moegraft.operators.experts.devices.interface import Buffer, Device, OutOfDeviceMemoryError

logger = logging.getLogger(__name__)
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
