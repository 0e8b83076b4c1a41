"""A planned model as the list of what a token passes: how many bytes and how much arithmetic, at which rate.

GPUs to plan for, which need not be here: their memory and what they and the link to them reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moegraft.injection.meta_model import MetaModel
from moegraft.injection.plan import Plan, Swap
from moegraft.operators.experts_layer import experts_layer, experts_per_token
from moegraft.operators.machine import Machine
from moegraft.operators.offload.devices.profiles import PROFILES
from moegraft.operators.offload.shared_overlap import SHARED_NAMES
from moegraft.operators.structure import kinds

ASSUMED = PROFILES["a6000_10core"]


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What a GPU reaches, which is less than its data sheet has.

    Attributes:
        gbps: of its own memory.
        tflops: of 16-bit arithmetic.
        link_gbps: of copies to it from host memory.
        origin: where the figures are from, for people.
    """

    gbps: float
    tflops: float
    link_gbps: float
    origin: str

    def stated(self, gbps: float | None, link_gbps: float | None) -> GpuRates:
        """With the rates that the user gave."""
        given = {name: value for name, value in (("gbps", gbps), ("link_gbps", link_gbps)) if value is not None}
        if not given:
            return self
        said = " and ".join("--gpu-bandwidth" if name == "gbps" else "--link-bandwidth" for name in given)
        return replace(self, **given, origin=f"stated by {said}" + ("" if len(given) == 2 else f", else {self.origin}"))

    def describe(self) -> str:
        return f"a GPU of {self.gbps:.4g} GB/s and {self.tflops:.3g} TFLOP/s behind a link of {self.link_gbps:.3g} GB/s ({self.origin})"


ASSUMED_RATES = GpuRates(
    ASSUMED.gpu_gb_s, ASSUMED.gpu_tflop_s, ASSUMED.link_gb_s, "assumed, as an A6000; --gpu-bandwidth and --link-bandwidth state others"
)


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """GPUs of one kind; a model's layers are shared out among them evenly.

    Attributes:
        available_bytes: of each, free for the model.
    """

    available_bytes: int
    count: int
    rates: GpuRates


def budget_of(
    machine: Machine, stated_bytes: tuple[int, ...] | None, measured: GpuRates | None, *, gbps: float | None, link_gbps: float | None
) -> GpuBudget | None:
    """What to plan for: the stated GPUs, else those of this machine; None where there are none, or where none are wanted (0 bytes).

    Args:
        measured: rates of this machine's GPU.
    """
    sizes = tuple(gpu.free_bytes for gpu in machine.gpus) if stated_bytes is None else stated_bytes
    if not sizes or not min(sizes):
        return None
    return GpuBudget(min(sizes), len(sizes), (measured or ASSUMED_RATES).stated(gbps, link_gbps))


def gpu_option(swap: Swap) -> str:
    """The `gpu` that a rule gives: `none`, `auto`, or devices with commas between."""
    options: Any = swap.options
    return getattr(options, "gpu", None) or "none"


def wants_gpu(swap: Swap) -> bool:
    return gpu_option(swap) != "none" and not gpu_option(swap).startswith("emulated")


def gpus_used(plan: Plan, budget: GpuBudget) -> int:
    """How many GPUs the rest of the model is put on by what rules ask for; 0: it stays on the CPU."""
    wanted = {device for swap in plan.swaps if wants_gpu(swap) for device in gpu_option(swap).split(",")}
    if not wanted:
        return 0
    return 1 if len(wanted) == 1 and "auto" not in wanted else budget.count


def held_on_gpu(swap: Swap) -> bool:
    """Whether all that the operator holds is on a GPU: a packed linear layer, or experts that are there alone."""
    return wants_gpu(swap) and not shares_experts(swap)


def shares_experts(swap: Swap) -> bool:
    """Whether it has experts in host memory, and some of them in slots on a GPU."""
    return wants_gpu(swap) and getattr(swap.options, "cache", None) is not None


NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float32"}


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the model: `batch` sequences at once, each with `context` tokens before the next, `prompt` to begin with."""

    context: int
    batch: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Work:
    """One module, or the sum of alike ones.

    Attributes:
        kind: whose rates count, `experts` or `linear`.
        weights: the weight type.
        nbytes: of all weights.
        weight_count: of all weights.
        share: of them, that one token needs: K / E of experts.
        left_out: share of neurons whose up and down a token does not need.
        device: `cpu`, `gpu`, or `shared` for experts in host memory and in slots.
        beside: of shared experts, which a GPU computes while the routed ones are under way.
    """

    kind: str
    weights: str
    nbytes: int
    weight_count: int
    share: float
    left_out: float = 0.0
    device: str = "cpu"
    beside: bool = False


def weight_type(swap: Swap, stored: torch.dtype) -> str | None:
    """The type that a swap packs its weights to; None for an operator that has no such option."""
    name = getattr(swap.options, "weights", None)
    return NAMES.get(stored) if name == "stored" else name


def work_of(meta_model: MetaModel, plan: Plan, *, on_gpu: bool = False) -> list[Work]:
    """What is replaced by what its operators hold, the rest as PyTorch has it; embeddings are looked up and cost nothing.

    Args:
        on_gpu: whether there is a GPU for the rules that ask for one, and so for what is not replaced.

    Raises:
        UnsupportedModelError: how many experts a token has is not known.
    """
    skeleton = meta_model.skeleton
    swaps = {swap.module: swap for swap in plan.swaps if not swap.in_place}
    found: list[Work] = []
    for path, module in skeleton.named_modules():
        if any(path.startswith(f"{outer}.") for outer in _outer(path) if outer in swaps):
            continue
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if path in swaps:
            found.append(replace(_replaced(swaps[path], module, meta_model, on_gpu), beside=_is_shared(path)))
        elif own and not isinstance(module, nn.Embedding):
            experts = "experts" in kinds(path, module, skeleton)
            size = own * skeleton.dtype.itemsize
            share = _share(module, meta_model) if experts else 1.0
            device = "gpu" if on_gpu else "cpu"
            found.append(Work("linear", NAMES[skeleton.dtype], size, own, share, device=device, beside=_is_shared(path)))
    return list(_summed(found))


def _is_shared(path: str) -> bool:
    return any(part in SHARED_NAMES for part in path.split("."))


def _outer(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _replaced(swap: Swap, module: nn.Module, meta_model: MetaModel, on_gpu: bool) -> Work:
    count = sum(parameter.numel() for parameter in module.parameters())
    weights = weight_type(swap, meta_model.stored) or "unknown"
    is_experts = "experts" in kinds(swap.module, module, meta_model.skeleton)
    size = swap.footprint.total_bytes
    device = "cpu" if not on_gpu else "shared" if shares_experts(swap) else "gpu" if held_on_gpu(swap) else "cpu"
    if not is_experts:
        return Work("linear", weights, size, count, 1.0, device=device)
    sparsity = swap.operator_type.sparsity_options(swap.options)
    left_out = experts_layer(swap.module, meta_model.skeleton).routed_target(sparsity) if sparsity is not None else 0.0
    return Work("experts", weights, size, count, _share(module, meta_model), left_out, device)


def _share(module: nn.Module, meta_model: MetaModel) -> float:
    num_experts = module.num_experts
    assert isinstance(num_experts, int), "an experts module says how many it has"
    return min(1.0, experts_per_token(meta_model.source.config) / num_experts)


def _summed(works: list[Work]) -> Iterator[Work]:
    groups: dict[Work, list[Work]] = {}
    for work in works:
        groups.setdefault(replace(work, nbytes=0, weight_count=0), []).append(work)
    for alike, group in groups.items():
        yield replace(alike, nbytes=sum(work.nbytes for work in group), weight_count=sum(work.weight_count for work in group))
