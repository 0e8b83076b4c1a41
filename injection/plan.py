"""`plan`: what a rule file does to a model, decided without changing it and without reading a weight.

A plan as a table for people: one line for each run of layers that one rule treats alike.

Which weight type a rule's means where the file holds codes: the plan says so before a weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.sources import StoredTypes, StoredWeights
from moegraft.injection.checks import check_operators, check_requires, check_sparsity, check_taken
from moegraft.injection.rules import Diagnostic, Rule, RuleFile
from moegraft.injection.rules.diagnostics import Findings
from moegraft.injection.rules.document import MappingNode
from moegraft.injection.rules.matching import Assignment, ModelModules, assign
from moegraft.injection.rules.rule import grouped
from moegraft.operators.base import Footprint
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.weight_formats import FORMATS
from moegraft.operators.weights import SUPER_BLOCK_BYTES


def swap_lines(swaps: Sequence[Swap]) -> list[str]:
    """`model.layers.{0-47}.mlp.experts  experts (cpu.yaml:4)  hybrid_experts  weights=int8  17.3 GiB cpu`, in columns."""
    groups: list[list[Swap]] = []
    for swap in swaps:
        group = next((group for group in groups if _alike(group[0], swap)), None)
        if group is None:
            groups.append([swap])
        else:
            group.append(swap)
    rows = [row for group in groups for row in _rows(group)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _alike(first: Swap, second: Swap) -> bool:
    """Of one rule and of one path but for the layer."""
    return first.rule is second.rule and len(grouped([first.module, second.module])) == 1


def _rows(group: Sequence[Swap]) -> list[tuple[str, ...]]:
    rule = group[0].rule
    where = f"{rule.id} ({Path(rule.position.file).name}:{rule.position.line})"
    options = " ".join(given_options(rule.kwargs, group[0].options))
    paths = " ".join(grouped(swap.module or "(the model)" for swap in group))
    return [(paths, where, group[0].operator, options, bytes_text(total_bytes(swap.footprint.by_device for swap in group)))]


def given_options(kwargs: MappingNode | None, options: object, path: str = "") -> list[str]:
    """The options that a rule gives, as `name=value` with the value they resolved to."""
    found = []
    for entry in kwargs or ():
        value: Any = getattr(options, entry.key)
        if isinstance(entry.value, MappingNode) and is_dataclass(value):
            found += given_options(entry.value, value, f"{path}{entry.key}.")
        else:
            found.append(f"{path}{entry.key}={value}")
    return found


def total_bytes(devices: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum for each device."""
    total: dict[str, int] = {}
    for by_device in devices:
        for device, size in by_device.items():
            total[device] = total.get(device, 0) + size
    return total


def bytes_text(by_device: Mapping[str, int]) -> str:
    return ", ".join(f"{human_bytes(size)} {device}" for device, size in sorted(by_device.items())) or "0 B"


def human_bytes(size: int) -> str:
    """`17.3 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Swap:
    """One module that an operator will replace; `module` is its path, empty for the model itself.

    `in_place`: the operator leaves the module, and its weights, where they are.
    """

    module: str
    rule: Rule
    operator: str
    options: object
    footprint: Footprint
    in_place: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be replaced by what.

    Attributes:
        swaps: in the model's order.
        notices: warnings and notices, which stop nothing.
        files: the rule file and what it extends.
        replaced_bytes: of the parameters whose modules are replaced, as the model holds them.
        rest_bytes: of the parameters and buffers that stay.
    """

    swaps: tuple[Swap, ...]
    notices: tuple[Diagnostic, ...]
    files: tuple[str, ...]
    replaced_bytes: int
    rest_bytes: int

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """What the loaded model will hold on each device when all that stays is on the CPU."""
        return total_bytes([*(swap.footprint.by_device for swap in self.swaps), {"cpu": self.rest_bytes}])

    def describe(self) -> str:
        """A table for people: swaps by runs of layers, bytes, then the notices."""
        devices = ", ".join(f"{human_bytes(size)} {device}" for device, size in sorted(self.bytes_by_device.items()))
        packed = sum(swap.footprint.total_bytes for swap in self.swaps)
        return "\n".join(
            [
                *(swap_lines(self.swaps) or ["nothing is replaced"]),
                f"replaced: {human_bytes(self.replaced_bytes)} become {human_bytes(packed)}; the rest: {human_bytes(self.rest_bytes)}",
                f"in all: {devices}",
                *map(str, self.notices),
            ]
        )


def plan(model: nn.Module, rules: RuleFile, *, registry: OperatorRegistry, dtype: torch.dtype, model_type: str | None = None) -> Plan:
    """Decides what the rules replace; pure, for a model on meta as well as for one in memory.

    Args:
        dtype: that of the stored weights, which operators may keep.
        model_type: by default that of the model's config.

    Raises:
        RuleErrors: everything that the rules ask of this model and cannot have.
    """
    findings = Findings()
    modules = ModelModules(model)
    if model_type is None:
        model_type = getattr(getattr(model, "config", None), "model_type", None)
    check_requires(rules, model_type, findings)
    assignment = assign(rules.rules, modules, registry.in_place)
    check_taken(rules.rules, assignment, modules, findings)
    check_operators(rules.rules, assignment, modules, registry, findings)
    check_sparsity(rules.rules, assignment, model, findings)
    findings.raise_errors()
    swaps = _swaps(rules.rules, assignment, modules, registry, dtype)
    replaced_bytes, rest_bytes = _bytes(model, [swap.module for swap in swaps if not swap.in_place])
    return Plan(swaps, findings.in_order(), rules.files, replaced_bytes, rest_bytes)


def _swaps(
    rules: Sequence[Rule], assignment: Assignment, modules: ModelModules, registry: OperatorRegistry, dtype: torch.dtype
) -> tuple[Swap, ...]:
    taken = {path: rule for rule, paths in zip(rules, assignment.taken, strict=True) for path in paths}
    swaps = []
    for path in modules:
        rule = taken.get(path)
        if rule is not None and rule.operator is not None:
            footprint = registry[rule.operator].footprint(modules[path], rule.options, dtype)
            swaps.append(Swap(path, rule, rule.operator, rule.options, footprint, rule.operator in registry.in_place))
    return tuple(swaps)


def _bytes(model: nn.Module, replaced: Sequence[str]) -> tuple[int, int]:
    """Bytes inside the replaced modules and outside them; what is shared or tied counts once, and stays where one use of it stays."""
    inside = {id(tensor) for path in replaced for tensor in model.get_submodule(path).parameters()}
    prefixes = tuple(f"{path}." for path in replaced)
    stays = {id(tensor): tensor.nbytes for name, tensor in model.named_parameters(remove_duplicate=False) if not name.startswith(prefixes)}
    stays |= {id(tensor): tensor.nbytes for name, tensor in model.named_buffers(remove_duplicate=False) if not name.startswith(prefixes)}
    all_bytes = sum(tensor.nbytes for tensor in model.parameters() if id(tensor) in inside and id(tensor) not in stays)
    return all_bytes, sum(stays.values())


STORED = "stored"
# Of a block of 256 weights: what a file has in fewer stays as it is.
BLOCK_BYTES = {name: found.nbytes(256) for name, found in FORMATS.items() if found.scaled}


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
    if kept is not None and operator.supports_weight_type(options, kept):
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
