"""What a rule file says, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moegraft.injection.rulefile.diagnostics import Position
from moegraft.injection.rulefile.layers import Layers
from moegraft.injection.rulefile.nodes import MappingNode, Value

if TYPE_CHECKING:
    from moegraft.operators.base import Kind

# The members of `Kind`, written out because whoever only reads a rule file should not wait for torch.
KINDS: tuple[Kind, ...] = ("experts", "router", "linear", "attention", "norm", "model")
LEAVE_ALONE = "default"  # the class of a rule that keeps its modules as they are


@dataclass(frozen=True, slots=True)
class Match:
    """Which modules a rule takes; what is None does not matter, and all that is given must hold.

    Attributes:
        name: a regular expression for `re.search` on the module's path.
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
        id: as written, else `rule-<number>`.
        named: whether the file gives the id; only then can a rule of that id in an extending file replace this one.
        operator: an operator's name, or None where the rule leaves its modules alone.
        kwargs: the operator's options as written, with their positions.
        options: the operator's options dataclass with defaults filled in; None where `operator` is.
        recursive: whether later rules may still take modules inside those of this one.
        expect: how many modules the rule must take; None: any number from 1; "any": none, too.
        inherited: whether the rule is from a file that was extended.
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
        """Where the first of `keys` that the rule has is written, else where the rule is."""
        return next((self.places[key] for key in keys if key in self.places), self.position)


@dataclass(frozen=True, slots=True)
class Requirement:
    """One of `values` must be the model's type."""

    values: tuple[str, ...]
    position: Position


@dataclass(frozen=True, slots=True)
class RuleFile:
    """A rule file with all that it extends.

    Attributes:
        rules: in the order in which they are tried; a file's own come before those it inherits.
        vars: after overriding.
        files: the file itself, then what it extends, down to the last.
    """

    rules: tuple[Rule, ...]
    vars: Mapping[str, Value]
    requires: tuple[Requirement, ...]
    position: Position
    files: tuple[str, ...]
