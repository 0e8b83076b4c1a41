"""Which weight type a rule's means where the file holds codes: the plan says so before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.weights import StoredTypes, StoredWeights
from moegraft.injection.plan import Plan, Swap
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.weights import SUPER_BLOCK_BYTES

STORED = "stored"
# Of a block of 256 weights: what a file has in fewer stays as it is.
BLOCK_BYTES = {**SUPER_BLOCK_BYTES, "int8": 272, "int4": 144}


def settle_stored(
    the_plan: Plan, weights: StoredWeights, skeleton: PreTrainedModel, registry: OperatorRegistry, dtype: torch.dtype
) -> Plan:
    """The plan with weight types as the file has them.

    `weights: stored` of an operator that can keep codes becomes the type that the file has. What it has in super-blocks stays in them
    under `stored`, and under int8 and int4 where those have no fewer bits, if the operator can compute with them.
    """
    return replace(the_plan, swaps=tuple(_settled(swap, weights, skeleton, registry, dtype) for swap in the_plan.swaps))


def weight_types(the_plan: Plan) -> Mapping[str, str]:
    """Of the modules whose operators have one, by path."""
    named = {swap.module: getattr(swap.options, "weights", None) for swap in the_plan.swaps}
    return {module: name for module, name in named.items() if isinstance(name, str)}


def _settled(swap: Swap, weights: StoredWeights, skeleton: PreTrainedModel, registry: OperatorRegistry, dtype: torch.dtype) -> Swap:
    options: Any = swap.options
    operator, asked = registry[swap.operator], getattr(options, "weights", None)
    if operator.kind not in ("experts", "linear") or not isinstance(asked, str):
        return swap
    stored = weights.stored_types(swap.module, operator.kind)
    if stored is None:
        return swap
    named = get_args(get_type_hints(type(options))["weights"])
    settled = stored.whole if asked == STORED and stored.whole in named else asked
    kept = _kept(asked, stored)
    if kept is not None and operator.keeps(options, kept):
        settled = kept
    if settled == asked:
        return swap
    options = replace(options, weights=settled)
    footprint = operator.footprint(skeleton.get_submodule(swap.module), options, dtype)
    return replace(swap, options=options, footprint=footprint)


def _kept(asked: str, stored: StoredTypes) -> str | None:
    """The weight type with what stays in super-blocks; None where nothing does."""

    def settled(own: str) -> str:
        if asked == STORED:
            return own
        return own if own in SUPER_BLOCK_BYTES and BLOCK_BYTES[own] <= BLOCK_BYTES.get(asked, 0) else asked

    gate_up, down = settled(stored.gate_up), settled(stored.down)
    if gate_up not in SUPER_BLOCK_BYTES and down not in SUPER_BLOCK_BYTES:
        return None
    return gate_up if gate_up == down else f"{gate_up}+{down}"
