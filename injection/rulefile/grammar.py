"""The list of rules: which keys a rule has, and what their values may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moegraft.injection.rulefile.clauses import check_keys, read_match, read_text
from moegraft.injection.rulefile.diagnostics import Findings, Position, shown
from moegraft.injection.rulefile.nodes import ListNode, MappingNode, Node, ScalarNode
from moegraft.injection.rulefile.replacement import read_replace
from moegraft.injection.rulefile.rules import Rule

if TYPE_CHECKING:
    from moegraft.operators.registry import OperatorRegistry

RULE_KEYS = ("id", "match", "replace", "recursive", "expect")
NEEDED_KEYS = {"match": "name, class, kind or layers", "replace": "the 'class' of an operator"}


class RuleReader:
    """Reads the rules of one file."""

    def __init__(self, registry: OperatorRegistry, findings: Findings, *, inherited: bool) -> None:
        self._registry = registry
        self._findings = findings
        self._inherited = inherited

    def rules(self, node: Node | None, *, extends: bool) -> tuple[Rule, ...]:
        """All rules that could be read; the others are in the findings."""
        if node is None:
            return ()
        if not isinstance(node, ListNode):
            self._findings.error(node.position, f"rules must be a list, not {node}; write '- ' before the first key of each rule")
            return ()
        if not node.items and not extends:
            self._findings.error(node.position, "a rule file needs at least one rule")
        ids: dict[str, Position] = {}
        read = (self._rule(item, number, ids) for number, item in enumerate(node.items, start=1))
        return tuple(rule for rule in read if rule is not None)

    def _rule(self, node: Node, number: int, ids: dict[str, Position]) -> Rule | None:
        if not isinstance(node, MappingNode):
            self._findings.error(node.position, f"a rule must be a mapping with 'match' and 'replace', not {node}")
            return None
        present = check_keys(node, RULE_KEYS, "a rule", self._findings)
        for key, form in NEEDED_KEYS.items():
            if key not in present:
                self._findings.error(node.position, f"a rule needs '{key}', a mapping with {form}")
        places: dict[str, Position] = {}
        rule_id = self._id(node.get("id"), number, ids)
        match = read_match(node, places, self._findings)
        replacement = read_replace(node, match, places, self._registry, self._findings)
        return Rule(
            id=rule_id,
            named=node.get("id") is not None,
            match=match,
            operator=replacement.operator,
            kwargs=replacement.kwargs,
            options=replacement.options,
            recursive=self._recursive(node.get("recursive")),
            expect=self._expect(node.get("expect"), places),
            position=node.position,
            inherited=self._inherited,
            places=places,
        )

    def _id(self, node: Node | None, number: int, ids: dict[str, Position]) -> str:
        rule_id = read_text(node, "id", self._findings) if node is not None else None
        if rule_id is None or node is None:
            return f"rule-{number}"
        if rule_id in ids:
            self._findings.error(node.position, f"id {shown(rule_id)} is taken by the rule in line {ids[rule_id].line}")
        ids.setdefault(rule_id, node.position)
        return rule_id

    def _recursive(self, node: Node | None) -> bool:
        if node is None:
            return True
        if isinstance(node, ScalarNode) and isinstance(node.value, bool):
            return node.value
        self._findings.error(node.position, f"recursive must be true or false (without quotes), not {node}")
        return True

    def _expect(self, node: Node | None, places: dict[str, Position]) -> int | Literal["any"] | None:
        if node is None:
            return None
        places["expect"] = node.position
        if isinstance(node, ScalarNode) and type(node.value) is int and node.value >= 1:
            return node.value
        if isinstance(node, ScalarNode) and node.value == "any":
            return "any"
        self._findings.error(node.position, f"expect must be the number of modules, 1 or more, or any, not {node}")
        return None
