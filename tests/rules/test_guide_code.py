"""The Python of the documentation runs: the operator that the guide writes is found, planned, loaded and as exact as it says."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents import blocks, the_block
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.moegraft import app
from moegraft.injection.demo import demo_path
from moegraft.operators.registry import ENTRY_POINT_GROUP, load_registry

RULES = next(block.text for block in blocks("yaml") if "fp8_linear" in block.text)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The guide's operator as an installed package, by the entry point that the guide shows."""
    operator = the_block("python", "operator").text
    (tmp_path / "fp8_linear.py").write_text(operator)
    project = tomllib.loads(the_block("toml", "entry point").text)["project"]["entry-points"]
    assert list(project) == [ENTRY_POINT_GROUP]
    info = tmp_path / "fp8_linear-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8-linear\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in project[ENTRY_POINT_GROUP].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))
    (tmp_path / "rules.yaml").write_text(RULES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("fp8_linear", None)


def test_the_operator_is_written_in_forty_lines() -> None:
    code = the_block("python", "operator").text.partition("class Fp8Linear(Operator)")[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


def test_the_operator_is_found_and_planned_with_the_error_in_the_guide(installed: Path) -> None:
    assert "fp8_linear" in load_registry()
    model = optimize_and_load(demo_path(), installed / "rules.yaml", progress=False)
    swaps = {swap.module: swap.footprint.total_bytes for swap in model.moegraft.plan.swaps}
    assert len(swaps) == 20
    stock = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.bfloat16)
    torch.manual_seed(0)
    errors = []
    for path, held_bytes in swaps.items():
        operator, module = model.get_submodule(path), stock.get_submodule(path)
        assert operator.weight.nbytes + operator.scale.nbytes == held_bytes < 0.6 * module.weight.nbytes
        x = torch.randn(16, module.in_features).to(torch.bfloat16)
        with torch.no_grad():
            wanted = module(x).float()
        errors.append(float((operator(x).float() - wanted).norm() / wanted.norm()))
    assert sum(errors) / len(errors) == pytest.approx(0.027, abs=0.002)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_the_commands_know_the_operator(installed: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    assert run("check", "rules.yaml", "--strict").exit_code == 0
    assert "fp8_linear" in run("explain", "rules.yaml").stdout
    assert "fp8_linear" in json.dumps(json.loads(run("schema").stdout))
    (installed / "large.yaml").write_text(RULES.replace("1024", "99999999"))
    refused = run("explain", "large.yaml")
    assert refused.exit_code == 1 and "weights, fewer than 99999999" in refused.stdout + refused.stderr
    (installed / "typo.yaml").write_text(RULES.replace("smallest", "smalest"))
    assert "unknown option 'smalest' of fp8_linear; did you mean 'smallest'?" in run("check", "typo.yaml").stdout


def test_a_bias_is_kept(installed: Path) -> None:
    from fp8_linear import Fp8Linear  # type: ignore[import-not-found]

    from moegraft.injection.checkpoint.sources import ModuleSource

    module = torch.nn.Linear(64, 32)
    operator = Fp8Linear.build(module, Fp8Linear.options_type(), None)
    operator.load(ModuleSource("linear", module), lambda size: None)
    x = torch.randn(3, 64)
    assert (operator(x) - module(x)).norm() < 0.05 * module(x).norm()
    assert operator.bias is not None and torch.equal(operator.bias, module.bias)


RUN_ELSEWHERE = ("operator", "with Ray")  # here, and in the tests of replicas


@pytest.mark.parametrize("block", [block for block in blocks("python") if block.mark not in RUN_ELSEWHERE], ids=lambda block: block.place)
def test_the_python_of_the_pages_runs(block: Any, installed: Path) -> None:
    if "peft" in block.text:
        pytest.importorskip("peft", reason="PEFT is not installed (the extra `train`)")
    (installed / "mine.yaml").write_text("extends: cpu\n")
    exec(compile(block.text.replace("path/or/hub-id", demo_path().as_posix()), block.place, "exec"), {"__name__": "a page"})


@pytest.mark.parametrize("language", ["json", "toml"])
def test_other_files_of_the_pages_can_be_read(language: str) -> None:
    found = blocks(language)
    assert found
    for block in found:
        assert (json if language == "json" else tomllib).loads(block.text)
