"""Every command about a model takes its weights from a GGUF file, and shows what the rules come to with that file's types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_tokenizer import byte_tokenizer
from support.gguf_files import BlockType, write_gguf
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import Result

from moegraft.injection.estimate import measure as store
from moegraft.injection.estimate.measure import Measurements
from moegraft.operators.base import Rate

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
KINDS = {"_down_exps": BlockType.Q6_K, "_exps": BlockType.Q4_K}
EXPERT_BYTES = (2 * 144 + 210) * 256  # I = H = 256: a row of each is one block
MODULE = "model.layers.1.mlp.experts"
RATES = {name: Rate(1.0, 1.0) for name in ("float32", "bfloat16", "int8", "int4")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The options that name a folder without weights, and the file that has them."""
    folder = tmp_path_factory.mktemp("gguf")
    torch.manual_seed(0)
    byte_tokenizer().save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=260,
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.05,
        eos_token_id=0,
        dtype=torch.float32,
    )
    config.save_pretrained(folder)
    write_gguf(folder / "model.gguf", Qwen3MoeForCausalLM(config), KINDS)
    return ["--model", folder, "--gguf", folder / "model.gguf"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 12)
    return path


def test_explain_shows_what_the_file_has(run: Run, run_json: RunJson, model: list[str | Path]) -> None:
    found = run_json("explain", "cpu-exact", *model)
    swap = next(swap for swap in found["modules"] if swap["module"] == MODULE)
    assert swap["options"]["weights"] == "q4_k+q6_k"
    assert swap["bytes_by_device"] == {"cpu": 4 * EXPERT_BYTES}
    assert "q4_k+q6_k" in run("explain", "cpu-exact", *model, "--module", MODULE).stdout


def test_check_counts_what_the_file_has(run: Run, run_json: RunJson, model: list[str | Path]) -> None:
    found = run_json("check", "cpu-exact", *model)
    assert (found["exit_code"], found["files"][0]["modules"]) == (0, 4), "two layers: experts and attention"
    without = run_json("check", "cpu-exact", *model[:2])
    assert found["files"][0]["bytes_by_device"]["cpu"] < without["files"][0]["bytes_by_device"]["cpu"]
    refused = run("check", "cpu-exact", *model[2:])
    assert refused.exit_code == 2 and "the file alone does not describe its model" in refused.stderr


def test_plan_predicts_with_super_blocks(
    run_json: RunJson, model: list[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store.save(Measurements(1.0, RATES, RATES, 1e-3, 0.0))
    found = run_json("plan", "cpu-exact", *model)
    assert found["speed"]["decode_tokens_s"] > 0
    assert found["bytes_by_device"]["cpu"] < run_json("plan", "cpu-exact", *model[:2])["bytes_by_device"]["cpu"]


def test_init_weighs_what_the_file_has(
    run: Run, run_json: RunJson, model: list[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store.save(Measurements(1.0, RATES, RATES, 1e-3, 0.0))
    file = tmp_path / "mine.yaml"
    found = run_json("init", *model, "--output", file, "--gpu-memory", "0")
    best = found["candidates"][found["chosen"]]
    assert best["experts"] in ("stored", "int8")  # int4 would be as large for gate and up, and a second loss for down
    assert "with the weights of model.gguf" in file.read_text()
    assert run("check", file, *model, "--strict").exit_code == 0


def test_diff_compares_what_the_file_has(run_json: RunJson, model: list[str | Path]) -> None:
    """Both keep the experts; without the file one has floats."""

    def experts(found: dict[str, Any]) -> bool:
        return any(one["module"] == MODULE for one in found["modules"])

    assert not experts(run_json("diff", "cpu", "cpu-exact", *model))
    assert experts(run_json("diff", "cpu", "cpu-exact", *model[:2]))


def test_verify_has_the_file_as_its_stock_model(run_json: RunJson, model: list[str | Path], text: Path) -> None:
    found = run_json("verify", *model, "--rules", "cpu-exact", "--text", text, "--tokens", 64)
    assert found["exit_code"] == 0
    assert {layer["weight_type"] for layer in found["layers"]} == {"q4_k+q6_k"}
    assert all(0 < layer["relative_error"] < 0.04 for layer in found["layers"])


def test_calibrate_reads_the_file(run_json: RunJson, model: list[str | Path], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "thresholds.json"
    found = run_json("calibrate", *model, "--rules", "cpu-exact", "--text", text, "--out", out, "--target", 0.5, "--window", 100)
    assert found["exit_code"] == 0 and out.is_file()
    assert found["layers"] == ["model.layers.0.mlp.experts", MODULE]
