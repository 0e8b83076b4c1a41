"""`read_rules`: read a rule file and the files that it extends, and make all checks that need no model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moegraft.injection.rules.document import (
    MAX_TEXT,
    Findings,
    ListNode,
    MappingNode,
    Node,
    Position,
    ScalarNode,
    Value,
    did_you_mean,
    nearest,
    parse_document,
    plain_text,
    read_document,
    shown,
    why_unprintable,
)
from moegraft.injection.rules.ktransformers import KWARGS, class_advice
from moegraft.injection.rules.options import read_options, with_new_names
from moegraft.injection.rules.patterns import why_unusable
from moegraft.injection.rules.rule import KINDS, LEAVE_ALONE, Layers, Match, Requirement, Rule, RuleFile, ShareRule, parse_layers
from moegraft.rules import FORMER_NAMES, shipped_rules

if TYPE_CHECKING:
    from moegraft.operators.base import Kind
    from moegraft.operators.registry import OperatorRegistry

DEFAULT_RULES = "cpu"  # the shipped file that is used where none is named; it serves every family
SUFFIXES = (".yaml", ".yml")
MAX_CHAIN = 16
VERSION = 1
MOST_SHARE = 1e9
TOP_KEYS = ("version", "extends", "vars", "requires", "parallel", "rules")
RULE_KEYS = ("id", "match", "replace", "recursive", "expect")
NEEDED_KEYS = {"match": "name, class, kind or layers", "replace": "the 'class' of an operator"}
MATCH_KEYS = ("name", "class", "kind", "layers")
REPLACE_KEYS = ("class", "kwargs")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CLASS_NAME = re.compile(rf"{NAME.pattern}(\.{NAME.pattern})*")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


def read_rules(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    vars: Mapping[str, object] | None = None,
    registry: OperatorRegistry,
    text: str | None = None,
) -> RuleFile:
    """Read a rule file, and check everything that can be checked without a model.

    Args:
        source: a path, the name of a shipped file such as `cpu`, or the content of a file as a mapping.
        text: the content, where the file is not written yet.
        vars: values for `${...}`; they override those in the file and in the files that it extends.
        registry: the operators that rules may name.

    Raises:
        RuleErrors: every mistake of the file, and of the files that it extends, with line and column.
    """
    findings = Findings()
    if isinstance(source, Mapping):
        source, text = "rules", json.dumps(source, indent=1, default=str)  # which is YAML
    headers = _read_chain(_find(source, findings) if text is None else Path(source), findings, text)
    variables = _merge_vars(headers, vars or {}, findings)
    _report_unused(headers, findings)
    rules: list[Rule] = []
    requires: list[Requirement] = []
    shares: ShareRule | None = None
    for depth, header in enumerate(headers):
        requires += _read_requires(_filled(header.requires, variables, findings), findings)
        given = _read_parallel(_filled(header.parallel, variables, findings), findings)
        shares = shares or given
        reader = RuleReader(registry, findings, inherited=depth > 0)
        own = reader.rules(_filled(header.rules, variables, findings), extends=header.extends is not None)
        taken = {rule.id for rule in rules if rule.named}
        rules += [rule for rule in own if not (rule.named and rule.id in taken)]
    findings.raise_errors()
    files = tuple(header.position.file for header in headers)
    values = {name: variable.value for name, variable in variables.items()}
    return RuleFile(tuple(rules), values, tuple(requires), files, findings.in_order(), shares or "auto")


def check_syntax(source: str | os.PathLike[str]) -> None:
    """Make those checks of `read_rules` after which it would read no further, without operators, whose import takes seconds.

    Raises:
        RuleErrors: there is no such file, or it is not YAML; or one that it extends.
    """
    findings = Findings()
    path = _find(source, findings)
    if path.is_file():  # a pipe can be read only once
        _read_chain(path, findings, None)


def _filled(node: Node | None, variables: Mapping[str, Variable], findings: Findings) -> Node | None:
    return None if node is None else _substitute(node, variables, findings)


def _find(source: str | os.PathLike[str], findings: Findings) -> Path:
    """Return the path of a file, or of a shipped file where `source` is the bare name of one."""
    name = os.fspath(source)
    path = _shipped(name, Position(name, 1, 1), findings) if isinstance(source, str) else None
    path = path or (_existing(name, Path()) if name else None)
    if path is None:
        findings.stop(Position(name, 1, 1), f"there is no such rule file{_shipped_hint(name, shipped_rules(), Path())}")
    return path


def _shipped(name: str, position: Position, findings: Findings) -> Path | None:
    """Return the shipped file of this name, or None. A former name is reported as a notice at `position`."""
    new_name = FORMER_NAMES.get(name)
    if new_name is not None:
        findings.notice(position, f"the shipped rule file '{name}' is now '{new_name}', which serves every family")
    return shipped_rules().get(new_name or name)


def _existing(name: str, folder: Path) -> Path | None:
    """Return the path if it exists, else None. `Path` methods raise for a name that is too long or an unknown user; these do not."""
    path = os.path.join(folder, os.path.expanduser(name))  # noqa: PTH111, PTH118
    return Path(path) if os.path.exists(path) else None  # noqa: PTH110


def _shipped_hint(name: str, shipped: Mapping[str, Path], folder: Path) -> str:
    """Return the end of an error message: the nearest shipped file, or the nearest file in the folder that was searched."""
    path = Path(name)
    stem = path.stem if path.suffix in SUFFIXES else path.name
    if stem in shipped:
        return f"; did you mean the shipped '{stem}'?"
    beside = os.path.join(folder, path.parent)  # noqa: PTH118
    if (len(path.parts) > 1 or path.suffix in SUFFIXES) and os.path.isdir(beside):  # noqa: PTH112
        near = nearest(path.name, [entry.name for entry in Path(beside).glob("*.y*ml")])
        if near is not None or len(path.parts) > 1:
            return f"; did you mean '{path.parent / near}'?" if near else ""
    return did_you_mean(stem, shipped).replace("known are", "shipped are")


def _read_chain(path: Path, findings: Findings, text: str | None) -> list[Header]:
    """Return the file's header, then that of the file it extends, and so on."""
    document = read_document(path, findings) if text is None else parse_document(text, str(path), findings)
    headers = [_read_header(document, findings)]
    seen = [path.resolve()]
    while (extended := headers[-1].extends) is not None:
        assert isinstance(extended.value, str), "_read_header checks it"
        folder = Path(headers[-1].position.file).parent
        found = _shipped(extended.value, extended.position, findings) or _existing(extended.value, folder)
        if found is None:
            hint = _shipped_hint(extended.value, shipped_rules(), folder)
            findings.stop(extended.position, f"extends {shown(extended.value)}: there is no such rule file{hint}")
        if found.resolve() in seen:
            cycle = " -> ".join([*(header.position.file for header in headers), str(found)])
            findings.stop(extended.position, f"extends {shown(extended.value)} is circular: {cycle}")
        if len(headers) == MAX_CHAIN:
            findings.stop(extended.position, f"more than {MAX_CHAIN} rule files extend each other")
        seen.append(found.resolve())
        headers.append(_read_header(read_document(found, findings), findings))
    return headers


@dataclass(frozen=True, slots=True)
class Variable:
    """One entry of `vars`, or a value that the caller gives, which has no position."""

    value: Value
    position: Position | None


@dataclass(frozen=True, slots=True)
class Header:
    """The top level of a file, before variables are substituted."""

    position: Position
    extends: ScalarNode | None
    vars: Mapping[str, Variable]
    requires: Node | None
    parallel: Node | None
    rules: Node | None


def _read_header(node: Node, findings: Findings) -> Header:
    """Read the top level of a file: a mapping, or a bare list of rules as in KTransformers."""
    if isinstance(node, ListNode):
        return Header(node.position, None, {}, None, None, node)
    if isinstance(node, ScalarNode):
        findings.stop(node.position, f"a rule file is a mapping with 'rules', or a list of rules, not {node}")
    if node.get("match") is not None or node.get("replace") is not None:
        findings.stop(node.position, "rules must be in a list: write '- ' before the first key of each rule and indent its other keys")
    if not _check_keys(node, TOP_KEYS, "a rule file", findings) & {"rules", "extends"}:
        findings.error(node.position, "a rule file needs 'rules', a list of rules, or 'extends'")
    version = node.get("version")
    if version is not None and not (isinstance(version, ScalarNode) and type(version.value) is int and version.value == VERSION):
        findings.error(version.position, f"version must be {VERSION}, not {version}")
    extends = node.get("extends")
    if extends is not None and not (isinstance(extends, ScalarNode) and isinstance(extends.value, str)):
        findings.error(extends.position, f"extends must be the name of a shipped rule file or a path, not {extends}")
        extends = None
    variables = _read_vars(node.get("vars"), findings)
    return Header(node.position, extends, variables, node.get("requires"), node.get("parallel"), node.get("rules"))


def _read_vars(node: Node | None, findings: Findings) -> dict[str, Variable]:
    if node is None:
        return {}
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"vars must be a mapping of names to values, not {node}")
        return {}
    variables: dict[str, Variable] = {}
    for entry in node:
        if not NAME.fullmatch(entry.key):
            findings.error(entry.position, f"{shown(entry.key)} is no valid variable name: use letters, digits and _")
        elif not isinstance(entry.value, ScalarNode):
            findings.error(entry.value.position, f"variable '{entry.key}' must be text, a number, true, false or null, not {entry.value}")
        elif isinstance(entry.value.value, str) and "${" in entry.value.value:
            findings.error(entry.value.position, f"variable '{entry.key}' refers to another variable; only values outside vars may do that")
        else:
            variables[entry.key] = Variable(entry.value.value, entry.position)
    return variables


def _merge_vars(headers: Sequence[Header], given: Mapping[str, object], findings: Findings) -> dict[str, Variable]:
    merged: dict[str, Variable] = {}
    for header in reversed(headers):
        merged.update(header.vars)
    for name, value in given.items():
        if name not in merged:
            known = did_you_mean(str(name), merged) or "; it has no vars"
            findings.error(headers[0].position, f"this rule file has no variable {shown(str(name))}{known}")
        elif not isinstance(value, str | int | float | bool | None) or (isinstance(value, str) and len(value) > MAX_TEXT):
            message = f"the value of variable '{name}' is a {type(value).__name__}; it must be text, a number, true, false or null"
            findings.error(headers[0].position, message)
        elif isinstance(value, str) and (unprintable := why_unprintable(value)) is not None:
            findings.error(headers[0].position, f"the value of variable '{name}': {unprintable}")
        else:
            merged[name] = Variable(value, None)
    return merged


def _report_unused(headers: Sequence[Header], findings: Findings) -> None:
    """Report variables of files that extend others which nothing uses: a misspelt one would leave the inherited value as it is."""
    used = {name for header in headers for node in (header.requires, header.parallel, header.rules) for name in _references(node)}
    for header in headers[:-1]:
        for name, variable in header.vars.items():
            if name not in used:
                assert variable.position is not None, "it is an entry of a file"
                findings.error(variable.position, f"no rule uses variable {shown(name)}{did_you_mean(name, sorted(used)) or ': remove it'}")


def _references(node: Node | None) -> Iterator[str]:
    """Yield the names of all `${name}` in a node."""
    if isinstance(node, ScalarNode):
        yield from _REFERENCE.findall(node.value) if isinstance(node.value, str) else ()
    elif node is not None:
        for inner in node.items if isinstance(node, ListNode) else (entry.value for entry in node):
            yield from _references(inner)


def _substitute(node: Node, variables: Mapping[str, Variable], findings: Findings) -> Node:
    """Return `node` with every `${name}` replaced; an undefined one is an error at its position and becomes null."""
    if isinstance(node, ScalarNode):
        return _substituted(node, variables, findings)
    if isinstance(node, ListNode):
        return replace(node, items=tuple(_substitute(item, variables, findings) for item in node.items))
    return MappingNode(tuple(replace(entry, value=_substitute(entry.value, variables, findings)) for entry in node), node.position)


def _substituted(node: ScalarNode, variables: Mapping[str, Variable], findings: Findings) -> ScalarNode:
    text = node.value
    if not isinstance(text, str) or "${" not in text:
        return node
    names = _REFERENCE.findall(text)
    if "${" in _REFERENCE.sub("", text):
        findings.void(node.position, f"'${{' without '}}' in {shown(text)}")
        return replace(node, value=None)
    for name in names:
        if name not in variables:
            known = did_you_mean(name, variables) or "; the file has no vars"
            findings.void(node.position, f"variable {shown(f'${{{name}}}')} is not defined{known}")
            return replace(node, value=None)
    if len(names) == 1 and text == f"${{{names[0]}}}":
        return ScalarNode(variables[names[0]].value, node.position, _origin(node, names[0], variables))
    length = len(_REFERENCE.sub("", text)) + sum(len(plain_text(variables[name].value)) for name in names)
    if length > MAX_TEXT:
        findings.void(node.position, f"a value may have at most {MAX_TEXT} characters, and this one has {length} with its variables")
        return replace(node, value=None)
    filled = _REFERENCE.sub(lambda reference: plain_text(variables[reference[1]].value), text)
    return ScalarNode(filled, node.position, _origin(node, names[0], variables) if names else None)


def _origin(node: ScalarNode, name: str, variables: Mapping[str, Variable]) -> str:
    position = variables[name].position
    return f"${{{name}}}" if position is None or position.file == node.position.file else f"${{{name}}}, {position}"


def _read_requires(node: Node | None, findings: Findings) -> tuple[Requirement, ...]:
    """Read the model types that a file is for."""
    if node is None:
        return ()
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"requires must be a mapping, such as {{model_type: mixtral}}, not {node}")
        return ()
    _check_keys(node, ("model_type",), "requires", findings)
    types = node.get("model_type")
    if types is None:
        return ()
    items = types.items if isinstance(types, ListNode) else (types,)
    values = [item.value for item in items if isinstance(item, ScalarNode) and isinstance(item.value, str)]
    if not values or len(values) < len(items):
        findings.error(types.position, f"model_type must be text or a list of text, not {types}")
        return ()
    return (Requirement(tuple(values), types.position),)


def _read_parallel(node: Node | None, findings: Findings) -> ShareRule | None:
    """Read the shares of the processes that hold the experts; None where the file gives none."""
    if node is None:
        return None
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"parallel must be a mapping, such as {{shares: [2, 1]}}, not {node}")
        return None
    _check_keys(node, ("shares",), "parallel", findings)
    shares = node.get("shares")
    if shares is None or (isinstance(shares, ScalarNode) and shares.value in ("auto", "none")):
        return "none" if isinstance(shares, ScalarNode) and shares.value == "none" else "auto"
    items = shares.items if isinstance(shares, ListNode) else ()
    numbers = [item.value for item in items if isinstance(item, ScalarNode) and type(item.value) in (int, float)]
    sizes = [number for number in numbers if isinstance(number, int | float) and 0 < number < MOST_SHARE]
    if not sizes or len(sizes) < len(items):
        form = "auto, none, or a list of positive numbers, one for each process"
        findings.error(shares.position, f"shares must be {form}, not {shares}; a process without a share need not be started")
        return None
    return tuple(map(float, sizes))


class RuleReader:
    """Reads the rules of one file."""

    def __init__(self, registry: OperatorRegistry, findings: Findings, *, inherited: bool) -> None:
        self._registry = registry
        self._findings = findings
        self._inherited = inherited

    def rules(self, node: Node | None, *, extends: bool) -> tuple[Rule, ...]:
        """Return the rules that could be read; the errors of the others are in the findings."""
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
        present = _check_keys(node, RULE_KEYS, "a rule", self._findings)
        for key, form in NEEDED_KEYS.items():
            if key not in present:
                self._findings.error(node.position, f"a rule needs '{key}', a mapping with {form}")
        places: dict[str, Position] = {}
        rule_id = self._id(node.get("id"), number, ids)
        recursive, expect = self._recursive(node.get("recursive")), self._expect(node.get("expect"), places)
        match = _read_match(node, places, self._findings)
        operator, kwargs, options = _read_replace(node, match, places, self._registry, self._findings)
        return Rule(
            id=rule_id,
            named=node.get("id") is not None,
            match=match,
            operator=operator,
            kwargs=kwargs,
            options=options,
            recursive=recursive,
            expect=expect,
            position=node.position,
            inherited=self._inherited,
            places=places,
        )

    def _id(self, node: Node | None, number: int, ids: dict[str, Position]) -> str:
        rule_id = _read_text(node, "id", self._findings) if node is not None else None
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


def _check_keys(node: MappingNode, known: Sequence[str], where: str, findings: Findings) -> set[str]:
    """Report every key of `node` that is not in `known`; return the keys that are present, misspelt ones under their right name."""
    present: set[str] = set()
    for entry in node:
        if entry.key not in known:
            findings.error(entry.position, f"unknown key {shown(entry.key)} in {where}{did_you_mean(entry.key, known)}")
        present.add(entry.key if entry.key in known else nearest(entry.key, known) or entry.key)
    return present


def _read_text(node: Node, key: str, findings: Findings) -> str | None:
    """Return the text of `node`; None, with an error, for anything else and for empty text."""
    if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value:
        return node.value
    quote = "; put it in quotes" if isinstance(node, ScalarNode) and node.value not in (None, "") else ""
    findings.error(node.position, f"{key} must be text, not {node}{quote}")
    return None


def _read_match(rule: MappingNode, places: dict[str, Position], findings: Findings) -> Match:
    """Read the `match` of a rule, and add the positions of its values to `places`."""
    node = rule.get("match")
    if node is None:
        return Match()  # the reader of the rule reports the missing key
    if not isinstance(node, MappingNode) or not node.entries:
        found = "an empty one" if isinstance(node, MappingNode) else node
        findings.error(node.position, f"match must be a mapping with name, class, kind or layers, not {found}")
        return Match()
    places["match"] = node.position
    _check_keys(node, MATCH_KEYS, "match", findings)
    given = {entry.key: entry.value for entry in node}
    places.update({key: value.position for key, value in given.items() if key in MATCH_KEYS})
    return Match(
        name=_regex(given["name"], findings) if "name" in given else None,
        class_name=_class_name(given["class"], findings) if "class" in given else None,
        kind=_kind(given["kind"], findings) if "kind" in given else None,
        layers=_layers(given["layers"], findings) if "layers" in given else None,
    )


def _regex(node: Node, findings: Findings) -> str | None:
    pattern = _read_text(node, "name", findings)
    if pattern is None:
        return None
    reason = why_unusable(pattern)
    if reason is not None:
        findings.error(node.position, f"name {shown(pattern)} {reason}")
        return None
    return pattern


def _class_name(node: Node, findings: Findings) -> str | None:
    name = _read_text(node, "class", findings)
    if name is not None and not CLASS_NAME.fullmatch(name):
        findings.error(node.position, f"class must be a class name such as MixtralExperts or torch.nn.Linear, not {shown(name)}")
        return None
    return name


def _kind(node: Node, findings: Findings) -> Kind | None:
    name = _read_text(node, "kind", findings)
    if name is None:
        return None
    known = next((kind for kind in KINDS if kind == name), None)
    if known is None:
        findings.error(node.position, f"unknown kind {shown(name)}{did_you_mean(name, KINDS)}")
    return known


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


def _read_replace(
    rule: MappingNode, match: Match, places: dict[str, Position], registry: OperatorRegistry, findings: Findings
) -> tuple[str | None, MappingNode | None, object]:
    """Read the `replace` of a rule: the operator, None if the module stays, its options as written, and as its dataclass.

    The positions of the values are added to `places`.
    """
    node = rule.get("replace")
    if node is None:
        return None, None, None  # the reader of the rule reports the missing key
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"replace must be a mapping with the 'class' of an operator, not {node}")
        return None, None, None
    present = _check_keys(node, REPLACE_KEYS, "replace", findings)
    class_node = node.get("class")
    if class_node is None:
        if "class" not in present:
            findings.error(node.position, f"replace needs 'class', the name of an operator{_known(registry)}")
        return None, None, None
    places["operator"] = class_node.position
    kwargs = _read_kwargs(node.get("kwargs"), places, findings)
    name = _read_operator(class_node, registry, findings)
    for entry in (kwargs or ()) if name == LEAVE_ALONE else ():
        advice = KWARGS.get(entry.key)
        reason = f"'{entry.key}' is an argument of KTransformers: {advice}" if advice else f"unknown option {shown(entry.key)}"
        findings.error(entry.position, f"{reason}; '{LEAVE_ALONE}' leaves modules unchanged and has no options")
    if name is None or name == LEAVE_ALONE:
        return None, kwargs, None
    operator = registry[name]
    if match.kind is not None and match.kind != operator.kind:
        message = f"operator '{name}' replaces modules of kind {operator.kind}, and this rule matches kind {match.kind}"
        findings.error(places["kind"], message)
    if kwargs is not None:
        kwargs = with_new_names(name, operator.options_type, kwargs, findings)
    place = places.get("kwargs", class_node.position)
    return name, kwargs, read_options(name, operator.options_type, kwargs, place, findings)


def _known(registry: OperatorRegistry) -> str:
    return f"; known are: {', '.join([*registry, LEAVE_ALONE])}"


def _read_operator(node: Node, registry: OperatorRegistry, findings: Findings) -> str | None:
    name = _read_text(node, "class", findings)
    if name is None or name in registry or name == LEAVE_ALONE:
        return name
    advice = class_advice(name)
    if advice is not None:
        findings.error(node.position, f"{shown(name)} is a class of KTransformers: {advice}")
    elif "." in name:
        findings.error(node.position, f"class must be the name of an operator, not a path: {shown(name)}{_known(registry)}")
    else:
        findings.error(node.position, f"unknown operator {shown(name)}{did_you_mean(name, [*registry, LEAVE_ALONE])}")
    return None


def _read_kwargs(node: Node | None, places: dict[str, Position], findings: Findings) -> MappingNode | None:
    if node is None or (isinstance(node, ScalarNode) and node.value is None and node.origin is None):
        return None
    places["kwargs"] = node.position
    if not isinstance(node, MappingNode):
        findings.error(node.position, f"kwargs must be a mapping of options to values, not {node}")
        return None
    return node
