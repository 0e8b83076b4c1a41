"""Checks of an assignment: what rules ask of a model and do not get."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moegraft.injection.planning.assignment import Assignment
from moegraft.injection.planning.misses import explain_miss
from moegraft.injection.planning.modules import ModelModules
from moegraft.injection.rulefile import Match, Rule, RuleFile
from moegraft.injection.rulefile.diagnostics import Findings
from moegraft.injection.rulefile.layers import grouped, runs
from moegraft.operators.base import Operator
from moegraft.operators.registry import OperatorRegistry

# A number in a pattern, alone or in a group of them, that is followed by any character or by nothing.
_OPEN_NUMBER = re.compile(r"(?P<before>\w*\\?\.|[(|])(?P<number>[0-9]+)(?=(\|[0-9]+)*\)?(\.|$))")
MAX_LISTED = 3


def check_requires(rules: RuleFile, model_type: str | None, findings: Findings) -> None:
    """Reports each requirement that the model's type does not meet."""
    for requirement in rules.requires:
        if model_type not in requirement.values:
            wanted = " or ".join(f"'{value}'" for value in requirement.values)
            found = f"this model is of type '{model_type}'" if model_type is not None else "this model has no type"
            findings.error(requirement.position, f"this rule file is for models of type {wanted}, and {found}")


def check_taken(rules: Sequence[Rule], assignment: Assignment, modules: ModelModules, findings: Findings) -> None:
    """Reports rules that take nothing, too few or too many modules, or more layers than was meant, and swaps inside swaps."""
    for rule, taken, lost in zip(rules, assignment.taken, assignment.lost, strict=True):
        if not taken and rule.expect == "any":
            findings.notice(rule.place("match"), f"rule '{rule.id}' takes no module of {modules.model_class}, which it allows")
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
        mend = "a model takes one operator of its own: keep one of the rules" if of_model else "move it up, or narrow the earlier rule"
        findings.error(rule.place("match"), f"{message}; {mend}")


def _where(owner: Rule, rule: Rule) -> str:
    same_file = owner.position.file == rule.position.file
    return f"line {owner.position.line}" if same_file else f"{owner.position.file}:{owner.position.line}"


def _count(number: int) -> str:
    return f"{number} module{'s' if number != 1 else ''}"


def _listed(paths: Sequence[str]) -> str:
    forms = grouped(paths) if paths != [""] else ["the model"]
    more = f" and {len(forms) - MAX_LISTED} more" if len(forms) > MAX_LISTED else ""
    return f"{', '.join(forms[:MAX_LISTED])}{more} ({_count(len(paths))})"


def _warn_of_open_numbers(rule: Rule, taken: Sequence[str], modules: ModelModules, findings: Findings) -> None:
    """`layers.1.` as a pattern takes layers 10 to 19 too: its last dot is any character."""
    layers = {layer for path in taken if (layer := modules.layer(path)) is not None}
    for found in _OPEN_NUMBER.finditer(rule.match.name or ""):
        number = found["number"]
        more = [layer for layer in layers if str(layer) != number and str(layer).startswith(number)]
        if not more:
            continue
        word = found["before"].rstrip("\\.(|")
        mend = f"'{word}\\.{number}\\.'" if word else f"'\\.' after {number}"
        findings.warning(
            rule.place("name"),
            f"name '{rule.match.name}' also takes layer{'s' if len(more) > 1 else ''} {runs(more)}: a dot stands for any character, "
            f"a dot after a backslash for itself; for layer {number} alone write {mend}",
        )


def _warn_of_absent_layers(rule: Rule, modules: ModelModules, findings: Findings) -> None:
    if rule.match.layers is None:
        return
    match = rule.match
    all_layers = {layer for path in modules.matching(_anywhere(match)) if (layer := modules.layer(path)) is not None}
    for first, last in rule.match.layers.ranges:
        absent = [layer for layer in (first, last) if layer not in all_layers]
        if absent:
            part = str(first) if first == last else f"{first}-{last}"
            findings.warning(rule.place("layers"), f"layers '{part}': what the rule matches is in layers {runs(all_layers)} alone")


def _anywhere(match: Match) -> Match:
    return Match(match.name, match.class_name, match.kind, None)


def check_operators(
    rules: Sequence[Rule], assignment: Assignment, modules: ModelModules, registry: OperatorRegistry, findings: Findings
) -> None:
    """Reports operators that cannot replace what their rule takes: one error for all modules that are refused for one reason."""
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
        mend = f"; add 'kind: {operator.kind}' to its match"
        return f"{type(modules[path]).__name__} is not of kind {operator.kind}{found}{mend if rule.match.kind is None else ''}"
    return operator.refuse(modules[path], rule.options)
