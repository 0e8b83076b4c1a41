"""`moegraft explain`: every module with its rule, every rule's fate on one module, and models of any size."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.programs import Program
from transformers import DeepseekV3Config
from typer.testing import Result

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
Write = Callable[..., Path]

RULES = r"""
- id: head
  match: {name: '^lm_head$'}
  replace: {class: default}
- id: queries
  match: {kind: linear, name: '\.q_proj$', layers: "2-3"}
  replace: {class: quantized_linear, kwargs: {weights: int4}}
- id: attention
  match: {name: '\.self_attn$', layers: "4"}
  replace: {class: default}
  recursive: false
- id: experts
  match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {weights: int8}}
- id: linears
  match: {kind: linear}
  replace: {class: quantized_linear}
"""
EXPERTS = "model.layers.5.mlp.experts"


def fates(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {trial["rule"]: (trial["outcome"], trial["reason"]) for trial in found["trials"]}


def test_the_table(run: Run, rules: Write, config_folder: Path) -> None:
    result = run("explain", rules(RULES), "--model", config_folder)
    assert result.exit_code == 0, result.output
    rows = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines()}
    assert rows["model.layers.{1-11}.mlp.experts"][1:5] == ["experts", "rules.yaml:12", "hybrid_experts", "weights=int8"]
    assert rows["model.layers.{2-3}.self_attn.q_proj"][1:5] == ["queries", "rules.yaml:5", "quantized_linear", "weights=int4"]
    assert rows["lm_head"][1:4] == ["head", "rules.yaml:2", "default"]
    assert rows["everything else"][-1] == "cpu"
    one_each = run("explain", rules(RULES), "--model", config_folder, "--each").stdout
    assert sum(" hybrid_experts " in line for line in one_each.splitlines()) == 11


def test_json_is_complete(run_json: RunJson, rules: Write, config_folder: Path) -> None:
    found = run_json("explain", rules(RULES), "--model", config_folder)
    assert (found["exit_code"], found["ok"], found["model_class"]) == (0, True, "Qwen3MoeForCausalLM")
    swaps = {module["module"]: module for module in found["modules"]}
    assert len(swaps) == len(found["modules"])
    experts = swaps[EXPERTS]
    assert (experts["rule"], experts["line"], experts["operator"]) == ("experts", 12, "hybrid_experts")
    assert experts["options"]["weights"] == "int8"
    total = sum(module["bytes_by_device"]["cpu"] for module in found["modules"])
    assert found["bytes_by_device"] == {"cpu": total + found["rest_bytes"]}
    assert {module["module"] for module in found["left_alone"]} == {"lm_head", "model.layers.4.self_attn"}


@pytest.mark.parametrize(
    ("module", "rule", "outcome", "reason"),
    [
        (EXPERTS, "experts", "won", "the first rule that matches"),
        (EXPERTS, "head", "lost", "name '^lm_head$' is not found in its path"),
        (EXPERTS, "queries", "lost", "it is of kind experts, not linear; it is in layer 5, not in 2-3"),
        (EXPERTS, "linears", "not tried", "rule 'experts' comes first and matches; this rule does not match"),
        ("model.layers.2.self_attn.q_proj", "queries", "won", "the first rule that matches"),
        ("model.layers.2.self_attn.q_proj", "linears", "not tried", "matches as well"),
        ("model.layers.4.self_attn.q_proj", "linears", "not tried", "inside model.layers.4.self_attn, which rule 'attention' takes"),
        ("lm_head", "head", "won", "stays as it is"),
        ("lm_head", "experts", "not tried", "rule 'head' comes first"),
        ("model.rotary_emb", "linears", "lost", "of no kind"),
        ("model.norm", "queries", "lost", "in no layer"),
    ],
)
def test_each_rule_has_its_reason(
    module: str, rule: str, outcome: str, reason: str, run_json: RunJson, rules: Write, config_folder: Path
) -> None:
    found = fates(run_json("explain", rules(RULES), "--model", config_folder, "--module", module))
    assert list(found) == ["head", "queries", "attention", "experts", "linears"]
    assert found[rule][0] == outcome
    assert reason in found[rule][1]


def test_a_model_with_several_operators(run: Run, run_json: RunJson, rules: Write, config_folder: Path) -> None:
    rule = "- {{id: {}, match: {{kind: model}}, replace: {{class: {}, kwargs: {{{}}}}}}}\n"
    drafts, codes = (
        rule.format("drafts", "speculative_draft", "draft: ngram"),
        rule.format("codes", "quantized_kv_cache", "backend: native"),
    )
    reads = "- {id: reads, match: {kind: attention}, replace: {class: cpu_attention}}\n"
    one, both = rules(reads + drafts, "one.yaml"), rules(reads + drafts + codes, "both.yaml")
    found = fates(run_json("explain", both, "--model", config_folder, "--module", ""))
    assert found["drafts"] == ("won", "the first rule that matches")
    assert found["codes"] == ("won", "the first rule that matches for its operator")
    text = run("explain", both, "--model", config_folder, "--module", "").stdout
    assert "replaced by speculative_draft (" in text and "replaced by quantized_kv_cache (" in text and "no rule takes it" not in text
    (changed,) = run_json("diff", one, both, "--model", config_folder)["modules"]
    assert changed["before"] is None and changed["after"]["operator"] == "quantized_kv_cache"


def test_a_part_of_what_is_replaced(run: Run, run_json: RunJson, rules: Write, config_folder: Path) -> None:
    path = rules("- {id: all, match: {name: experts}, replace: {class: hybrid_experts}}\n")
    module = f"{EXPERTS}.act_fn"
    assert (
        "inside model.layers.5.mlp.experts, which this rule replaces"
        in fates(run_json("explain", path, "--model", config_folder, "--module", module))["all"][1]
    )
    assert (
        f"it is replaced with {EXPERTS}, which rule 'all' takes"
        in run("explain", path, "--model", config_folder, "--module", module).stdout
    )


def test_class_and_text(run: Run, rules: Write, config_folder: Path) -> None:
    path = rules("- {match: {class: torch.nn.Linear, name: gate_proj}, replace: {class: quantized_linear}}\n")
    lost = run("explain", path, "--model", config_folder, "--module", EXPERTS)
    assert f"{EXPERTS}: Qwen3MoeExperts, of kind experts\n" in lost.stdout
    assert "its class is Qwen3MoeExperts, not torch.nn.Linear" in lost.stdout
    assert "no rule takes it: it is not replaced" in lost.stdout
    won = run("explain", path, "--model", config_folder, "--module", "model.layers.0.mlp.gate_proj")
    assert "replaced by quantized_linear (weights=int8, gpu=none)" in won.stdout


def test_rules_that_do_not_fit_are_still_explained(run: Run, run_json: RunJson, rules: Write, config_folder: Path) -> None:
    path = rules("- {id: typo, match: {name: 'mlp.expert$'}, replace: {class: hybrid_experts}}\n")
    result = run("explain", path, "--model", config_folder, "--module", EXPERTS)
    assert result.exit_code == 1
    assert "name 'mlp.expert$' is not found in its path" in result.stdout
    found = run_json("explain", path, "--model", config_folder)
    assert (found["exit_code"], found["ok"], found["modules"]) == (1, False, [])
    assert found["diagnostics"][0]["line"] == 1


def test_without_rules_the_shipped_ones_are_explained(run_json: RunJson, config_folder: Path) -> None:
    found = run_json("explain", "--model", config_folder)
    assert [Path(file).name for file in found["files"]] == ["cpu.yaml"]


def test_what_cannot_be_answered(run: Run, rules: Write, config_folder: Path, tmp_path: Path) -> None:
    missing = run("explain", rules(RULES), "--model", config_folder, "--module", EXPERTS.removesuffix("s"))
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert f"the nearest is {EXPERTS}" in missing.stderr
    assert run("explain", tmp_path / "none.yaml", "--model", config_folder).exit_code == 2
    wrong = run("explain", rules("- match: 3\n"), "--model", config_folder)
    assert (wrong.exit_code, wrong.stdout) == (1, "")


MEMORY = """
import resource, sys
from moegraft.injection.cli.moegraft import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def test_671_billion_parameters_in_less_than_a_gigabyte(rules: Write, tmp_path: Path) -> None:
    DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path / "v3")
    path = rules("- {id: experts, match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weights: int4}}, expect: 58}\n")
    arguments = ["explain", path, "--model", tmp_path / "v3", "--json"]
    program = Program(["-c", MEMORY, *map(str, arguments)], os.environ)
    output, errors = program.communicate()
    assert program.returncode == 0, errors
    assert int(errors.split()[-1]) * 1024 < 1_000_000_000
    found = json.loads(output)
    assert [module["module"] for module in found["modules"]] == [f"model.layers.{layer}.mlp.experts" for layer in range(3, 61)]
    experts = 58 * 256 * 3 * 7168 * 2048
    assert found["replaced_bytes"] == 2 * experts
    assert 4.5 / 8 <= sum(module["bytes_by_device"]["cpu"] for module in found["modules"]) / experts < 4.6 / 8
    assert 600e9 < experts + found["rest_bytes"] / 2 < 700e9
