"""`moegraft init --from-ktransformers`: what each of their rules becomes, what is left out and why, and that the file is right."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from moegraft.injection.rules import RuleErrors
from moegraft.injection.rules.ktransformers import Outcome, Paths, convert, file_text, read_their_rules

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
OPERATORS = "ktransformers.operators"
EXPERTS = f"replace: {{class: {OPERATORS}.experts.KTransformersExperts, kwargs: {{prefill_device: cuda, generate_device: cpu}}}}"
LINEAR = f"replace: {{class: {OPERATORS}.linear.KTransformersLinear, kwargs: {{generate_device: cuda, generate_op: KLinearMarlin}}}}"
WHOLE = rf"""
- match: {{class: ktransformers.models.modeling_deepseek.RotaryEmbedding}}
  replace:
    class: {OPERATORS}.RoPE.YarnRotaryEmbedding
    kwargs: {{generate_device: cuda, prefill_device: cuda}}
- match: {{name: 'layers\.[0-9]+\.(?!self_attn\.kv_b)', class: torch.nn.Linear}}
  {LINEAR}
- match: {{name: 'layers\.[0-9]+\.mlp$', class: ktransformers.models.modeling_deepseek.Block}}
  replace: {{class: {OPERATORS}.experts.KDeepseekV2MoE, kwargs: {{generate_device: cuda}}}}
- match: {{class: ktransformers.models.modeling_deepseek.Gate}}
  replace: {{class: {OPERATORS}.gate.KMoEGate}}
- match: {{name: '\.mlp\.experts$'}}
  {EXPERTS}
  recursive: False
- match: {{name: 'self_attn$'}}
  replace: {{class: {OPERATORS}.attention.KDeepseekV2Attention}}
- match: {{name: '^model$'}}
  replace: {{class: {OPERATORS}.models.KDeepseekV2Model, kwargs: {{transfer_map: {{5: 'cuda:1', 8: 'cuda:2'}}}}}}
- match: {{name: '^model\.embed_tokens'}}
  replace: {{class: default, kwargs: {{generate_device: cpu}}}}
"""


def outcomes(text: str, folder: Path, paths: Paths | None = None) -> tuple[Outcome, ...]:
    path = folder / "theirs.yaml"
    path.write_text(textwrap.dedent(text))
    return convert(read_their_rules(path), paths or Paths.typical())


def rule_of(outcome: Outcome) -> dict[str, Any]:
    """What a converted rule says, as data."""
    (rule,) = yaml.safe_load("\n".join(outcome.lines))
    assert isinstance(rule, dict)
    return rule


def test_every_rule_is_named_and_the_file_is_right(run: Run, run_json: RunJson, config_folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(WHOLE)
    found = run_json("init", "--from-ktransformers", source, "--out", target)
    assert (found["exit_code"], found["ok"], found["output"]) == (0, True, str(target))
    assert [row["operator"] for row in found["source"]] == [None, "quantized_linear", None, None, "hybrid_experts", None, None, None]
    assert not any(row["doubtful"] for row in found["source"])
    text = target.read_text()
    for row in found["source"]:
        assert f"theirs.yaml:{row['line']} " in text
    assert run("check", target, "--strict").exit_code == 0
    assert run("check", target, "--strict", "--model", config_folder).exit_code == 0
    data = yaml.safe_load(text)
    assert data["vars"] == {"weights": "int4", "linear": "int8", "gpu": "auto"}
    experts = {"class": "hybrid_experts", "kwargs": {"weights": "${weights}", "gpu": "${gpu}"}}
    assert data["rules"][1] == {"id": "experts-12", "match": {"kind": "experts"}, "replace": experts}
    notices = {row["line"]: row["message"] for row in found["diagnostics"]}
    assert {row["severity"] for row in found["diagnostics"]} == {"notice"}
    assert "rotary embeddings stay transformers' own" in notices[2]
    assert "the rule in line 12 does it" in notices[8]
    assert "attention layers stay transformers' own" in notices[15]
    assert "models stay" in notices[17] and "device_map" in notices[19]


def test_with_a_model_matches_are_counted_and_misses_reported(run: Run, run_json: RunJson, config_folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(WHOLE + f"- match: {{name: '^vision.*', class: torch.nn.Linear}}\n  {LINEAR}\n")
    found = run_json("init", "--from-ktransformers", source, "--model", config_folder, "--out", target)
    data = yaml.safe_load(target.read_text())
    # Twelve layers with four projections of attention; three of the dense MLP of layer 0; the others have experts.
    assert [rule["expect"] for rule in data["rules"]] == [12 * 4 + 3, 11]
    (last,) = [row for row in found["diagnostics"] if row["severity"] == "warning"]
    assert last["message"].endswith("name '^vision.*' matches no linear layer of this model")
    assert run("check", target, "--strict", "--model", config_folder).exit_code == 0


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        (r"^model\.layers\.([3-9]|[1-5][0-9])\.mlp\.experts$", "3-59"),
        (r"^model\.layers\.1.*experts$", "1,10-19,100-199"),  # what KTransformers takes, said plainly
        (r"^model\.layers\.(0|7)\.block_sparse_moe\.experts$", "0,7"),  # transformers 4's name for Mixtral's mlp
        (r"^model\.layers\..*experts$", None),
        ("experts", None),
    ],
)
def test_layers_come_of_the_name(name: str, layers: str | None, tmp_path: Path) -> None:
    (found,) = outcomes(f"- match: {{name: '{name}'}}\n  {EXPERTS}\n", tmp_path)
    assert rule_of(found)["match"] == {"kind": "experts"} | ({"layers": layers} if layers else {})


def test_two_gpus_are_one_set_of_slots(tmp_path: Path) -> None:
    text = "".join(
        f"- match: {{name: 'layers\\.{layers}\\.mlp\\.experts$'}}\n"
        f"  replace: {{class: KTransformersExperts, kwargs: {{prefill_device: 'cuda:{gpu}', generate_device: {decodes}}}}}\n"
        for gpu, layers, decodes in ((0, "[0-9]", "cpu"), (1, "[1-3][0-9]", "'cuda:1'"))
    )
    found = outcomes(text, tmp_path)
    assert [rule_of(outcome)["match"]["layers"] for outcome in found] == ["0-9", "10-39"]
    assert "with a slot on the GPU" in found[1].notes[1] and len(found[0].notes) == 1
    assert yaml.safe_load(file_text(found, Path("x.yaml"), None))["vars"]["gpu"] == "cuda:0,cuda:1"


@pytest.mark.parametrize(("device", "gpu"), [("cuda", "auto"), ("cuda:1", "cuda:1"), ("cpu", None), ("xpu", None)])
def test_linear_layers_stay_on_their_device(device: str, gpu: str | None, tmp_path: Path) -> None:
    rule = f"replace: {{class: KTransformersLinear, kwargs: {{generate_device: '{device}', generate_op: KLinearMarlin}}}}"
    (found,) = outcomes(f"- match: {{name: '_proj$', class: torch.nn.Linear}}\n  {rule}\n", tmp_path)
    assert rule_of(found)["replace"]["kwargs"] == {"weights": "${linear}"} | ({"gpu": gpu} if gpu else {})
    assert any("device_map places the layer around it" in note for note in found.notes) == (device == "cuda:1")


def test_experts_on_the_cpu_alone_ask_for_no_gpu(tmp_path: Path) -> None:
    (found,) = outcomes(
        "- match: {name: experts$}\n  replace: {class: KTransformersExperts, kwargs: {generate_device: cpu, backend: AMXInt8}}\n", tmp_path
    )
    assert rule_of(found)["replace"]["kwargs"] == {"weights": "int8"}
    assert "vars" not in yaml.safe_load(file_text([found], Path("x.yaml"), None))


def test_a_block_alone_is_its_experts(tmp_path: Path) -> None:
    (found,) = outcomes("- match: {name: 'layers\\.[0-4]\\.mlp$'}\n  replace: {class: KQwen3MoeSparseMoeBlock}\n", tmp_path)
    assert rule_of(found)["match"] == {"kind": "experts", "layers": "0-4"}


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ("replace: {class: default, kwargs: {generate_device: 'cuda:1'}}", "device_map"),
        ("replace: {class: KTransformersLinear, kwargs: {generate_op: KLinearTorch}}", "16 bits"),
        (f"replace: {{class: {OPERATORS}.gate.KMoEGate}}", "routers"),
        (f"replace: {{class: {OPERATORS}.attention.KDeepseekV2Attention}}\n  recursive: false", "attention"),
    ],
)
def test_what_keeps_later_rules_off_stays(kept: str, why: str, tmp_path: Path) -> None:
    paths = Paths(("model.layers.0.mlp.experts",), ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head"))
    first = f"- match: {{name: 'self_attn{'$' if 'recursive' in kept else ''}'}}\n  {kept}\n"
    later = f"- match: {{class: torch.nn.Linear}}\n  {LINEAR}\n"
    stays, linear = outcomes(first + later, tmp_path, paths)
    assert stays.operator == "default" and why in stays.notes[0] and not stays.doubtful
    assert rule_of(stays).get("recursive", True) == ("recursive" not in kept)
    assert rule_of(linear)["expect"] == 2
    (alone,) = outcomes(first, tmp_path, paths)
    assert (alone.operator, alone.doubtful) == (None, False), "with nothing after it, it does nothing"


def test_experts_that_a_default_keeps_stay(tmp_path: Path) -> None:
    text = f"- match: {{name: 'layers\\.0\\.'}}\n  replace: {{class: default}}\n- match: {{name: experts$}}\n  {EXPERTS}\n"
    stays, experts = outcomes(text, tmp_path)
    assert stays.operator == "default" and rule_of(experts)["match"]["layers"] == "1-199"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- match: {name: x}\n  replace: {class: mine.Thing}\n", "unknown class 'mine.Thing'"),
        (
            "- match: {name: x}\n  replace: {class: ktransformers.operators.other.Thing}\n",
            "unknown class 'ktransformers.operators.other.Thing'",
        ),
        (f"- match: {{clas: x}}\n  {EXPERTS}\n", "line 1: KTransformers has no key 'clas' in match; did you mean 'class'?"),
        (f"- macth: {{name: x}}\n  {EXPERTS}\n", "line 1: KTransformers has no key 'macth' in a rule; did you mean 'match'?"),
        (f"- match: {{name: '['}}\n  {EXPERTS}\n", "name '[' is not a valid regular expression"),
        (f"- match: {{name: {'x' * 501}}}\n  {EXPERTS}\n", "it has 501 characters, and at most 500 are allowed"),
        (f"- match: {{name: 7}}\n  {EXPERTS}\n", "name must be text"),
        (f"- {EXPERTS}\n", "match is missing"),
        ("- match: {name: x}\n  replace: {kwargs: {}}\n", "replace has no 'class'"),
        (f"- match: {{name: expertz}}\n  {EXPERTS}\n", "name 'expertz' matches no experts by their name in transformers 5"),
        (f"- match: {{class: mine.Attention}}\n  {LINEAR}\n", "class 'mine.Attention' is not torch.nn.Linear"),
        (
            f"- match: {{name: experts}}\n  {EXPERTS}\n- match: {{name: 'mlp.experts'}}\n  {EXPERTS}\n",
            "earlier rules take all modules that it matches",
        ),
    ],
)
def test_rules_without_an_equivalent_are_reported(text: str, why: str, tmp_path: Path) -> None:
    found = outcomes(text, tmp_path)[-1]
    assert (found.operator, found.doubtful, found.lines) == (None, True, ())
    assert why in found.notes[0]


def test_what_ktransformers_ignores_is_reported(tmp_path: Path) -> None:
    text = '- match: {name: experts}\n  replace: {class: KTransformersExperts, kwargs: {generate_devcie: cpu}}\n  recursive: "False"\n'
    (found,) = outcomes(text, tmp_path)
    assert found.operator == "hybrid_experts"
    assert any("argument 'generate_devcie' is not known; did you mean 'generate_device'?" in note for note in found.notes)
    assert any("recursive is text 'False', in quotes, which KTransformers reads as true" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "this rule file is empty"),
        ("rules:\n- match: {kind: experts}\n", "this is a rule file of moegraft"),
        ("just: words\n", "is a list of rules with 'match' and 'replace', not a mapping"),
        ("- words\n", "a rule must be a mapping"),
        ("- !!python/object/apply:os.system ['true']\n", "tags are not allowed in rule files"),
        ("- &a {match: {name: x}}\n- *a\n", "anchors are not allowed in rule files"),
        ("- " + "[" * 70_000, "a rule file may have at most 64 KiB"),
    ],
)
def test_what_is_no_rule_file_is_refused(text: str, why: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(RuleErrors, match=why):
        read_their_rules(path)
    result = run("init", "--from-ktransformers", path, "--out", tmp_path / "ours.yaml")
    assert result.exit_code == 1 and why in result.stderr and str(path) in result.stderr
    assert not (tmp_path / "ours.yaml").exists()


def test_a_file_of_which_nothing_can_be_mapped_writes_nothing(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    path, target = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    path.write_text(f"- match: {{name: norm}}\n  replace: {{class: {OPERATORS}.layernorm.RMSNorm}}\n")
    result = run("init", "--from-ktransformers", path, "--out", target)
    assert (result.exit_code, result.stdout) == (1, "nothing is written: no rule could be converted\n")
    assert f"{path}:1:3: notice: RMSNorm: left out: norms stay transformers' own" in result.stderr
    assert not target.exists()
    assert run_json("init", "--from-ktransformers", path, "--out", target)["rules"] is None


def test_what_the_command_refuses(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "theirs.yaml"
    assert run("init", "--from-ktransformers", path, "--out", "-").exit_code == 2, "there is no such file"
    path.write_text(WHOLE)
    refused = run("init", "--from-ktransformers", path, "--goal", "quality", "--gpu-memory", "24GiB", "--out", "-")
    assert refused.exit_code == 2 and "--goal, --gpu-memory: --from-ktransformers converts a file" in refused.stderr
    refused = run("init", "--from-ktransformers", path, "--out", path)
    assert refused.exit_code == 2 and "exists; give --force" in refused.stderr and path.read_text() == WHOLE


def test_their_words_cannot_leave_a_comment_or_a_quote(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "a\nrules: [].yaml"
    path.write_text(f"""- match: {{name: "q'\\n- x: y"}}\n  {LINEAR}\n- match: {{name: x}}\n  replace: {{class: "K\\n- rules: []"}}\n""")
    text = run("init", "--from-ktransformers", path, "--out", "-").stdout
    (rule,) = yaml.safe_load(text)["rules"]
    assert rule["match"]["name"] == "q'\n- x: y"
