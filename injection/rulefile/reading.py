"""From the name of a rule file to its rules, with all that it extends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moegraft.injection.rulefile.diagnostics import Findings, Position, did_you_mean, nearest, shown
from moegraft.injection.rulefile.document import MAX_TEXT, read_document
from moegraft.injection.rulefile.grammar import RuleReader
from moegraft.injection.rulefile.header import Header, read_header, read_requires
from moegraft.injection.rulefile.nodes import Node, Value
from moegraft.injection.rulefile.rules import Requirement, Rule, RuleFile
from moegraft.injection.rulefile.variables import substitute
from moegraft.rules import shipped_rules

if TYPE_CHECKING:
    from moegraft.operators.registry import OperatorRegistry

GENERIC = "cpu"
SUFFIXES = (".yaml", ".yml")
MAX_CHAIN = 16


def default_rules(model_type: str) -> str:
    """The name of the shipped file for a model's type, or for the family whose text part it is, else `cpu`."""
    shipped = shipped_rules()
    return next((name for name in (model_type, model_type.removesuffix("_text")) if name in shipped), GENERIC)


def read_rules(source: str | os.PathLike[str], *, vars: Mapping[str, object] | None = None, registry: OperatorRegistry) -> RuleFile:
    """Reads and checks a rule file: everything that can be known without a model.

    Args:
        source: a path, or the name of a shipped file such as `cpu`.
        vars: values for `${...}`, over those in the file and in what it extends.
        registry: the operators that rules may name.

    Raises:
        RuleErrors: every mistake of the file, and of the files it extends, with line and column.
    """
    findings = Findings()
    headers = _read_chain(_find(source, findings), findings)
    variables = _merge_vars(headers, vars or {}, findings)
    rules: list[Rule] = []
    requires: list[Requirement] = []
    for depth, header in enumerate(headers):
        reader = RuleReader(registry, findings, inherited=depth > 0)
        own = reader.rules(_filled(header.rules, variables, findings), extends=header.extends is not None)
        taken = {rule.id for rule in rules if rule.named}
        rules += [rule for rule in own if not (rule.named and rule.id in taken)]
        requires += read_requires(_filled(header.requires, variables, findings), findings)
    findings.raise_errors()
    return RuleFile(tuple(rules), variables, tuple(requires), headers[0].position, tuple(header.file for header in headers))


def _filled(node: Node | None, variables: Mapping[str, Value], findings: Findings) -> Node | None:
    return None if node is None else substitute(node, variables, findings)


def _find(source: str | os.PathLike[str], findings: Findings) -> Path:
    """A path, or a shipped file where `source` is the bare name of one."""
    shipped = shipped_rules()
    name = os.fspath(source)
    if isinstance(source, str) and source in shipped:
        return shipped[source]
    path = _existing(name, Path())
    if path is None:
        findings.stop(Position(name, 1, 1), f"there is no such rule file{_shipped_hint(name, shipped, Path())}")
    return path


def _existing(name: str, folder: Path) -> Path | None:
    """The path where it exists. Path's own methods raise for a name that is too long or a user that is none; these do not."""
    path = os.path.join(folder, os.path.expanduser(name))  # noqa: PTH111, PTH118
    return Path(path) if os.path.exists(path) else None  # noqa: PTH110


def _shipped_hint(name: str, shipped: Mapping[str, Path], folder: Path) -> str:
    """What was meant: a shipped file, or one that lies where this one was looked for, from `folder` on."""
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


def _read_chain(path: Path, findings: Findings) -> list[Header]:
    """The file, then what it extends, then what that extends."""
    headers = [read_header(read_document(path, findings), findings)]
    seen = [path.resolve()]
    while (extended := headers[-1].extends) is not None:
        assert isinstance(extended.value, str), "read_header checks it"
        found = _find_extended(extended.value, Path(headers[-1].file).parent)
        if found is None:
            hint = _shipped_hint(extended.value, shipped_rules(), Path(headers[-1].file).parent)
            findings.stop(extended.position, f"extends {shown(extended.value)}: there is no such rule file{hint}")
        if found.resolve() in seen:
            circle = " -> ".join([*(header.file for header in headers), str(found)])
            findings.stop(extended.position, f"extends {shown(extended.value)} is circular: {circle}")
        if len(headers) == MAX_CHAIN:
            findings.stop(extended.position, f"more than {MAX_CHAIN} rule files extend each other")
        seen.append(found.resolve())
        headers.append(read_header(read_document(found, findings), findings))
    return headers


def _find_extended(name: str, folder: Path) -> Path | None:
    shipped = shipped_rules()
    if name in shipped:
        return shipped[name]
    return _existing(name, folder)


def _merge_vars(headers: Sequence[Header], given: Mapping[str, object], findings: Findings) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    for header in reversed(headers):
        merged.update(header.vars)
    for name, value in given.items():
        if name not in merged:
            known = did_you_mean(str(name), merged) or "; it has no vars"
            findings.error(headers[0].position, f"variable {shown(str(name))} was given, and this rule file does not have it{known}")
        elif not isinstance(value, str | int | float | bool | None) or (isinstance(value, str) and len(value) > MAX_TEXT):
            message = f"variable '{name}' was given as a {type(value).__name__}; it must be text, a number, true, false or null"
            findings.error(headers[0].position, message)
        else:
            merged[name] = value
    return merged
