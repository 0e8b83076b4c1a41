"""The rule files that come with moegraft, and their guide, hold what they say."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.documents import PAGES, Block, blocks, the_block
from support.families import FamilyCase, build_config, family_cases
from support.rule_support import findings_of, write
from torch import nn
from transformers import AutoModelForCausalLM

from moegraft.injection.planning import plan
from moegraft.injection.rules import DEFAULT_RULES, read_rules
from moegraft.injection.rules.ktransformers import CLASSES, their_class
from moegraft.operators.registry import load_registry
from moegraft.rules import FORMER_NAMES, shipped_rules

REGISTRY = load_registry()
GUIDE = ROOT / "rules" / "README.md"


def cases() -> dict[str, FamilyCase]:
    return {case.model_type: case for case in family_cases() if case.buildable}


def on_meta(case: FamilyCase) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(build_config(case), dtype=torch.bfloat16)
    return model


@pytest.mark.parametrize("name", sorted(shipped_rules()))
def test_a_shipped_file_is_valid(name: str) -> None:
    assert read_rules(name, registry=REGISTRY).rules


@pytest.mark.parametrize("name", sorted(set(shipped_rules()) - {"cpu-exact"}))
def test_weights_can_be_chosen_in_every_file(name: str) -> None:
    for weights in ("int4", "bfloat16"):
        rules = read_rules(name, vars={"weights": weights}, registry=REGISTRY).rules
        assert [getattr(rule.options, "weights", None) for rule in rules if rule.match.kind == "experts"] == [weights]


SMALL = [("cpu_norm", None), ("cpu_router", None), ("cpu_recurrent", None)]
FUSED = [("fused_norm", None), ("fused_router", None), ("cpu_recurrent", None)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", [("hybrid_experts", "int8"), ("quantized_linear", "int8"), ("cpu_attention", None), *SMALL]),
        ("cpu-exact", [("hybrid_experts", "stored"), ("cpu_attention", None), ("cpu_recurrent", None)]),
        ("hybrid", [("hybrid_experts", "int4"), ("quantized_linear", "int8"), ("fused_attention", None), *FUSED]),
    ],
    ids=["cpu", "cpu-exact", "hybrid"],
)
def test_the_generic_files(name: str, expected: list[tuple[str, str]]) -> None:
    rules = read_rules(name, registry=REGISTRY).rules
    assert [(rule.operator, getattr(rule.options, "weights", None)) for rule in rules] == expected


def test_the_gpu_packs_the_same_linear_layers_as_the_cpu() -> None:
    names = [[rule.match.name for rule in read_rules(name, registry=REGISTRY).rules if rule.id == "linears"] for name in ("cpu", "hybrid")]
    assert names[0] == names[1] and names[0][0]


@pytest.mark.parametrize("name", [*FORMER_NAMES, "qwen3_5_moe_text"])
def test_cpu_plans_every_family(name: str) -> None:
    model = on_meta(cases()[name])
    found = plan(model, read_rules(DEFAULT_RULES, registry=REGISTRY), registry=REGISTRY, dtype=torch.bfloat16)
    experts = [path for path, _ in model.named_modules() if path.endswith(".experts")]
    assert [swap.module for swap in found.swaps if swap.operator == "hybrid_experts"] == experts
    linears = [swap.module for swap in found.swaps if swap.operator == "quantized_linear"]
    assert "lm_head" in linears and any(path.endswith("o_proj") for path in linears)
    assert not any(path.endswith(("gate", "router")) or "visual" in path for path in linears)
    assert found.notices == ()
    assert sum(swap.footprint.total_bytes for swap in found.swaps) > 0


@pytest.mark.parametrize("block", [block for block in blocks("yaml") if not block.mark.startswith("needs")], ids=lambda block: block.place)
def test_the_examples_of_the_documentation_are_valid(block: Block, tmp_path: Path) -> None:
    assert findings_of(lambda: read_rules(write(tmp_path, block.text), registry=REGISTRY)) == (), block.text


def test_the_guide_names_every_file_and_operator() -> None:
    text, options = GUIDE.read_text(encoding="utf-8"), (GUIDE.parent / "guide" / "options.md").read_text(encoding="utf-8")
    for name in [*shipped_rules(), *REGISTRY]:
        assert f"`{name}`" in text, name
    for operator in REGISTRY:
        assert f"| `{operator}` |" in options, operator
        assert all(f"`{option.name}`" in options for option in fields(REGISTRY[operator].options_type)), operator


def test_the_guides_file_of_ktransformers_is_refused_with_advice(tmp_path: Path) -> None:
    found = findings_of(lambda: read_rules(write(tmp_path, the_block("", "theirs").text), registry=REGISTRY))
    assert [finding.position.line for finding in found] == [4, 11, 11]
    assert all(re.search("is an? (class|argument) of KTransformers", finding.message) for finding in found)


def test_the_page_for_ktransformers_gives_the_replacements_of_the_code() -> None:
    text = (GUIDE.parent / "guide" / "ktransformers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+`.*) \| (.+) \|$", text.partition("<!-- classes -->")[2].partition("<!-- end -->")[0], re.MULTILINE)
    assert len(rows) == len(CLASSES)
    for (theirs, ours), row in zip(rows, CLASSES, strict=True):
        replacement = {"experts": "hybrid_experts", "linear": "quantized_linear"}.get(
            row.becomes, f"no rule: {row.what} stay transformers' own"
        )
        assert replacement in ours and all(their_class(f"ktransformers.{name}") is row for name in re.findall(r"`(\w+)`", theirs))
    assert all(argument in text for argument in ("generate_device", "prefill_device", "generate_op", "prefill_op", "backend", "recursive"))


def test_links_between_the_pages_lead_somewhere() -> None:
    assert len(PAGES) > 5
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            there = (page.parent / target).resolve() if target else page
            assert there.exists(), (page, target)
            titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}, anchor


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("qwen3_next", {"in_proj_qkvz", "out_proj"}),
        ("qwen3_5_moe_text", {"in_proj_qkv", "in_proj_z", "out_proj"}),
        ("jamba", {"in_proj", "out_proj"}),
        ("lfm2_moe", {"in_proj", "out_proj"}),
        ("granitemoehybrid", {"in_proj", "out_proj"}),
        ("nemotron_h", {"in_proj", "out_proj"}),
        ("zaya", set()),  # out_proj is a router's
    ],
)
def test_large_projections_of_recurrent_layers_are_packed(name: str, packed: set[str]) -> None:
    model = on_meta(cases()[name])
    found = plan(model, read_rules(DEFAULT_RULES, registry=REGISTRY), registry=REGISTRY, dtype=torch.bfloat16)
    leaves = {swap.module.rpartition(".")[2] for swap in found.swaps if swap.operator == "quantized_linear"}
    assert {leaf for leaf in leaves if leaf.startswith(("in_proj", "out_proj"))} == packed
