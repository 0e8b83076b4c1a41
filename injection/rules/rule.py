"""The dataclasses of rule files, and the reading of a rule's `match`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moegraft.injection.rules.diagnostics import Diagnostic, Findings, Position, did_you_mean, nearest, shown
from moegraft.injection.rules.document import MappingNode, Node, ScalarNode, Value
from moegraft.injection.rules.patterns import why_unusable

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
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError('write layer numbers and ranges, such as "4-47" or "0,3,5-9"')
        first = int(found[1])
        last = first if found[2] is None else int(found[2])
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
    return [f"{head}{_braced(layers)}{tail}" for (head, tail), layers in groups.items()]


def _braced(layers: list[int]) -> str:
    if not layers:
        return ""
    return str(layers[0]) if len(layers) == 1 else f"{{{runs(layers)}}}"


# The members of `Kind`, repeated here because reading a rule file must not import torch.
KINDS: tuple[Kind, ...] = ("experts", "router", "linear", "attention", "norm", "model")
LEAVE_ALONE = "default"  # the class of a rule that leaves its modules unchanged


@dataclass(frozen=True, slots=True)
class Match:
    """The conditions that a module must meet, all of them; None is no condition.

    Attributes:
        name: a regular expression, searched for in the module's path.
        class_name: the name of the module's class or of one of its bases, bare or dotted.
        layers: the layer number in the module's path.
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
    position: Position
    files: tuple[str, ...]
    notices: tuple[Diagnostic, ...] = ()
    shares: ShareRule = "auto"


MATCH_KEYS = ("name", "class", "kind", "layers")
_CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


def check_keys(node: MappingNode, known: Sequence[str], where: str, findings: Findings) -> set[str]:
    """Report every key of `node` that is not in `known`; return the keys that are present, misspelt ones under their right name."""
    present: set[str] = set()
    for entry in node:
        if entry.key not in known:
            findings.error(entry.position, f"unknown key {shown(entry.key)} in {where}{did_you_mean(entry.key, known)}")
        present.add(entry.key if entry.key in known else nearest(entry.key, known) or entry.key)
    return present


def read_text(node: Node, key: str, findings: Findings) -> str | None:
    """Return the text of `node`; None, with an error, for anything else and for empty text."""
    if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value:
        return node.value
    quote = "; put it in quotes" if isinstance(node, ScalarNode) and node.value not in (None, "") else ""
    findings.error(node.position, f"{key} must be text, not {node}{quote}")
    return None


def read_match(rule: MappingNode, places: dict[str, Position], findings: Findings) -> Match:
    """Read the `match` of a rule, and add the positions of its values to `places`."""
    node = rule.get("match")
    if node is None:
        return Match()  # the reader of the rule reports the missing key
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
    reason = why_unusable(pattern)
    if reason is not None:
        findings.error(node.position, f"name {shown(pattern)} {reason}")
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
