"""What a rule that matches no module was probably meant to say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches

from moegraft.injection.planning.modules import ModelModules, has_class
from moegraft.injection.rulefile import Match, Position, Rule
from moegraft.injection.rulefile.diagnostics import nearest
from moegraft.injection.rulefile.layers import runs
from moegraft.injection.rulefile.migration import is_theirs

MAX_FORMS = 2000  # distinct paths that a near miss is sought among
_WORD = re.compile(r"\\.|[A-Za-z_][A-Za-z0-9_]*")  # an escape such as \d is no word
_INDENT = "\n    "


def explain_miss(rule: Rule, modules: ModelModules) -> tuple[Position, str]:
    """Position and message for a rule whose `match` fits no module."""
    match = rule.match
    lines: list[str] = []
    keys: list[str] = []
    for key, value, alone in _parts(match):
        found = modules.matching(alone)
        if found:
            lines.append(f"{key}: {value} alone matches {_count(found)}")
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
    """Why parts that each match something match nothing together."""
    elsewhere = [layer for path in modules.matching(replace(match, layers=None)) if (layer := modules.layer(path)) is not None]
    if match.layers is not None and elsewhere:
        return f"what else is asked for is in layers {runs(elsewhere)}"
    return "no module fits all of them at once"


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
        return f"{indent}the model has no module named 'experts': it is no mixture of experts, or one that transformers builds otherwise"
    return f"{indent}{named[0]} ({type(modules[named[0]]).__name__}) is named so, but does not hold its experts in 3-D parameters"


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
    for mended in _mended(pattern, modules):
        try:
            found = modules.matching(Match(name=mended))
        except re.error:
            continue  # a word of the pattern's own syntax was renamed, such as the P of (?P<layer>
        if found:
            return f"{indent}nearest: {found[0]} ({_count(found)}); did you mean '{mended}'?"
    near = get_close_matches(_literal(pattern), list(modules.forms)[:MAX_FORMS], n=1, cutoff=0.4)
    return f"{indent}nearest: {modules.forms[near[0]][0]} ({_count(modules.forms[near[0]])})" if near else ""


def _mended(pattern: str, modules: ModelModules) -> Iterator[str]:
    """`pattern` with words that no path has replaced by those nearest to them: one word at a time, then all."""
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
    """Roughly the path that a pattern was written after: wildcards and escapes become a layer number."""
    text = re.sub(r"\\d[+*]?|\[[^\]]*\][+*]?|\.[*+]|\(\?[^)]*\)", "0", pattern)
    return re.sub(r"\d+", "0", re.sub(r"[\\^$()?+*]", "", text))


def _count(found: Sequence[str]) -> str:
    return f"{len(found)} module{'s' if len(found) != 1 else ''}"
