"""The data of a rule file with a position on every key and value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from typing import TypeAlias

from moegraft.injection.rulefile.diagnostics import Position, shown

Value: TypeAlias = str | int | float | bool | None

# YAML 1.2's core schema: `yes`, `no`, `on` and `off` are text, `010` is no octal, `1:30` no number in base 60.
_WORDS: dict[str, Value] = {"true": True, "false": False, "null": None, "~": None, "": None}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,18}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]")


@dataclass(frozen=True, slots=True)
class ScalarNode:
    """One value. `variable` names the `${...}` that it came from, for messages."""

    value: Value
    position: Position
    variable: str | None = None

    def moved(self, position: Position, variable: str) -> ScalarNode:
        return replace(self, position=position, variable=variable)

    def __str__(self) -> str:
        origin = f" (from ${{{self.variable}}})" if self.variable else ""
        if isinstance(self.value, str):
            return f"text {shown(self.value)}{origin}"
        return f"{plain_text(self.value)}{origin}"


@dataclass(frozen=True, slots=True)
class ListNode:
    items: tuple[Node, ...]
    position: Position

    def __str__(self) -> str:
        return "a list"


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping with its value."""

    key: str
    position: Position
    value: Node


@dataclass(frozen=True, slots=True)
class MappingNode:
    """A mapping whose keys are text, each once."""

    entries: tuple[Entry, ...]
    position: Position

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def get(self, key: str) -> Node | None:
        return next((entry.value for entry in self.entries if entry.key == key), None)

    def __str__(self) -> str:
        return "a mapping"


Node: TypeAlias = ScalarNode | ListNode | MappingNode


def parse_value(text: str) -> Value:
    """An unquoted value: true, false, null or a finite decimal number in any usual form, else the text itself."""
    if text.lower() in _WORDS and text in (text.lower(), text.upper(), text.capitalize()):
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.match(text) and isfinite(float(text)):
        return float(text)
    return text


def plain_text(value: Value) -> str:
    """A value as YAML writes it, the inverse of `parse_value`."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
