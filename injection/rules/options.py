"""The options of a rule, from nodes to the operator's dataclass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moegraft.injection.rules.document import (
    Findings,
    ListNode,
    MappingNode,
    Node,
    Position,
    ScalarNode,
    did_you_mean,
    nearest,
    parse_value,
    plain_text,
)
from moegraft.injection.rules.ktransformers import KWARGS

_YAML_1_1_BOOLS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def read_options(operator: str, options_type: type[Any], kwargs: MappingNode | None, position: Position, findings: Findings) -> object:
    """Read the options of one rule; None, with the errors in `findings`, if they are wrong.

    Field types may be bool, int, float, str, Path (relative to the rule file), Literal, None, tuple, Mapping with text keys,
    another dataclass, and unions of these.

    Args:
        position: where missing options are reported.
    """
    node = kwargs or MappingNode((), position)
    return _Reader(operator, findings).options(options_type, node, "", position)


def with_new_names(operator: str, options_type: type[Any], kwargs: MappingNode, findings: Findings, path: str = "") -> MappingNode:
    """Return `kwargs` with renamed options under their new names, at any depth; each old name is reported as a notice.

    An options dataclass declares them as `renamed_options: ClassVar[Mapping[str, str]] = {"old": "new"}`.
    """
    renamed: Mapping[str, str] = getattr(options_type, "renamed_options", {})
    hints = get_type_hints(options_type)
    entries = []
    for entry in kwargs:
        name = renamed.get(entry.key, entry.key)
        if name != entry.key:
            both = next((other for other in kwargs if other.key == name), None)
            if both is not None:
                old, new = f"{path}{entry.key}", f"{path}{name}"
                findings.error(entry.position, f"option '{old}' is the old name of '{new}', in line {both.position.line}; delete it")
                continue
            findings.notice(entry.position, f"option '{path}{entry.key}' of {operator} is now called '{path}{name}'")
        value = entry.value
        if isinstance(value, MappingNode):
            nested = next((member for member in _members(hints.get(name)) if is_dataclass(member) and isinstance(member, type)), None)
            if nested is not None:
                value = with_new_names(operator, nested, value, findings, f"{path}{name}.")
        entries.append(replace(entry, key=name, value=value))
    return replace(kwargs, entries=tuple(entries))


class _Reader:
    def __init__(self, operator: str, findings: Findings) -> None:
        self._operator = operator
        self._findings = findings
        self._failed = False

    def _error(self, position: Position, message: str) -> None:
        self._failed = True
        self._findings.error(position, message)

    def options(self, options_type: type[Any], node: MappingNode, path: str, position: Position) -> object:
        """Return an instance of the dataclass; `path` is the option that has it as its value, with a dot at the end."""
        hints = get_type_hints(options_type)
        known = {field.name: field for field in fields(options_type) if field.init}
        values: dict[str, Any] = {}
        for entry in node:
            if entry.key in known:
                values[entry.key] = self.value(hints[entry.key], entry.value, path + entry.key)
            else:
                self._unknown(entry.key, entry.position, path, list(known))
        for name, field in known.items():
            if name in values or field.default is not MISSING or field.default_factory is not MISSING:
                continue
            self._error(position, f"option '{path}{name}' of {self._operator} is missing; it has no default")
        if self._failed:
            return None
        try:
            return options_type(**values)
        except ValueError as error:
            where = f"option '{path.removesuffix('.')}' of {self._operator}" if path else f"options of {self._operator}"
            named = [entry for entry in node if re.search(rf"\b{re.escape(entry.key)}\b", str(error))]
            self._error(named[0].value.position if len(named) == 1 else position, f"{where}: {error}")
            return None

    def _unknown(self, key: str, position: Position, path: str, known: list[str]) -> None:
        where = f"option '{path.removesuffix('.')}' of {self._operator}" if path else self._operator
        advice = KWARGS.get(key)
        if advice is not None:
            self._error(position, f"'{key}' is an argument of KTransformers, not an option of {where}: {advice}")
        else:
            hint = did_you_mean(key, known) if known else "; it has none"
            self._error(position, f"unknown option '{key}' of {where}{hint}")

    def value(self, hint: Any, node: Node, path: str) -> Any:
        """Return `node` as a value of type `hint`; None, with an error, if it is none."""
        fitting = [member for member in _members(hint) if _fits(member, node)]
        member = max(fitting, key=lambda member: _known_keys(member, node), default=None)
        if member is None:
            self._error(node.position, self._mismatch(hint, node, path))
            return None
        if isinstance(node, MappingNode):
            if is_dataclass(member) and isinstance(member, type):
                return self.options(member, node, f"{path}.", node.position)
            of_values = get_args(member)[1] if get_args(member) else Any
            return {entry.key: self.value(of_values, entry.value, f"{path}.{entry.key}") for entry in node}
        if isinstance(node, ListNode):
            return self._tuple(member, node, path)
        if member is Path:
            return Path(node.position.file).parent / str(node.value)
        return float(node.value) if member is float and isinstance(node.value, int) else node.value

    def _tuple(self, member: Any, node: ListNode, path: str) -> tuple[Any, ...]:
        of_items = get_args(member)
        if len(of_items) == 2 and of_items[1] is Ellipsis:
            of_items = (of_items[0],) * len(node.items)
        if len(of_items) != len(node.items):
            self._error(node.position, f"option '{path}' of {self._operator} must have {len(of_items)} items, not {len(node.items)}")
            return ()
        pairs = zip(of_items, node.items, strict=True)
        return tuple(self.value(hint, item, f"{path}[{index}]") for index, (hint, item) in enumerate(pairs))

    def _mismatch(self, hint: Any, node: Node, path: str) -> str:
        where = f"option '{path}' of {self._operator}"
        choices = [choice for member in _members(hint) for choice in get_args(member) if get_origin(member) is Literal]
        text = node.value if isinstance(node, ScalarNode) and isinstance(node.value, str) else None
        near = nearest(text, [choice for choice in choices if isinstance(choice, str)]) if text is not None else None
        meant = f"; did you mean '{near}'?" if near is not None else _unquoted(hint, text, node.position)
        return f"{where} must be {_expected(hint)}, not {node}{meant}"


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(inner for member in get_args(hint) for inner in _members(member))
    return (hint,)


def _fits(hint: Any, node: Node) -> bool:
    if hint is Any or hint is object:
        return isinstance(node, ScalarNode)
    if isinstance(node, MappingNode):
        return is_dataclass(hint) or get_origin(hint) in (dict, Mapping) or hint is dict
    if isinstance(node, ListNode):
        return get_origin(hint) is tuple
    value = node.value
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is Path:
        return isinstance(value, str)
    return type(value) is hint


def _known_keys(hint: Any, node: Node) -> int:
    """Return how many keys of a mapping are options of a dataclass."""
    if not isinstance(node, MappingNode) or not is_dataclass(hint):
        return 0
    return len({field.name for field in fields(hint)} & {entry.key for entry in node})


_NAMES: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", NoneType: "null"}


def _expected(hint: Any) -> str:
    return " or ".join(_expected_member(member) for member in _members(hint))


def _expected_member(hint: Any) -> str:
    if get_origin(hint) is Literal:
        names = [plain_text(choice) for choice in get_args(hint)]
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    if is_dataclass(hint):
        return f"a mapping ({', '.join(field.name for field in fields(hint) if field.init)})"
    if get_origin(hint) is tuple:
        return f"a list, each item {_expected(get_args(hint)[0])}"
    return _NAMES.get(hint, "a mapping")


def _unquoted(hint: Any, text: str | None, position: Position) -> str:
    if text is None:
        return ""
    if bool in _members(hint) and text.lower() in _YAML_1_1_BOOLS:
        return f"; write {_YAML_1_1_BOOLS[text.lower()]}"
    value = parse_value(text)
    fits = not isinstance(value, str) and any(_fits(member, ScalarNode(value, position)) for member in _members(hint))
    return "; write it without quotes" if fits else ""
