"""The forecast of a plan: its memory, whether it fits a machine, its speed, and changes that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moegraft.injection.estimate.measure import Measurements
from moegraft.injection.estimate.memory import GpuMemory, Memory, gpu_memory_of, memory_of
from moegraft.injection.estimate.planned import GpuBudget, PlannedModel, Workload
from moegraft.injection.estimate.speed import Speed, predict, predict_with_gpu, work_of
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.planning import Plan
from moegraft.operators.cache_form import KvCache, kv_cache
from moegraft.operators.errors import UnsupportedModelError, human_bytes
from moegraft.operators.estimates import GpuRates
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.structure import kinds

SHORTEST_CONTEXT = 256  # tokens; shorter ones are not suggested


@dataclass(frozen=True, slots=True)
class TargetMachine:
    """The machine that a plan is made for.

    Attributes:
        available_bytes: host memory that the plan may use.
        measured: this machine's rates; None if they are not measured.
        gpu: the GPUs of this machine, or the stated ones.
    """

    available_bytes: int
    measured: Measurements | None
    gpu: GpuBudget | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan's figures on a machine.

    Attributes:
        memory: of the host.
        gpu: of each GPU; None if the plan uses none.
        gpu_rates: the rates of the GPU that the speed is computed from.
        without_gpu: whether a rule asks for a GPU and there is none, so that all figures are for the CPU.
        speed: None if it cannot be predicted; `no_speed` has the reason.
        rough: whether the rates were measured while other programs ran.
        would_fit: changes that would make the plan fit, as text.
    """

    plan: Plan
    load: Workload
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
        """The bytes of weights and expert slots."""
        if self.gpu is None:
            return self.plan.bytes_by_device
        return {"cpu": self.memory.weights, "gpu": self.gpu.count * (self.gpu.weights + self.gpu.slots)}

    @property
    def fits(self) -> bool:
        return self.fits_host and (self.gpu is None or self.gpu.fits)


def forecast(
    meta_model: MetaModel, plan: Plan, load: Workload, target: TargetMachine, registry: OperatorRegistry, *, cache: KvCache | None = None
) -> Forecast:
    """Predict a plan's memory and speed.

    Args:
        cache: the model's cache, if it is known: measuring it takes longer than everything else.
    """
    planned = PlannedModel(meta_model, plan, registry)
    meta_model, stock_cache = planned.meta_model, cache or kv_cache(meta_model.skeleton)
    cache = replace(stock_cache, form=planned.cache_form())
    gpu = None if target.gpu is None else gpu_memory_of(planned, cache, load, target.gpu)
    rates = target.gpu.rates if target.gpu is not None and gpu is not None else None
    # Attention reads the cache in the model's dtype, also a quantised one.
    speed, no_speed = _speed(planned, load, stock_cache.nbytes(load.context, load.batch), target.measured, gpu, rates)
    found = Forecast(
        plan=plan,
        load=load,
        memory=memory_of(planned, cache, load, on_gpu=gpu is not None),
        cache=cache,
        available_bytes=target.available_bytes,
        gpu=gpu,
        gpu_rates=rates,
        without_gpu=gpu is None and any(swap.traits.devices for swap in plan.swaps),
        speed=speed,
        no_speed=no_speed,
        rough=target.measured is not None and target.measured.busy,
    )
    return found if found.fits else replace(found, would_fit=tuple(_would_fit(found, planned)))


def _speed(
    planned: PlannedModel, load: Workload, kv_bytes: int, measured: Measurements | None, gpu: GpuMemory | None, rates: GpuRates | None
) -> tuple[Speed | None, str | None]:
    if measured is None:
        return None, "this machine is not measured with these versions; run: moegraft doctor --measure"
    layers = planned.meta_model.source.config.get_text_config().num_hidden_layers
    try:
        if gpu is None or rates is None:
            replays = planned.replays_steps(load)
            speed = predict(work_of(planned), measured, layers=layers, kv_bytes=kv_bytes, load=load, replays=replays)
        else:
            speed = predict_with_gpu(planned, gpu, measured, rates, layers=layers, kv_bytes=kv_bytes, load=load)
    except UnsupportedModelError as error:
        return None, str(error)
    if speed.missing:
        return None, f"no rate is measured for {', '.join(speed.missing)}"
    return speed, None


def _would_fit(found: Forecast, planned: PlannedModel) -> Iterator[str]:
    """Yield changes that would make the plan fit, the smallest loss first: the context, then weight types, then the machine."""
    context = _longest_context(found)
    if context is not None:
        yield f"a context of {context:,} tokens instead of {found.load.context:,}"
    if found.gpu is not None and not found.gpu.fits:
        yield from _on_gpu(found.gpu, found, planned)
    if not found.fits_host:
        yield from _on_host(found, planned)


def _longest_context(found: Forecast) -> int | None:
    """Return the context, halved as often as needed, with which everything fits; None if no context does."""
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


def _on_host(found: Forecast, planned: PlannedModel) -> Iterator[str]:
    needed, free = found.memory.needed, found.available_bytes
    saved: dict[str, int] = {}  # bytes by advice
    for swap in planned.plan.swaps:
        module = planned.meta_model.skeleton.get_submodule(swap.module)
        packing = swap.operator_type.packing
        for advice, options in () if packing is None else packing.smaller(swap.options).items():
            footprint = swap.operator_type.footprint(module, options, planned.meta_model.stored)
            less = swap.footprint.by_device.get("cpu", 0) - footprint.by_device.get("cpu", 0)
            saved[advice] = saved.get(advice, 0) + max(0, less)
    for advice, less in saved.items():
        if less > 0 and needed - less <= free:
            yield f"{advice}, which needs {human_bytes(needed - less)}"
    yield f"a machine with {human_bytes(needed - free)} more free memory"


def _on_gpu(gpu: GpuMemory, found: Forecast, planned: PlannedModel) -> Iterator[str]:
    least = gpu.needed - gpu.slots  # without slots, which take the free memory
    is_sized = any(group.rule.is_sized for group in gpu.groups)
    if not is_sized and least <= gpu.available:
        tokens = found.load.context * found.load.batch
        yield f"'cache: {{context: {tokens}}}' in the rule of the experts, so that slots leave memory for this many tokens"
    ratio = gpu.largest_ratio() if is_sized else None
    if ratio is not None:
        yield f"'cache: {{ratio: {ratio:g}}}', or no size: slots then take the free memory"
    for advice, less in _savings_of_the_rest(planned).items():
        if least > gpu.available >= least - less // gpu.count:
            yield f"{advice}, which saves {human_bytes(less // gpu.count)} on each GPU"
    gap = (gpu.needed if is_sized or least <= gpu.available else least) - gpu.available
    yield f"a GPU with {human_bytes(gap)} more free memory"


def _savings_of_the_rest(planned: PlannedModel) -> dict[str, int]:
    """Return the bytes that operators would save on modules that no rule replaces, by advice."""
    meta_model = planned.meta_model
    taken = {swap.module for swap in planned.plan.swaps}
    saved: dict[str, int] = {}
    for path, module in meta_model.skeleton.named_modules():
        found = kinds(path, module, meta_model.skeleton) if path and path not in taken else ()
        for operator in (planned.registry[name] for name in planned.registry) if found else ():
            if operator.kind in found and operator.packing is not None:
                held = sum(parameter.numel() for parameter in module.parameters()) * meta_model.dtype.itemsize
                for advice, options in operator.packing.smaller(None).items():
                    if operator.unsupported_reason(module, options) is None:
                        footprint = operator.footprint(module, options, meta_model.stored)
                        saved[advice] = saved.get(advice, 0) + max(0, held - footprint.total_bytes)
    return saved
