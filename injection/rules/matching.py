"""The assignment of a model's modules to rules, and the nearest match for a rule that matches none."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property

from torch import nn

from moegraft.injection.rules import Match, Position, Rule
from moegraft.injection.rules.diagnostics import Findings, nearest, shown
from moegraft.injection.rules.ktransformers import is_theirs
from moegraft.injection.rules.patterns import Patterns, SlowPatternError
from moegraft.injection.rules.rule import layer_of, runs
from moegraft.operators.base import Kind
from moegraft.operators.structure import kinds


class ModelModules:
    """Every module of a model by path, outer modules before inner ones; the model's own path is empty."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_path: dict[str, nn.Module] = dict(model.named_modules())
        self._kinds: dict[str, frozenset[Kind]] = {}
        self._by_kind: dict[Kind, frozenset[str]] = {}
        self._layers: dict[str, int | None] = {}
        self._patterns = Patterns()
        self._by_name: dict[str, frozenset[str]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __getitem__(self, path: str) -> nn.Module:
        return self._by_path[path]

    @property
    def model_class(self) -> str:
        return type(self._model).__name__

    def kinds(self, path: str) -> frozenset[Kind]:
        found = self._kinds.get(path)
        if found is None:
            found = self._kinds[path] = kinds(path, self._by_path[path], self._model)
        return found

    def layer(self, path: str) -> int | None:
        if path not in self._layers:
            self._layers[path] = layer_of(path)
        return self._layers[path]

    def matching(self, match: Match) -> list[str]:
        """Return the paths that meet all conditions of `match`, in the model's order.

        The model itself has no name and no layer: only its kind and its class can match.

        Raises:
            SlowPatternError: matching the name takes too long.
        """
        paths: Iterable[str] = self._by_path
        if match.layers is not None:
            layers = match.layers
            paths = [path for path in paths if self.layer(path) in layers]
        if match.name is not None:
            named = self._named(match.name)
            paths = [path for path in paths if path in named]
        if match.class_name is not None:
            fitting = {cls for cls in set(map(type, self._by_path.values())) if has_class(cls, match.class_name)}
            paths = [path for path in paths if type(self._by_path[path]) in fitting]
        if match.kind is not None:
            of_kind = self._of_kind(match.kind)
            paths = [path for path in paths if path in of_kind]
        return list(paths)

    def _named(self, pattern: str) -> frozenset[str]:
        found = self._by_name.get(pattern)
        if found is None:
            found = self._by_name[pattern] = frozenset(path for path in self if path and self._patterns.found_in(pattern, path))
        return found

    def _of_kind(self, kind: Kind) -> frozenset[str]:
        found = self._by_kind.get(kind)
        if found is None:
            found = self._by_kind[kind] = frozenset(path for path in self if kind in self.kinds(path))
        return found

    @cached_property
    def words(self) -> list[str]:
        """The names in the paths."""
        return sorted({part for path in self for part in path.split(".") if part and not part.isdecimal()})

    @cached_property
    def forms(self) -> dict[str, list[str]]:
        """The paths, grouped by the path with every number replaced by 0."""
        found: dict[str, list[str]] = {}
        for path in self:
            found.setdefault(re.sub(r"\d+", "0", path), []).append(path)
        return found


def has_class(cls: type, name: str) -> bool:
    """Whether `cls` or one of its bases has this name. A dotted name may leave out inner modules: torch.nn.Linear is
    torch.nn.modules.linear.Linear. Nothing is imported."""
    package, _, bare = name.rpartition(".")
    return any(base.__name__ == bare and f"{base.__module__}.".startswith(f"{package}." if package else "") for base in cls.__mro__)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outcome for each rule, by its index.

    Attributes:
        taken: the paths that each rule takes.
        lost: for a rule that takes no module, the paths that it matches, by the index of the rule that takes them; empty if it
            matches none.
        nested: conflicts, in which a rule replaces a module inside one that another rule replaces: paths by (inner rule, outer rule).
    """

    taken: Sequence[Sequence[str]]
    lost: Sequence[dict[int, list[str]]]
    nested: Mapping[tuple[int, int], Sequence[str]]


@dataclass(slots=True)
class _Walk:
    """The state of a walk over the modules, outer ones first.

    Attributes:
        closed: the path around the current one that a rule with `recursive: false` takes, with the rule's index.
        replaced: the path around the current one that a rule replaces, with the rule's index.
        owner: the index of the rule that takes or closes a path.
    """

    closed: tuple[str, int] | None = None
    replaced: tuple[str, int] | None = None
    owner: dict[str, int] = field(default_factory=dict)

    def leave(self, path: str) -> None:
        if self.closed is not None and not _inside(path, self.closed[0]):
            self.closed = None
        if self.replaced is not None and not _inside(path, self.replaced[0]):
            self.replaced = None


def _inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def assign(rules: Sequence[Rule], modules: ModelModules, in_place: Collection[str]) -> Assignment:
    """Assign every module to the first rule that matches it. Pure.

    Args:
        in_place: the operators that leave their module in place, and its parts to other rules.

    Raises:
        RuleErrors: matching the name of a rule takes too long.
    """
    fitting = _fitting(rules, modules)
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
            continue  # a part of a module that the rule takes, such as the activation within experts
        taken[index].append(path)
        if walk.replaced is not None and rules[index].operator is not None:
            nested.setdefault((index, walk.replaced[1]), []).append(path)
        if not rules[index].recursive:
            walk.closed = (path, index)
        if rules[index].operator not in (None, *in_place) and walk.replaced is None:
            walk.replaced = (path, index)
    lost = [{} if took else _by_owner(fits, walk.owner) for took, fits in zip(taken, fitting, strict=True)]
    return Assignment(taken, lost, nested)


def _fitting(rules: Sequence[Rule], modules: ModelModules) -> list[list[str]]:
    findings = Findings()
    fitting: list[list[str]] = [[] for _ in rules]
    for rule, paths in zip(rules, fitting, strict=True):
        try:
            paths += modules.matching(rule.match)
        except SlowPatternError as error:
            findings.error(rule.place("name"), f"rule '{rule.id}': name {shown(rule.match.name or '')} {error}")
    findings.raise_errors()
    return fitting


def _by_owner(paths: Sequence[str], owner: dict[str, int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for path in paths:
        found.setdefault(owner[path], []).append(path)
    return dict(sorted(found.items()))


MAX_FORMS = 2000  # distinct paths among which the nearest one is searched
_WORD = re.compile(r"\\.|[A-Za-z_][A-Za-z0-9_]*")  # an escape such as \d is no word
_INDENT = "\n    "


def explain_miss(rule: Rule, modules: ModelModules) -> tuple[Position, str]:
    """Return the position and the message of the error for a rule that matches no module."""
    match = rule.match
    lines: list[str] = []
    keys: list[str] = []
    for key, value, alone in _parts(match):
        found = modules.matching(alone)
        if found:
            lines.append(f"{key}: {value} alone matches {count_text(found)}")
        else:
            keys.append(key)
            lines.append(f"{key}: {value}{_near(key, match, modules)}")
    if not keys:
        lines.append(_apart(match, modules))
    return rule.place(*keys, "match"), _INDENT.join([f"rule '{rule.id}' matches no module of {modules.model_class}", *lines])


def _parts(match: Match) -> Iterator[tuple[str, str, Match]]:
    if match.name is not None:
        yield "name", f"'{match.name}'", Match(name=match.name)
    if match.class_name is not None:
        yield "class", match.class_name, Match(class_name=match.class_name)
    if match.kind is not None:
        yield "kind", match.kind, Match(kind=match.kind)
    if match.layers is not None:
        yield "layers", f"'{match.layers}'", Match(layers=match.layers)


def _apart(match: Match, modules: ModelModules) -> str:
    """Return the reason why conditions that each match some module match none together."""
    elsewhere = [layer for path in modules.matching(replace(match, layers=None)) if (layer := modules.layer(path)) is not None]
    if match.layers is not None and elsewhere:
        return f"the other conditions match modules in layers {runs(elsewhere)}"
    return "no module meets all conditions at once"


def _near(key: str, match: Match, modules: ModelModules) -> str:
    indent = _INDENT + " " * 6
    if key == "name":
        assert match.name is not None, "a part is there when its key is"
        return _near_name(match.name, modules, indent)
    if key == "class":
        assert match.class_name is not None, "a part is there when its key is"
        return _near_class(match.class_name, modules, indent)
    if key == "kind":
        return _near_kind(match, modules, indent)
    layers = sorted({layer for path in modules if (layer := modules.layer(path)) is not None})
    return f"{indent}the model has layers {runs(layers)}" if layers else f"{indent}the model has no numbered layers"


def _near_kind(match: Match, modules: ModelModules, indent: str) -> str:
    if match.kind != "experts":
        return ""
    named = [path for path in modules if path.rpartition(".")[2] == "experts"]
    if not named:
        return f"{indent}the model has no module named 'experts': it is no mixture of experts, or transformers builds it in another way"
    return f"{indent}{named[0]} ({type(modules[named[0]]).__name__}) does not hold its experts in 3-D parameters"


def _near_class(name: str, modules: ModelModules, indent: str) -> str:
    names = {base.__name__ for path in modules for base in type(modules[path]).__mro__ if base is not object}
    bare = name.rpartition(".")[2]
    if bare in names:
        full = next(type(modules[path]) for path in modules if has_class(type(modules[path]), bare))
        where = next(base.__module__ for base in full.__mro__ if base.__name__ == bare)
        theirs = "; KTransformers' copies of models are not used here" if is_theirs(name) else ""
        return f"{indent}the model's {bare} is {where}.{bare}; did you mean '{bare}'?{theirs}"
    near = nearest(bare, sorted(names))
    return f"{indent}did you mean '{near}'?" if near is not None else ""


def _near_name(pattern: str, modules: ModelModules, indent: str) -> str:
    for corrected in _corrected(pattern, modules):
        try:
            found = modules.matching(Match(name=corrected))
        except ValueError:  # the pattern is slow, or a part of its syntax was replaced, such as the P of (?P<layer>
            continue
        if found:
            return f"{indent}nearest: {found[0]} ({count_text(found)}); did you mean '{corrected}'?"
    near = get_close_matches(_literal(pattern), list(modules.forms)[:MAX_FORMS], n=1, cutoff=0.4)
    return f"{indent}nearest: {modules.forms[near[0]][0]} ({count_text(modules.forms[near[0]])})" if near else ""


def _corrected(pattern: str, modules: ModelModules) -> Iterator[str]:
    """Yield `pattern` with words that occur in no path replaced by the nearest ones: one word at a time, then all."""
    unknown = {word[0] for word in _WORD.finditer(pattern) if word[0][0] != "\\" and word[0] not in modules.words}
    changes: dict[str, str] = {}
    for word in sorted(unknown):
        for near in get_close_matches(word, modules.words, n=3, cutoff=0.6):
            changes.setdefault(word, near)
            yield _renamed(pattern, {word: near})
    if len(changes) > 1:
        yield _renamed(pattern, changes)


def _renamed(pattern: str, changes: dict[str, str]) -> str:
    return _WORD.sub(lambda word: changes.get(word[0], word[0]), pattern)


def _literal(pattern: str) -> str:
    """Return roughly the path that a pattern describes: wildcards and escapes become a layer number."""
    text = re.sub(r"\\d[+*]?|\[[^\]]*\][+*]?|\.[*+]|\(\?[^)]*\)", "0", pattern)
    return re.sub(r"\d+", "0", re.sub(r"[\\^$()?+*]", "", text))


def count_text(paths: Sequence[str]) -> str:
    """Return text such as `48 modules`."""
    return f"{len(paths)} module{'s' if len(paths) != 1 else ''}"
