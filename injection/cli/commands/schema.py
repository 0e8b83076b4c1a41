"""`moegraft schema`: the JSON Schema of rule files, for editors.

It is derived from the key lists of the grammar and from the options dataclass of every operator.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from moegraft.injection.cli.options import PROGRAM
from moegraft.injection.cli.output import open_terminal, user_errors, write_json
from moegraft.injection.rules.patterns import MAX_LENGTH
from moegraft.injection.rules.reading import CLASS_NAME, MATCH_KEYS, NAME, REPLACE_KEYS, RULE_KEYS, TOP_KEYS, VERSION
from moegraft.injection.rules.rule import KINDS, LEAVE_ALONE
from moegraft.rules import shipped_rules

if TYPE_CHECKING:
    from moegraft.operators.registry import OperatorRegistry

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
