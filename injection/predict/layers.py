"""A planned model as the list of what a token passes: how many bytes and how much arithmetic, at which rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from moegraft.injection.outline import Outline
from moegraft.injection.plan import Plan, Swap
from moegraft.injection.predict.gpu import held_on_gpu, shares_experts
from moegraft.injection.routing import experts_per_token
from moegraft.injection.sparsity.targets import experts_layer, sparsity_options
from moegraft.operators.experts.engine.beside import SHARED_NAMES
from moegraft.operators.structure import kinds

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float32"}


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


def work_of(outline: Outline, plan: Plan, *, on_gpu: bool = False) -> list[Work]:
    """What is replaced by what its operators hold, the rest as PyTorch has it; embeddings are looked up and cost nothing.

    Args:
        on_gpu: whether there is a GPU for the rules that ask for one, and so for what is not replaced.

    Raises:
        UnsupportedModelError: how many experts a token has is not known.
    """
    skeleton = outline.skeleton
    swaps = {swap.module: swap for swap in plan.swaps if not swap.in_place}
    found: list[Work] = []
    for path, module in skeleton.named_modules():
        if any(path.startswith(f"{outer}.") for outer in _outer(path) if outer in swaps):
            continue
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if path in swaps:
            found.append(replace(_replaced(swaps[path], module, outline, on_gpu), beside=_is_shared(path)))
        elif own and not isinstance(module, nn.Embedding):
            experts = "experts" in kinds(path, module, skeleton)
            size = own * skeleton.dtype.itemsize
            share = _share(module, outline) if experts else 1.0
            device = "gpu" if on_gpu else "cpu"
            found.append(Work("linear", NAMES[skeleton.dtype], size, own, share, device=device, beside=_is_shared(path)))
    return list(_summed(found))


def _is_shared(path: str) -> bool:
    return any(part in SHARED_NAMES for part in path.split("."))


def _outer(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _replaced(swap: Swap, module: nn.Module, outline: Outline, on_gpu: bool) -> Work:
    count = sum(parameter.numel() for parameter in module.parameters())
    weights = weight_type(swap, outline.stored) or "unknown"
    is_experts = "experts" in kinds(swap.module, module, outline.skeleton)
    size = swap.footprint.total_bytes
    device = "cpu" if not on_gpu else "shared" if shares_experts(swap) else "gpu" if held_on_gpu(swap) else "cpu"
    if not is_experts:
        return Work("linear", weights, size, count, 1.0, device=device)
    sparsity = sparsity_options(swap.options)
    left_out = experts_layer(swap.module, outline.skeleton).routed_target(sparsity) if sparsity is not None else 0.0
    return Work("experts", weights, size, count, _share(module, outline), left_out, device)


def _share(module: nn.Module, outline: Outline) -> float:
    num_experts = module.num_experts
    assert isinstance(num_experts, int), "an experts module says how many it has"
    return min(1.0, experts_per_token(outline.source.config) / num_experts)


def _summed(works: list[Work]) -> Iterator[Work]:
    groups: dict[Work, list[Work]] = {}
    for work in works:
        groups.setdefault(replace(work, nbytes=0, weight_count=0), []).append(work)
    for alike, group in groups.items():
        yield replace(alike, nbytes=sum(work.nbytes for work in group), weight_count=sum(work.weight_count for work in group))
