"""Predicted memory of a plan: of the host at rest, at the peak of loading and while running; of each GPU; and of the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.estimate.planned import GpuBudget, PlannedModel, Workload
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.planning import Swap
from moegraft.operators.cache_form import QuantisedForm, kv_cache_bytes, token_bytes
from moegraft.operators.estimates import ExpertSlots, gpu_margin_bytes
from moegraft.operators.layout import read_layout
from moegraft.operators.structure import kinds

WIDTHS = 8  # vectors of the hidden size per token that are alive at once: residual, norms, projections, copies of the operator


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer for one sequence; `window` is the maximum number of tokens that it keeps."""

    bytes_per_token: int
    fixed_bytes: int
    window: int | None


@dataclass(frozen=True, slots=True)
class KvCache:
    """A model's key-value cache.

    Attributes:
        exact: whether it is measured on the model; otherwise it is computed from the config's numbers of heads.
        itemsize: bytes of a value in the model's dtype.
        form: the form of a quantised cache.
    """

    layers: tuple[LayerCache, ...]
    exact: bool
    itemsize: int
    form: QuantisedForm | None = None

    def nbytes(self, context: int, batch: int = 1) -> int:
        """Return the bytes of `batch` sequences of `context` tokens."""
        if self.form is not None:
            states = sum(layer.fixed_bytes for layer in self.layers)
            return batch * (states + self.form.cache_bytes([layer.bytes_per_token for layer in self.layers], self.itemsize, context))
        kept = (min(context, layer.window) if layer.window else context for layer in self.layers)
        return batch * sum(layer.fixed_bytes + layer.bytes_per_token * tokens for layer, tokens in zip(self.layers, kept, strict=True))


def kv_cache(skeleton: PreTrainedModel) -> KvCache:
    """Measure the cache of a model on meta with one and with two tokens, for any kind of attention."""
    try:
        one, two = (_filled(skeleton, tokens) for tokens in (1, 2))
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        one = two = []  # some families read values, which meta tensors do not have
    layers = tuple(
        LayerCache(after - before, 2 * before - after, window) for (before, window), (after, _) in zip(one, two, strict=True) if after
    )
    if layers:
        return KvCache(layers, True, skeleton.dtype.itemsize)
    by_config = tuple(LayerCache(size, 0, None) for size in token_bytes(skeleton.config, skeleton.dtype))
    return KvCache(by_config, False, skeleton.dtype.itemsize)


def _filled(skeleton: PreTrainedModel, tokens: int) -> list[tuple[int, int | None]]:
    """Return the bytes and the window of each layer of a cache with this many tokens."""
    with _without_experts(skeleton), torch.no_grad(), torch.device("meta"):
        cache = skeleton(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=True).past_key_values
    return [(sum(map(_nbytes, vars(layer).values())), getattr(layer, "sliding_window", None)) for layer in cache.layers]


def _nbytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


@contextmanager
def _without_experts(skeleton: PreTrainedModel) -> Iterator[None]:
    """Let experts return their input while the body runs: routing needs values, and the cache does not depend on it."""
    experts = [module for path, module in skeleton.named_modules() if "experts" in kinds(path, module, skeleton)]
    for module in experts:
        module.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        yield
    finally:
        for module in experts:
            del module.forward


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
    groups = tuple(_slot_groups(planned, (budget.available_bytes - weights - margin) * count))
    reserve = max(margin, activation_bytes(planned.meta_model, load))
    return GpuMemory(count, budget.available_bytes, weights, kv_bytes, reserve, groups)


def _slot_groups(planned: PlannedModel, free_bytes: int) -> Iterator[SlotGroup]:
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
        kv_bytes = kv_cache_bytes(meta_model.source.config, slots.context, meta_model.dtype, planned.cache_form())
        room = max(0, free_bytes - kv_bytes)
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
