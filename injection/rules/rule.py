"""The dataclasses of rule files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moegraft.injection.rules.document import Diagnostic, ListNode, MappingNode, Node, Position, Value

if TYPE_CHECKING:
    from moegraft.operators.base import Kind


_PART = re.compile(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?")


@dataclass(frozen=True, slots=True)
class Layers:
    """Ranges of layer numbers, both ends included."""

    ranges: tuple[tuple[int, int], ...]

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and any(first <= layer <= last for first, last in self.ranges)

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)


def parse_layers(text: str) -> Layers:
    """Parse text such as `"4-47"` or `"0,3,5-9"`.

    Raises:
        ValueError: the text has another form, or a range runs backwards.
    """
    ranges = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError('write layer numbers and ranges, such as "4-47" or "0,3,5-9"')
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise ValueError(f"range {first}-{last} runs backwards; write {last}-{first}")
        ranges.append((first, last))
    return Layers(tuple(ranges))


def layer_of(path: str) -> int | None:
    """Return the number of the layer that a module path is in: its first numeric component."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def runs(numbers: Iterable[int]) -> str:
    """Return text such as `0-3,7`."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return str(Layers(tuple(ranges)))


def grouped(paths: Iterable[str]) -> list[str]:
    """Join module paths that differ only in the layer: `model.layers.{0-47}.mlp.experts`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        parts = path.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if index is None:
            groups.setdefault((path, ""), [])
        else:
            groups.setdefault((".".join([*parts[:index], ""]), ".".join(["", *parts[index + 1 :]])), []).append(int(parts[index]))
    braced = (f"{{{runs(layers)}}}" if len(layers) > 1 else "".join(map(str, layers)) for layers in groups.values())
    return [f"{head}{layers}{tail}" for (head, tail), layers in zip(groups, braced, strict=True)]


# The members of `Kind`, repeated here because reading a rule file must not import torch.
KINDS: tuple[Kind, ...] = ("experts", "router", "linear", "attention", "norm", "recurrent", "model")
LEAVE_ALONE = "default"  # the class of a rule that leaves its modules unchanged


@dataclass(frozen=True, slots=True)
class Match:
    """The conditions that a module must meet, all of them; None is no condition.

    Attributes:
        name: a regular expression, searched for in the module's path.
        class_name: the name of the module's class or of one of its bases, bare or dotted.
        layers: the layer number in the module's path; layers for multi-token prediction are numbered after the others.
    """

    name: str | None = None
    class_name: str | None = None
    kind: Kind | None = None
    layers: Layers | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        id: from the file, else `rule-<number>`.
        named: whether the file gives the id; only then can a rule of that id in an extending file replace this one.
        operator: an operator's name; None if the rule leaves its modules unchanged.
        kwargs: the operator's options as written, with their positions.
        options: the operator's options dataclass with defaults filled in; None if `operator` is None.
        recursive: whether later rules may take modules inside those of this one.
        expect: how many modules the rule must take; None: 1 or more; "any": 0 or more.
        inherited: whether the rule comes from a file that another one extends.
        places: the positions of `match`, `name`, `class`, `kind`, `layers`, `operator`, `kwargs` and `expect`, where given.
    """

    id: str
    named: bool
    match: Match
    operator: str | None
    kwargs: MappingNode | None
    options: object
    recursive: bool
    expect: int | Literal["any"] | None
    position: Position
    inherited: bool
    places: Mapping[str, Position]

    def place(self, *keys: str) -> Position:
        """Return the position of the first of `keys` that the rule has, else that of the rule."""
        return next((self.places[key] for key in keys if key in self.places), self.position)

    @property
    def place_text(self) -> str:
        """The file's name and the rule's line, as `cpu.yaml:4`."""
        return f"{Path(self.position.file).name}:{self.position.line}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition on the model's type: it must be one of `values`."""

    values: tuple[str, ...]
    position: Position


# Of experts over several processes: by their measured speed and memory, not at all, or one positive number for each process.
ShareRule = Literal["auto", "none"] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RuleFile:
    """A rule file with all that it extends.

    Attributes:
        rules: in the order in which they are tried; a file's own rules come before inherited ones.
        vars: values by name, overrides applied.
        files: the file itself, then the file that it extends, and so on.
        notices: findings that are no errors, such as the old name of an option.
        shares: how experts are divided over several processes.
    """

    rules: tuple[Rule, ...]
    vars: Mapping[str, Value]
    requires: tuple[Requirement, ...]
    files: tuple[str, ...]
    notices: tuple[Diagnostic, ...] = ()
    shares: ShareRule = "auto"

    def to_mapping(self) -> dict[str, Any]:
        """Return the file as JSON values, with inherited rules and without variables; `read_rules` reads them as the same rules."""
        found: dict[str, Any] = {"version": 1, "rules": [_rule_mapping(rule) for rule in self.rules]}
        values = [set(requirement.values) for requirement in self.requires]
        if values:
            found["requires"] = {"model_type": sorted(set.intersection(*values))}
        if self.shares != "auto":
            found["parallel"] = {"shares": self.shares if isinstance(self.shares, str) else list(self.shares)}
        return found


def _rule_mapping(rule: Rule) -> dict[str, Any]:
    match = {"name": rule.match.name, "class": rule.match.class_name, "kind": rule.match.kind}
    given = {key: value for key, value in match.items() if value is not None}
    if rule.match.layers is not None:
        given["layers"] = str(rule.match.layers)
    replace: dict[str, Any] = {"class": rule.operator or LEAVE_ALONE}
    if rule.kwargs is not None:
        replace["kwargs"] = plain_value(rule.kwargs)
    found: dict[str, Any] = {"id": rule.id} if rule.named else {}
    found |= {"match": given, "replace": replace}
    if not rule.recursive:
        found["recursive"] = False
    if rule.expect is not None:
        found["expect"] = rule.expect
    return found


def plain_value(node: Node) -> Any:
    """Return a node as dicts, lists and scalars."""
    if isinstance(node, MappingNode):
        return {entry.key: plain_value(entry.value) for entry in node}
    return [plain_value(item) for item in node.items] if isinstance(node, ListNode) else node.value
