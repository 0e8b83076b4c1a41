"""`--gguf` of the programs: config and tokenizer from the folder, weights from the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.gguf_files import BlockType, write_gguf
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from moegraft.injection.cli.local_chat import app as local_chat
from moegraft.injection.cli.moegraft import app as moegraft

ANSWER = ["--prompt", "hello", "--no-do-sample", "--max-new-tokens", "12"]


@pytest.fixture
def folder(chat_folder: Path, tmp_path: Path) -> Path:
    """The chat model's folder without its weights, and those in a GGUF file."""
    path = tmp_path / "model"
    shutil.copytree(chat_folder, path)
    write_gguf(path / "model.gguf", AutoModelForCausalLM.from_pretrained(chat_folder), {"_exps": BlockType.Q8_0})
    for weights in path.glob("*.safetensors*"):
        weights.unlink()
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(local_chat, list(map(str, arguments)), prog_name="local_chat")


def test_the_chat_answers_as_from_the_checkpoint(folder: Path, chat_folder: Path) -> None:
    expected = run("--model", chat_folder, "--rules", "cpu-exact", *ANSWER)
    write_gguf(folder / "model.gguf", AutoModelForCausalLM.from_pretrained(chat_folder))
    for option in ("--gguf", "--gguf_path"):
        result = run("--model", folder, option, folder / "model.gguf", "--rules", "cpu-exact", *ANSWER)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == expected.stdout


def test_a_mistake_is_one_sentence(folder: Path) -> None:
    result = run("--model", folder, "--gguf", folder / "modle.gguf", *ANSWER)
    assert result.exit_code == 2 and result.stdout == ""
    assert "modle.gguf: no such GGUF file or folder" in result.stderr and "Traceback" not in result.stderr


def test_the_plan_of_a_file(folder: Path) -> None:
    result = run("--model", folder, "--gguf", folder, "--rules", "cpu-exact", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "int8" in result.stdout or "hybrid_experts" in result.stdout
    sizes = []
    for given in (["--gguf", str(folder)], []):
        planned = CliRunner().invoke(moegraft, ["plan", "cpu-exact", "--model", str(folder), *given, "--json"])
        assert planned.exit_code == 0, planned.stderr
        sizes.append(json.loads(planned.stdout))
    assert sizes[0] != sizes[1], "experts of 8 bits take less than the config's dtype"


def test_verify_reads_the_stock_weights_from_the_file(folder: Path) -> None:
    arguments = ["verify", "--model", str(folder), "--gguf", str(folder), "--rules", "cpu-exact", "--tokens", "32", "--json"]
    result = CliRunner().invoke(moegraft, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {layer["weight_type"] for layer in found["layers"]} == {"int8"}
