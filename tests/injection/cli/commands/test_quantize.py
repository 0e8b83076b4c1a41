"""`moegraft quantize`: the file loads with the other commands, and every mistake is one sentence and leaves no file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.byte_tokenizer import byte_tokenizer
from support.mtp import write_checkpoint
from typer.testing import Result

from moegraft.injection.texts import read_text

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]


def test_the_file_loads_and_verifies(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    out, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    text.write_text(read_text("calibration")[:400])
    found = run_json("quantize", "--out", out, "--weights", "Q4_K,down=Q8_0,attention=Q8_0", "--imatrix", text)
    assert found["exit_code"] == 0 and found["importance"]
    assert set(found["bytes_by_type"]) == {"Q4_K", "Q8_0", "F32"} and found["fallbacks"] == []
    assert sum(found["bytes_by_type"].values()) == found["bytes"] < out.stat().st_size
    checked = run_json("verify", "--gguf", out, "--rules", "cpu", "--tokens", 32)
    assert checked["exit_code"] == 0
    assert any(layer["weight_type"] == "q4_k+int8" for layer in checked["layers"])
    again = run("quantize", "--out", out)
    assert (
        again.exit_code == 2
        and again.stderr == f"moegraft: error: {out} exists; give --force to overwrite it, or --out with another FILE\n"
    )


def test_notices_of_short_texts_and_of_weights_that_are_rounded_already(run: Run, tmp_path: Path) -> None:
    once, twice, text = tmp_path / "once.gguf", tmp_path / "twice.gguf", tmp_path / "text.txt"
    text.write_text("Once upon a time")
    done = run("quantize", "--out", once, "--weights", "Q5_0", "--imatrix", text)
    assert done.exit_code == 0, done.stderr
    assert f"--imatrix: {text} has " in done.stderr and "at least 512 tokens" in done.stderr
    assert "rounded already" not in done.stderr
    text.write_text(read_text("calibration")[:8000])
    again = run("quantize", "--gguf", once, "--out", twice, "--weights", "Q4_0", "--imatrix", text)
    assert again.exit_code == 0, again.stderr
    assert "the model's weights are rounded already (" in again.stderr and "--imatrix: " not in again.stderr
    bundled = run("quantize", "--out", once, "--weights", "Q5_0", "--tokens", 100, "--force")
    assert "--imatrix: the bundled text has 100 tokens" in bundled.stderr


def test_a_full_disk_shows_before_the_text_is_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.delattr("moegraft.injection.importance.measure_importance")
    out = tmp_path / "model.gguf"
    done = run("quantize", "--out", out)
    assert done.exit_code == 2 and done.stderr == f"moegraft: error: {out}: No space left on device\n"
    assert not list(tmp_path.iterdir())


def test_people_read_sizes_and_what_fell_back(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "my model.gguf"
    done = run("quantize", "--out", out, "--weights", "Q6_K", "--imatrix", "none")
    assert done.exit_code == 0, done.stderr
    assert f"bits per weight; to chat: local_chat --gguf '{out}'\n" in done.stdout
    assert (
        "5 tensors in Q8_0 instead of Q6_K, whose blocks do not divide their rows: blk.0.ffn_down_exps.weight (rows of 64) and 4 more"
        in (done.stderr)
    )


def test_rank_0_alone_writes_the_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, files in (("1", []), ("0", ["model.gguf"])):
        monkeypatch.setenv("RANK", rank)
        done = run("quantize", "--out", tmp_path / "model.gguf", "--imatrix", "none")
        assert done.exit_code == 0, done.stderr
        assert [file.name for file in tmp_path.iterdir()] == files


def test_mtp_layers_that_no_file_has_are_left_out_with_a_notice(run: Run, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    sizes = {"mlp_only_layers": [3], "norm_topk_prob": True, "vocab_size": 257}  # the MTP layer is dense, and all others have experts
    write_checkpoint(tmp_path, "qwen3_moe", **sizes)
    done = run("quantize", "--model", tmp_path, "--out", tmp_path / "quantised.gguf", "--weights", "Q8_0", "--imatrix", "none")
    assert done.exit_code == 0, done.stderr
    assert "MTP layers are left out (" in done.stderr
    planned = run("plan", "cpu", "--model", tmp_path)
    assert "notice: the checkpoint has MTP layers, which are not loaded (" in planned.stdout
    assert "draft: mtp" in planned.stdout


def test_layers_of_other_types_have_rows_of_their_own(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    assert run("quantize", "--out", out, "--weights", "gate=Q4_K,up=Q4_K,down=Q8_0,down@1-2=Q4_0", "--imatrix", "none").exit_code == 0
    shown = run("explain", "cpu-exact", "--gguf", out).stdout
    found = {line.split()[0]: line.split()[4] for line in shown.splitlines() if ".mlp.experts" in line}
    assert found == {
        "model.layers.{0,3-4}.mlp.experts": "weights=q4_k+int8",
        "model.layers.{1-2}.mlp.experts": "weights=q4_k+int4",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "model.gguf", "--weights", "Q9"), "--weights: type 'Q9' cannot be written; the types are F32, F16, BF16, Q8_0"),
        (("--out", "model.gguf", "--weights", "middle=Q4_K"), "--weights: unknown role 'middle'"),
        (("--out", "model.gguf", "--weights", "down@9=Q4_K"), "types: 'down@9=Q4_K' fits no matrix of this model"),
        (("--out", "."), "--out . is a folder; give the name of a file in it"),
        (("--out", "model.bin"), "the name of a GGUF file ends with .gguf"),
        (("--out", "absent/model.gguf"), "the folder absent does not exist; create it first"),
        (("--out", "model.gguf", "--imatrix", "absent.txt"), "absent.txt: No such file or directory"),
        (("--out", "model.gguf", "--weights", "absent.yaml"), "absent.yaml: No such file or directory"),
    ],
)
def test_mistakes_are_one_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("quantize", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
