"""GPU memory that a plan takes: what stays of the model, the KV cache, and expert slots in what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moegraft.injection.outline import Outline
from moegraft.injection.plan import Plan, Swap
from moegraft.injection.predict.gpu import GpuBudget, gpus_used, held_on_gpu, shares_experts
from moegraft.injection.predict.kv_cache import KvCache, form_of
from moegraft.injection.predict.speed import Load
from moegraft.operators.experts.engine.room import MARGIN_BYTES, MARGIN_SHARE, kv_cache_bytes


@dataclass(frozen=True, slots=True)
class Shared:
    """Layers alike whose experts are in host memory and in slots.

    Attributes:
        resident: share of the experts that have a slot.
    """

    swaps: tuple[Swap, ...]
    num_experts: int
    expert_bytes: int
    slots: int
    slot_bytes: int
    stated: bool

    @property
    def experts(self) -> int:
        return len(self.swaps) * self.num_experts

    @property
    def resident(self) -> float:
        return min(1.0, self.slots / self.experts)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on each of `count` GPUs.

    Attributes:
        weights: what stays of the model, and what operators hold there for good.
        reserve: activations of a prompt, PyTorch's own blocks and the display.
        shared: layers with slots.
    """

    count: int
    available: int
    weights: int
    kv_cache: int
    reserve: int
    shared: tuple[Shared, ...]

    @property
    def slots(self) -> int:
        return sum(group.slot_bytes for group in self.shared) // self.count

    @property
    def needed(self) -> int:
        return self.weights + self.kv_cache + self.reserve + self.slots

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def experts_with_slot(self) -> int:
        return sum(group.slots for group in self.shared)

    @property
    def experts(self) -> int:
        return sum(group.experts for group in self.shared)


def moved_bytes(plan: Plan) -> int:
    """Of what a plan counts for the host when there is no GPU, what goes to one: all but the experts in host memory."""
    return plan.rest_bytes + sum(swap.footprint.by_device.get("cpu", 0) for swap in plan.swaps if held_on_gpu(swap))


def gpu_memory_of(outline: Outline, plan: Plan, cache: KvCache, load: Load, budget: GpuBudget, activations: int) -> GpuMemory | None:
    """What a plan takes of each GPU; None where no rule asks for one.

    Slots are counted as they are opened: in what is free then, after a KV cache of the rule's own `context`.
    """
    count = gpus_used(plan, budget)
    if not count:
        return None
    held = sum(sum(swap.footprint.by_device.values()) for swap in plan.swaps if held_on_gpu(swap))
    weights = -(-(plan.rest_bytes + held) // count)
    margin = max(MARGIN_BYTES, int(MARGIN_SHARE * budget.available_bytes))
    kv_bytes = cache.nbytes(load.context, load.batch) // count
    shared = tuple(_shared(outline, plan, (budget.available_bytes - weights - margin) * count))
    return GpuMemory(count, budget.available_bytes, weights, kv_bytes, max(margin, activations), shared)


def _shared(outline: Outline, plan: Plan, free_bytes: int) -> Iterator[Shared]:
    """Each group takes what those before it leave, as engines are opened."""
    for swaps in _groups(plan).values():
        options: Any = swaps[0].options
        module = outline.skeleton.get_submodule(swaps[0].module)
        num_experts = module.num_experts
        assert isinstance(num_experts, int), "an experts module says how many it has"
        expert_bytes = _host_bytes(swaps[0]) // num_experts
        kv_bytes = kv_cache_bytes(outline.source.config, options.cache.context, outline.dtype, form_of(plan, outline.skeleton))
        room, captured = max(0, free_bytes - kv_bytes), options.on_gpu.captures
        plan_of_slots = options.cache.plan(len(swaps), num_experts, expert_bytes, room, captured=captured)
        stated = any(getattr(options.cache, name) is not None for name in ("ratio", "slots", "gpu_memory"))
        found = Shared(tuple(swaps), num_experts, expert_bytes, plan_of_slots.total, plan_of_slots.slots * expert_bytes, stated)
        free_bytes -= found.slot_bytes
        yield found


def _groups(plan: Plan) -> dict[object, list[Swap]]:
    found: dict[object, list[Swap]] = {}
    for swap in plan.swaps:
        if shares_experts(swap):
            options: Any = swap.options
            found.setdefault((options.on_gpu, _host_bytes(swap)), []).append(swap)
    return found


def _host_bytes(swap: Swap) -> int:
    return swap.footprint.by_device.get("cpu", 0) + swap.footprint.by_device.get("disk", 0)


def largest_ratio(memory: GpuMemory) -> float | None:
    """The largest share of every group's experts, in hundredths, that fits beside the rest; None where not one slot does."""
    room = (memory.available - memory.weights - memory.kv_cache - memory.reserve) * memory.count
    return next((percent / 100 for percent in range(100, 0, -1) if _slot_bytes(memory.shared, percent / 100) <= room), None)


def _slot_bytes(shared: Sequence[Shared], ratio: float) -> int:
    total = 0
    for group in shared:
        options: Any = group.swaps[0].options
        cache = replace(options.cache, ratio=ratio, slots=None, gpu_memory=None)
        slots = cache.plan(len(group.swaps), group.num_experts, group.expert_bytes, 0, captured=options.on_gpu.captures).slots
        total += slots * group.expert_bytes
    return total
