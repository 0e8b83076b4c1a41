"""A planned model with its workload and GPUs, and its predicted memory.

Memory is that of the host at rest, at the peak of loading and while running; of each GPU; and of the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
from torch import nn

from moegraft.injection.meta_model import MetaModel
from moegraft.injection.planning import Plan, Swap
from moegraft.operators.base import MAX_REPLAYED_SEQUENCES, ExpertSlots, GpuRates, gpu_margin_bytes
from moegraft.operators.cache_form import KvCache, QuantisedForm
from moegraft.operators.layout import read_layout
from moegraft.operators.machine import Machine
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.sparsity import experts_layer
from moegraft.operators.structure import kinds

ASSUMED_RATES = GpuRates(540.0, 60.0, 24.0, "assumed, as an A6000; --gpu-bandwidth and --link-bandwidth state others")


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch` sequences at once, each with a prompt of `prompt` tokens, decoded after `context` tokens."""

    context: int
    batch: int
    prompt: int


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """GPUs of one kind; a model's layers are distributed evenly over them.

    Attributes:
        available_bytes: free memory of each.
    """

    available_bytes: int
    count: int
    rates: GpuRates


def budget_of(
    machine: Machine, stated_bytes: tuple[int, ...] | None, measured: GpuRates | None, *, gbps: float | None, link_gbps: float | None
) -> GpuBudget | None:
    """Return the stated GPUs, by default those of this machine; None if there are none, or if 0 bytes are stated.

    Args:
        measured: the rates of this machine's GPU.
        gbps, link_gbps: stated rates.
    """
    sizes = tuple(gpu.free_bytes for gpu in machine.gpus) if stated_bytes is None else stated_bytes
    if not sizes or not min(sizes):
        return None
    rates = measured or ASSUMED_RATES
    stated = {"gbps": gbps, "link_gbps": link_gbps}
    given = {name: value for name, value in stated.items() if value is not None}
    if given:
        options = " and ".join("--gpu-bandwidth" if name == "gbps" else "--link-bandwidth" for name in given)
        rates = replace(rates, **given, origin=f"stated by {options}" + ("" if len(given) == len(stated) else f", else {rates.origin}"))
    return GpuBudget(min(sizes), len(sizes), rates)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model with its plan, and the answers of the plan's operators on their modules."""

    meta_model: MetaModel
    plan: Plan
    registry: OperatorRegistry

    def __post_init__(self) -> None:
        if self.plan.mtp:
            object.__setattr__(self, "meta_model", self.meta_model.with_mtp)

    def gpus_used(self, budget: GpuBudget) -> int:
        """Return how many GPUs hold what is not replaced; 0 if no rule asks for a GPU, and it stays on the CPU."""
        wanted = self.plan.devices
        if not wanted:
            return 0
        return 1 if len(wanted) == 1 and "auto" not in wanted else budget.count

    def on_gpu_alone(self, swap: Swap) -> bool:
        """Whether all weights of the operator are on a GPU."""
        return bool(swap.traits.devices) and swap.traits.slots is None

    def weight_type(self, swap: Swap) -> str:
        packing = swap.operator_type.packing
        return "unknown" if packing is None else packing.type_for(swap.options, self.meta_model.stored)

    def left_out(self, swap: Swap) -> float:
        """Return the share of the routed experts' neurons that a token does not need.

        Raises:
            UnsupportedModelError: the config does not give the number of experts per token.
        """
        sparsity = swap.traits.sparsity
        return 0.0 if sparsity is None else experts_layer(swap.module, self.meta_model.skeleton).routed_target(sparsity)

    def replays_steps(self, load: Workload) -> bool:
        """Return whether decode steps on the CPU may be replayed as native programs, which record the kernels of operators."""
        operators = [swap.traits.replays_steps for swap in self.plan.swaps]
        return bool(operators) and all(operators) and self.cache_form() is None and load.batch <= MAX_REPLAYED_SEQUENCES

    def cache_form(self) -> QuantisedForm | None:
        """Return the form of a quantised key-value cache; None if it is in the model's dtype."""
        return self.plan.cache_form(self.meta_model.source.config)

    @property
    def framed(self) -> list[Swap]:
        """The operators whose weights stay in files, and of which host memory holds a part."""
        return [swap for swap in self.plan.swaps if swap.traits.host_budget is not None]

    @property
    def framed_bytes(self) -> int:
        """The bytes of their weights."""
        return sum(swap.footprint.by_device.get("disk", 0) for swap in self.framed)

    def host_bytes(self) -> int:
        """Return the bytes of weights in host memory if there is a GPU: without operators that are on the GPU alone."""
        return sum(swap.footprint.by_device.get("cpu", 0) for swap in self.plan.swaps if not self.on_gpu_alone(swap))


WIDTHS = 8  # vectors of the hidden size per token that are alive at once: residual, norms, projections, copies of the operator


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in bytes.

    Attributes:
        weights: of operators and of what is not replaced.
        program: of Python and its libraries.
        loading: in addition, at the peak of loading; mapped files are not counted, as the system can drop their pages.
        kv_cache, activations: in addition, while running.
        frames: for weights that stay in files, once all others are loaded.
    """

    weights: int
    program: int
    loading: int
    kv_cache: int
    activations: int
    frames: int = 0

    @property
    def at_rest(self) -> int:
        return self.weights + self.program + self.frames

    @property
    def peak_loading(self) -> int:
        return self.weights + self.program + self.loading

    @property
    def running(self) -> int:
        return self.at_rest + self.kv_cache + self.activations

    @property
    def needed(self) -> int:
        """The maximum at any time."""
        return max(self.peak_loading, self.running)


def memory_of(planned: PlannedModel, cache: KvCache, load: Workload, available_bytes: int, *, on_gpu: bool) -> Memory:
    """Predict the host memory for loading and running a plan.

    Args:
        available_bytes: of the host, of which weights in files get a part.
        on_gpu: whether everything but the experts is on a GPU.
    """
    meta_model = planned.meta_model
    hidden_size = getattr(meta_model.source.config.get_text_config(), "hidden_size", 0)
    copied = 2 * load.batch * load.prompt * hidden_size * meta_model.dtype.itemsize  # tokens on their way to the experts and back
    memory = Memory(
        weights=planned.host_bytes() if on_gpu else planned.plan.bytes_by_device.get("cpu", 0),
        program=psutil.Process().memory_info().rss,  # this process has loaded the same libraries and no weights
        loading=max(_transient_bytes(planned), default=0),
        kv_cache=0 if on_gpu else cache.nbytes(load.context, load.batch),
        activations=copied if on_gpu else activation_bytes(meta_model, load),
    )
    budget = next((swap.traits.host_budget for swap in planned.framed), None)
    if budget is None:
        return memory
    layer = max(swap.footprint.by_device.get("disk", 0) for swap in planned.framed)  # about what frames need at least
    held = min(planned.framed_bytes, budget(max(0, available_bytes - memory.weights - memory.program)))
    return replace(memory, frames=max(layer, held))


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

        def taken(group: SlotGroup, ratio: float) -> int:
            return group.rule.with_ratio(ratio).count(len(group.swaps), group.num_experts, group.expert_bytes, 0).total * group.expert_bytes

        ratios = (percent / 100 for percent in range(100, 0, -1))
        return next((ratio for ratio in ratios if sum(taken(group, ratio) for group in self.groups) <= room), None)


def gpu_memory_of(planned: PlannedModel, cache: KvCache, load: Workload, budget: GpuBudget) -> GpuMemory | None:
    """Predict the memory of a plan on each GPU; None if no rule asks for one.

    Slots are sized as at load: they take the free memory minus a KV cache of the rule's `context`.
    """
    count = planned.gpus_used(budget)
    if not count:
        return None
    operator_bytes = sum(swap.footprint.total_bytes for swap in planned.plan.swaps if planned.on_gpu_alone(swap))
    weights = -(-(planned.plan.rest_bytes + operator_bytes) // count)
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
            kind = sum(swap.footprint.by_device.get(device, 0) for device in ("cpu", "disk")), planned.weight_type(swap)
            alike.setdefault(slots, {}).setdefault(kind, []).append(swap)
    for slots, sizes in alike.items():
        room = max(0, free_bytes - cache.nbytes(slots.context))
        every = sum(host_bytes * len(swaps) for (host_bytes, _), swaps in sizes.items())
        for (host_bytes, _), swaps in sizes.items():
            num_experts = read_layout(planned.meta_model.skeleton.get_submodule(swaps[0].module)).num_experts
            expert_bytes = host_bytes // num_experts
            count = slots.count(len(swaps), num_experts, expert_bytes, room, host_bytes * len(swaps) / every)
            yield SlotGroup(slots, tuple(swaps), num_experts, expert_bytes, count.resident, count.total * expert_bytes)
            free_bytes -= count.total * expert_bytes
