"""What to change where a plan does not fit, from the smallest loss on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moegraft.injection.outline import Outline
from moegraft.injection.plan import Swap
from moegraft.injection.predict.gpu_memory import GpuMemory, largest_ratio
from moegraft.injection.predict.layers import weight_type
from moegraft.operators.linear.quantized import QuantizedLinear, QuantizedLinearOptions
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.structure import kinds

if TYPE_CHECKING:
    from moegraft.injection.predict.forecast import Forecast

GIB = 1 << 30
SHORTEST_CONTEXT = 256  # tokens; below, nobody is helped
SMALLER_TYPES = ("bfloat16", "int8", "int4")  # from the most exact to the smallest


def would_fit(found: Forecast, outline: Outline, registry: OperatorRegistry) -> Iterator[str]:
    """Sentences: context, then what takes the memory, then the machine."""
    context = _longest_context(found)
    if context is not None:
        yield f"a context of {context:,} tokens instead of {found.load.context:,}"
    if found.gpu is not None and not found.gpu.fits:
        yield from _on_gpu(found.gpu, found, outline)
    if not found.fits_host:
        yield from _on_host(found, outline, registry)


def _on_host(found: Forecast, outline: Outline, registry: OperatorRegistry) -> Iterator[str]:
    memory, free = found.memory, found.available_bytes
    for weights in SMALLER_TYPES:
        swaps = [_with_weights(swap, weights, outline, registry) for swap in found.plan.swaps]
        saved = sum(_host_bytes(old) - _host_bytes(new) for old, new in zip(found.plan.swaps, swaps, strict=True))
        if saved > 0 and memory.needed - saved <= free:
            yield f"'weights: {weights}' for the experts, which needs {(memory.needed - saved) / GIB:.1f} GiB"
    mapped = sum(_host_bytes(swap) for swap in found.plan.swaps if getattr(swap.options, "cache_dir", "none") is None)
    if mapped and memory.needed - mapped <= free:
        yield "'cache_dir: FOLDER' for the experts: what does not fit is then read from disk as it is used, at the disk's speed"
    yield f"a machine with {(memory.needed - free) / GIB:.1f} GiB more free memory"


def _on_gpu(gpu: GpuMemory, found: Forecast, outline: Outline) -> Iterator[str]:
    least = gpu.needed - gpu.slots  # where slots take what is left, all that must fit
    stated = any(group.stated for group in gpu.shared)
    if not stated and least <= gpu.available:
        tokens = found.load.context * found.load.batch
        yield f"'cache: {{context: {tokens}}}' in the rule of the experts, so that slots leave room for that many tokens"
    ratio = largest_ratio(gpu) if stated else None
    if ratio is not None:
        yield f"'cache: {{ratio: {ratio:g}}}', or no size at all: slots then take what is left"
    saved = _packed_linears_save(found, outline) // gpu.count
    if least > gpu.available >= least - saved:
        yield f"'quantized_linear' with 'weights: int8' and 'gpu: auto' for the linear layers, which saves {saved / GIB:.1f} GiB there"
    gap = (gpu.needed if stated or least <= gpu.available else least) - gpu.available
    yield f"a GPU with {gap / GIB:.1f} GiB more free memory"


def _packed_linears_save(found: Forecast, outline: Outline) -> int:
    """Bytes that linear layers take less as int8, those that no rule has."""
    taken = {swap.module for swap in found.plan.swaps}
    options = QuantizedLinearOptions(weights="int8")
    saved = 0
    for path, module in outline.skeleton.named_modules():
        if path not in taken and "linear" in kinds(path, module, outline.skeleton) and QuantizedLinear.refuse(module, options) is None:
            own = sum(parameter.numel() for parameter in module.parameters()) * outline.dtype.itemsize
            saved += max(0, own - QuantizedLinear.footprint(module, options, outline.stored).total_bytes)
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


def _with_weights(swap: Swap, weights: str, outline: Outline, registry: OperatorRegistry) -> Swap:
    """The same swap with smaller weights; as it is where its operator has no such type, or one as small already."""
    operator = registry[swap.operator]
    if operator.kind != "experts" or weight_type(swap, outline.stored) is None:
        return swap
    options: Any = replace(swap.options, weights=weights)  # type: ignore[type-var]
    footprint = operator.footprint(outline.skeleton.get_submodule(swap.module), options, outline.stored)
    return replace(swap, options=options, footprint=footprint) if footprint.total_bytes < swap.footprint.total_bytes else swap
