"""`replace`: an operator by name and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moegraft.injection.rulefile.clauses import check_keys, read_text
from moegraft.injection.rulefile.diagnostics import Findings, Position, did_you_mean, shown
from moegraft.injection.rulefile.migration import class_advice, kwarg_advice
from moegraft.injection.rulefile.nodes import MappingNode, Node, ScalarNode
from moegraft.injection.rulefile.options import read_options
from moegraft.injection.rulefile.rules import LEAVE_ALONE, Match

if TYPE_CHECKING:
    from moegraft.operators.registry import OperatorRegistry

REPLACE_KEYS = ("class", "kwargs")


@dataclass(frozen=True, slots=True)
class Replacement:
    """An operator (None: the module stays) with its options as written and as read."""

    operator: str | None = None
    kwargs: MappingNode | None = None
    options: object = None


def read_replace(
    rule: MappingNode, match: Match, places: dict[str, Position], registry: OperatorRegistry, findings: Findings
) -> Replacement:
    """The `replace` of a rule that has one; `places` takes the positions of its values."""
    node = rule.get("replace")
    if node is None:
        return Replacement()  # the rule's own keys are checked where it is read
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"replace must be a mapping with the 'class' of an operator, not {node}")
        return Replacement()
    present = check_keys(node, REPLACE_KEYS, "replace", findings)
    class_node = node.get("class")
    if class_node is None:
        if "class" in present:
            return Replacement()
        findings.error(node.position, f"replace needs 'class', the name of an operator{_known(registry)}")
        return Replacement()
    places["operator"] = class_node.position
    kwargs = _read_kwargs(node.get("kwargs"), places, findings)
    name = _read_operator(class_node, registry, findings)
    if name == LEAVE_ALONE:
        _refuse_kwargs(kwargs, findings)
    if name is None or name == LEAVE_ALONE:
        return Replacement(None, kwargs)
    operator = registry[name]
    if match.kind is not None and match.kind != operator.kind:
        message = f"operator '{name}' replaces modules of kind {operator.kind}, and this rule matches kind {match.kind}"
        findings.error(places["kind"], message)
    place = places.get("kwargs", class_node.position)
    return Replacement(name, kwargs, read_options(name, operator.options_type, kwargs, place, findings))


def _known(registry: OperatorRegistry) -> str:
    return f"; known are: {', '.join([*registry, LEAVE_ALONE])}"


def _read_operator(node: Node, registry: OperatorRegistry, findings: Findings) -> str | None:
    name = read_text(node, "class", findings)
    if name is None or name in registry or name == LEAVE_ALONE:
        return name
    advice = class_advice(name)
    if advice is not None:
        findings.error(node.position, f"{shown(name)} is KTransformers': {advice}")
    elif "." in name:
        findings.error(node.position, f"class must be the name of an operator, not a path: {shown(name)}{_known(registry)}")
    else:
        findings.error(node.position, f"unknown operator {shown(name)}{did_you_mean(name, [*registry, LEAVE_ALONE])}")
    return None


def _read_kwargs(node: Node | None, places: dict[str, Position], findings: Findings) -> MappingNode | None:
    if node is None or (isinstance(node, ScalarNode) and node.value is None and node.variable is None):
        return None
    places["kwargs"] = node.position
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"kwargs must be a mapping of options to values, not {node}")
        return None
    return node


def _refuse_kwargs(kwargs: MappingNode | None, findings: Findings) -> None:
    for entry in kwargs or ():
        advice = kwarg_advice(entry.key)
        why = f"'{entry.key}' is KTransformers': {advice}" if advice else f"unknown option {shown(entry.key)}"
        findings.error(entry.position, f"{why}; '{LEAVE_ALONE}' leaves its modules alone and has no options")
