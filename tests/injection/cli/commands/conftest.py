"""A tiny Qwen3-MoE checkpoint with a tokenizer, and the `moegraft` command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_tokenizer import byte_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner, Result

from moegraft.injection.cli.moegraft import app

Run = Callable[..., Result]
LAYERS = 12  # above 10, so that a pattern for layer 1 can take 10 and 11 too


@pytest.fixture
def run() -> Run:
    """Runs `moegraft ARGUMENTS...`."""

    def moegraft(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="moegraft")

    return moegraft


@pytest.fixture
def run_json(run: Run) -> Callable[..., dict[str, Any]]:
    """Runs a command with --json and returns what it prints, with its exit code under `exit_code`."""

    def moegraft(*arguments: object) -> dict[str, Any]:
        result = run(*arguments, "--json")
        assert result.stdout, result.stderr
        return {**json.loads(result.stdout), "exit_code": result.exit_code}

    return moegraft


@pytest.fixture
def rules(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a rule file."""

    def write(text: str, name: str = "rules.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def experts_rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts on the CPU and nothing else, in the weight type that `--var weights=TYPE` gives."""
    path = tmp_path_factory.mktemp("rules") / "experts.yaml"
    rule = '- {match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weights: "${weights}"}}}'
    path.write_text(f"vars: {{weights: int8}}\nrules:\n{rule}\n")
    return path


def tiny_config(**changes: object) -> Qwen3MoeConfig:
    sizes: dict[str, object] = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "initializer_range": 0.2,
        "eos_token_id": 0,
        "dtype": torch.float32,
    }
    return Qwen3MoeConfig(**sizes | changes)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 0 is dense, layers 1 to 11 have four experts."""
    path = tmp_path_factory.mktemp("tiny_moe")
    torch.manual_seed(0)
    byte_tokenizer().save_pretrained(path)
    Qwen3MoeForCausalLM(tiny_config()).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def config_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of that checkpoint alone."""
    path = tmp_path_factory.mktemp("tiny_config")
    (path / "config.json").write_text((folder / "config.json").read_text())
    return path
