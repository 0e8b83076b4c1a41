"""The forecast of a plan: its memory, whether it fits a machine, or several that divide the experts, its speed, and changes that would
make it fit.

Tokens per second are predicted from the modules that a token passes and the rates of the CPU and GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from moegraft.injection.estimate.measure import Measurements, Network
from moegraft.injection.estimate.memory import GpuBudget, GpuMemory, Memory, PlannedModel, SlotGroup, Workload, gpu_memory_of, memory_of
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.parallel import KEPT_FREE, divide_by_speed
from moegraft.injection.planning import Plan, Swap, plan
from moegraft.injection.rules import RuleFile
from moegraft.operators.base import GpuRates, Rate, RoutedExperts
from moegraft.operators.cache_form import KvCache, kv_cache
from moegraft.operators.errors import UnsupportedModelError, human_bytes
from moegraft.operators.expert_group import Shares
from moegraft.operators.layout import experts_per_token, read_layout
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.structure import SHARED_NAMES, kinds
from moegraft.operators.weight_formats import FLOAT_TYPES, STORED_FORMATS
from moegraft.operators.weights import BLOCK_BYTES, WeightTypes

# Weight types without a measured rate, and the type whose kernels have about the same rate.
MEASURED_AS = {"float16": "bfloat16"} | {
    name: min(("int4", "int8"), key=lambda measured: abs(BLOCK_BYTES[measured] - BLOCK_BYTES[name])) for name in STORED_FORMATS
}
HOST_MS = 0.2  # the scheduling of a layer in Python: host_us_per_layer in benchmarks/results/hybrid_modelled.csv, 2 slow cores


@dataclass(frozen=True, slots=True)
class Speed:
    """A prediction; `missing` has the weight types without a measured rate, with which no speed is predicted."""

    decode_tokens_s: float | None
    prefill_tokens_s: float | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """The weights of one module, or the sum over equal ones.

    Attributes:
        kind: `experts` or `linear`, which have different rates.
        weights: the weight type.
        nbytes, weight_count: bytes and number of all weights.
        share: the share of the weights that one token needs: K / E for experts.
        left_out: share of neurons whose up and down a token does not need.
        device: `cpu`, `gpu`, or `slots` for experts in host memory and in slots.
        is_shared: whether these are shared experts, which a GPU computes while routed ones are transferred or computed on the CPU.
    """

    kind: str
    weights: str
    nbytes: int
    weight_count: int
    share: float
    left_out: float = 0.0
    device: str = "cpu"
    is_shared: bool = False

    def seconds(self, measured: Measurements, tokens: int) -> float:
        """Return the time of the CPU for this many tokens: of reading weights or of arithmetic, whichever is longer."""
        rate = rate_of(self.kind, self.weights, measured)
        assert rate is not None, "missing rates are reported first"
        # Tokens choose experts independently: the expected share of experts that at least one token needs.
        touched = 1 - (1 - self.share) ** tokens
        # Neurons as well: the expected share of a touched expert that one of its tokens needs; its gate is always read.
        of_expert = (3 - 2 * math.pow(self.left_out, tokens * self.share / touched)) / 3
        reading_s = self.nbytes * touched * of_expert / (rate.decode_gbps * 1e9)
        arithmetic_s = 2 * self.weight_count * self.share * tokens / (rate.prefill_gflops * 1e9)
        return max(reading_s, arithmetic_s)

    def gpu_seconds(self, rates: GpuRates, tokens: int) -> float:
        return max(self.nbytes / rates.gbps / 1e9, 2 * self.weight_count * self.share * tokens / rates.tflops / 1e12)


def work_of(planned: PlannedModel, *, on_gpu: bool = False) -> list[Work]:
    """List the weights that a token passes: of operators, and of stock modules. Embeddings are looked up and cost nothing.

    Args:
        on_gpu: whether there is a GPU for the rules that ask for one; stock modules are on it as well.

    Raises:
        UnsupportedModelError: the config does not give the number of experts per token.
    """
    skeleton = planned.meta_model.skeleton
    swaps = {swap.module: swap for swap in planned.plan.swaps if not swap.in_place}
    sums: dict[Work, tuple[int, int]] = {}
    for path, module in skeleton.named_modules():
        parts = path.split(".")
        if any(".".join(parts[:length]) in swaps for length in range(1, len(parts))):
            continue
        if path in swaps:
            work = _replaced(swaps[path], module, planned, on_gpu)
        else:
            own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            if not own or isinstance(module, nn.Embedding):
                continue
            share = _share_per_token(module, planned) if "experts" in kinds(path, module, skeleton) else 1.0
            work = Work("linear", FLOAT_TYPES[skeleton.dtype], own * skeleton.dtype.itemsize, own, share, device="gpu" if on_gpu else "cpu")
        alike = replace(work, nbytes=0, weight_count=0, is_shared=any(part in SHARED_NAMES for part in parts))
        nbytes, count = sums.get(alike, (0, 0))
        sums[alike] = nbytes + work.nbytes, count + work.weight_count
    return [replace(alike, nbytes=nbytes, weight_count=count) for alike, (nbytes, count) in sums.items()]


def _replaced(swap: Swap, module: nn.Module, planned: PlannedModel, on_gpu: bool) -> Work:
    device = "cpu"
    if on_gpu and swap.traits.devices:
        device = "gpu" if swap.traits.slots is None else "slots"
    count = sum(parameter.numel() for parameter in module.parameters())
    weights, nbytes = planned.weight_type(swap), swap.footprint.total_bytes
    if "experts" not in kinds(swap.module, module, planned.meta_model.skeleton):
        return Work("linear", weights, nbytes, count, 1.0, device=device)
    return Work("experts", weights, nbytes, count, _share_per_token(module, planned), planned.left_out(swap), device)


def _share_per_token(module: nn.Module, planned: PlannedModel) -> float:
    num_experts = module.num_experts
    assert isinstance(num_experts, int), "an experts module has the attribute num_experts"
    return min(1.0, experts_per_token(planned.meta_model.source.config) / num_experts)


def rate_of(kind: str, weights: str, measured: Measurements) -> Rate | None:
    """Return the rate of the CPU, the slowest one of several types; None if one was not measured."""
    rates = measured.experts if kind == "experts" else measured.linear
    found = [rates.get(MEASURED_AS.get(name, name)) for name in WeightTypes.parse(weights).names]
    known = [rate for rate in found if rate is not None]
    if len(known) < len(found):
        return None
    return Rate(min(rate.decode_gbps for rate in known), min(rate.prefill_gflops for rate in known))


def predict(works: Iterable[Work], measured: Measurements, *, layers: int, kv_bytes: int, load: Workload, replays: bool = False) -> Speed:
    """Predict the speed on the CPU from the time of each module and an overhead per layer.

    Args:
        kv_bytes: of the whole cache at `load.context`, which is read once per step.
        replays: whether decode steps are native programs, which take less time between the layers.

    The arithmetic of attention is ignored: it matters in prompts of tens of thousands of tokens.
    """
    works = list(works)
    missing = missing_rates(works, measured)
    if missing:
        return Speed(None, None, missing)
    step_s = _pass_s(works, measured, layers, load.batch, kv_bytes, replays=replays)
    return Speed(load.batch / step_s, load.prompt / _pass_s(works, measured, layers, load.prompt))


def _pass_s(works: Iterable[Work], measured: Measurements, layers: int, tokens: int, kv_bytes: int = 0, *, replays: bool = False) -> float:
    """Return the time of a forward pass on the CPU."""
    replayed_ms = measured.step_overhead_ms if replays else None
    overhead_s = layers * (measured.layer_overhead_ms if replayed_ms is None else replayed_ms) / 1e3
    return overhead_s + kv_bytes / (measured.read_gbps * 1e9) + sum(work.seconds(measured, tokens) for work in works)


def predict_with_gpu(
    planned: PlannedModel, memory: GpuMemory, measured: Measurements, rates: GpuRates, *, layers: int, kv_bytes: int, load: Workload
) -> Speed:
    """Predict the speed with experts split by their schedule for even routing, and everything else on a GPU.

    The GPU's time is that of reading weights and cache or of arithmetic, whichever is longer, with an overhead per layer.

    Raises:
        UnsupportedModelError: the config does not give the number of experts per token.
    """
    works = work_of(planned, on_gpu=True)
    missing = missing_rates([work for work in works if work.device != "gpu"], measured)
    if missing:
        return Speed(None, None, missing)
    routed = [(group, _routed_experts(group, planned)) for group in memory.groups]
    layers_with_slots = sum(len(group.swaps) for group in memory.groups)

    def taken_s(tokens: int) -> float:
        seconds = layers * (measured.layer_overhead_ms + HOST_MS) / 1e3
        shared_s = 0.0
        for work in works:
            if work.device == "cpu":
                seconds += work.seconds(measured, tokens)
            elif work.device == "gpu" and work.is_shared and layers_with_slots:
                shared_s += work.gpu_seconds(rates, tokens)  # overlaps with the routed experts
            elif work.device == "gpu":
                seconds += work.gpu_seconds(rates, tokens)
        shared_ms = 1e3 * shared_s / max(layers_with_slots, 1)
        for group, experts in routed:
            cpu = rate_of("experts", planned.weight_type(group.swaps[0]), measured)
            assert cpu is not None, "missing rates are reported first"
            seconds += len(group.swaps) * group.rule.layer_ms(experts, tokens, cpu, rates, shared_ms) / 1e3
        return seconds

    return Speed(load.batch / (taken_s(load.batch) + kv_bytes / rates.gbps / 1e9), load.prompt / taken_s(load.prompt))


def missing_rates(works: Iterable[Work], measured: Measurements) -> tuple[str, ...]:
    """Return the kinds and weight types without a measured rate."""
    return tuple(sorted({f"{work.kind}, {work.weights}" for work in works if rate_of(work.kind, work.weights, measured) is None}))


def _routed_experts(group: SlotGroup, planned: PlannedModel) -> RoutedExperts:
    swap = group.swaps[0]
    module = planned.meta_model.skeleton.get_submodule(swap.module)
    count = sum(parameter.numel() for parameter in module.parameters()) / group.num_experts
    return RoutedExperts(
        num_experts=group.num_experts,
        top_k=experts_per_token(planned.meta_model.source.config),
        expert_bytes=group.expert_bytes,
        bits_per_weight=8 * group.expert_bytes / count,
        resident=group.resident_share,
        left_out=planned.left_out(swap),
        gated=read_layout(module).gated,
    )


def tokens_text(tokens_s: float) -> str:
    """Return a rate as text with three significant figures."""
    return f"{tokens_s:,.0f} tokens/s" if tokens_s >= 100 else f"{tokens_s:.3g} tokens/s"


SHORTEST_CONTEXT = 256  # tokens; shorter ones are not suggested
# What a layer takes more when one other rank is asked, and with each further one, as `doctor --measure` found in two and three processes
# on two cores (240 to 262 us, and 126 us more).
ASKED_S = 2.5e-4
EACH_FURTHER_S = 1.3e-4
CABLE_S = 5e-5  # that a message and its reply take longer between two machines; an assumption
NETWORK_GBIT = 10.0  # where none is given or measured
DRAWS = 4000  # of a token's experts, for the mean of the machine with the most of them


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
        framed_bytes: of weights in files, of which memory holds a part.
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
    framed_bytes: int = 0

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
    memory = memory_of(planned, cache, load, target.available_bytes, on_gpu=gpu is not None)
    read = cache if cache.form is not None and cache.form.in_place else stock_cache  # others are restored to the model's dtype
    speed, no_speed = _speed(planned, load, read.nbytes(load.context, load.batch), target.measured, gpu, rates, memory)
    result = Forecast(
        plan=plan,
        load=load,
        memory=memory,
        cache=cache,
        available_bytes=target.available_bytes,
        gpu=gpu,
        gpu_rates=rates,
        without_gpu=gpu is None and bool(plan.devices),
        speed=speed,
        no_speed=no_speed,
        rough=target.measured is not None and target.measured.busy,
        framed_bytes=planned.framed_bytes,
    )
    return result if result.fits else replace(result, would_fit=tuple(_would_fit(result, planned)))


def _speed(
    planned: PlannedModel,
    load: Workload,
    kv_bytes: int,
    measured: Measurements | None,
    gpu: GpuMemory | None,
    rates: GpuRates | None,
    memory: Memory,
) -> tuple[Speed | None, str | None]:
    if measured is None:
        return None, "this machine is not measured with these versions; run: moegraft doctor --measure"
    if planned.framed and measured.disk is None:
        return None, "the disk of the experts is not measured; run: moegraft doctor --measure --disk FOLDER"
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
    return _with_disk(speed, planned, load, measured, memory, gpu), None


def _with_disk(speed: Speed, planned: PlannedModel, load: Workload, measured: Measurements, memory: Memory, gpu: GpuMemory | None) -> Speed:
    """Return a speed with the reads of experts that neither memory nor a GPU holds, for even routing: real routing has more hits.

    A decode step waits for them; in a prompt they are read while others are computed.
    """
    if not planned.framed or measured.disk is None or speed.decode_tokens_s is None or speed.prefill_tokens_s is None:
        return speed
    with_slot = 0.0 if gpu is None or not gpu.experts else gpu.experts_with_slot / gpu.experts
    missing = max(0.0, 1 - with_slot - memory.frames / planned.framed_bytes)

    def read_s(tokens: int) -> float:
        nbytes = 0.0
        for swap in planned.framed:
            share = _share_per_token(planned.meta_model.skeleton.get_submodule(swap.module), planned)
            nbytes += swap.footprint.by_device.get("disk", 0) * (1 - (1 - share) ** tokens)
        return missing * nbytes / (measured.disk.best_gbps * 1e9)  # type: ignore[union-attr] # it is checked above

    step_s = load.batch / speed.decode_tokens_s + read_s(load.batch)
    prompt_s = max(load.prompt / speed.prefill_tokens_s, read_s(load.prompt))
    return Speed(load.batch / step_s, load.prompt / prompt_s)


def _would_fit(result: Forecast, planned: PlannedModel) -> Iterator[str]:
    """Yield changes that would make the plan fit, the smallest loss first: the context, then weight types, then the machine."""
    context = _longest_context(result)
    if context is not None:
        yield f"a context of {context:,} tokens instead of {result.load.context:,}"
    if result.gpu is not None and not result.gpu.fits:
        yield from _on_gpu(result.gpu, result, planned)
    if not result.fits_host:
        yield from _on_host(result, planned)


def _longest_context(result: Forecast) -> int | None:
    """Return the context, halved as often as needed, with which everything fits; None if no context does."""
    memory, context, gpu = result.memory, result.load.context, result.gpu
    while context > SHORTEST_CONTEXT:
        context //= 2
        kv_bytes = result.cache.nbytes(context, result.load.batch)
        if gpu is not None:
            if result.fits_host and gpu.needed - gpu.kv_cache + kv_bytes // gpu.count <= gpu.available:
                return context
        elif max(memory.at_rest + memory.activations + kv_bytes, memory.peak_loading) <= result.available_bytes:
            return context
    return None


def _on_host(figures: Forecast, planned: PlannedModel) -> Iterator[str]:
    needed, free = figures.memory.needed, figures.available_bytes
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


def _on_gpu(gpu: GpuMemory, figures: Forecast, planned: PlannedModel) -> Iterator[str]:
    least = gpu.needed - gpu.slots  # without slots, which take the free memory
    is_sized = any(group.rule.is_sized for group in gpu.groups)
    if not is_sized and least <= gpu.available:
        tokens = figures.load.context * figures.load.batch
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
        of_kinds = kinds(path, module, meta_model.skeleton) if path and path not in taken else ()
        for operator in (planned.registry[name] for name in planned.registry) if of_kinds else ():
            if operator.kind in of_kinds and operator.packing is not None:
                nbytes = sum(parameter.numel() for parameter in module.parameters()) * meta_model.dtype.itemsize
                for advice, options in operator.packing.smaller(None).items():
                    if operator.unsupported_reason(module, options) is None:
                        footprint = operator.footprint(module, options, meta_model.stored)
                        saved[advice] = saved.get(advice, 0) + max(0, nbytes - footprint.total_bytes)
    return saved


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: its share of the experts, the bytes it needs with Python and its libraries, and those it has."""

    rank: int
    share: float
    needed_bytes: int
    available_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class DividedForecast:
    """The machines, and the speed of all together; None if no rates are measured.

    Attributes:
        network_gbit: the bandwidth of each machine's link.
    """

    nodes: tuple[Node, ...]
    speed: Speed | None
    network_gbit: float

    @property
    def fits(self) -> bool:
        return all(node.fits for node in self.nodes)


def divided_forecast(
    meta_model: MetaModel,
    rules: RuleFile,
    whole: Plan,
    load: Workload,
    memory: Sequence[int],
    target: TargetMachine,
    registry: OperatorRegistry,
    network_gbit: float | None = None,
    measured: Network | None = None,
) -> DividedForecast:
    """Predict the memory of each machine, and the speed of machines that are as fast as this one.

    Args:
        whole: the plan for one machine.
        network_gbit: the bandwidth between the machines; by default the slowest link of `measured`, or else 10.
        measured: the messages' time.
        memory: bytes of each machine; the first one also holds what is not experts.

    Raises:
        NotEnoughMemoryError: the experts do not fit.
        RuleErrors: the rules cannot be divided.
        UnsupportedModelError: there are more machines than experts, or the rules have shares for another number of machines.
    """
    experts = sum(swap.footprint.by_device.get("cpu", 0) for swap in whole.swaps if swap.operator_type.kind == "experts")
    rest = whole.bytes_by_device.get("cpu", 0) - experts
    if isinstance(rules.shares, str):
        bytes_free = [int(free * (1 - KEPT_FREE)) - (0 if rank else rest) for rank, free in enumerate(memory)]
        sizes: Sequence[float] = divide_by_speed([1.0] * len(memory), bytes_free, experts)
    else:
        sizes = rules.shares
        if len(sizes) != len(memory):
            raise UnsupportedModelError(f"parallel.shares has {len(sizes)} numbers, for {len(memory)} machines; give one for each")
    cache = kv_cache(meta_model.skeleton)
    nodes = []
    for rank, free in enumerate(memory):
        shares = Shares(tuple(sizes), rank)
        planned = PlannedModel(meta_model, plan(meta_model, rules, registry=registry, shares=shares), registry)
        needs = memory_of(planned, replace(cache, form=planned.cache_form()), load, free, on_gpu=False)
        nodes.append(Node(rank, shares.sizes[rank] / sum(shares.sizes), needs.at_rest if rank else needs.needed, free))
    gbit = network_gbit or (NETWORK_GBIT if measured is None else measured.slowest.gbit)
    message_s = _message_s(len(sizes) - 1, measured)
    speed = _divided_speed(PlannedModel(meta_model, whole, registry), load, cache, target, sizes, gbit, message_s)
    return DividedForecast(tuple(nodes), speed, gbit)


def _message_s(others: int, measured: Network | None) -> float:
    """Return the time that a layer takes longer when all other ranks are asked for one row."""
    if others == 0:
        return 0.0
    if measured is None:
        return ASKED_S + CABLE_S + EACH_FURTHER_S * (others - 1)
    one_s, all_s = 1e-6 * max(link.layer_us for link in measured.links), 1e-6 * measured.all_us
    further = len(measured.links) - 1
    each_s = max(all_s - one_s, 0.0) / further if further else EACH_FURTHER_S
    return one_s + each_s * (others - 1)


def _divided_speed(
    planned: PlannedModel,
    load: Workload,
    cache: KvCache,
    target: TargetMachine,
    sizes: Sequence[float],
    network_gbit: float,
    message_s: float,
) -> Speed | None:
    measured = target.measured
    if measured is None:
        return None
    works = work_of(planned)
    missing = missing_rates(works, measured)
    if missing:
        return Speed(None, None, missing)
    config = planned.meta_model.source.config.get_text_config()
    layers = [swap for swap in planned.plan.swaps if swap.operator_type.kind == "experts"]
    layout = read_layout(planned.meta_model.skeleton.get_submodule(layers[0].module))
    counts = np.array([len(Shares(tuple(sizes), rank).experts(layout.num_experts)) for rank in range(len(sizes))])
    top_k = min(experts_per_token(config), layout.num_experts)

    def pass_s(tokens: int, kv_bytes: int = 0, *, replays: bool = False) -> float:
        largest = _largest_part(counts, top_k, tokens)
        divided = [
            replace(work, nbytes=int(work.nbytes * largest), weight_count=int(work.weight_count * largest))
            if work.kind == "experts"
            else work
            for work in works
        ]
        item = planned.meta_model.dtype.itemsize
        nbytes = 2 * tokens * layout.hidden * item * (len(sizes) - 1)  # there and back, all over rank 0's link
        messages_s = len(layers) * (message_s + nbytes * 8 / (network_gbit * 1e9))
        return _pass_s(divided, measured, config.num_hidden_layers, tokens, kv_bytes, replays=replays) + messages_s

    step_s = pass_s(load.batch, cache.nbytes(load.context, load.batch), replays=planned.replays_steps(load))
    return Speed(load.batch / step_s, load.prompt / pass_s(load.prompt))


def _largest_part(counts: np.ndarray[tuple[int], np.dtype[np.int64]], top_k: int, tokens: int) -> float:
    """Return the part of a step's experts that the busiest machine computes: the mean over random choices of `top_k` experts."""
    if tokens > 1:  # nearly all experts are needed, each machine's alike
        return float(counts.max() / counts.sum())
    drawn = np.random.default_rng(0).multivariate_hypergeometric(counts, top_k, DRAWS)
    return float(drawn.max(-1).mean() / top_k)
