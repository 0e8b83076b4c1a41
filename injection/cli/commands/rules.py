"""`moegraft check`: the mistakes of rule files; `explain`: which rule takes which module, and what that costs; `diff`: what changes.

`schema`: the JSON Schema of rule files, for editors, from the key lists of the grammar and the options dataclass of every operator.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import typer

from moegraft.injection.cli.options import (
    PROGRAM,
    Fields,
    JsonOption,
    MetaModelOptions,
    ModelOptions,
    PlannedModelOptions,
    option,
    takes_options,
)
from moegraft.injection.cli.output import (
    FINDINGS,
    USER_ERROR,
    Json,
    columns,
    diagnostic_json,
    open_terminal,
    plural,
    user_errors,
    write_json,
    write_result,
)
from moegraft.injection.rules import Diagnostic, Match, RuleErrors, read_rules
from moegraft.injection.rules.patterns import MAX_LENGTH
from moegraft.injection.rules.reading import CLASS_NAME, MATCH_KEYS, NAME, REPLACE_KEYS, RULE_KEYS, TOP_KEYS, VERSION
from moegraft.injection.rules.rule import KINDS, LEAVE_ALONE
from moegraft.operators.errors import UnsupportedModelError, human_bytes
from moegraft.rules import shipped_rules

if TYPE_CHECKING:
    from moegraft.injection.meta_model import MetaModel
    from moegraft.injection.planning import Plan, Swap
    from moegraft.injection.rules import Rule, RuleFile
    from moegraft.injection.rules.matching import Assignment, ModelModules
    from moegraft.operators.registry import OperatorRegistry

HEADER = ("modules", "rule", "from", "operator", "options", "bytes")
Outcome = Literal["won", "lost", "not tried"]
_Difference: TypeAlias = "tuple[str, Swap | None, Swap | None]"
_CheckedModelOption: TypeAlias = Annotated[
    str | None, option("--model", "NAME", "Check the rules for this model as well: hub id or folder; config.json is enough.")
]


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome for one file; `modules` and `bytes_by_device` are None without a model, and after an error."""

    rules: str
    findings: tuple[Diagnostic, ...]
    readable: bool = True
    modules: int | None = None
    bytes_by_device: Mapping[str, int] | None = None

    def severities(self) -> set[str]:
        return {finding.severity for finding in self.findings}


@user_errors(PROGRAM)
@takes_options
def check(
    rules: Annotated[list[str], typer.Argument(metavar="RULES", help="Rule files, or names of shipped ones.")],
    options: Annotated[ModelOptions, Fields("model", "var", "gguf", "trust_remote_code", model=_CheckedModelOption)],
    strict: Annotated[bool, option("--strict", None, "Warnings count as errors.")] = False,
    json: JsonOption = False,
) -> None:
    """Check rule files, by themselves and with --model for that model. No weights are read.

    Exit code 0: no errors; 1: errors; 2: a file or the model cannot be read, or the command is wrong.
    """
    from moegraft.injection.cli.models import open_meta_model
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    meta_model = open_meta_model(options) if options.model is not None else None
    checked = [_checked(file, options.vars(), meta_model, registry) for file in rules]
    notices = [] if meta_model is None else [_notice(meta_model)]
    write_result(open_terminal(), _checked_lines(checked, meta_model), _checked_json(checked, meta_model), as_json=json, notices=notices)
    code = max(_exit_code(outcome, strict=strict) for outcome in checked)
    if code:
        raise typer.Exit(code)


def _checked(file: str, variables: Mapping[str, object], meta_model: MetaModel | None, registry: OperatorRegistry) -> Checked:
    from moegraft.injection.planning import plan

    try:
        rule_file = read_rules(file, vars=variables, registry=registry)
        if meta_model is None:
            return Checked(file, rule_file.notices)
        planned = plan(meta_model, rule_file, registry=registry)
    except RuleErrors as error:
        return Checked(file, error.diagnostics, readable=Path(error.diagnostics[0].position.file).is_file())
    return Checked(file, planned.notices, True, len(planned.swaps), planned.bytes_by_device)


def _exit_code(checked: Checked, *, strict: bool) -> int:
    if not checked.readable:
        return USER_ERROR
    severities = checked.severities()
    return FINDINGS if "error" in severities or (strict and "warning" in severities) else 0


def _notice(meta_model: MetaModel) -> str | None:
    """Return why the model's weights cannot be loaded, if so."""
    return None if meta_model.unloadable is None else f"notice: {meta_model.unloadable}"


def _checked_lines(checked: list[Checked], meta_model: MetaModel | None) -> Iterator[str]:
    from moegraft.injection.planning import bytes_text

    for outcome in checked:
        yield from map(str, outcome.findings)
        if "error" in outcome.severities():
            continue
        taken = ""
        if outcome.modules is not None and meta_model is not None:
            sizes = bytes_text(outcome.bytes_by_device or {})
            taken = f"; it replaces {plural(outcome.modules, 'module')} of {meta_model.model_class}, which then holds {sizes}"
        yield f"{outcome.rules}: no errors{taken}"


def _checked_json(checked: list[Checked], meta_model: MetaModel | None) -> Json:
    files = [
        {
            "rules": outcome.rules,
            "ok": "error" not in outcome.severities(),
            "diagnostics": [diagnostic_json(finding) for finding in outcome.findings],
            "modules": outcome.modules,
            "bytes_by_device": outcome.bytes_by_device,
        }
        for outcome in checked
    ]
    return {
        "ok": all(file["ok"] for file in files),
        "files": files,
        "model_class": meta_model.model_class if meta_model else None,
        "unloadable": meta_model.unloadable if meta_model else None,
    }


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one rule on one module, with its reason as a sentence."""

    rule: Rule
    outcome: Outcome
    reason: str


@user_errors(PROGRAM, wrong_rules=FINDINGS)
@takes_options
def explain(
    options: PlannedModelOptions,
    module: Annotated[str | None, option("--module", "PATH", "Show for this module only why each rule takes it or does not.")] = None,
    each: Annotated[bool, option("--each", None, "Print a line for each module instead of one for a run of layers.")] = False,
    json: JsonOption = False,
) -> None:
    """Show which rule takes which module of a model, with which operator, options and bytes. No weights are read.

    Exit code 0: the rules fit the model; 1: they do not; 2: a file or the model cannot be read, or the command is wrong.
    """
    from moegraft.injection.cli.models import model_and_rules

    terminal = open_terminal()
    meta_model, rule_file, registry = model_and_rules(options)
    explained = explanation(meta_model, rule_file, registry)
    trials, notices = None, [_notice(meta_model)]
    if module is not None:
        trials, notices = explained.trials(module), []
    lines = _table_lines(explained, meta_model, each) if module is None else _trials_lines(module, trials or [], explained)
    data = _as_json(explained, meta_model, trials)
    write_result(terminal, [*lines, *map(str, explained.findings)], data, as_json=json, ok=data["ok"], notices=notices)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The outcome of a rule file on a model.

    Attributes:
        plan: None if `findings` contains an error.
    """

    rules: RuleFile
    modules: ModelModules
    assignment: Assignment
    plan: Plan | None
    findings: tuple[Diagnostic, ...]

    @property
    def left_alone(self) -> Iterator[tuple[Rule, Sequence[str]]]:
        """The rules of class `default` that take modules, with the modules' paths."""
        pairs = zip(self.rules.rules, self.assignment.taken, strict=True)
        return ((rule, taken) for rule, taken in pairs if rule.operator is None and taken)

    def trials(self, module: str) -> list[Trial]:
        """Return the outcome of each rule on one module, in the order of the rules.

        Raises:
            UnsupportedModelError: the model has no such module.
        """
        if module not in set(self.modules):
            near = get_close_matches(module, list(self.modules), n=1, cutoff=0.4)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise UnsupportedModelError(f"{self.modules.model_class} has no module {module!r}{hint}")
        rules, assignment, parts = self.rules.rules, self.assignment, module.split(".")
        around = {".".join(parts[:length]) for length in range(len(parts))} if module else set()
        # The innermost module around this one that each rule takes, by the rule's index.
        outer = {index: max(inside, key=len) for index, taken in enumerate(assignment.taken) if (inside := around.intersection(taken))}
        closed = next((index for index, taken in outer.items() if not rules[index].recursive), None)
        if closed is not None:
            reason = f"the module is inside {outer[closed]}, which rule '{rules[closed].id}' takes with recursive: false"
            return [Trial(rule, "not tried", reason) for rule in rules]
        trials: list[Trial] = []
        first: Rule | None = None
        for index, rule in enumerate(rules):
            misses = _why_not(rule.match, module, self.modules)
            won = module in assignment.taken[index]
            if first is not None and not won:
                also = "does not match" if misses else "matches as well"
                trials.append(Trial(rule, "not tried", f"rule '{first.id}' comes first and matches; this rule {also}"))
            elif misses:
                trials.append(Trial(rule, "lost", "; ".join(misses)))
            elif won:
                note = "; its class is 'default', so the module stays as it is" if rule.operator is None else ""
                trials.append(Trial(rule, "won", f"the first rule that matches{'' if first is None else ' for its operator'}{note}"))
                first = first or rule
            else:
                first = rule
                reason = f"matches, but the module is inside {outer.get(index)}, which this rule replaces as a whole"
                trials.append(Trial(rule, "lost", reason))
        return trials


def _why_not(match: Match, path: str, modules: ModelModules) -> list[str]:
    """Return the conditions of `match` that the module at `path` does not meet, as sentences; empty if it matches."""
    misses = []
    if match.name is not None and path not in modules.matching(Match(name=match.name)):
        misses.append(f"name '{match.name}' is not found in its path")
    if match.class_name is not None and path not in modules.matching(Match(class_name=match.class_name)):
        misses.append(f"its class is {type(modules[path]).__name__}, not {match.class_name}")
    if match.kind is not None and match.kind not in modules.kinds(path):
        actual = " and ".join(sorted(modules.kinds(path)))
        misses.append(f"it is of kind {actual}, not {match.kind}" if actual else f"it is of no kind, so not of kind {match.kind}")
    if match.layers is not None and modules.layer(path) not in match.layers:
        layer = modules.layer(path)
        misses.append(
            f"it is in layer {layer}, not in {match.layers}" if layer is not None else f"it is in no layer, not in {match.layers}"
        )
    return misses


def explanation(meta_model: MetaModel, rules: RuleFile, registry: OperatorRegistry) -> Explanation:
    """Apply rules to a model; errors are among the findings."""
    from moegraft.injection.planning import plan, planned_model
    from moegraft.injection.rules.matching import ModelModules, assign

    modules = ModelModules(planned_model(meta_model, rules, registry).skeleton)
    assignment = assign(rules.rules, modules, registry.in_place)
    try:
        planned = plan(meta_model, rules, registry=registry)
    except RuleErrors as error:
        return Explanation(rules, modules, assignment, None, error.diagnostics)
    return Explanation(rules, modules, assignment, planned, planned.notices)


def _table_lines(explained: Explanation, meta_model: MetaModel, each: bool) -> list[str]:
    from moegraft.injection.planning import bytes_text

    if explained.plan is None:
        return []
    rows = [HEADER, *_rows(explained, explained.plan, each)]
    rows.append(("everything else", "-", "-", "(stock)", "", f"{human_bytes(explained.plan.rest_bytes)} cpu"))
    swaps = plural(len({swap.module for swap in explained.plan.swaps}), "module")
    return [*columns(rows), f"{meta_model.model_class}: {swaps} replaced; total {bytes_text(explained.plan.bytes_by_device)}"]


def _rows(explained: Explanation, plan: Plan, each: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row for each swap or, without `each`, each run of layers, then one for each rule that leaves its modules unchanged."""
    from moegraft.injection.planning import swap_rows
    from moegraft.injection.rules.rule import grouped

    for paths, rule, *rest in swap_rows(plan.swaps, each=each):
        yield paths, rule.id, rule.place_text, *rest
    for rule, taken in explained.left_alone:
        yield " ".join(grouped(path or "(the model)" for path in taken)), rule.id, rule.place_text, "default", "", "(not replaced)"


def _trials_lines(module: str, trials: Sequence[Trial], explained: Explanation) -> Iterator[str]:
    from moegraft.injection.planning import bytes_text

    kinds = ", ".join(sorted(explained.modules.kinds(module)))
    yield f"{module or '(the model)'}: {type(explained.modules[module]).__name__}{f', of kind {kinds}' if kinds else ''}"
    rows = [(trial.outcome, f"{trial.rule.place_text}:", f"rule '{trial.rule.id}':", trial.reason) for trial in trials]
    yield from (f"  {line}" for line in columns(rows))
    swaps = explained.plan.swaps if explained.plan else ()
    replacing = [swap for swap in swaps if swap.module == module]
    for swap in replacing:
        options = ", ".join(f"{name}={value}" for name, value in asdict(swap.options).items())  # type: ignore[call-overload]
        yield f"  replaced by {swap.operator} ({options}): {bytes_text(swap.footprint.by_device)}"
    if not replacing and not any(trial.outcome == "won" for trial in trials):
        outer = next((swap for swap in swaps if not swap.in_place and module.startswith(f"{swap.module}.")), None)
        fate = "it is not replaced" if outer is None else f"it is replaced with {outer.module}, which rule '{outer.rule.id}' takes"
        yield f"  no rule takes it: {fate}"


def _as_json(explained: Explanation, meta_model: MetaModel, trials: Sequence[Trial] | None) -> Json:
    plan = explained.plan
    shown = [{**_rule_json(trial.rule), "outcome": trial.outcome, "reason": trial.reason} for trial in trials or ()]
    return {
        "ok": plan is not None,
        "model_class": meta_model.model_class,
        "files": explained.rules.files,
        "modules": [{"module": swap.module, **_rule_json(swap.rule), **swap_json(swap)} for swap in plan.swaps] if plan else [],
        "left_alone": [{"module": path, **_rule_json(rule)} for rule, taken in explained.left_alone for path in taken],
        "rest_bytes": plan.rest_bytes if plan else None,
        "replaced_bytes": plan.replaced_bytes if plan else None,
        "bytes_by_device": plan.bytes_by_device if plan else None,
        "unloadable": meta_model.unloadable,
        "diagnostics": [diagnostic_json(finding) for finding in explained.findings],
        "trials": None if trials is None else shown,
    }


def _rule_json(rule: Rule) -> Mapping[str, object]:
    return {"rule": rule.id, "file": rule.position.file, "line": rule.position.line}


def swap_json(swap: Swap) -> Mapping[str, object]:
    """Return an operator with all its options and the bytes it will hold."""
    options = asdict(swap.options)  # type: ignore[call-overload]
    return {"operator": swap.operator, "options": options, "bytes_by_device": dict(swap.footprint.by_device)}


@user_errors(PROGRAM, wrong_rules=FINDINGS)
@takes_options
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A rule file, or the name of a shipped one.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The file to compare it with.")],
    options: MetaModelOptions,
    json: JsonOption = False,
) -> None:
    """Show what changes for a model from rule file A to rule file B, module by module. No weights are read.

    Exit code 0: nothing changes; 1: something changes, or the rules are wrong; 2: a file or the model cannot be read.
    """
    from moegraft.injection.cli.models import open_meta_model
    from moegraft.injection.planning import plan
    from moegraft.operators.registry import load_registry

    registry = load_registry()
    rules = [read_rules(file, registry=registry) for file in (before, after)]
    meta_model = open_meta_model(options)
    first, second = (plan(meta_model, rule_file, registry=registry) for rule_file in rules)
    changes = _differences(first, second)
    modules = [{"module": module, "before": one and swap_json(one), "after": other and swap_json(other)} for module, one, other in changes]
    sums = {"bytes_before": first.bytes_by_device, "bytes_after": second.bytes_by_device}
    data = {"same": not changes, "modules": modules, **sums}
    write_result(open_terminal(), _changes_lines(changes, (before, first), (after, second)), data, as_json=json, ok=not changes)


def _differences(before: Plan, after: Plan) -> list[_Difference]:
    """Return every module whose operator, options or bytes differ, with its swap in each plan; None where that does not replace it."""
    first, second = ({(swap.module, "" if swap.module else swap.operator): swap for swap in plan.swaps} for plan in (before, after))
    found = [(key[0], first.get(key), second.get(key)) for key in dict.fromkeys([*first, *second])]
    return [(module, one, other) for module, one, other in found if _effect(one) != _effect(other)]


def _effect(swap: Swap | None) -> object:
    return None if swap is None else (swap.operator, swap.options, swap.footprint.by_device)


def _changes_lines(changes: list[_Difference], before: tuple[str, Plan], after: tuple[str, Plan]) -> list[str]:
    from moegraft.injection.planning import LAYER, bytes_text
    from moegraft.injection.rules.rule import grouped

    if not changes:
        return ["no module differs"]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for module, one, other in changes:
        stock = "(stock)" if module else "-"  # the model may have other operators
        key = (LAYER.sub(".{}.", module, count=1), _text(one, stock), _text(other, stock))
        groups.setdefault(key, []).append(module or "(the model)")
    rows = [("modules", before[0], after[0])]
    rows += [(" ".join(grouped(modules)), old, new) for (_, old, new), modules in groups.items()]
    rows.append(("total", bytes_text(before[1].bytes_by_device), bytes_text(after[1].bytes_by_device)))
    return [*columns(rows), f"{plural(len(changes), 'module')} differ{'s' if len(changes) == 1 else ''}"]


def _text(swap: Swap | None, without: str) -> str:
    from moegraft.injection.planning import bytes_text, given_options

    if swap is None:
        return without
    options = " ".join(given_options(swap.rule.kwargs, swap.options))
    return " ".join(part for part in (swap.operator, options, f"({bytes_text(swap.footprint.by_device)})") if part)


Schema = dict[str, Any]  # JSON

# Draft 7, which the YAML language server of VS Code and other editors supports.
DRAFT = "http://json-schema.org/draft-07/schema#"
VARIABLE = {"$ref": "#/definitions/variable"}
LAYERS = r"^\s*[0-9]{1,6}(\s*-\s*[0-9]{1,6})?\s*(,\s*[0-9]{1,6}(\s*-\s*[0-9]{1,6})?\s*)*$"
_SCALARS: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string", "description": "A path, relative to the rule file."},
    NoneType: {"type": "null"},
}


def _closed(properties: Schema, required: list[str] | None = None) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _or_variable(schema: Schema, description: str, **more: Any) -> Schema:
    """Return the schema of a rule's value: `schema`, or text with a variable in it."""
    return {"description": description, "anyOf": [schema, VARIABLE], **more}


_TEXT: Schema = {"type": "string", "minLength": 1}
_MODEL_TYPES: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
_TOP: Schema = {
    "version": {"const": VERSION, "description": "The version of the grammar."},
    "extends": {
        "anyOf": [{"enum": sorted(shipped_rules())}, _TEXT],
        "description": "A shipped rule file, or a path relative to this file; this file's rules come before those it inherits.",
    },
    "vars": {
        "type": "object",
        "description": "Values for ${name}.",
        "propertyNames": {"pattern": f"^{NAME.pattern}$"},
        "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
    },
    "requires": {**_closed({"model_type": _MODEL_TYPES}), "description": "The models that the file is for."},
    "parallel": {
        **_closed(
            {
                "shares": _or_variable(
                    {
                        "anyOf": [
                            {"enum": ["auto", "none"]},
                            {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 1},
                        ]
                    },
                    "auto: by each process's measured speed and free memory; none: every process holds all experts; or numbers, one for "
                    "each process.",
                    default="auto",
                )
            }
        ),
        "description": "How several processes, started by torchrun, share the experts.",
    },
    "rules": {
        "type": "array",
        "items": {"$ref": "#/definitions/rule"},
        "description": "Tried in order: the first rule that matches a module takes it.",
    },
}
_RULE: Schema = {
    "id": {**_TEXT, "description": "The rule's name in messages; a rule of this id in an extending file replaces this one."},
    "match": {"$ref": "#/definitions/match"},
    "replace": {"$ref": "#/definitions/replace"},
    "recursive": _or_variable(
        {"type": "boolean"}, "Whether later rules may take modules inside those of this one; true by default.", default=True
    ),
    "expect": _or_variable(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "any"}]},
        "The number of modules the rule must take; without it, one or more. 'any': none is allowed too.",
    ),
}
_MATCH: Schema = {
    "name": {
        **_TEXT,
        "maxLength": MAX_LENGTH,
        "description": "A regular expression to search for in the module's path; '\\.' is a dot.",
    },
    "class": _or_variable(
        {"type": "string", "pattern": f"^{CLASS_NAME.pattern}$"}, "The module's class or a base of it: MixtralExperts, torch.nn.Linear."
    ),
    "kind": _or_variable({"enum": list(KINDS)}, "The kind of module, found by its structure in every family."),
    "layers": _or_variable(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": LAYERS}]}, 'Layers, such as "4-47" or "0,3,5-9".'
    ),
}


@user_errors(PROGRAM)
def schema() -> None:
    """Print the JSON Schema of rule files, with the options of every installed operator, for editors."""
    from moegraft.operators.registry import load_registry

    write_json(open_terminal(), rule_schema(load_registry()))


def rule_schema(registry: OperatorRegistry) -> Schema:
    """Return the schema of rule files with the operators of `registry`; a bare list of rules is also a valid file.

    Only `moegraft check` makes checks that depend on a model, and those of the options dataclasses themselves.
    """
    # Keywords for objects ignore lists, and those for lists ignore objects, so one schema covers both forms.
    return {
        "$schema": DRAFT,
        "title": "moegraft rule file",
        "type": ["object", "array"],
        "properties": {key: _TOP[key] for key in TOP_KEYS},
        "additionalProperties": False,
        "anyOf": [{"required": ["rules"]}, {"required": ["extends"]}],
        "items": {"$ref": "#/definitions/rule"},
        "minItems": 1,
        "definitions": {
            "variable": {"type": "string", "pattern": rf"\$\{{{NAME.pattern}\}}", "description": "A value with a ${variable} in it."},
            "rule": _closed({key: _RULE[key] for key in RULE_KEYS}, required=["match", "replace"]),
            "match": {**_closed({key: _MATCH[key] for key in MATCH_KEYS}), "minProperties": 1},
            "replace": _replace(registry),
            **{f"options of {name}": _options(registry[name].options_type) for name in registry},
        },
    }


def _replace(registry: OperatorRegistry) -> Schema:
    names = [*registry, LEAVE_ALONE]
    about = [registry[name].summary for name in registry] + ["the module is not replaced"]
    listed = "; ".join(f"{name}: {text}" for name, text in zip(names, about, strict=True))
    properties: Schema = {
        "class": _or_variable({"enum": names}, f"The operator. {listed}."),
        "kwargs": {"type": ["object", "null"], "description": "The operator's options."},
    }
    assert set(properties) == set(REPLACE_KEYS), "every key of replace is described"
    kwargs: Schema = {name: {"anyOf": [{"$ref": f"#/definitions/options of {name}"}, {"type": "null"}]} for name in registry}
    kwargs[LEAVE_ALONE] = {"type": ["object", "null"], "maxProperties": 0}
    by_operator = [
        {"if": {"properties": {"class": {"const": name}}, "required": ["class"]}, "then": {"properties": {"kwargs": schema}}}
        for name, schema in kwargs.items()
    ]
    return {**_closed(properties, ["class"]), "allOf": by_operator}


def _options(options_type: type[Any]) -> Schema:
    hints = get_type_hints(options_type)
    about = attribute_texts(options_type)
    properties: Schema = {}
    required = []
    for field in fields(options_type):
        if field.init:
            default = {"default": field.default} if isinstance(field.default, str | int | float | bool | None) else {}
            properties[field.name] = _or_variable(_type(hints[field.name]), about.get(field.name, ""), **default)
            if field.default is MISSING and field.default_factory is MISSING:
                required.append(field.name)
    for old, new in getattr(options_type, "renamed_options", {}).items():
        properties[old] = {**properties[new], "description": f"The old name of '{new}'.", "deprecationMessage": f"Write '{new}'."}
    return _closed(properties, required)


def _type(hint: Any) -> Schema:
    """Return the schema of a type that options may have (see `read_options`)."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return {"enum": list(arguments)}
    if get_origin(hint) in (Union, UnionType):
        return {"anyOf": [_type(member) for member in arguments]}
    if is_dataclass(hint) and isinstance(hint, type):
        return _options(hint)
    if get_origin(hint) is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _type(arguments[0])}
    if get_origin(hint) is tuple:
        return {
            "type": "array",
            "items": [_type(argument) for argument in arguments],
            "minItems": len(arguments),
            "maxItems": len(arguments),
        }
    if get_origin(hint) in (dict, Mapping):
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    return {}


def attribute_texts(cls: type[Any]) -> dict[str, str]:
    """Return the text of each attribute in the `Attributes:` section of a class's docstring, as one line."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    attributes = re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {match[1]: re.sub(r"\s+", " ", match[2]) for match in attributes}
