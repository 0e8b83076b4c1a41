"""Everything that can be said of a plan before it is loaded.

What to change where a plan does not fit, from the smallest loss on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moegraft.injection.estimate.measure import Measurements
from moegraft.injection.estimate.memory import (
    GpuMemory,
    KvCache,
    Memory,
    activation_bytes,
    form_of,
    gpu_memory_of,
    kv_cache,
    largest_ratio,
    memory_of,
)
from moegraft.injection.estimate.speed import Speed, predict, predict_with_gpu
from moegraft.injection.estimate.work import GpuBudget, GpuRates, Load, wants_gpu, weight_type, work_of
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.plan import Plan, Swap
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.linear import QuantizedLinear, QuantizedLinearOptions
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.structure import kinds

GIB = 1 << 30
SHORTEST_CONTEXT = 256  # tokens; below, nobody is helped
SMALLER_TYPES = ("bfloat16", "int8", "int4")  # from the most exact to the smallest


def would_fit(found: Forecast, meta_model: MetaModel, registry: OperatorRegistry) -> Iterator[str]:
    """Sentences: context, then what takes the memory, then the machine."""
    context = _longest_context(found)
    if context is not None:
        yield f"a context of {context:,} tokens instead of {found.load.context:,}"
    if found.gpu is not None and not found.gpu.fits:
        yield from _on_gpu(found.gpu, found, meta_model)
    if not found.fits_host:
        yield from _on_host(found, meta_model, registry)


def _on_host(found: Forecast, meta_model: MetaModel, registry: OperatorRegistry) -> Iterator[str]:
    memory, free = found.memory, found.available_bytes
    for weights in SMALLER_TYPES:
        swaps = [_with_weights(swap, weights, meta_model, registry) for swap in found.plan.swaps]
        saved = sum(_host_bytes(old) - _host_bytes(new) for old, new in zip(found.plan.swaps, swaps, strict=True))
        if saved > 0 and memory.needed - saved <= free:
            yield f"'weights: {weights}' for the experts, which needs {(memory.needed - saved) / GIB:.1f} GiB"
    mapped = sum(_host_bytes(swap) for swap in found.plan.swaps if getattr(swap.options, "cache_dir", "none") is None)
    if mapped and memory.needed - mapped <= free:
        yield "'cache_dir: FOLDER' for the experts: what does not fit is then read from disk as it is used, at the disk's speed"
    yield f"a machine with {(memory.needed - free) / GIB:.1f} GiB more free memory"


def _on_gpu(gpu: GpuMemory, found: Forecast, meta_model: MetaModel) -> Iterator[str]:
    least = gpu.needed - gpu.slots  # where slots take what is left, all that must fit
    stated = any(group.stated for group in gpu.shared)
    if not stated and least <= gpu.available:
        tokens = found.load.context * found.load.batch
        yield f"'cache: {{context: {tokens}}}' in the rule of the experts, so that slots leave room for that many tokens"
    ratio = largest_ratio(gpu) if stated else None
    if ratio is not None:
        yield f"'cache: {{ratio: {ratio:g}}}', or no size at all: slots then take what is left"
    saved = _packed_linears_save(found, meta_model) // gpu.count
    if least > gpu.available >= least - saved:
        yield f"'quantized_linear' with 'weights: int8' and 'gpu: auto' for the linear layers, which saves {saved / GIB:.1f} GiB there"
    gap = (gpu.needed if stated or least <= gpu.available else least) - gpu.available
    yield f"a GPU with {gap / GIB:.1f} GiB more free memory"


def _packed_linears_save(found: Forecast, meta_model: MetaModel) -> int:
    """Bytes that linear layers take less as int8, those that no rule has."""
    taken = {swap.module for swap in found.plan.swaps}
    options = QuantizedLinearOptions(weights="int8")
    saved = 0
    for path, module in meta_model.skeleton.named_modules():
        if (
            path not in taken
            and "linear" in kinds(path, module, meta_model.skeleton)
            and QuantizedLinear.unsupported_reason(module, options) is None
        ):
            own = sum(parameter.numel() for parameter in module.parameters()) * meta_model.dtype.itemsize
            saved += max(0, own - QuantizedLinear.footprint(module, options, meta_model.stored).total_bytes)
    return saved


def _longest_context(found: Forecast) -> int | None:
    """The context, halved as often as it takes, with which everything fits; None where that alone does not help."""
    memory, context, gpu = found.memory, found.load.context, found.gpu
    while context > SHORTEST_CONTEXT:
        context //= 2
        kv_bytes = found.cache.nbytes(context, found.load.batch)
        if gpu is not None:
            if found.fits_host and gpu.needed - gpu.kv_cache + kv_bytes // gpu.count <= gpu.available:
                return context
        elif max(memory.at_rest + memory.activations + kv_bytes, memory.peak_loading) <= found.available_bytes:
            return context
    return None


def _host_bytes(swap: Swap) -> int:
    return swap.footprint.by_device.get("cpu", 0)


def _with_weights(swap: Swap, weights: str, meta_model: MetaModel, registry: OperatorRegistry) -> Swap:
    """The same swap with smaller weights; as it is where its operator has no such type, or one as small already."""
    operator = registry[swap.operator]
    if operator.kind != "experts" or weight_type(swap, meta_model.stored) is None:
        return swap
    options: Any = replace(swap.options, weights=weights)  # type: ignore[type-var]
    footprint = operator.footprint(meta_model.skeleton.get_submodule(swap.module), options, meta_model.stored)
    return replace(swap, options=options, footprint=footprint) if footprint.total_bytes < swap.footprint.total_bytes else swap


@dataclass(frozen=True, slots=True)
class Machinery:
    """What a plan is held against.

    Attributes:
        available_bytes: host memory that it may take.
        measured: this machine's rates, None where they are not known.
        gpu: the GPUs to plan for, here or not.
    """

    available_bytes: int
    measured: Measurements | None
    gpu: GpuBudget | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan's figures on a machine.

    Attributes:
        memory: of the host.
        gpu: of each GPU; None where the plan uses none.
        gpu_rates: what the speed with a GPU rests on.
        without_gpu: whether a rule asks for a GPU and there is none to plan for, so that all figures are of the CPU.
        speed: None where it cannot be predicted; `no_speed` says why.
        rough: whether the speed rests on rates that were measured while other programs ran.
        would_fit: sentences, where the plan does not fit.
    """

    plan: Plan
    load: Load
    memory: Memory
    cache: KvCache
    available_bytes: int
    gpu: GpuMemory | None
    gpu_rates: GpuRates | None
    without_gpu: bool
    speed: Speed | None
    no_speed: str | None
    rough: bool
    would_fit: tuple[str, ...] = ()

    @property
    def fits_host(self) -> bool:
        return self.memory.needed <= self.available_bytes

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """Weights and expert slots."""
        if self.gpu is None:
            return self.plan.bytes_by_device
        return {"cpu": self.memory.weights, "gpu": self.gpu.count * (self.gpu.weights + self.gpu.slots)}

    @property
    def fits(self) -> bool:
        return self.fits_host and (self.gpu is None or self.gpu.fits)


def forecast(
    meta_model: MetaModel, plan: Plan, load: Load, machinery: Machinery, registry: OperatorRegistry, *, cache: KvCache | None = None
) -> Forecast:
    """Figures for a plan; `cache` is the model's where it is known, for finding it takes longer than all else."""
    plain, budget, measured = cache or kv_cache(meta_model.skeleton), machinery.gpu, machinery.measured
    cache = replace(plain, form=form_of(plan, meta_model.skeleton))
    gpu = None if budget is None else gpu_memory_of(meta_model, plan, cache, load, budget, activation_bytes(meta_model, load))
    memory = memory_of(meta_model, plan, cache, load, on_gpu=gpu is not None)
    rates = budget.rates if budget is not None and gpu is not None else None
    # Attention reads the cache in the model's dtype, however it is kept.
    speed, why = _speed(meta_model, plan, load, plain, measured, gpu, rates)
    found = Forecast(
        plan=plan,
        load=load,
        memory=memory,
        cache=cache,
        available_bytes=machinery.available_bytes,
        gpu=gpu,
        gpu_rates=rates,
        without_gpu=gpu is None and any(map(wants_gpu, plan.swaps)),
        speed=speed,
        no_speed=why,
        rough=measured is not None and measured.busy,
    )
    return found if found.fits else replace(found, would_fit=tuple(would_fit(found, meta_model, registry)))


def _speed(
    meta_model: MetaModel,
    plan: Plan,
    load: Load,
    cache: KvCache,
    measured: Measurements | None,
    gpu: GpuMemory | None,
    rates: GpuRates | None,
) -> tuple[Speed | None, str | None]:
    if measured is None:
        return None, "this machine's rates are not measured with these versions; run: moegraft doctor --measure"
    layers, kv_bytes = meta_model.source.config.get_text_config().num_hidden_layers, cache.nbytes(load.context, load.batch)
    try:
        works = work_of(meta_model, plan, on_gpu=gpu is not None)
        if gpu is None or rates is None:
            speed = predict(works, measured, layers=layers, kv_bytes=kv_bytes, load=load)
        else:
            speed = predict_with_gpu(works, gpu, measured, rates, meta_model, kv_bytes=kv_bytes, load=load)
    except UnsupportedModelError as error:
        return None, str(error)
    if speed.missing:
        return None, f"no rate is known for {', '.join(speed.missing)}"
    return speed, None
