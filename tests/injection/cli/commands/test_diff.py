"""`moegraft diff`: what changes between two rule files, by what they come to and not by how they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
EXPERTS = "- {match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weights: int8}}}\n"


def test_the_same_in_other_words(run: Run, run_json: RunJson, rules: Write, config_folder: Path) -> None:
    one = rules(EXPERTS, "one.yaml")
    other = rules("vars: {w: int8}\nrules:\n- {match: {name: experts$}, replace: {class: hybrid_experts, kwargs: {weights: '${w}'}}}\n")
    assert (
        run("diff", one, other, "--model", config_folder).exit_code,
        run_json("diff", one, other, "--model", config_folder)["same"],
    ) == (
        0,
        True,
    )
    assert "no module differs" in run("diff", one, other, "--model", config_folder).stdout


def test_what_changes(run: Run, run_json: RunJson, rules: Write, config_folder: Path) -> None:
    one = rules(EXPERTS, "one.yaml")
    two = rules(
        "- {match: {kind: experts, layers: '3-5'}, replace: {class: hybrid_experts, kwargs: {weights: int4}}}\n"
        "- {match: {kind: experts, layers: '11'}, replace: {class: default}}\n"
        "- {match: {name: '^lm_head$'}, replace: {class: quantized_linear}}\n" + EXPERTS,
        "two.yaml",
    )
    found = run_json("diff", one, two, "--model", config_folder)
    assert (found["exit_code"], found["same"]) == (1, False)
    changed = {module["module"]: module for module in found["modules"]}
    assert set(changed) == {*(f"model.layers.{layer}.mlp.experts" for layer in (3, 4, 5, 11)), "lm_head"}
    assert changed["model.layers.4.mlp.experts"]["before"]["options"]["weights"] == "int8"
    assert changed["model.layers.4.mlp.experts"]["after"]["options"]["weights"] == "int4"
    assert changed["model.layers.11.mlp.experts"]["after"] is None
    assert changed["lm_head"]["before"] is None
    back = run_json("diff", two, one, "--model", config_folder)
    assert {m["module"]: (m["after"], m["before"]) for m in back["modules"]} == {
        m["module"]: (m["before"], m["after"]) for m in found["modules"]
    }
    table = run("diff", one, two, "--model", config_folder).stdout
    assert "model.layers.{3-5}.mlp.experts  hybrid_experts weights=int8" in table and "5 modules differ" in table


def test_wrong_rules(run: Run, rules: Write, config_folder: Path) -> None:
    good, bad = rules(EXPERTS, "good.yaml"), rules("- match: 3\n", "bad.yaml")
    result = run("diff", good, bad, "--model", config_folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{bad}:1:10: error: " in result.stderr
