"""What a rule file says about itself, before its rules: version, extends, vars, requires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moegraft.injection.rulefile.clauses import check_keys
from moegraft.injection.rulefile.diagnostics import Findings, Position, shown
from moegraft.injection.rulefile.nodes import ListNode, MappingNode, Node, ScalarNode, Value
from moegraft.injection.rulefile.rules import Requirement
from moegraft.injection.rulefile.variables import NAME

VERSION = 1
TOP_KEYS = ("version", "extends", "vars", "requires", "rules")


@dataclass(frozen=True, slots=True)
class Header:
    """A file before its variables are put in."""

    file: str
    position: Position
    extends: ScalarNode | None
    vars: Mapping[str, Value]
    requires: Node | None
    rules: Node | None


def read_header(node: Node, findings: Findings) -> Header:
    """What a file says about itself; a bare list, as KTransformers writes it, says nothing.

    Raises:
        RuleErrors: the file is neither a mapping nor a list.
    """
    file = node.position.file
    if isinstance(node, ListNode):
        return Header(file, node.position, None, {}, None, node)
    if isinstance(node, ScalarNode):
        findings.stop(node.position, f"a rule file is a mapping with 'rules', or a list of rules, not {node}")
    if node.get("match") is not None or node.get("replace") is not None:
        findings.stop(node.position, "rules stand in a list: write '- ' before the first key of each rule and indent its other keys")
    if not check_keys(node, TOP_KEYS, "a rule file", findings) & {"rules", "extends"}:
        findings.error(node.position, "a rule file needs 'rules', a list of rules, or 'extends'")
    version = node.get("version")
    if version is not None and not (isinstance(version, ScalarNode) and type(version.value) is int and version.value == VERSION):
        findings.error(version.position, f"version must be {VERSION}, not {version}")
    extends = node.get("extends")
    if extends is not None and not (isinstance(extends, ScalarNode) and isinstance(extends.value, str)):
        findings.error(extends.position, f"extends must be the name of a shipped rule file or a path, not {extends}")
        extends = None
    return Header(file, node.position, extends, _read_vars(node.get("vars"), findings), node.get("requires"), node.get("rules"))


def _read_vars(node: Node | None, findings: Findings) -> dict[str, Value]:
    if node is None:
        return {}
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"vars must be a mapping of names to values, not {node}")
        return {}
    found: dict[str, Value] = {}
    for entry in node:
        if not NAME.fullmatch(entry.key):
            findings.error(entry.position, f"{shown(entry.key)} is no name for a variable: use letters, digits and _")
        elif not isinstance(entry.value, ScalarNode):
            findings.error(entry.value.position, f"variable '{entry.key}' must be text, a number, true, false or null, not {entry.value}")
        elif isinstance(entry.value.value, str) and "${" in entry.value.value:
            findings.error(entry.value.position, f"variable '{entry.key}' refers to a variable, which only values outside vars may")
        else:
            found[entry.key] = entry.value.value
    return found


def read_requires(node: Node | None, findings: Findings) -> tuple[Requirement, ...]:
    """The types of model that a file is for."""
    if node is None:
        return ()
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"requires must be a mapping, such as {{model_type: mixtral}}, not {node}")
        return ()
    check_keys(node, ("model_type",), "requires", findings)
    types = node.get("model_type")
    if types is None:
        return ()
    items = types.items if isinstance(types, ListNode) else (types,)
    values = [item.value for item in items if isinstance(item, ScalarNode) and isinstance(item.value, str)]
    if not values or len(values) < len(items):
        findings.error(types.position, f"model_type must be text or a list of text, not {types}")
        return ()
    return (Requirement(tuple(values), types.position),)
