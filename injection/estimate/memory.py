"""Predicted memory of a plan: of the host at rest, at the peak of loading and while running; of each GPU; and of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
from torch import nn

from moegraft.injection.estimate.planned import GpuBudget, PlannedModel, Workload
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.planning import Swap
from moegraft.operators.cache_form import KvCache
from moegraft.operators.estimates import ExpertSlots, gpu_margin_bytes
from moegraft.operators.layout import read_layout
from moegraft.operators.structure import kinds

WIDTHS = 8  # vectors of the hidden size per token that are alive at once: residual, norms, projections, copies of the operator


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in bytes.

    Attributes:
        weights: of operators and of what is not replaced.
        program: of Python and its libraries.
        loading: in addition, at the peak of loading; mapped files are not counted, as the system can drop their pages.
        kv_cache, activations: in addition, while running.
    """

    weights: int
    program: int
    loading: int
    kv_cache: int
    activations: int

    @property
    def at_rest(self) -> int:
        return self.weights + self.program

    @property
    def peak_loading(self) -> int:
        return self.at_rest + self.loading

    @property
    def running(self) -> int:
        return self.at_rest + self.kv_cache + self.activations

    @property
    def needed(self) -> int:
        """The maximum at any time."""
        return max(self.peak_loading, self.running)


def memory_of(planned: PlannedModel, cache: KvCache, load: Workload, *, on_gpu: bool) -> Memory:
    """Predict the host memory for loading and running a plan; with `on_gpu`, everything but the experts is on a GPU."""
    meta_model = planned.meta_model
    hidden_size = getattr(meta_model.source.config.get_text_config(), "hidden_size", 0)
    copied = 2 * load.batch * load.prompt * hidden_size * meta_model.dtype.itemsize  # tokens on their way to the experts and back
    return Memory(
        weights=planned.host_bytes() if on_gpu else planned.plan.bytes_by_device.get("cpu", 0),
        program=psutil.Process().memory_info().rss,  # this process has loaded the same libraries and no weights
        loading=max(_transient_bytes(planned), default=0),
        kv_cache=0 if on_gpu else cache.nbytes(load.context, load.batch),
        activations=copied if on_gpu else activation_bytes(meta_model, load),
    )


def activation_bytes(meta_model: MetaModel, load: Workload) -> int:
    """Return the bytes of activations that are alive at once while a prompt is computed."""
    config = meta_model.source.config.get_text_config()
    tokens = load.batch * max(load.prompt, 1)
    widest = max(getattr(config, "hidden_size", 0), getattr(config, "intermediate_size", 0) or 0)
    vocabulary = getattr(config, "vocab_size", 0) * load.batch * 4  # logits of the last position, in float32
    return tokens * widest * WIDTHS * meta_model.dtype.itemsize + vocabulary


def _transient_bytes(planned: PlannedModel) -> Iterator[int]:
    """Yield the bytes that are read of each module at once, with the converted copy."""
    meta_model = planned.meta_model
    replaced = {swap.module for swap in planned.plan.swaps if not swap.in_place}
    for path, module in meta_model.skeleton.named_modules():
        for parameter in module.parameters(recurse=False):
            read = parameter.numel() * meta_model.stored.itemsize
            if path in replaced:
                yield 2 * _piece_bytes(path, module, read, meta_model)
            else:
                yield read if meta_model.stored == meta_model.dtype else 2 * read


def _piece_bytes(path: str, module: nn.Module, parameter_bytes: int, meta_model: MetaModel) -> int:
    """Return the bytes of one expert, or of the whole parameter for layouts that only transformers' converter can read."""
    if "experts" not in kinds(path, module, meta_model.skeleton):
        return parameter_bytes
    layout = read_layout(module)
    return parameter_bytes if layout.transposed or layout.interleaved else parameter_bytes // layout.num_experts


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Equal layers whose experts are in host memory and share slots on a GPU.

    Attributes:
        resident: the number of experts with a slot, of all layers.
        slot_bytes: of all slots, staging slots included.
    """

    rule: ExpertSlots
    swaps: tuple[Swap, ...]
    num_experts: int
    expert_bytes: int
    resident: int
    slot_bytes: int

    @property
    def experts(self) -> int:
        return len(self.swaps) * self.num_experts

    @property
    def resident_share(self) -> float:
        return min(1.0, self.resident / self.experts)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on each of `count` GPUs.

    Attributes:
        weights: of modules that are not replaced, and of operators that are on the GPU alone.
        reserve: for the activations of a prompt, PyTorch's own blocks and the display.
        groups: layers with slots.
    """

    count: int
    available: int
    weights: int
    kv_cache: int
    reserve: int
    groups: tuple[SlotGroup, ...]

    @property
    def slots(self) -> int:
        return sum(group.slot_bytes for group in self.groups) // self.count

    @property
    def needed(self) -> int:
        return self.weights + self.kv_cache + self.reserve + self.slots

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def experts_with_slot(self) -> int:
        return sum(group.resident for group in self.groups)

    @property
    def experts(self) -> int:
        return sum(group.experts for group in self.groups)

    def largest_ratio(self) -> float | None:
        """Return the largest share of every group's experts, in hundredths, for which slots fit; None if not even one slot fits."""
        room = (self.available - self.weights - self.kv_cache - self.reserve) * self.count
        return next((percent / 100 for percent in range(100, 0, -1) if self._slot_bytes(percent / 100) <= room), None)

    def _slot_bytes(self, ratio: float) -> int:
        return sum(
            group.expert_bytes * group.rule.with_ratio(ratio).count(len(group.swaps), group.num_experts, group.expert_bytes, 0).total
            for group in self.groups
        )


def gpu_memory_of(planned: PlannedModel, cache: KvCache, load: Workload, budget: GpuBudget) -> GpuMemory | None:
    """Predict the memory of a plan on each GPU; None if no rule asks for one.

    Slots are sized as at load: they take the free memory minus a KV cache of the rule's `context`.
    """
    count = planned.gpus_used(budget)
    if not count:
        return None
    held = sum(swap.footprint.total_bytes for swap in planned.plan.swaps if planned.on_gpu_alone(swap))
    weights = -(-(planned.plan.rest_bytes + held) // count)
    margin = gpu_margin_bytes(budget.available_bytes)
    kv_bytes = cache.nbytes(load.context, load.batch) // count
    groups = tuple(_slot_groups(planned, cache, (budget.available_bytes - weights - margin) * count))
    reserve = max(margin, activation_bytes(planned.meta_model, load))
    return GpuMemory(count, budget.available_bytes, weights, kv_bytes, reserve, groups)


def _slot_groups(planned: PlannedModel, cache: KvCache, free_bytes: int) -> Iterator[SlotGroup]:
    """Yield the groups in the order in which they are allocated.

    Rules take the memory that earlier ones leave; layers of one rule whose experts differ in size share it by their bytes.
    """
    alike: dict[ExpertSlots, dict[tuple[int, str], list[Swap]]] = {}
    for swap in planned.plan.swaps:
        slots = swap.traits.slots
        if slots is not None:
            kind = _host_bytes(swap), planned.weight_type(swap)
            alike.setdefault(slots, {}).setdefault(kind, []).append(swap)
    meta_model = planned.meta_model
    for slots, sizes in alike.items():
        room = max(0, free_bytes - cache.nbytes(slots.context))
        every = sum(host_bytes * len(swaps) for (host_bytes, _), swaps in sizes.items())
        for (host_bytes, _), swaps in sizes.items():
            num_experts = _num_experts(meta_model, swaps)
            expert_bytes = host_bytes // num_experts
            count = slots.count(len(swaps), num_experts, expert_bytes, room, host_bytes * len(swaps) / every)
            yield SlotGroup(slots, tuple(swaps), num_experts, expert_bytes, count.resident, count.total * expert_bytes)
            free_bytes -= count.total * expert_bytes


def _host_bytes(swap: Swap) -> int:
    return sum(swap.footprint.by_device.get(device, 0) for device in ("cpu", "disk"))


def _num_experts(meta_model: MetaModel, swaps: Sequence[Swap]) -> int:
    found = meta_model.skeleton.get_submodule(swaps[0].module).num_experts
    assert isinstance(found, int), "an experts module has the attribute num_experts"
    return found
