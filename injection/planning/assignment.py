"""Which rule takes which module: the first that matches, outer modules before what they hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from moegraft.injection.planning.modules import ModelModules
from moegraft.injection.rulefile import Rule


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outcome for each rule, by its index.

    Attributes:
        taken: the paths that each rule takes.
        lost: for a rule that takes nothing: what it would have taken, by the index of the rule that has it. Empty where the
            rule's match fits no module at all.
        nested: swaps inside what another rule replaces as a whole, which cannot both be: paths by (inner rule, outer rule).
    """

    taken: Sequence[Sequence[str]]
    lost: Sequence[dict[int, list[str]]]
    nested: Mapping[tuple[int, int], Sequence[str]]


@dataclass(slots=True)
class _Walk:
    """Where a walk over the modules stands: inside which module that is out of reach, or replaced."""

    closed: tuple[str, int] | None = None
    replaced: tuple[str, int] | None = None
    owner: dict[str, int] = field(default_factory=dict)  # path -> the rule that takes it or keeps others from it

    def leave(self, path: str) -> None:
        if self.closed is not None and not _inside(path, self.closed[0]):
            self.closed = None
        if self.replaced is not None and not _inside(path, self.replaced[0]):
            self.replaced = None


def _inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def assign(rules: Sequence[Rule], modules: ModelModules, in_place: Collection[str]) -> Assignment:
    """Assigns every module to the first rule that matches it; pure.

    Args:
        in_place: the operators that leave their module where it is, and its parts to other rules.
    """
    fitting = [modules.matching(rule.match) for rule in rules]
    candidates: dict[str, int] = {}  # path -> the first rule that matches it
    for index, paths in reversed(list(enumerate(fitting))):
        candidates.update(dict.fromkeys(paths, index))
    taken: list[list[str]] = [[] for _ in rules]
    nested: dict[tuple[int, int], list[str]] = {}
    walk = _Walk()
    for path in modules:
        walk.leave(path)
        if walk.closed is not None:
            walk.owner[path] = walk.closed[1]
            continue
        if path not in candidates:
            continue
        index = candidates[path]
        walk.owner[path] = index
        if walk.replaced is not None and walk.replaced[1] == index:
            continue  # a part of what the rule takes already, such as the activation within experts
        taken[index].append(path)
        if walk.replaced is not None and rules[index].operator is not None:
            nested.setdefault((index, walk.replaced[1]), []).append(path)
        if not rules[index].recursive:
            walk.closed = (path, index)
        if rules[index].operator not in (None, *in_place) and walk.replaced is None:
            walk.replaced = (path, index)
    lost = [{} if took else _by_owner(fits, walk.owner) for took, fits in zip(taken, fitting, strict=True)]
    return Assignment(taken, lost, nested)


def _by_owner(paths: Sequence[str], owner: dict[str, int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for path in paths:
        found.setdefault(owner[path], []).append(path)
    return dict(sorted(found.items()))
