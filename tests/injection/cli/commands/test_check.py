"""`moegraft check`: each mistake of a rule file is named at its line and column, by the command, with the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.programs import Program
from typer.testing import Result

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
RIGHT = "- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {weights: int8}}\n"


@dataclass(frozen=True)
class Mistake:
    name: str
    text: str
    place: str  # line:column
    says: tuple[str, ...]


# The first ten are what KTransformers' users ran into; its own answer to each was silence or a KeyError.
MISTAKES = [
    Mistake("name-typo", "- match: {name: '\\.mlp\\.expert$'}\n  replace: {class: hybrid_experts}\n", "1:17", ("no module", "experts$")),
    Mistake(
        "layer-10-too", "- match: {kind: experts, name: layers.1.}\n  replace: {clas: hybrid_experts}\n", "2:13", ("'clas'", "'class'")
    ),
    Mistake("option-typo", RIGHT.replace("weights:", "wieghts:"), "2:45", ("'wieghts'", "did you mean 'weights'")),
    Mistake("option-value", RIGHT.replace("int8", "int5"), "2:54", ("'int5'", "int4")),
    Mistake("shadowed", RIGHT + RIGHT, "3:10", ("takes no module", "line 1")),
    Mistake("recursive-text", RIGHT + '  recursive: "False"\n', "3:14", ("true or false",)),
    Mistake("match-typo", RIGHT.replace("match", "macth"), "1:3", ("'macth'", "'match'")),
    Mistake("empty", "", "1:1", ("empty",)),
    Mistake("theirs", RIGHT.replace("hybrid_experts", "ktransformers.operators.experts.KTransformersExperts"), "2:20", ("hybrid_experts",)),
    Mistake("no-operator", RIGHT.replace("hybrid_experts", "hybrid_expert"), "2:20", ("did you mean 'hybrid_experts'",)),
    Mistake("expect", RIGHT + "  expect: 12\n", "3:11", ("(11 modules)", "12 are expected")),
    Mistake("requires", "requires: {model_type: mixtral}\nrules:\n" + RIGHT, "1:24", ("'mixtral'", "'qwen3_moe'")),
    Mistake("wrong-kind", RIGHT.replace("kind: experts", "kind: linear"), "1:17", ("kind experts", "kind linear")),
    Mistake("tab", "- match:\n\tkind: experts\n", "2:1", ("tab",)),
    Mistake("variable", RIGHT.replace("int8", "'${wieght}'"), "2:54", ("${wieght}", "not defined")),
    Mistake("extends", "extends: cpu-exct\n", "1:10", ("cpu-exct", "did you mean", "cpu-exact")),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_named_where_it_is(mistake: Mistake, run: Run, rules: Write, config_folder: Path) -> None:
    path = rules(mistake.text)
    result = run("check", path, "--model", config_folder)
    assert result.exit_code == 1, result.output
    (error,) = (line for line in result.stdout.splitlines() if ": error: " in line)  # one mistake is one error
    assert error.startswith(f"{path}:{mistake.place}: error: ")
    explained = run("explain", path, "--model", config_folder)
    assert explained.exit_code == 1 and error in explained.stdout + explained.stderr
    for part in mistake.says:
        assert part in result.stdout
    assert "Traceback" not in result.output


def test_right_rules(run: Run, rules: Write, config_folder: Path) -> None:
    path = rules(RIGHT)
    assert (run("check", path).exit_code, run("check", path).stdout) == (0, f"{path}: no errors\n")
    result = run("check", path, "--model", config_folder)
    assert result.exit_code == 0
    assert "replaces 11 modules of Qwen3MoeForCausalLM" in result.stdout


def test_warnings_fail_only_when_asked(run: Run, rules: Write, config_folder: Path) -> None:
    path = rules(RIGHT.replace("kind: experts", "kind: experts, name: 'layers.1.'"))
    result = run("check", path, "--model", config_folder)
    assert result.exit_code == 0
    assert "also takes layers 10-11" in result.stdout
    assert run("check", path, "--model", config_folder, "--strict").exit_code == 1


def test_several_files_are_all_checked(run_json: RunJson, rules: Write, config_folder: Path) -> None:
    good, bad = rules(RIGHT, "good.yaml"), rules(RIGHT.replace("int8", "int5"), "bad.yaml")
    found = run_json("check", bad, good, "--model", config_folder)
    assert (found["exit_code"], found["ok"]) == (1, False)
    assert [(file["rules"], file["ok"], file["modules"]) for file in found["files"]] == [(str(bad), False, None), (str(good), True, 11)]
    (diagnostic,) = found["files"][0]["diagnostics"]
    assert (diagnostic["file"], diagnostic["line"], diagnostic["column"], diagnostic["severity"]) == (str(bad), 2, 54, "error")


def test_variables_are_given(run: Run, rules: Write) -> None:
    path = rules("vars: {weights: int8}\nrules:\n" + RIGHT.replace("int8", '"${weights}"'))
    assert run("check", path, "--var", "weights=int4").exit_code == 0
    assert run("check", path, "--var", "weights=int5").exit_code == 1
    refused = run("check", path, "--var", "weights")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "give NAME=VALUE" in refused.stderr


def test_what_cannot_be_read_is_no_finding(run: Run, rules: Write, tmp_path: Path) -> None:
    for arguments, says in [
        ((tmp_path / "none.yaml",), "there is no such rule file"),
        ((tmp_path,), "Is a directory"),
        ((rules(RIGHT), "--model", tmp_path), "no config.json"),
        ((rules(RIGHT), "--model", "./nowhere/at/all"), "no such file or folder"),
        ((rules(RIGHT), "--model", "~nobody-of-this-name/model"), "this machine has no user of that name"),
        (("--no-such-option",), "No such option"),
    ]:
        result = run("check", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert says in result.output


def test_a_quantised_checkpoint_is_matched_and_reported_as_unloadable(run: Run, rules: Write, config_folder: Path, tmp_path: Path) -> None:
    text = (config_folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"quantization_config": {"quant_method": "bitsandbytes"},', 1))
    result = run("check", rules(RIGHT), "--model", tmp_path)
    assert result.exit_code == 0
    assert "quantised by a method that cannot be loaded: bitsandbytes" in result.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("check", "--help")], ids=["program", "command"])
def test_help_needs_no_torch_and_no_colour_in_a_pipe(arguments: tuple[str, ...]) -> None:
    code = "import sys\nfrom moegraft.injection.cli.moegraft import main\ntry:\n main()\nfinally:\n assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "Exit code" in done.stdout and "check" in done.stdout


def test_a_closed_pipe_is_no_traceback(rules: Write) -> None:
    program = Program(["-m", "moegraft.injection.cli.moegraft", "check", str(rules(RIGHT)), "--json"], os.environ)
    program.stdout.close()
    errors = program.stderr.read()
    assert program.wait() != 0 and "Traceback" not in errors
