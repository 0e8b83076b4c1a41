"""The clauses of a rule, `match` and `replace`: which keys stand there, and what their values may be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moegraft.injection.rulefile.diagnostics import Findings, Position, did_you_mean, nearest, shown
from moegraft.injection.rulefile.layers import Layers, parse_layers
from moegraft.injection.rulefile.nodes import MappingNode, Node, ScalarNode
from moegraft.injection.rulefile.rules import KINDS, Match

if TYPE_CHECKING:
    from moegraft.operators.base import Kind

MATCH_KEYS = ("name", "class", "kind", "layers")
MAX_REGEX = 500
_CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def check_keys(node: MappingNode, known: Sequence[str], where: str, findings: Findings) -> set[str]:
    """Reports every key of `node` that is not in `known`; returns the keys that are there, misspelt ones under their right name."""
    present: set[str] = set()
    for entry in node:
        if entry.key not in known:
            findings.error(entry.position, f"unknown key {shown(entry.key)} in {where}{did_you_mean(entry.key, known)}")
        present.add(entry.key if entry.key in known else nearest(entry.key, known) or entry.key)
    return present


def read_text(node: Node, key: str, findings: Findings) -> str | None:
    """Text that is not empty."""
    if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value:
        return node.value
    quote = "; put it in quotes" if isinstance(node, ScalarNode) and node.value not in (None, "") else ""
    findings.error(node.position, f"{key} must be text, not {node}{quote}")
    return None


def read_match(rule: MappingNode, places: dict[str, Position], findings: Findings) -> Match:
    """The `match` of a rule that has one; `places` takes the positions of its values."""
    node = rule.get("match")
    if node is None:
        return Match()  # the rule's own keys are checked where it is read
    if not isinstance(node, MappingNode) or not node.entries:
        found = "an empty one" if isinstance(node, MappingNode) else node
        findings.error(node.position, f"match must be a mapping with name, class, kind or layers, not {found}")
        return Match()
    places["match"] = node.position
    check_keys(node, MATCH_KEYS, "match", findings)
    given = {entry.key: entry.value for entry in node}
    places.update({key: value.position for key, value in given.items() if key in MATCH_KEYS})
    return Match(
        name=_regex(given["name"], findings) if "name" in given else None,
        class_name=_class_name(given["class"], findings) if "class" in given else None,
        kind=_kind(given["kind"], findings) if "kind" in given else None,
        layers=_layers(given["layers"], findings) if "layers" in given else None,
    )


def _regex(node: Node, findings: Findings) -> str | None:
    pattern = read_text(node, "name", findings)
    if pattern is None:
        return None
    try:
        if len(pattern) > MAX_REGEX:
            raise ValueError(f"it has {len(pattern)} characters and {MAX_REGEX} are allowed")
        re.compile(pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        findings.error(node.position, f"name {shown(pattern)} is no regular expression: {error}")
        return None
    return pattern


def _class_name(node: Node, findings: Findings) -> str | None:
    name = read_text(node, "class", findings)
    if name is not None and not _CLASS_NAME.fullmatch(name):
        findings.error(node.position, f"class must be a class name such as MixtralExperts or torch.nn.Linear, not {shown(name)}")
        return None
    return name


def _kind(node: Node, findings: Findings) -> Kind | None:
    name = read_text(node, "kind", findings)
    if name is None:
        return None
    found = next((kind for kind in KINDS if kind == name), None)
    if found is None:
        findings.error(node.position, f"unknown kind {shown(name)}{did_you_mean(name, KINDS)}")
    return found


def _layers(node: Node, findings: Findings) -> Layers | None:
    if isinstance(node, ScalarNode) and type(node.value) is int and node.value >= 0:
        return Layers(((node.value, node.value),))
    if not (isinstance(node, ScalarNode) and isinstance(node.value, str)):
        findings.error(node.position, f'layers must be a number or text such as "4-47" or "0,3,5-9", not {node}')
        return None
    try:
        return parse_layers(node.value)
    except ValueError as error:
        findings.error(node.position, f"layers {shown(node.value)}: {error}")
        return None
