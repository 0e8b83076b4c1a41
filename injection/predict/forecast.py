"""Everything that can be said of a plan before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moegraft.injection.outline import Outline
from moegraft.injection.plan import Plan
from moegraft.injection.predict.gpu import GpuBudget, GpuRates, wants_gpu
from moegraft.injection.predict.gpu_memory import GpuMemory, gpu_memory_of
from moegraft.injection.predict.gpu_speed import predict_with_gpu
from moegraft.injection.predict.kv_cache import KvCache, form_of, kv_cache
from moegraft.injection.predict.layers import work_of
from moegraft.injection.predict.measure import Measurements
from moegraft.injection.predict.memory import Memory, activation_bytes, memory_of
from moegraft.injection.predict.remedies import would_fit
from moegraft.injection.predict.speed import Load, Speed, predict
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry


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
    outline: Outline, plan: Plan, load: Load, machinery: Machinery, registry: OperatorRegistry, *, cache: KvCache | None = None
) -> Forecast:
    """Figures for a plan; `cache` is the model's where it is known, for finding it takes longer than all else."""
    plain, budget, measured = cache or kv_cache(outline.skeleton), machinery.gpu, machinery.measured
    cache = replace(plain, form=form_of(plan, outline.skeleton))
    gpu = None if budget is None else gpu_memory_of(outline, plan, cache, load, budget, activation_bytes(outline, load))
    memory = memory_of(outline, plan, cache, load, on_gpu=gpu is not None)
    rates = budget.rates if budget is not None and gpu is not None else None
    # Attention reads the cache in the model's dtype, however it is kept.
    speed, why = _speed(outline, plan, load, plain, measured, gpu, rates)
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
    return found if found.fits else replace(found, would_fit=tuple(would_fit(found, outline, registry)))


def _speed(
    outline: Outline,
    plan: Plan,
    load: Load,
    cache: KvCache,
    measured: Measurements | None,
    gpu: GpuMemory | None,
    rates: GpuRates | None,
) -> tuple[Speed | None, str | None]:
    if measured is None:
        return None, "this machine's rates are not measured with these versions; run: moegraft doctor --measure"
    layers, kv_bytes = outline.source.config.get_text_config().num_hidden_layers, cache.nbytes(load.context, load.batch)
    try:
        works = work_of(outline, plan, on_gpu=gpu is not None)
        if gpu is None or rates is None:
            speed = predict(works, measured, layers=layers, kv_bytes=kv_bytes, load=load)
        else:
            speed = predict_with_gpu(works, gpu, measured, rates, outline, kv_bytes=kv_bytes, load=load)
    except UnsupportedModelError as error:
        return None, str(error)
    if speed.missing:
        return None, f"no rate is known for {', '.join(speed.missing)}"
    return speed, None
