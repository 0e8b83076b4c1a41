"""One module's way through the rules: which were tried, which won, and why the others did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moegraft.injection.planning.assignment import Assignment
from moegraft.injection.planning.modules import ModelModules
from moegraft.injection.rulefile import Match, Rule

Outcome = Literal["won", "lost", "not tried"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One rule on one module, and a sentence that says why it ended so."""

    rule: Rule
    outcome: Outcome
    reason: str


def trials(path: str, rules: Sequence[Rule], assignment: Assignment, modules: ModelModules) -> list[Trial]:
    """Every rule on the module at `path`, in the order of the rules."""
    outer = _outer(path, assignment)
    closed = next((index for index, taken in outer.items() if not rules[index].recursive), None)
    if closed is not None:
        why = f"the module is inside {outer[closed]}, which rule '{rules[closed].id}' takes with recursive: false"
        return [Trial(rule, "not tried", why) for rule in rules]
    found: list[Trial] = []
    first: Rule | None = None
    for index, rule in enumerate(rules):
        misses = why_not(rule.match, path, modules)
        if first is not None:
            would = "would match too" if not misses else "would not match either"
            found.append(Trial(rule, "not tried", f"rule '{first.id}' comes first and matches; this one {would}"))
        elif misses:
            found.append(Trial(rule, "lost", "; ".join(misses)))
        else:
            first = rule
            found.append(_matching(rule, path in assignment.taken[index], outer.get(index)))
    return found


def _matching(rule: Rule, taken: bool, outer: str | None) -> Trial:
    """The first rule that matches; it wins unless it replaces what the module is a part of."""
    if not taken:
        return Trial(rule, "lost", f"matches, but the module is inside {outer}, which this rule replaces as a whole")
    kept = "; its class is 'default', so the module stays as it is" if rule.operator is None else ""
    return Trial(rule, "won", f"the first rule that matches{kept}")


def _outer(path: str, assignment: Assignment) -> dict[int, str]:
    """What each rule takes that `path` is inside of, by the rule's index; the innermost where there are several."""
    parts = path.split(".")
    around = {".".join(parts[:length]) for length in range(len(parts))} if path else set()
    return {index: max(inside, key=len) for index, taken in enumerate(assignment.taken) if (inside := around.intersection(taken))}


def why_not(match: Match, path: str, modules: ModelModules) -> list[str]:
    """What of `match` the module at `path` does not meet; empty where it matches."""
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
