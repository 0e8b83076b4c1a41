"""Host memory that a plan takes: at rest, at the peak of loading, and while it runs.

GPU memory that a plan takes: what stays of the model, the KV cache, and expert slots in what is left.

How large a model's key-value cache grows: measured on meta tensors, so that every kind of attention tells its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.estimate.work import GpuBudget, Load, gpus_used, held_on_gpu, shares_experts
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.plan import Plan, Swap
from moegraft.operators.cache_form import QuantisedForm
from moegraft.operators.kv_cache import QuantizedKvCache, QuantizedKvCacheOptions, group_of
from moegraft.operators.layout import read_layout
from moegraft.operators.offload.options import MARGIN_BYTES, MARGIN_SHARE, kv_cache_bytes, token_bytes
from moegraft.operators.structure import kinds


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache for one sequence; `window` bounds the tokens it keeps."""

    bytes_per_token: int
    fixed_bytes: int
    window: int | None


@dataclass(frozen=True, slots=True)
class KvCache:
    """A model's cache.

    Attributes:
        exact: False where it is from the config's numbers of heads instead of from the model itself.
        itemsize: bytes of a value in the model's dtype.
        form: of a quantised cache, of which one layer at a time is in that dtype as well.
    """

    layers: tuple[LayerCache, ...]
    exact: bool
    itemsize: int
    form: QuantisedForm | None = None

    def nbytes(self, context: int, batch: int = 1) -> int:
        """For `batch` sequences of `context` tokens."""
        if self.form is not None:
            return batch * self.form.cache_bytes([layer.bytes_per_token for layer in self.layers], self.itemsize, context)
        kept = (min(context, layer.window) if layer.window else context for layer in self.layers)
        per_sequence = sum(layer.fixed_bytes + layer.bytes_per_token * tokens for layer, tokens in zip(self.layers, kept, strict=True))
        return batch * per_sequence


def form_of(plan: Plan, skeleton: PreTrainedModel) -> QuantisedForm | None:
    """What a plan's rules make of the cache; None: nothing."""
    found = next((swap.options for swap in plan.swaps if swap.operator == QuantizedKvCache.name), None)
    return found.form(group_of(skeleton.config, found)) if isinstance(found, QuantizedKvCacheOptions) else None


def kv_cache(skeleton: PreTrainedModel) -> KvCache:
    """The cache of a model on meta: what one and two tokens leave in it, read off its tensors."""
    try:
        one, two = (_filled(skeleton, tokens) for tokens in (1, 2))
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        # Some families look at values, which meta tensors do not have.
        return _by_config(skeleton)
    layers = tuple(
        LayerCache(after - before, 2 * before - after, window) for (before, window), (after, _) in zip(one, two, strict=True) if after
    )
    return KvCache(layers, True, skeleton.dtype.itemsize) if layers else _by_config(skeleton)


def _filled(skeleton: PreTrainedModel, tokens: int) -> list[tuple[int, int | None]]:
    """Bytes and window of each layer of a cache with this many tokens."""
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
    """While it lasts, experts give back what they are given: which expert a token goes to is a value, and no cache depends on it."""
    experts = [module for path, module in skeleton.named_modules() if "experts" in kinds(path, module, skeleton)]
    for module in experts:
        module.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        yield
    finally:
        for module in experts:
            del module.forward


def _by_config(skeleton: PreTrainedModel) -> KvCache:
    config = skeleton.config.get_text_config()
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    found = tuple(LayerCache(token_bytes(layer, skeleton.dtype), 0, None) for layer in layers)
    return KvCache(found, False, skeleton.dtype.itemsize)


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


def gpu_memory_of(meta_model: MetaModel, plan: Plan, cache: KvCache, load: Load, budget: GpuBudget, activations: int) -> GpuMemory | None:
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
    shared = tuple(_shared(meta_model, plan, (budget.available_bytes - weights - margin) * count))
    return GpuMemory(count, budget.available_bytes, weights, kv_bytes, max(margin, activations), shared)


def _shared(meta_model: MetaModel, plan: Plan, free_bytes: int) -> Iterator[Shared]:
    """Each group takes what those before it leave, as engines are opened."""
    for swaps in _groups(plan).values():
        options: Any = swaps[0].options
        module = meta_model.skeleton.get_submodule(swaps[0].module)
        num_experts = module.num_experts
        assert isinstance(num_experts, int), "an experts module says how many it has"
        expert_bytes = _host_bytes(swaps[0]) // num_experts
        kv_bytes = kv_cache_bytes(meta_model.source.config, options.cache.context, meta_model.dtype, form_of(plan, meta_model.skeleton))
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


PROGRAM_BYTES = 1 << 29  # Python, PyTorch and transformers where it cannot be read
WIDTHS = 8  # hidden-size vectors a token that are alive at once: residual, norms, projections, and the operator's own copies


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in bytes.

    Attributes:
        weights: of operators and of what is not replaced.
        program: of Python and its libraries.
        loading: on top of these at the worst moment of loading; mapped files are not counted, as the system takes them back.
        kv_cache, activations: on top of these while it runs.
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
        """The most at any time."""
        return max(self.peak_loading, self.running)


def memory_of(meta_model: MetaModel, plan: Plan, cache: KvCache, load: Load, *, on_gpu: bool) -> Memory:
    """What loading and running a plan takes of the host, `on_gpu` with all but the experts on a GPU."""
    hidden_size = getattr(meta_model.source.config.get_text_config(), "hidden_size", 0)
    copied = 2 * load.batch * load.prompt * hidden_size * meta_model.dtype.itemsize  # tokens on their way to the experts and back
    return Memory(
        weights=plan.bytes_by_device.get("cpu", 0) - (moved_bytes(plan) if on_gpu else 0),
        program=_program_bytes(),
        loading=max(_transient_bytes(meta_model, plan), default=0),
        kv_cache=0 if on_gpu else cache.nbytes(load.context, load.batch),
        activations=copied if on_gpu else activation_bytes(meta_model, load),
    )


def activation_bytes(meta_model: MetaModel, load: Load) -> int:
    """What is alive at once while a prompt is read, wherever that is."""
    config = meta_model.source.config.get_text_config()
    tokens = load.batch * max(load.prompt, 1)
    widest = max(getattr(config, "hidden_size", 0), getattr(config, "intermediate_size", 0) or 0)
    vocabulary = getattr(config, "vocab_size", 0) * load.batch * 4  # logits of the last position, in float32
    return tokens * widest * WIDTHS * meta_model.dtype.itemsize + vocabulary


def _program_bytes() -> int:
    """What this process holds now: it has loaded the same libraries and no weights."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return PROGRAM_BYTES


def _transient_bytes(meta_model: MetaModel, plan: Plan) -> Iterator[int]:
    """For every module, what is read of it at once, and the copy that it becomes on its way."""
    replaced = {swap.module for swap in plan.swaps if not swap.in_place}
    for path, module in meta_model.skeleton.named_modules():
        for parameter in module.parameters(recurse=False):
            read = parameter.numel() * meta_model.stored.itemsize
            if path in replaced:
                yield 2 * _piece_bytes(path, module, read, meta_model)
            else:
                yield read if meta_model.stored == meta_model.dtype else 2 * read


def _piece_bytes(path: str, module: nn.Module, parameter_bytes: int, meta_model: MetaModel) -> int:
    """Experts are read one at a time, but for layouts that only transformers' converter can make, which come as a whole."""
    if "experts" not in kinds(path, module, meta_model.skeleton):
        return parameter_bytes
    layout = read_layout(module)
    return parameter_bytes if layout.transposed or layout.interleaved else parameter_bytes // layout.num_experts
