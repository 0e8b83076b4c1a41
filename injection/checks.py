"""Checks of rules against a model, and the trials of every rule on one module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from moegraft.injection.rules import Match, Position, Rule, RuleFile
from moegraft.injection.rules.diagnostics import Findings
from moegraft.injection.rules.document import MappingNode, Node
from moegraft.injection.rules.matching import Assignment, ModelModules, count_text, explain_miss
from moegraft.injection.rules.rule import grouped, runs
from moegraft.operators.base import Operator
from moegraft.operators.experts_layer import sparsity_errors
from moegraft.operators.registry import OperatorRegistry

# A number in a pattern, alone or in a group of alternatives, that is followed by any character or by the end.
_OPEN_NUMBER = re.compile(r"(?P<before>\w*\\?\.|[(|])(?P<number>[0-9]+)(?=(\|[0-9]+)*\)?(\.|$))")
MAX_LISTED = 3


def check_requires(rules: RuleFile, model_type: str | None, findings: Findings) -> None:
    """Report each requirement that the model's type does not meet."""
    for requirement in rules.requires:
        if model_type not in requirement.values:
            wanted = " or ".join(f"'{value}'" for value in requirement.values)
            found = f"this model is of type '{model_type}'" if model_type is not None else "this model has no type"
            findings.error(requirement.position, f"this rule file is for models of type {wanted}, and {found}")


def check_taken(rules: Sequence[Rule], assignment: Assignment, modules: ModelModules, findings: Findings) -> None:
    """Report rules that take no module, a wrong number of modules or unexpected layers, and swaps inside swaps."""
    for rule, taken, lost in zip(rules, assignment.taken, assignment.lost, strict=True):
        if not taken and rule.expect == "any":
            findings.notice(rule.place("match"), f"rule '{rule.id}' takes no module of {modules.model_class}, as 'expect: any' allows")
            continue
        if not taken:
            _report_nothing_taken(rule, lost, rules, modules, findings)
            continue
        if rule.expect not in (None, "any", len(taken)):
            message = f"rule '{rule.id}' takes {_listed(taken)} and {rule.expect} are expected"
            findings.error(rule.place("expect"), message)
        _warn_of_open_numbers(rule, taken, modules, findings)
        _warn_of_absent_layers(rule, modules, findings)
    for (inner, outer), paths in assignment.nested.items():
        owner = rules[outer]
        findings.error(
            rules[inner].place("match"),
            f"rule '{rules[inner].id}' takes {_listed(paths)} inside what rule '{owner.id}' ({_where(owner, rules[inner])}) replaces "
            f"as a whole; add 'recursive: false' to rule '{owner.id}', or narrow one of the two",
        )


def _report_nothing_taken(rule: Rule, lost: dict[int, list[str]], rules: Sequence[Rule], modules: ModelModules, findings: Findings) -> None:
    if not lost:
        findings.error(*explain_miss(rule, modules))
        return
    owners = [rules[index] for index in lost]
    names = ", ".join(f"rule '{owner.id}' ({_where(owner, rule)})" for owner in owners)
    total = sum(map(len, lost.values()))
    message = f"rule '{rule.id}' takes no module: all {total} that it matches are taken or closed by {names}, which comes first"
    if rule.inherited and not any(owner.inherited for owner in owners):
        findings.notice(rule.place("match"), f"{message}, and so overrides it")
    else:
        of_model = any("" in paths for paths in lost.values())
        fix = "a model can have one operator of kind model: keep one of the rules" if of_model else "move it up, or narrow the earlier rule"
        findings.error(rule.place("match"), f"{message}; {fix}")


def _where(owner: Rule, rule: Rule) -> str:
    same_file = owner.position.file == rule.position.file
    return f"line {owner.position.line}" if same_file else f"{owner.position.file}:{owner.position.line}"


def _listed(paths: Sequence[str]) -> str:
    forms = grouped(paths) if paths != [""] else ["the model"]
    more = f" and {len(forms) - MAX_LISTED} more" if len(forms) > MAX_LISTED else ""
    return f"{', '.join(forms[:MAX_LISTED])}{more} ({count_text(paths)})"


def _warn_of_open_numbers(rule: Rule, taken: Sequence[str], modules: ModelModules, findings: Findings) -> None:
    """Warn of patterns such as `layers.1.`, which takes layers 10 to 19 as well: its last dot matches any character."""
    layers = {layer for path in taken if (layer := modules.layer(path)) is not None}
    for found in _OPEN_NUMBER.finditer(rule.match.name or ""):
        number = found["number"]
        more = [layer for layer in layers if str(layer) != number and str(layer).startswith(number)]
        if not more:
            continue
        word = found["before"].rstrip("\\.(|")
        fix = f"'{word}\\.{number}\\.'" if word else f"'\\.' after {number}"
        findings.warning(
            rule.place("name"),
            f"name '{rule.match.name}' also takes layer{'s' if len(more) > 1 else ''} {runs(more)}: a dot matches any character, "
            f"and a dot after a backslash only a dot; for layer {number} alone write {fix}",
        )


def _warn_of_absent_layers(rule: Rule, modules: ModelModules, findings: Findings) -> None:
    if rule.match.layers is None:
        return
    all_layers = {layer for path in modules.matching(replace(rule.match, layers=None)) if (layer := modules.layer(path)) is not None}
    for first, last in rule.match.layers.ranges:
        absent = [layer for layer in (first, last) if layer not in all_layers]
        if absent:
            part = str(first) if first == last else f"{first}-{last}"
            findings.warning(rule.place("layers"), f"layers '{part}': the modules that the rule matches are in layers {runs(all_layers)}")


def check_operators(
    rules: Sequence[Rule], assignment: Assignment, modules: ModelModules, registry: OperatorRegistry, findings: Findings
) -> None:
    """Report modules that an operator cannot replace, in one error for each rule and reason."""
    for rule, taken in zip(rules, assignment.taken, strict=True):
        if rule.operator is None:
            continue
        operator = registry[rule.operator]
        refused: dict[str, list[str]] = {}
        for path in taken:
            reason = _refusal(operator, rule, path, modules)
            if reason is not None:
                refused.setdefault(reason, []).append(path)
        for reason, paths in refused.items():
            findings.error(rule.place("operator"), f"rule '{rule.id}': {operator.name} cannot replace {_listed(paths)}: {reason}")


def _refusal(operator: type[Operator], rule: Rule, path: str, modules: ModelModules) -> str | None:
    kinds = modules.kinds(path)
    if operator.kind not in kinds:
        found = f" but of kind {', '.join(sorted(kinds))}" if kinds else ""
        fix = f"; add 'kind: {operator.kind}' to the rule's match" if rule.match.kind is None else ""
        return f"{type(modules[path]).__name__} is not of kind {operator.kind}{found}{fix}"
    return operator.unsupported_reason(modules[path], rule.options)


Outcome = Literal["won", "lost", "not tried"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one rule on one module, with its reason as a sentence."""

    rule: Rule
    outcome: Outcome
    reason: str


def trials(path: str, rules: Sequence[Rule], assignment: Assignment, modules: ModelModules) -> list[Trial]:
    """Try every rule on the module at `path`, in the order of the rules."""
    outer = _outer(path, assignment)
    closed = next((index for index, taken in outer.items() if not rules[index].recursive), None)
    if closed is not None:
        reason = f"the module is inside {outer[closed]}, which rule '{rules[closed].id}' takes with recursive: false"
        return [Trial(rule, "not tried", reason) for rule in rules]
    found: list[Trial] = []
    first: Rule | None = None
    for index, rule in enumerate(rules):
        misses = why_not(rule.match, path, modules)
        if first is not None:
            also = "does not match" if misses else "matches as well"
            found.append(Trial(rule, "not tried", f"rule '{first.id}' comes first and matches; this rule {also}"))
        elif misses:
            found.append(Trial(rule, "lost", "; ".join(misses)))
        else:
            first = rule
            found.append(_matching(rule, path in assignment.taken[index], outer.get(index)))
    return found


def _matching(rule: Rule, taken: bool, outer: str | None) -> Trial:
    """Return the trial of the first rule that matches; it loses only inside a module that the rule replaces as a whole."""
    if not taken:
        return Trial(rule, "lost", f"matches, but the module is inside {outer}, which this rule replaces as a whole")
    kept = "; its class is 'default', so the module stays as it is" if rule.operator is None else ""
    return Trial(rule, "won", f"the first rule that matches{kept}")


def _outer(path: str, assignment: Assignment) -> dict[int, str]:
    """Return the innermost module around `path` that each rule takes, by the rule's index."""
    parts = path.split(".")
    around = {".".join(parts[:length]) for length in range(len(parts))} if path else set()
    return {index: max(inside, key=len) for index, taken in enumerate(assignment.taken) if (inside := around.intersection(taken))}


def why_not(match: Match, path: str, modules: ModelModules) -> list[str]:
    """Return the conditions of `match` that the module at `path` does not meet, as sentences; empty if it matches."""
    misses = []
    if match.name is not None and path not in modules.matching(Match(name=match.name)):
        misses.append(f"name '{match.name}' is not found in its path")
    if match.class_name is not None and path not in modules.matching(Match(class_name=match.class_name)):
        misses.append(f"its class is {type(modules[path]).__name__}, not {match.class_name}")
    if match.kind is not None and match.kind not in modules.kinds(path):
        found = " and ".join(sorted(modules.kinds(path)))
        misses.append(f"it is of kind {found}, not {match.kind}" if found else f"it is of no kind, so not of kind {match.kind}")
    if match.layers is not None and modules.layer(path) not in match.layers:
        layer = modules.layer(path)
        misses.append(
            f"it is in layer {layer}, not in {match.layers}" if layer is not None else f"it is in no layer, not in {match.layers}"
        )
    return misses


def check_plan(rules: Sequence[Rule], assignment: Assignment, model: nn.Module, registry: OperatorRegistry, findings: Findings) -> None:
    """Report the requirements of operators that the model, or the other operators, do not meet."""
    used = [
        (rule, registry[rule.operator], taken)
        for rule, taken in zip(rules, assignment.taken, strict=True)
        if taken and rule.operator is not None
    ]
    drafts = (operator.traits(rule.options).draft_sparsity for rule, operator, _ in used)
    draft = next((share for share in drafts if share is not None), None)
    for rule, operator, taken in used:
        sparsity, packing = operator.traits(rule.options).sparsity, operator.packing
        found = [] if sparsity is None else list(sparsity_errors(sparsity, draft, taken, model))
        unfit = (list(packing.errors(path, model.get_submodule(path), rule.options)) for path in taken) if packing is not None else ()
        found += next((errors for errors in unfit if errors), [])
        for option, reason in found:
            findings.error(_place_of(rule, option), f"rule '{rule.id}': {reason}")


def check_divided(rules: Sequence[Rule], assignment: Assignment, registry: OperatorRegistry, findings: Findings) -> None:
    """Report operators whose experts several processes cannot hold together, and rules that leave no experts to them."""
    divided = False
    for rule, taken in zip(rules, assignment.taken, strict=True):
        if not taken or rule.operator is None or registry[rule.operator].kind != "experts":
            continue
        divided = True
        reason = registry[rule.operator].traits(rule.options).undivided
        if reason is not None:
            reason = reason or f"{rule.operator} needs all experts in one process: replace it by hybrid_experts, or start one process"
            findings.error(rule.place("operator"), f"rule '{rule.id}': {reason}")
    if not divided:
        findings.error(rules[0].position, "no rule replaces experts, which is what several processes share; start one process")


def _place_of(rule: Rule, option: str) -> Position:
    """Return the position of an option such as `sparsity.target`; that of the operator if the rule does not set it."""
    node: Node | None = rule.kwargs
    for name in option.split("."):
        node = node.get(name) if isinstance(node, MappingNode) else None
    return node.position if node is not None else rule.place("operator")
