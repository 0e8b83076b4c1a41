"""Everything that can be said of a plan before it is loaded, and what would fit where it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moegraft.injection.outline import Outline
from moegraft.injection.plan import Plan, Swap
from moegraft.injection.predict.kv_cache import KvCache, kv_cache
from moegraft.injection.predict.layers import weight_type, work_of
from moegraft.injection.predict.measure import Measurements
from moegraft.injection.predict.memory import Memory, memory_of
from moegraft.injection.predict.speed import Load, Speed, predict
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry

GIB = 1 << 30
SHORTEST_CONTEXT = 256  # tokens; below, nobody is helped
SMALLER_TYPES = ("bfloat16", "int8", "int4")  # from the most exact to the smallest


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan's figures on this machine.

    Attributes:
        speed: None where it cannot be predicted; `no_speed` says why.
        rough: whether the speed rests on rates that were measured while other programs ran.
        would_fit: sentences, where the plan does not fit.
    """

    plan: Plan
    load: Load
    memory: Memory
    cache: KvCache
    available_bytes: int
    speed: Speed | None
    no_speed: str | None
    rough: bool
    would_fit: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.memory.needed <= self.available_bytes


def forecast(
    outline: Outline, plan: Plan, load: Load, *, available_bytes: int, measured: Measurements | None, registry: OperatorRegistry
) -> Forecast:
    """Figures for a plan; `available_bytes` is the host memory that it may take."""
    cache = kv_cache(outline.skeleton)
    memory = memory_of(outline, plan, cache, load)
    speed, why = _speed(outline, plan, load, cache, measured)
    found = Forecast(plan, load, memory, cache, available_bytes, speed, why, rough=measured is not None and measured.busy)
    return found if found.fits else replace(found, would_fit=tuple(_would_fit(found, outline, registry)))


def _speed(outline: Outline, plan: Plan, load: Load, cache: KvCache, measured: Measurements | None) -> tuple[Speed | None, str | None]:
    if measured is None:
        return None, "this machine's rates are not measured with these versions; run: moegraft doctor --measure"
    layers = outline.source.config.get_text_config().num_hidden_layers
    try:
        works = work_of(outline, plan)
    except UnsupportedModelError as error:
        return None, str(error)
    speed = predict(works, measured, layers=layers, kv_bytes=cache.nbytes(load.context, load.batch), load=load)
    if speed.missing:
        return None, f"no rate is known for {', '.join(speed.missing)}"
    return speed, None


def _would_fit(found: Forecast, outline: Outline, registry: OperatorRegistry) -> list[str]:
    """What to change, from the smallest loss on: context, then weight types, then the machine."""
    memory, free = found.memory, found.available_bytes
    sentences = []
    context = _longest_context(found)
    if context is not None:
        sentences.append(f"a context of {context:,} tokens instead of {found.load.context:,}")
    for weights in SMALLER_TYPES:
        swaps = [_with_weights(swap, weights, outline, registry) for swap in found.plan.swaps]
        saved = sum(old.footprint.total_bytes - new.footprint.total_bytes for old, new in zip(found.plan.swaps, swaps, strict=True))
        if saved > 0 and memory.needed - saved <= free:
            sentences.append(f"'weights: {weights}' for the experts, which needs {(memory.needed - saved) / GIB:.1f} GiB")
    sentences.append(f"a machine with {(memory.needed - free) / GIB:.1f} GiB more free memory")
    return sentences


def _longest_context(found: Forecast) -> int | None:
    """The context, halved as often as it takes, with which everything fits; None where that alone does not help."""
    memory, context = found.memory, found.load.context
    while context > SHORTEST_CONTEXT:
        context //= 2
        running = memory.at_rest + memory.activations + found.cache.nbytes(context, found.load.batch)
        if max(running, memory.peak_loading) <= found.available_bytes:
            return context
    return None


def _with_weights(swap: Swap, weights: str, outline: Outline, registry: OperatorRegistry) -> Swap:
    """The same swap with smaller weights; as it is where its operator has no such type, or one as small already."""
    operator = registry[swap.operator]
    if operator.kind != "experts" or weight_type(swap, outline.stored) is None:
        return swap
    options: Any = replace(swap.options, weights=weights)  # type: ignore[type-var]
    footprint = operator.footprint(outline.skeleton.get_submodule(swap.module), options, outline.stored)
    return replace(swap, options=options, footprint=footprint) if footprint.total_bytes < swap.footprint.total_bytes else swap
