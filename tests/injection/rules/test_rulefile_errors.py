"""Errors of rule files beyond the table of mistakes: KTransformers' names, several files, several errors, variables from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rule_support import findings_of, read, write

RULE = "- match: {kind: experts}\n  replace: {class: hybrid_experts}\n"

THEIRS = (
    ("ktransformers.operators.experts.KTransformersExperts", "use hybrid_experts: write 'match: {kind: experts}'"),
    ("ktransformers.operators.experts.KTransformersExpertsV2", "use hybrid_experts"),
    ("KExpertsCPU", "use hybrid_experts"),
    ("ktransformers.operators.experts.KDeepseekV3MoE", "use hybrid_experts"),
    ("ktransformers.operators.experts.KQwen3MoeSparseMoeBlock", "use hybrid_experts"),
    ("ktransformers.operators.linear.KTransformersLinear", "use quantized_linear"),
    ("KLinearMarlin", "use quantized_linear"),
    ("ktransformers.operators.gate.KMoEGate", "no replacement is needed, routers stay"),
    ("ktransformers.operators.RoPE.YarnRotaryEmbeddingV3", "no replacement is needed, rotary embeddings stay"),
    ("ktransformers.operators.attention.KDeepseekV2Attention", "no replacement is needed, attention layers stay"),
    ("ktransformers.operators.balance_serve_attention.flashinfer_attn", "no replacement is needed, attention layers stay"),
    ("ktransformers.operators.models.KDeepseekV2Model", "no replacement is needed, models stay"),
    ("ktransformers.operators.layernorm.RMSNorm", "no replacement is needed, norms stay"),
    ("ktransformers.operators.mlp.kDeepseekV3MLP", "no replacement is needed, dense MLPs stay"),
    ("ktransformers.operators.other.Thing", "no replacement is needed, such modules stay"),
)


@pytest.mark.parametrize(("name", "advice"), THEIRS, ids=lambda value: value if "." in value else None)
def test_a_class_of_ktransformers_is_refused_with_advice(name: str, advice: str, tmp_path: Path) -> None:
    path = write(tmp_path, f'- match: {{name: "x"}}\n  replace:\n    class: {name}\n    kwargs: {{generate_device: "cpu"}}\n')
    (found,) = findings_of(lambda: read(path))
    assert str(found).startswith(f"{path}:3:12: error: '{name}' is a class of KTransformers: {advice}")


@pytest.mark.parametrize("name", ["hybrid_experts", "default"])
def test_an_argument_of_ktransformers_is_refused_with_advice(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"- match: {{kind: experts}}\n  replace: {{class: {name}, kwargs: {{prefill_device: cuda}}}}\n")
    (found,) = findings_of(lambda: read(path))
    assert "'prefill_device' is an argument of KTransformers" in found.message
    assert "device_map= of optimize_and_load" in found.message


def test_all_mistakes_are_reported_together_in_order(tmp_path: Path) -> None:
    text = (
        "versoin: 1\nrules:\n- match: {kind: expert}\n  replace: {class: hybrid_expert}\n- id: 5\n  match: {kind: experts}\n"
        "  replace:\n    class: hybrid_experts\n    kwargs:\n      wieghts: 1\n      alpha: x\n"
    )
    found = findings_of(lambda: read(write(tmp_path, text)))
    assert [(finding.position.line, finding.position.column) for finding in found] == [(1, 1), (3, 17), (4, 20), (5, 7), (10, 7), (11, 14)]


def test_mistakes_of_an_extended_file_are_reported_in_that_file(tmp_path: Path) -> None:
    base = write(tmp_path, RULE.replace("kind: experts", "kind: expert"), "base.yaml")
    found = findings_of(lambda: read(write(tmp_path, "extends: base.yaml\nrulez: 1\n")))
    assert [(Path(finding.position.file).name, finding.position.line) for finding in found] == [("rules.yaml", 2), (base.name, 1)]


def test_a_circle_of_files_is_found(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: ./a.yaml\n", "b.yaml")
    (found,) = findings_of(lambda: read(tmp_path / "a.yaml"))
    assert found.position.file == str(tmp_path / "b.yaml")
    assert "is circular" in found.message


def test_errors_stop_at_a_hundred(tmp_path: Path) -> None:
    found = findings_of(lambda: read(write(tmp_path, "a: 1\n" * 10_000)))
    assert len(found) == 101
    assert found[-1].message == "stopped after 100 errors"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("cpuu", "cpuu:1:1: error: there is no such rule file; did you mean 'cpu'?"),
        ("cpu.yml", "cpu.yml:1:1: error: there is no such rule file; did you mean the shipped 'cpu'?"),
        ("nothing-like-it-at-all", "there is no such rule file; shipped are: all, cpu-exact, cpu"),
        ("a\0b", "there is no such rule file"),
        ("", "there is no such rule file; shipped are: all, cpu-exact, cpu"),
        (".", "this rule file cannot be read: Is a directory"),
    ],
)
def test_a_file_that_is_not_there(source: str, message: str) -> None:
    (found,) = findings_of(lambda: read(source))  # type: ignore[arg-type]
    assert message in str(found)


def test_a_near_path_is_named(tmp_path: Path) -> None:
    write(tmp_path, RULE, "hybrid.yaml")
    (found,) = findings_of(lambda: read(tmp_path / "hybrd.yaml"))
    assert found.message == f"there is no such rule file; did you mean '{tmp_path / 'hybrid.yaml'}'?"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cahce": 1}, "this rule file has no variable 'cahce'; did you mean 'cache'?"),
        ({"cache": "a\0b"}, "the value of variable 'cache': character U+0000 is not allowed in a rule file"),
        ({"cache": [1]}, "the value of variable 'cache' is a list; it must be text, a number, true, false or null"),
    ],
)
def test_variables_that_are_given_wrongly(given: dict[str, object], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"vars: {{cache: 1}}\nrules:\n{RULE}")
    (found,) = findings_of(lambda: read(path, **given))
    assert found.message == message


def test_a_misspelt_variable_of_a_file_that_extends_another_is_an_error(tmp_path: Path) -> None:
    """It would leave the inherited value as it is."""
    used = "- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {note: 'with ${cache}'}}\n"
    write(tmp_path, f"vars: {{cache: 1, unused: 2}}\nrules:\n{used}", "base.yaml")
    (found,) = findings_of(lambda: read(write(tmp_path, "extends: base.yaml\nvars: {cache: 2, cahce: 3}\n", "first.yaml")))
    assert found.message == "no rule uses variable 'cahce'; did you mean 'cache'?"
    assert (Path(found.position.file).name, found.position.line, found.position.column) == ("first.yaml", 2, 18)
    (found,) = findings_of(lambda: read(write(tmp_path, "extends: base.yaml\nvars: {xyz: 3}\n", "second.yaml")))
    assert found.message == "no rule uses variable 'xyz'; known are: cache"
    write(tmp_path, f"rules:\n{RULE}", "plain.yaml")
    (found,) = findings_of(lambda: read(write(tmp_path, "extends: plain.yaml\nvars: {xyz: 3}\n", "third.yaml")))
    assert found.message == "no rule uses variable 'xyz': remove it"


def test_a_wrong_value_of_a_variable_has_its_own_place_too(tmp_path: Path) -> None:
    used = "- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {alpha: '${alpha}'}}\n"
    base = write(tmp_path, f"vars: {{alpha: 0.5}}\nrules:\n{used}", "base.yaml")
    child = write(tmp_path, "extends: base.yaml\nvars: {alpha: much}\n", "child.yaml")
    (found,) = findings_of(lambda: read(child))
    assert found.position.file == str(base)
    assert found.message.endswith(f"must be a number, not text 'much' (from ${{alpha}}, {child}:2:8)")
    (found,) = findings_of(lambda: read(base, alpha="much"))
    assert found.message.endswith("not text 'much' (from ${alpha})")


def test_a_variable_may_serve_a_rule_that_is_replaced(tmp_path: Path) -> None:
    used = "- id: one\n  match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {alpha: '${alpha}'}}\n"
    write(tmp_path, f"vars: {{alpha: 0.5}}\nrules:\n{used}", "base.yaml")
    other = "- id: one\n  match: {kind: experts}\n  replace: {class: default}\n"
    path = write(tmp_path, f"extends: base.yaml\nvars: {{alpha: 0.25}}\nrules:\n{other}", "child.yaml")
    assert read(path).vars == {"alpha": 0.25}


def test_the_other_suffix_is_a_near_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, RULE, "mine.yaml")
    monkeypatch.chdir(tmp_path)
    (found,) = findings_of(lambda: read(Path("mine.yml")))
    assert found.message.endswith("; did you mean 'mine.yaml'?")
    (found,) = findings_of(lambda: read(write(tmp_path, f"extends: mine.yml\nrules:\n{RULE}", "other.yaml")))
    assert found.message.endswith("; did you mean 'mine.yaml'?")
