"""`plan`: what a rule file does to a model, decided without changing it and without reading a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moegraft.injection.planning.assignment import Assignment, assign
from moegraft.injection.planning.checks import check_operators, check_requires, check_taken
from moegraft.injection.planning.modules import ModelModules
from moegraft.injection.planning.sparsity import check_sparsity
from moegraft.injection.planning.table import human_bytes, swap_lines, total_bytes
from moegraft.injection.rulefile import Diagnostic, Rule, RuleFile
from moegraft.injection.rulefile.diagnostics import Findings
from moegraft.operators.base import Footprint
from moegraft.operators.registry import OperatorRegistry


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
