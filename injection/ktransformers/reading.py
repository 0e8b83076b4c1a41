"""KTransformers' rule files as data: read with a position on everything, by the reader of our own, which never calls what is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moegraft.injection.rulefile.clauses import MAX_REGEX
from moegraft.injection.rulefile.diagnostics import Findings, Position, nearest, shown
from moegraft.injection.rulefile.document import read_document
from moegraft.injection.rulefile.nodes import ListNode, MappingNode, Node, ScalarNode, plain_text

RULE_KEYS = ("match", "replace", "recursive")
MATCH_KEYS = ("name", "class")
REPLACE_KEYS = ("class", "kwargs")
Plain = str | Mapping[str, "Plain"]  # a value as text, or values by name


@dataclass(frozen=True, slots=True)
class TheirRule:
    """One rule as KTransformers has it.

    Attributes:
        name: a regular expression on module paths, or None.
        match_class: a dotted class, or None.
        operator: `replace.class`; empty where there is none.
        doubts: what is wrong with it, so that nobody knows what it means; KTransformers says nothing of these.
        remark: something that means less than it looks.
    """

    position: Position
    name: str | None
    match_class: str | None
    operator: str
    kwargs: Mapping[str, Plain]
    recursive: bool
    doubts: tuple[str, ...]
    remark: str = ""

    @property
    def operator_name(self) -> str:
        """The class without its package."""
        return self.operator.rpartition(".")[2]

    def text(self, key: str) -> str | None:
        """A keyword argument that is one value."""
        value = self.kwargs.get(key)
        return value if isinstance(value, str) else None

    def matches(self, path: str) -> bool:
        """Whether the name fits, as `re.search` sees it; a rule without a name fits any path."""
        return self.name is None or re.search(self.name, path) is not None


def read_their_rules(path: Path) -> tuple[TheirRule, ...]:
    """
    Raises:
        RuleErrors: the file cannot be read, is no YAML, too large or too deep, has tags or anchors, or is no list of rules.
    """
    findings = Findings()
    document = read_document(path, findings, plain_keys=True)
    if isinstance(document, MappingNode) and document.get("rules") is not None:
        findings.stop(document.position, "this is a rule file of moegraft already, a mapping with 'rules'; see moegraft check")
    if not isinstance(document, ListNode) or not document.items:
        findings.stop(document.position, f"a rule file of KTransformers is a list of rules with 'match' and 'replace', not {document}")
    rules = tuple(_read_rule(item, findings) for item in document.items)
    findings.raise_errors()
    return tuple(rule for rule in rules if rule is not None)


def _read_rule(node: Node, findings: Findings) -> TheirRule | None:
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"a rule must be a mapping with 'match' and 'replace', not {node}")
        return None
    doubts: list[str] = [*_unknown(node, RULE_KEYS, "a rule")]
    match, replace = (_mapping(node, key, keys, doubts) for key, keys in (("match", MATCH_KEYS), ("replace", REPLACE_KEYS)))
    kwargs = _mapping(replace, "kwargs", None, doubts) if replace.get("kwargs") is not None else MappingNode((), node.position)
    operator = _text(replace.get("class")) or ""
    if not operator and not doubts:
        doubts.append("replace has no 'class'")
    recursive = node.get("recursive")
    closed = isinstance(recursive, ScalarNode) and recursive.value is False
    is_text = isinstance(recursive, ScalarNode) and isinstance(recursive.value, str)
    return TheirRule(
        position=node.position,
        name=_regex(match.get("name"), doubts),
        match_class=_text(match.get("class")),
        operator=operator,
        kwargs={entry.key: _plain(entry.value) for entry in kwargs},
        recursive=not closed,
        doubts=tuple(doubts),
        remark=f"recursive is {recursive}, in quotes, which KTransformers takes for true" if is_text else "",
    )


def _unknown(node: MappingNode, known: tuple[str, ...], where: str) -> list[str]:
    found = []
    for entry in node:
        if entry.key not in known:
            near = nearest(entry.key, known)
            meant = f"; did you mean '{near}'?" if near else ""
            found.append(f"line {entry.position.line}: KTransformers has no key {shown(entry.key)} in {where}{meant}")
    return found


def _mapping(node: MappingNode, key: str, known: tuple[str, ...] | None, doubts: list[str]) -> MappingNode:
    """A part of a rule, with doubts for keys that it should not have; an empty one where it is missing."""
    found = node.get(key)
    if isinstance(found, MappingNode):
        doubts += _unknown(found, known, key) if known is not None else []
        return found
    empty = isinstance(found, ScalarNode) and found.value is None
    if not (key == "kwargs" and empty) and not any("did you mean" in doubt for doubt in doubts):
        doubts.append(f"{key} is missing" if found is None else f"{key} must be a mapping, not {found}")
    return MappingNode((), node.position)


def _text(node: Node | None) -> str | None:
    return node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value else None


def _regex(node: Node | None, doubts: list[str]) -> str | None:
    pattern = _text(node)
    if pattern is None:
        if node is not None:
            doubts.append(f"name must be text, not {node}")
        return None
    try:
        if len(pattern) > MAX_REGEX:
            raise ValueError(f"it has {len(pattern)} characters and {MAX_REGEX} are allowed")
        re.compile(pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        doubts.append(f"name {shown(pattern)} is no regular expression: {error}")
        return None
    return pattern


def _plain(node: Node) -> Plain:
    if isinstance(node, MappingNode):
        return {entry.key: _plain(entry.value) for entry in node}
    if isinstance(node, ListNode):
        return ", ".join(str(item) for item in node.items)
    return plain_text(node.value)
