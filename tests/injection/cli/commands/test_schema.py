"""The shipped JSON Schema is what the code generates, lets every right rule file pass and stops the mistakes editors should underline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml
from support import ROOT
from torch import nn

from moegraft.injection.cli.commands.rules import attribute_texts, rule_schema
from moegraft.operators.experts.hybrid import HybridExperts, HybridExpertsOptions
from moegraft.operators.registry import OperatorRegistry, load_registry
from moegraft.rules import shipped_rules

jsonschema = pytest.importorskip("jsonschema", reason="an extra for tests: pip install 'moegraft[test]'")
SHIPPED = ROOT / "rules" / "moegraft.schema.json"
HEAD = "- match: {kind: experts}\n  "
RIGHT = [
    HEAD + "replace: {class: hybrid_experts}",
    HEAD + "replace: {class: hybrid_experts, kwargs: {weights: int4}}",
    HEAD + 'replace: {class: hybrid_experts, kwargs: {weights: "${w}"}}',
    HEAD + "replace: {class: default}\n  recursive: false\n  expect: 3",
    "- match: {name: 'x', class: torch.nn.Linear, layers: 3}\n  replace: {class: quantized_linear, kwargs: null}",
    "extends: cpu\nvars: {weights: int4}",
    'version: 1\nrequires: {model_type: [a, b]}\nrules:\n- match: {layers: "1-4,7"}\n  replace: {class: "${operator}", kwargs: {any: 1}}',
]
WRONG = [
    "version: 2\nrules: []",
    "vars: {a: 1}",
    "[]",
    "rulez: []\nextends: cpu",
    "- match: {}\n  replace: {class: default}",
    "- macth: {kind: experts}\n  replace: {class: default}",
    "- match: {kind: expert}\n  replace: {class: default}",
    '- match: {layers: "4..7"}\n  replace: {class: default}',
    HEAD + "replace: {clas: hybrid_experts}",
    HEAD + "replace: {class: hybrid_expert}",
    HEAD + "replace: {class: hybrid_experts, kwargs: {wieghts: int4}}",
    HEAD + "replace: {class: hybrid_experts, kwargs: {weights: int5}}",
    HEAD + "replace: {class: default, kwargs: {weights: int4}}",
    HEAD + 'replace: {class: default}\n  recursive: "False"',
    HEAD + "replace: {class: default}\n  expect: 0",
]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    schema = json.loads(SHIPPED.read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def test_the_shipped_schema_is_up_to_date() -> None:
    made = json.loads(json.dumps(rule_schema(load_registry())))
    assert json.loads(SHIPPED.read_text()) == made, "run: moegraft schema > rules/moegraft.schema.json"


@pytest.mark.parametrize("name", shipped_rules())
def test_shipped_rules_pass(name: str, validator: jsonschema.Draft7Validator) -> None:
    validator.validate(yaml.safe_load(shipped_rules()[name].read_text()))


@pytest.mark.parametrize("text", RIGHT)
def test_right_rules_pass(text: str, validator: jsonschema.Draft7Validator) -> None:
    validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize("text", WRONG)
def test_wrong_rules_fail(text: str, validator: jsonschema.Draft7Validator) -> None:
    assert not validator.is_valid(yaml.safe_load(text))


@dataclass(frozen=True)
class Nested:
    depth: int = 1
    renamed_options: ClassVar[Mapping[str, str]] = {"levels": "depth"}


@dataclass(frozen=True)
class EveryType:
    """Options of every type.

    Attributes:
        must: is given,
            on two lines.
        inner: has options of its own.
    """

    must: str
    inner: Nested | None = None
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[bool, ...] = ()
    file: Path | None = None
    mode: Literal["a", 2] = "a"
    table: dict[str, float] = field(default_factory=dict)


class Plugin(HybridExperts):
    name = "plugin"
    options_type = EveryType


@pytest.mark.parametrize(
    ("kwargs", "right"),
    [
        ({"must": "x"}, True),
        ({}, False),
        ({"must": 3}, False),
        ({"must": "x", "inner": {"depth": 2}}, True),
        ({"must": "x", "inner": {"deep": 2}}, False),
        ({"must": "x", "inner": {"levels": 2}}, True),  # the old name of depth
        ({"must": "x", "inner": {"levels": "2"}}, False),
        ({"must": "x", "inner": None, "pair": [1, 2.5], "many": [True], "file": "t.json", "mode": 2, "table": {"a": 1}}, True),
        ({"must": "x", "pair": [1]}, False),
        ({"must": "x", "many": [1]}, False),
        ({"must": "x", "mode": "b"}, False),
        ({"must": "x", "table": {"a": "b"}}, False),
    ],
)
def test_an_installed_operator_is_in_the_schema(kwargs: dict[str, Any], right: bool) -> None:
    schema = rule_schema(OperatorRegistry([HybridExperts, Plugin]))
    rule = {"match": {"kind": "experts"}, "replace": {"class": "plugin", "kwargs": kwargs}}
    assert jsonschema.Draft7Validator(schema).is_valid([rule]) is right


def test_descriptions_come_from_docstrings() -> None:
    assert attribute_texts(EveryType) == {"must": "is given, on two lines.", "inner": "has options of its own."}
    assert attribute_texts(nn.Linear).get("must") is None
    options = rule_schema(load_registry())["definitions"]["options of hybrid_experts"]["properties"]
    assert options["weights"]["description"] == attribute_texts(HybridExpertsOptions)["weights"] != ""
    assert options["weights"]["default"] == "stored"
