"""What the weight type `stored` means where the file holds codes: the plan says so before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.weights import StoredWeights
from moegraft.injection.plan import Plan, Swap
from moegraft.operators.registry import OperatorRegistry

STORED = "stored"


def settle_stored(
    the_plan: Plan, weights: StoredWeights, skeleton: PreTrainedModel, registry: OperatorRegistry, dtype: torch.dtype
) -> Plan:
    """The plan with each `weights: stored` of an operator that can keep codes replaced by the type that the file has."""
    return replace(the_plan, swaps=tuple(_settled(swap, weights, skeleton, registry, dtype) for swap in the_plan.swaps))


def _settled(swap: Swap, weights: StoredWeights, skeleton: PreTrainedModel, registry: OperatorRegistry, dtype: torch.dtype) -> Swap:
    options: Any = swap.options
    if registry[swap.operator].kind != "experts" or getattr(options, "weights", None) != STORED:
        return swap
    weight_type = weights.weight_type(swap.module)
    if weight_type is None or weight_type not in get_args(get_type_hints(type(options))["weights"]):
        return swap
    options = replace(options, weights=weight_type)
    footprint = registry[swap.operator].footprint(skeleton.get_submodule(swap.module), options, dtype)
    return replace(swap, options=options, footprint=footprint)
