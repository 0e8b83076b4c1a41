"""What /stats says of drafts and devices, under the shipped file that has everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import build_model, case_of, prompt
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.chat.answer import work_lines
from moegraft.injection.demo import demo_path
from moegraft.operators.experts.hybrid import HybridExperts

VARS = {"gpu": "emulated", "weights": "stored", "cache": 0.5, "target": 0.0}


def tiny() -> PreTrainedModel:
    return build_model(case_of("qwen3_moe"))


def test_all_features_together_equal_the_stock_model_and_are_reported(tmp_path: Path) -> None:
    stock = tiny().generate(prompt(8), do_sample=False, max_new_tokens=40)
    rules = tmp_path / "exact.yaml"  # int8 linear layers would round
    rules.write_text("extends: all\nrules:\n- {id: linears, match: {kind: linear}, replace: {class: default}}\n")
    model = optimize_and_load(tiny(), rules, vars=VARS, progress=False, threads=1)
    assert work_lines(model)[0].startswith("emulated:0: slots ") and len(work_lines(model)) == 1  # no draft yet
    assert torch.equal(model.generate(prompt(8), do_sample=False, max_new_tokens=40), stock)
    drafts, device = work_lines(model)
    found = model.moegraft.model_operator.statistics()
    assert drafts.startswith(f"drafts: {found['rounds']} rounds of ") and " s drafting, " in drafts and "accepted by position" in drafts
    assert drafts.endswith(f"; {found['schedule']}") and "loads shared by tokens verified together: " in device
    assert "experts transferred on demand: " in device and "loaded ahead of verifications and used there: " in device


def test_leaving_neurons_out_goes_with_drafts() -> None:
    model = optimize_and_load(demo_path(), "all", vars=VARS | {"target": 0.5}, progress=False, threads=1)
    assert model.generate(prompt(8), do_sample=False, max_new_tokens=30).shape[1] > 20
    assert model.moegraft.model_operator.statistics()["rounds"] > 0
    assert model.moegraft.statistics()["sparsity"][0]["routed_sparsity"] == pytest.approx(0.5, abs=0.1)


def test_drafts_leave_out_more_neurons_by_a_variable_of_the_shipped_file() -> None:
    given = VARS | {"target": 0.3, "draft_sparsity": 0.8, "draft_top_k": 4}
    model = optimize_and_load(demo_path(), "all", vars=given, progress=False, threads=1)
    assert model.generate(prompt(8), do_sample=False, max_new_tokens=30).shape[1] > 20
    layer = next(module for module in model.modules() if isinstance(module, HybridExperts))
    found: Any = layer.statistics()["sparsity"]
    assert found["routed_sparsity"] == pytest.approx(0.3, abs=0.1) and found["draft_routed_sparsity"] == pytest.approx(0.8, abs=0.1)
    assert model.moegraft.model_operator.statistics()["rounds"] > 0


def test_a_lossy_mode_reports_its_agreement(tmp_path: Path) -> None:
    rules = tmp_path / "lossy.yaml"
    draft = "{class: speculative_draft, kwargs: {schedule: fixed, mode: adaptive, tolerance: 0.9}}"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n- match: {{kind: model}}\n  replace: {draft}\n")
    model = optimize_and_load(tiny(), rules, progress=False, threads=1)
    model.generate(prompt(8), do_sample=False, max_new_tokens=30)
    found = model.moegraft.model_operator.statistics()
    drafts, steps = work_lines(model)
    assert steps.startswith("decode steps: ") and " as native programs, " in steps and " of them outside kernels" in steps
    assert drafts.endswith(
        f"{found['agreement']:.1%} of tokens as in lossless decoding, perplexity {found['perplexity']:.2f} under the full model"
    )


def test_of_a_stock_model_there_is_nothing_to_tell() -> None:
    assert work_lines(tiny()) == []
