"""Predicted tokens per second, from the modules that a token passes and the rates of the CPU and GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from moegraft.injection.estimate.measure import Measurements
from moegraft.injection.estimate.memory import GpuMemory, SlotGroup
from moegraft.injection.estimate.planned import PlannedModel, Workload
from moegraft.injection.planning import Swap
from moegraft.operators.estimates import GpuRates, Rate, RoutedExperts
from moegraft.operators.layout import experts_per_token, read_layout
from moegraft.operators.structure import SHARED_NAMES, kinds
from moegraft.operators.weight_formats import STORED_FORMATS
from moegraft.operators.weights import BLOCK_BYTES, WeightTypes

# Weight types without a measured rate, and the type whose kernels have about the same rate.
MEASURED_AS = {"float16": "bfloat16"} | {
    name: min(("int4", "int8"), key=lambda measured: abs(BLOCK_BYTES[measured] - BLOCK_BYTES[name])) for name in STORED_FORMATS
}
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float32"}
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
            work = Work("linear", DTYPE_NAMES[skeleton.dtype], own * skeleton.dtype.itemsize, own, share, device="gpu" if on_gpu else "cpu")
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
    overhead_s = layers * measured.layer_overhead_ms / 1e3
    step_overhead_s = overhead_s
    if replays and measured.step_overhead_ms is not None:
        step_overhead_s = layers * measured.step_overhead_ms / 1e3
    step_s = step_overhead_s + kv_bytes / (measured.read_gbps * 1e9) + sum(work.seconds(measured, load.batch) for work in works)
    prompt_s = overhead_s + sum(work.seconds(measured, load.prompt) for work in works)
    return Speed(load.batch / step_s, load.prompt / prompt_s)


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
        found = layers * (measured.layer_overhead_ms + HOST_MS) / 1e3
        shared_s = 0.0
        for work in works:
            if work.device == "cpu":
                found += work.seconds(measured, tokens)
            elif work.device == "gpu" and work.is_shared and layers_with_slots:
                shared_s += work.gpu_seconds(rates, tokens)  # overlaps with the routed experts
            elif work.device == "gpu":
                found += work.gpu_seconds(rates, tokens)
        shared_ms = 1e3 * shared_s / max(layers_with_slots, 1)
        for group, experts in routed:
            cpu = rate_of("experts", planned.weight_type(group.swaps[0]), measured)
            assert cpu is not None, "missing rates are reported first"
            found += len(group.swaps) * group.rule.layer_ms(experts, tokens, cpu, rates, shared_ms) / 1e3
        return found

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
