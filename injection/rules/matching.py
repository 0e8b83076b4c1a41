"""The assignment of a model's modules to rules, its checks, and the nearest match for a rule that matches none."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial

from torch import nn

from moegraft.injection.rules import Match, Position, Rule, RuleFile
from moegraft.injection.rules.document import Findings, MappingNode, Node, nearest, shown
from moegraft.injection.rules.ktransformers import is_theirs
from moegraft.injection.rules.patterns import Patterns, SlowPatternError
from moegraft.injection.rules.rule import grouped, layer_of, runs
from moegraft.operators.base import Kind, ModelOperator, Operator, Traits
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.sparsity import sparsity_errors
from moegraft.operators.structure import MTP, kinds, layers_before_mtp


class ModelModules:
    """Every module of a model by path, outer modules before inner ones; the model's own path is empty."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
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
        return type(self.model).__name__

    def kinds(self, path: str) -> frozenset[Kind]:
        known = self._kinds.get(path)
        if known is None:
            known = self._kinds[path] = kinds(path, self._by_path[path], self.model)
        return known

    def layer(self, path: str) -> int | None:
        """Return the number of the layer that a module is in; those of MTP layers follow the body's, as in checkpoints."""
        if path not in self._layers:
            number = layer_of(path)
            if number is not None and path.startswith(f"{MTP}."):
                number += layers_before_mtp(self.model)
            self._layers[path] = number
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
        paths = self._by_name.get(pattern)
        if paths is None:
            paths = self._by_name[pattern] = frozenset(path for path in self if path and self._patterns.found_in(pattern, path))
        return paths

    def _of_kind(self, kind: Kind) -> frozenset[str]:
        paths = self._by_kind.get(kind)
        if paths is None:
            paths = self._by_kind[kind] = frozenset(path for path in self if kind in self.kinds(path))
        return paths

    @cached_property
    def words(self) -> list[str]:
        """The names in the paths."""
        return sorted({part for path in self for part in path.split(".") if part and not part.isdecimal()})

    @cached_property
    def forms(self) -> dict[str, list[str]]:
        """The paths, grouped by the path with every number replaced by 0."""
        by_form: dict[str, list[str]] = {}
        for path in self:
            by_form.setdefault(re.sub(r"\d+", "0", path), []).append(path)
        return by_form


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


def _inside(path: str, outer: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


def apply_rules(
    rules: RuleFile, modules: ModelModules, registry: OperatorRegistry, findings: Findings, *, model_type: str | None, divided: bool
) -> Assignment:
    """Assign every module to a rule, and check that the rules can be applied to this model. Pure.

    Args:
        findings: gets what is found; it may have findings already.
        divided: whether several processes will hold the experts.

    Raises:
        RuleErrors: every rule that cannot be applied.
    """
    for requirement in rules.requires:
        if model_type not in requirement.values:
            wanted = " or ".join(f"'{value}'" for value in requirement.values)
            actual = f"this model is of type '{model_type}'" if model_type is not None else "this model has no type"
            findings.error(requirement.position, f"this rule file is for models of type {wanted}, and {actual}")
    assignment = assign(rules.rules, modules, registry.in_place)
    _check_taken(rules.rules, assignment, modules, findings)
    refused = _check_operators(rules.rules, assignment, modules, registry, findings)
    _check_uses(rules.rules, assignment, modules.model, registry, refused, findings)
    if divided:
        _check_divided(rules.rules, assignment, registry, findings)
    findings.raise_errors()
    return assignment


def assign(rules: Sequence[Rule], modules: ModelModules, in_place: Collection[str]) -> Assignment:
    """Assign every module to the first rule that matches it, and the model also to others with further operators of its kind. Pure.

    Args:
        in_place: the operators that leave their module in place, and its parts to other rules.

    Raises:
        RuleErrors: matching the name of a rule takes too long.
    """
    fitting = _fitting(rules, modules)
    candidates: dict[str, int] = {}  # path -> the first rule that matches it
    for index, paths in reversed(list(enumerate(fitting))):
        candidates.update(dict.fromkeys(paths, index))
    of_model = _rules_of_model(rules, fitting, in_place)
    taken: list[list[str]] = [[] for _ in rules]
    nested: dict[tuple[int, int], list[str]] = {}
    owner: dict[str, int] = {}  # path -> the rule that takes or closes it
    # The path around the current one that a rule with `recursive: false` takes, and the one that a rule replaces, with the rule's index.
    closed: tuple[str, int] | None = None
    replaced: tuple[str, int] | None = None
    for path in modules:
        closed = closed if closed is not None and _inside(path, closed[0]) else None
        replaced = replaced if replaced is not None and _inside(path, replaced[0]) else None
        if closed is not None:
            owner[path] = closed[1]
            continue
        if path not in candidates:
            continue
        owner[path] = candidates[path]
        if replaced is not None and replaced[1] == candidates[path]:
            continue  # a part of a module that the rule takes, such as the activation within experts
        for index in [candidates[path]] if path else of_model:
            taken[index].append(path)
            if replaced is not None and rules[index].operator is not None:
                nested.setdefault((index, replaced[1]), []).append(path)
            if not rules[index].recursive:
                closed = (path, index)
            if rules[index].operator not in (None, *in_place) and replaced is None:
                replaced = (path, index)
    lost: list[dict[int, list[str]]] = []
    for rule, took, fits in zip(rules, taken, fitting, strict=True):
        if "" in fits and not took:
            owner[""] = next((index for index in of_model if rules[index].operator == rule.operator), of_model[-1])
        lost.append({} if took else _by_owner(fits, owner))
    return Assignment(taken, lost, nested)


def _rules_of_model(rules: Sequence[Rule], fitting: Sequence[Sequence[str]], in_place: Collection[str]) -> list[int]:
    """Return the rules that take the model itself: the first for each operator, and none after the first of class `default`."""
    takers: dict[str | None, int] = {}
    for index, (rule, paths) in enumerate(zip(rules, fitting, strict=True)):
        if "" in paths and None not in takers and (not takers or rule.operator in (None, *in_place)):
            takers.setdefault(rule.operator, index)
    return list(takers.values())


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
    by_owner: dict[int, list[str]] = {}
    for path in paths:
        by_owner.setdefault(owner[path], []).append(path)
    return dict(sorted(by_owner.items()))


# A number in a pattern, alone or in a group of alternatives, that is followed by any character or by the end.
_OPEN_NUMBER = re.compile(r"(?P<before>\w*\\?\.|[(|])(?P<number>[0-9]+)(?=(\|[0-9]+)*\)?(\.|$))")
MAX_LISTED = 3


def _check_taken(rules: Sequence[Rule], assignment: Assignment, modules: ModelModules, findings: Findings) -> None:
    """Report rules that take no module, a wrong number of modules or unexpected layers, and swaps inside swaps."""
    for rule, taken, lost in zip(rules, assignment.taken, assignment.lost, strict=True):
        if not taken and rule.expect == "any":
            if not lost and rule.match == Match(kind=rule.match.kind):
                continue  # a model without modules of the kind, which no other word can have missed
            findings.notice(rule.place("match"), f"rule '{rule.id}' takes no module of {modules.model_class}, as 'expect: any' allows")
            continue
        if not taken:
            _report_nothing_taken(rule, lost, rules, modules, findings)
            continue
        if rule.expect not in (None, "any", len(taken)):
            message = f"rule '{rule.id}' takes {_listed(taken)} and {rule.expect} are expected"
            findings.error(rule.place("expect"), message)
        _warn_of_open_numbers(rule, taken, modules, findings)
        _warn_of_absent_layers(rule, modules, findings)
    for (inner, outer), paths in assignment.nested.items():
        owner = rules[outer]
        findings.error(
            rules[inner].place("match"),
            f"rule '{rules[inner].id}' takes {_listed(paths)} inside what rule '{owner.id}' ({_where(owner, rules[inner])}) replaces "
            f"as a whole; add 'recursive: false' to rule '{owner.id}', or narrow one of the two",
        )


def _report_nothing_taken(rule: Rule, lost: dict[int, list[str]], rules: Sequence[Rule], modules: ModelModules, findings: Findings) -> None:
    if not lost:
        findings.error(*_explain_miss(rule, modules))
        return
    owners = [rules[index] for index in lost]
    names = ", ".join(f"rule '{owner.id}' ({_where(owner, rule)})" for owner in owners)
    total = sum(map(len, lost.values()))
    message = f"rule '{rule.id}' takes no module: all {total} that it matches are taken or closed by {names}, which comes first"
    if rule.inherited and not any(owner.inherited for owner in owners):
        findings.notice(rule.place("match"), f"{message}, and so overrides it")
    else:
        of_model = any("" in paths for paths in lost.values())
        fix = "a model can have each operator once: keep one of the rules" if of_model else "move it up, or narrow the earlier rule"
        findings.error(rule.place("match"), f"{message}; {fix}")


def _where(owner: Rule, rule: Rule) -> str:
    same_file = owner.position.file == rule.position.file
    return f"line {owner.position.line}" if same_file else f"{owner.position.file}:{owner.position.line}"


def _listed(paths: Sequence[str]) -> str:
    forms = grouped(paths) if paths != [""] else ["the model"]
    more = f" and {len(forms) - MAX_LISTED} more" if len(forms) > MAX_LISTED else ""
    return f"{', '.join(forms[:MAX_LISTED])}{more} ({_count_text(paths)})"


def _warn_of_open_numbers(rule: Rule, taken: Sequence[str], modules: ModelModules, findings: Findings) -> None:
    """Warn of patterns such as `layers.1.`, which takes layers 10 to 19 as well: its last dot matches any character."""
    layers = {layer for path in taken if (layer := modules.layer(path)) is not None}
    for match in _OPEN_NUMBER.finditer(rule.match.name or ""):
        number = match["number"]
        more = [layer for layer in layers if str(layer) != number and str(layer).startswith(number)]
        if not more:
            continue
        word = match["before"].rstrip("\\.(|")
        fix = f"'{word}\\.{number}\\.'" if word else f"'\\.' after {number}"
        findings.warning(
            rule.place("name"),
            f"name '{rule.match.name}' also takes layer{'s' if len(more) > 1 else ''} {runs(more)}: a dot matches any character, "
            f"and a dot after a backslash only a dot; for layer {number} alone write {fix}",
        )


def _warn_of_absent_layers(rule: Rule, modules: ModelModules, findings: Findings) -> None:
    if rule.match.layers is None:
        return
    all_layers = {layer for path in modules.matching(replace(rule.match, layers=None)) if (layer := modules.layer(path)) is not None}
    for first, last in rule.match.layers.ranges:
        absent = [layer for layer in (first, last) if layer not in all_layers]
        if absent:
            part = str(first) if first == last else f"{first}-{last}"
            findings.warning(rule.place("layers"), f"layers '{part}': the modules that the rule matches are in layers {runs(all_layers)}")


def _check_operators(
    rules: Sequence[Rule], assignment: Assignment, modules: ModelModules, registry: OperatorRegistry, findings: Findings
) -> list[Rule]:
    """Report modules that an operator cannot replace, in one error for each rule and reason; return these rules."""
    refusing = []
    for rule, taken in zip(rules, assignment.taken, strict=True):
        if rule.operator is None:
            continue
        operator = registry[rule.operator]
        refused: dict[str, list[str]] = {}
        for path in taken:
            reason = _refusal(operator, rule, path, modules)
            if reason is not None:
                refused.setdefault(reason, []).append(path)
        for reason, paths in refused.items():
            findings.error(rule.place("operator"), f"rule '{rule.id}': {operator.name} cannot replace {_listed(paths)}: {reason}")
            refusing.append(rule)
    return refusing


def _refusal(operator: type[Operator], rule: Rule, path: str, modules: ModelModules) -> str | None:
    kinds = modules.kinds(path)
    if operator.kind not in kinds:
        actual = f" but of kind {', '.join(sorted(kinds))}" if kinds else ""
        fix = f"; add 'kind: {operator.kind}' to the rule's match" if rule.match.kind is None else ""
        return f"{type(modules[path]).__name__} is not of kind {operator.kind}{actual}{fix}"
    return operator.unsupported_reason(modules[path], rule.options)


def _check_uses(
    rules: Sequence[Rule],
    assignment: Assignment,
    model: nn.Module,
    registry: OperatorRegistry,
    refused: Sequence[Rule],
    findings: Findings,
) -> None:
    """Report the requirements of operators that the model, or the other operators, do not meet; `refused`: rules with errors already."""
    used = [
        (rule, registry[rule.operator], taken, registry[rule.operator].traits(rule.options))
        for rule, taken in zip(rules, assignment.taken, strict=True)
        if taken and rule.operator is not None
    ]
    traits_of: dict[str, list[Traits]] = {}
    for _, _, taken, traits in used:
        for path in taken:
            traits_of.setdefault(path, []).append(traits)
    draft = next((traits.draft_sparsity for *_, traits in used if traits.draft_sparsity is not None), None)
    for rule, operator, taken, traits in used:
        if any(rule is each for each in refused):
            continue
        if issubclass(operator, ModelOperator) and (conflict := operator.conflict(model, rule.options, traits_of)) is not None:
            findings.error(rule.place("operator"), f"rule '{rule.id}': {conflict}")
        if traits.decode_loss is not None:
            message = f"rule '{rule.id}': lossy: {traits.decode_loss.text}; 'moegraft verify' measures what that costs"
            findings.notice(rule.place("operator"), message)
        sparsity = traits.sparsity
        for option, reason in () if sparsity is None else sparsity_errors(sparsity, draft, taken, model):
            node: Node | None = rule.kwargs
            for name in option.split("."):
                node = node.get(name) if isinstance(node, MappingNode) else None
            findings.error(rule.place("operator") if node is None else node.position, f"rule '{rule.id}': {reason}")


def _check_divided(rules: Sequence[Rule], assignment: Assignment, registry: OperatorRegistry, findings: Findings) -> None:
    """Report operators whose experts several processes cannot hold together, and rules that leave no experts to them."""
    divided = False
    for rule, taken in zip(rules, assignment.taken, strict=True):
        if not taken or rule.operator is None or registry[rule.operator].kind != "experts":
            continue
        divided = True
        reason = registry[rule.operator].traits(rule.options).undivided
        if reason is not None:
            reason = reason or f"{rule.operator} needs all experts in one process: replace it by hybrid_experts, or start one process"
            findings.error(rule.place("operator"), f"rule '{rule.id}': {reason}")
    if not divided:
        findings.error(rules[0].position, "no rule replaces experts, which is what several processes share; start one process")


MAX_FORMS = 2000  # distinct paths among which the nearest one is searched
_WORD = re.compile(r"\\.|[A-Za-z_][A-Za-z0-9_]*")  # an escape such as \d is no word
_INDENT = "\n    "


def _explain_miss(rule: Rule, modules: ModelModules) -> tuple[Position, str]:
    """Return the position and the message of the error for a rule that matches no module."""
    match = rule.match
    lines: list[str] = []
    keys: list[str] = []
    for key, value, alone, hint in _parts(match, modules):
        found = modules.matching(alone)
        if found:
            lines.append(f"{key}: {value} alone matches {_count_text(found)}")
        else:
            keys.append(key)
            lines.append(f"{key}: {value}" + (f"{_INDENT}      {text}" if (text := hint()) else ""))
    if not keys:  # each condition matches some module
        elsewhere = [layer for path in modules.matching(replace(match, layers=None)) if (layer := modules.layer(path)) is not None]
        in_layers = f"the other conditions match modules in layers {runs(elsewhere)}"
        lines.append(in_layers if match.layers is not None and elsewhere else "no module meets all conditions at once")
    return rule.place(*keys, "match"), _INDENT.join([f"rule '{rule.id}' matches no module of {modules.model_class}", *lines])


def _parts(match: Match, modules: ModelModules) -> Iterator[tuple[str, str, Match, Callable[[], str]]]:
    """Yield the key and the value of each condition, the condition alone, and what returns a hint where no module meets it."""
    if match.name is not None:
        yield "name", f"'{match.name}'", Match(name=match.name), partial(_near_name, match.name, modules)
    if match.class_name is not None:
        yield "class", match.class_name, Match(class_name=match.class_name), partial(_near_class, match.class_name, modules)
    if match.kind is not None:
        yield "kind", match.kind, Match(kind=match.kind), partial(_near_kind, match.kind, modules)
    if match.layers is not None:
        yield "layers", f"'{match.layers}'", Match(layers=match.layers), partial(_near_layers, modules)


def _near_layers(modules: ModelModules) -> str:
    layers = {layer for path in modules if (layer := modules.layer(path)) is not None}
    return f"the model has layers {runs(layers)}" if layers else "the model has no numbered layers"


def _near_kind(kind: Kind, modules: ModelModules) -> str:
    if kind != "experts":
        return ""
    named = [path for path in modules if path.rpartition(".")[2] == "experts"]
    if not named:
        return "the model has no module named 'experts': it is no mixture of experts, or transformers builds it in another way"
    fused = any(parameter.dim() == 3 for parameter in modules[named[0]].parameters(recurse=False))
    reason = "does not state how many experts it holds, as num_experts" if fused else "does not hold its experts in 3-D parameters"
    return f"{named[0]} ({type(modules[named[0]]).__name__}) {reason}"


def _near_class(name: str, modules: ModelModules) -> str:
    names = {base.__name__ for path in modules for base in type(modules[path]).__mro__ if base is not object}
    bare = name.rpartition(".")[2]
    if bare in names:
        full = next(type(modules[path]) for path in modules if has_class(type(modules[path]), bare))
        where = next(base.__module__ for base in full.__mro__ if base.__name__ == bare)
        theirs = "; KTransformers' copies of models are not used here" if is_theirs(name) else ""
        return f"the model's {bare} is {where}.{bare}; did you mean '{bare}'?{theirs}"
    near = nearest(bare, sorted(names))
    return f"did you mean '{near}'?" if near is not None else ""


def _near_name(pattern: str, modules: ModelModules) -> str:
    for corrected in _corrected(pattern, modules):
        try:
            found = modules.matching(Match(name=corrected))
        except ValueError:  # the pattern is slow, or a part of its syntax was replaced, such as the P of (?P<layer>
            continue
        if found:
            return f"nearest: {found[0]} ({_count_text(found)}); did you mean '{corrected}'?"
    near = get_close_matches(_literal(pattern), list(modules.forms)[:MAX_FORMS], n=1, cutoff=0.4)
    return f"nearest: {modules.forms[near[0]][0]} ({_count_text(modules.forms[near[0]])})" if near else ""


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


def _count_text(paths: Sequence[str]) -> str:
    """Return text such as `48 modules`."""
    return f"{len(paths)} module{'s' if len(paths) != 1 else ''}"
