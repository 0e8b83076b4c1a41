"""What a right rule file means: types, positions, variables, what it inherits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
from support.rule_support import REGISTRY, CacheOptions, DraftOptions, ExpertsOptions, plan_for, read, write

from moegraft.injection.planning import given_options
from moegraft.injection.rules import Match, Position, RuleFile, read_rules
from moegraft.injection.rules.document import parse_value
from moegraft.injection.rules.rule import KINDS, Layers, grouped, layer_of, runs
from moegraft.operators.base import Kind
from moegraft.operators.registry import load_registry
from moegraft.rules import FORMER_NAMES

FULL = """\
version: 1
vars: {cache: 0.5, where: gpu}
requires: {model_type: [qwen3_moe, mixtral]}
rules:
- id: experts
  match: {name: '\\.mlp\\.experts$', class: MixtralExperts, kind: experts, layers: "0,3,5-9"}
  replace:
    class: hybrid_experts
    kwargs:
      weights: int8
      cache: {policy: lru, ratio: "${cache}"}
      note: on ${where} at ${cache}
      alpha: 1
      slots: 4
      devices: [cpu, 'cuda:0']
      window: [1, 2]
      costs: {cpu: 1, gpu: .5}
      thresholds: sub/t.json
      pinned: true
  expect: 7
  recursive: false
- match: {kind: model}
  replace: {class: speculative_draft, kwargs: {max_draft: 5}}
- match: {name: vision}
  replace: {class: default}
"""


def test_everything_that_a_file_can_say(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    found = read(path)
    experts, draft, vision = found.rules
    assert experts.match == Match(r"\.mlp\.experts$", "MixtralExperts", "experts", Layers(((0, 0), (3, 3), (5, 9))))
    assert (experts.id, experts.operator, experts.recursive, experts.expect) == ("experts", "hybrid_experts", False, 7)
    assert experts.options == ExpertsOptions(
        weights="int8",
        cache=CacheOptions("lru", 0.5),
        note="on gpu at 0.5",
        alpha=1.0,
        slots=4,
        devices=("cpu", "cuda:0"),
        window=(1, 2),
        costs={"cpu": 1.0, "gpu": 0.5},
        thresholds=tmp_path / "sub/t.json",
        pinned=True,
    )
    assert (draft.id, draft.operator, draft.options) == ("rule-2", "speculative_draft", DraftOptions(5))
    assert (vision.operator, vision.options, vision.recursive, vision.expect) == (None, None, True, None)
    assert found.vars == {"cache": 0.5, "where": "gpu"}
    assert [requirement.values for requirement in found.requires] == [("qwen3_moe", "mixtral")]
    assert found.files == (str(path),)


def test_an_old_name_of_an_option_is_read_with_a_notice_at_its_place(tmp_path: Path) -> None:
    text = "- match: {kind: experts}\n  replace:\n    class: hybrid_experts\n    kwargs:\n      ahead: 5\n      cache: {share: 0.5}\n"
    path = write(tmp_path, text)
    found = read(path)
    rule = found.rules[0]
    assert rule.options == ExpertsOptions(lookahead=5, cache=CacheOptions(ratio=0.5))
    assert [str(notice) for notice in found.notices] == [
        f"{path}:5:7: notice: option 'ahead' of hybrid_experts is now called 'lookahead'",
        f"{path}:6:15: notice: option 'cache.share' of hybrid_experts is now called 'cache.ratio'",
    ]
    assert rule.kwargs is not None
    assert given_options(rule.kwargs, rule.options) == ["lookahead=5", "cache.ratio=0.5"]
    assert plan_for(path).notices == found.notices


def test_positions_are_those_of_the_text(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    rule = read(path).rules[0]
    places = {key: (place.line, place.column) for key, place in rule.places.items()}
    assert rule.position == Position(str(path), 5, 3)
    assert places["name"] == (6, 17)
    assert places["operator"] == (8, 12)
    assert places["kwargs"] == (10, 7)
    assert places["expect"] == (20, 11)
    assert rule.place("absent", "kind") == rule.places["kind"]
    assert rule.place("absent") == rule.position
    assert str(rule.position) == f"{path}:5:3"


@pytest.mark.parametrize(
    "data",
    [
        FULL.encode("utf-8-sig"),  # what Windows' editors write before the text
        FULL.replace("\n", "\r\n").encode(),
        FULL.encode() + b"...\n",
        b"---\n" + FULL.encode(),
        b"# caf\xc3\xa9\n" + FULL.encode(),
        FULL.replace("  expect: 7", "# \tin a comment\n  expect: 7").encode(),
    ],
    ids=["BOM", "CRLF", "document end", "document start", "UTF-8", "harmless tab"],
)
def test_forms_of_text_that_mean_the_same(data: bytes, tmp_path: Path) -> None:
    assert [rule.options for rule in read(write(tmp_path, data)).rules] == [rule.options for rule in read(write(tmp_path, FULL)).rules]


def test_a_bare_list_is_a_file(tmp_path: Path) -> None:
    found = read(write(tmp_path, "- match:\n    name: experts\n  replace:\n    class: hybrid_experts\n    kwargs:\n  recursive: False\n"))
    assert [(rule.id, rule.operator, rule.options, rule.recursive) for rule in found.rules] == [
        ("rule-1", "hybrid_experts", ExpertsOptions(), False)
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("yes", "yes"),  # YAML 1.1 reads true
        ("off", "off"),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-12", -12),
        ("010", "010"),  # YAML 1.1 reads 8
        ("1:30", "1:30"),  # YAML 1.1 reads 90
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("9" * 18, 10**18 - 1),
        ("9" * 19, "9" * 19),
        ("9" * 5000, "9" * 5000),
        (".5", 0.5),
        ("1.", 1.0),
        ("1e-5", 1e-5),  # YAML 1.1 reads text
        ("1e999", "1e999"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("2020-01-01", "2020-01-01"),
        ("4-47", "4-47"),
    ],
)
def test_unquoted_values(text: str, value: object) -> None:
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


def with_vars(folder: Path, value: str, given: Mapping[str, object] | None = None) -> RuleFile:
    header = "vars: {a: 0.5, b: text, c: true, d: 7}\nrules:\n- match: {kind: experts}\n"
    return read(write(folder, f"{header}  replace: {{class: hybrid_experts, kwargs: {value}}}\n"), **(given or {}))


@pytest.mark.parametrize(
    ("kwargs", "given", "name", "expected"),
    [
        ('{alpha: "${a}"}', {}, "alpha", 0.5),  # the type of the variable, also in quotes
        ('{alpha: "${a}"}', {"a": 0.75}, "alpha", 0.75),
        ('{lookahead: "${d}"}', {"d": 9}, "lookahead", 9),
        ('{pinned: "${c}", weights: int8}', {}, "pinned", True),
        ('{note: "${b}"}', {}, "note", "text"),
        ('{note: "${b}-${d}-${c}"}', {}, "note", "text-7-true"),
        ('{note: "${b} "}', {}, "note", "text "),
        ("{note: $b}", {}, "note", "$b"),
        ('{weights: "int${d}"}', {"d": 8}, "weights", "int8"),
        ('{thresholds: "${b}"}', {"b": None}, "thresholds", None),
    ],
)
def test_variables(kwargs: str, given: dict[str, object], name: str, expected: object, tmp_path: Path) -> None:
    assert getattr(with_vars(tmp_path, kwargs, given).rules[0].options, name) == expected


def test_an_extending_file_comes_first_and_its_variables_win(tmp_path: Path) -> None:
    experts = "match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {note: '${v}'}}"
    write(
        tmp_path,
        f"vars: {{v: base, w: base}}\nrequires: {{model_type: a}}\nrules:\n- {{id: x, {experts}}}\n- {{id: y, {experts}}}\n",
        "base.yaml",
    )
    middle = tmp_path / "sub"
    middle.mkdir()
    write(middle, f"extends: ../base.yaml\nvars: {{v: middle}}\nrequires: {{model_type: b}}\nrules:\n- {{id: z, {experts}}}\n")
    top = write(tmp_path, f"extends: sub/rules.yaml\nrules:\n- {{id: x, {experts}}}\n- {{{experts}}}\n", "top.yaml")
    found = read(top)
    assert [(rule.id, Path(rule.position.file).name, rule.inherited) for rule in found.rules] == [
        ("x", "top.yaml", False),
        ("rule-2", "top.yaml", False),
        ("z", "rules.yaml", True),
        ("y", "base.yaml", True),
    ]
    assert {rule.options.note for rule in found.rules if isinstance(rule.options, ExpertsOptions)} == {"middle"}
    assert found.vars == {"v": "middle", "w": "base"}
    assert [requirement.values for requirement in found.requires] == [("b",), ("a",)]
    assert [Path(file).name for file in found.files] == ["top.yaml", "rules.yaml", "base.yaml"]
    assert read(top, v="given").rules[3].options == ExpertsOptions(note="given")


def test_an_unnamed_rule_replaces_none_of_the_same_number(tmp_path: Path) -> None:
    rule = "- {match: {kind: experts}, replace: {class: hybrid_experts}}\n"
    write(tmp_path, f"rules:\n{rule}", "base.yaml")
    assert len(read(write(tmp_path, f"extends: base.yaml\nrules:\n{rule}")).rules) == 2


@pytest.mark.parametrize("name", sorted(FORMER_NAMES))
def test_the_former_file_of_a_family_is_cpu_with_a_notice(name: str, tmp_path: Path) -> None:
    registry = load_registry()
    named, cpu = read_rules(name, registry=registry), read_rules("cpu", registry=registry)
    assert named.rules == cpu.rules and named.files == cpu.files and not cpu.notices
    message = f"notice: the shipped rule file '{name}' is now 'cpu', which serves every family"
    assert [str(notice) for notice in named.notices] == [f"{name}:1:1: {message}"]
    path = write(tmp_path, f"version: 1\nextends: {name}\n")
    extending = read_rules(path, registry=registry)
    assert extending.files == (str(path), *cpu.files)
    assert [str(notice) for notice in extending.notices] == [f"{path}:2:10: {message}"]


def test_a_shipped_name_and_a_path_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu-exact").mkdir()  # a folder of a shipped file's name is not in its way
    assert Path(read_rules("cpu-exact", registry=REGISTRY).files[0]).name == "cpu-exact.yaml"
    write(tmp_path, "- {match: {kind: experts}, replace: {class: hybrid_experts}}\n", "mine")
    assert read_rules("mine", registry=REGISTRY).files == ("mine",)


def test_kinds_are_those_of_operators() -> None:
    assert get_args(Kind) == KINDS


def test_layers() -> None:
    assert layer_of("model.layers.12.mlp.experts.3") == 12
    assert layer_of("model.embed_tokens") is None
    assert runs([3, 0, 1, 2, 9, 1]) == "0-3,9"
    assert grouped(["a.0.b", "a.1.b", "lm_head", "a.3.b", "a.2.c"]) == ["a.{0-1,3}.b", "lm_head", "a.2.c"]
    assert (3 in Layers(((0, 3),)), 4 in Layers(((0, 3),)), None in Layers(((0, 3),))) == (True, False, False)
