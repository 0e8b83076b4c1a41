"""Checks of `sparsity` in a plan: targets that can be reached, thresholds files that are there and for this model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from moegraft.injection.planning.assignment import Assignment
from moegraft.injection.rulefile import Position, Rule
from moegraft.injection.rulefile.diagnostics import Findings
from moegraft.injection.rulefile.nodes import MappingNode
from moegraft.injection.sparsity.targets import ExpertsLayer, draft_sparsity, experts_layer, sparsity_options
from moegraft.operators.errors import ThresholdsError, UnsupportedModelError
from moegraft.operators.experts.layout import why_unsupported
from moegraft.operators.sparse.thresholds import Thresholds, read_thresholds


def check_sparsity(rules: Sequence[Rule], assignment: Assignment, model: nn.Module, findings: Findings) -> None:
    """Reports what a rule's `sparsity` asks of the layers it takes and cannot have; one error a rule."""
    draft = draft_sparsity(rule.options for rule, taken in zip(rules, assignment.taken, strict=True) if taken)
    for rule, taken in zip(rules, assignment.taken, strict=True):
        options = sparsity_options(rule.options)
        if options is None or not (options.target or draft):
            continue
        try:
            layers = list(_layers(taken, model))
            targets = [layer.routed_target(options) if draft is None else layer.draft_target(options, draft) for layer in layers]
        except (UnsupportedModelError, ValueError) as error:
            findings.error(_place(rule, "target"), f"rule '{rule.id}': {error}")
            continue
        if options.thresholds is None:
            continue
        try:
            _check_file(options.thresholds, layers, targets)
        except ThresholdsError as error:
            findings.error(_place(rule, "thresholds"), str(error))


def _layers(taken: Sequence[str], model: nn.Module) -> Iterator[ExpertsLayer]:
    for path in taken:
        if why_unsupported(model.get_submodule(path)) is None:  # else its operator has refused it
            yield experts_layer(path, model)


def _check_file(path: Path, layers: Sequence[ExpertsLayer], targets: Sequence[float]) -> None:
    """
    Raises:
        ThresholdsError: the file cannot be read, is not for these layers, or does not reach a target.
    """
    thresholds: Thresholds = read_thresholds(path)
    for layer, target in zip(layers, targets, strict=True):
        reason = layer.why_unfit(thresholds)
        if reason is not None:
            raise ThresholdsError(f"{path}: {reason}; calibrate this one with moegraft calibrate")
        if target > thresholds.grid[-1]:
            raise ThresholdsError(f"{path}: its last share is {thresholds.grid[-1]:g}, and {target:.4g} of the routed neurons are to go")


def _place(rule: Rule, name: str) -> Position:
    """Where an option of `sparsity` is written, else where the rule's operator is."""
    sparsity = rule.kwargs.get("sparsity") if rule.kwargs is not None else None
    node = sparsity.get(name) if isinstance(sparsity, MappingNode) else None
    return node.position if node is not None else rule.place("operator")
