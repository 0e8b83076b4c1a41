"""`--gguf` of the programs: config and tokenizer from the folder, weights from the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.gguf_files import BlockType, write_gguf
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from moegraft.injection.cli.local_chat import app as local_chat

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
    planned = run("--model", folder, "--gguf", folder, "--rules", "cpu-exact", "--dry-run")
    assert planned.exit_code == 0 and "hybrid_experts" in planned.stdout, planned.stderr
    for option in ("--gguf", "--gguf_path"):
        result = run("--model", folder, option, folder / "model.gguf", "--rules", "cpu-exact", *ANSWER)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == expected.stdout


def test_a_mistake_is_one_sentence(folder: Path) -> None:
    result = run("--model", folder, "--gguf", folder / "modle.gguf", *ANSWER)
    assert result.exit_code == 2 and result.stdout == ""
    assert "modle.gguf: no such GGUF file or folder" in result.stderr and "Traceback" not in result.stderr
