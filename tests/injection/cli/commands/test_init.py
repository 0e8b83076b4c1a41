"""`moegraft init`: the file it writes passes check, is the best of those tried for the goal, and says how it came to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig, Qwen3MoeConfig
from typer.testing import Result

from moegraft.injection.estimate import measure as store
from moegraft.injection.estimate.measure import Disk, Measurements
from moegraft.operators.base import Rate

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
# Reading is slower for wider weights as memory is what limits it; arithmetic is fastest in bfloat16's and int8's units.
RATES = Measurements(
    read_gbps=1e3,
    experts={"float32": Rate(1e-3, 1e-2), "bfloat16": Rate(1e-3, 1.0), "int8": Rate(1e-3, 1.0), "int4": Rate(1e-3, 0.5)},
    linear={"float32": Rate(1e-3, 1.0), "int8": Rate(1e-3, 2.0)},
    layer_overhead_ms=1e-6,
    load=0.0,
)


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store.save(RATES)
    monkeypatch.setattr(store, "measure_disk", lambda folder: Disk(str(folder), {"1": 1e-3, "4": 2e-3}, 100.0))


def chosen(found: dict[str, Any]) -> dict[str, Any]:
    candidate: dict[str, Any] = found["candidates"][found["chosen"]]
    return candidate


@pytest.mark.parametrize("goal", ["decode", "prefill", "quality"])
def test_what_is_written_is_right_and_the_best(goal: str, run: Run, run_json: RunJson, config_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / f"{goal}.yaml"
    found = run_json("init", "--model", config_folder, "--goal", goal, "--output", file)
    assert (found["exit_code"], found["ok"], found["output"]) == (0, True, str(file))
    assert file.read_text() == found["rules"]
    assert run("check", file, "--model", config_folder, "--strict").exit_code == 0
    best = chosen(found)
    if goal == "quality":
        assert (best["experts"], best["linears"]) == ("stored", None)
    else:
        key = f"{goal}_tokens_s"
        assert best["speed"][key] * 1.03 >= max(candidate["speed"][key] for candidate in found["candidates"])
        assert best["experts"] == {"decode": "int4", "prefill": "int8"}[goal]
        assert best["linears"] == "int8"


def test_the_written_file_is_the_planned_one(run_json: RunJson, config_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    best = chosen(run_json("init", "--model", config_folder, "--output", file))
    planned = run_json("plan", file, "--model", config_folder)
    assert planned["memory_bytes"]["weights"] == best["memory_bytes"]["weights"]
    assert planned["speed"] == best["speed"]


def test_the_next_commands_name_the_model(run: Run, config_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "my rules.yaml"
    shown = run("init", "--model", config_folder, "--output", file).stderr
    assert (
        f"moegraft explain '{file}' --model {config_folder}, " in shown
        and f"local_chat --rules '{file}' --model {config_folder}\n" in shown
    )


def test_the_comments_say_why(run: Run, config_folder: Path) -> None:
    text = run("init", "--model", config_folder, "--output", "-", "--gpu-memory", "24GiB").stdout
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert sum(line.startswith("# >") for line in comments) == 1
    table = [line for line in comments if " GiB " in line and " tokens/s" in line]
    assert len(table) == 12, "three types of experts, linears packed or not, with the GPU and without"
    assert sum(" both " in line for line in table) == sum(" CPU " in line for line in table) == 6
    assert any("a GPU of 540 GB/s" in line and "assumed" in line for line in comments)
    assert "# int4 experts: an error of about 15 % per layer\n" in run("init", "--model", config_folder, "--output", "-").stdout
    data = yaml.safe_load(text)
    assert data["requires"] == {"model_type": "qwen3_moe"}
    assert [(rule["id"], rule["expect"]) for rule in data["rules"] if rule["id"] != "linears"] == [
        ("experts", 11),
        ("attention", 12),
        ("norms", "any"),
        ("routers", "any"),
    ]


def test_less_memory_results_in_smaller_weights(run_json: RunJson, config_folder: Path) -> None:
    roomy = run_json("init", "--model", config_folder, "--goal", "quality", "--output", "-")
    needs = {(c["experts"], c["linears"]): c["memory_bytes"]["needed"] for c in roomy["candidates"]}
    # The process, a part of every need, grows a little from run to run: between two needs is room for that.
    ram = (needs["stored", "int8"] + needs["int8", "int8"]) // 2
    tight = run_json("init", "--model", config_folder, "--goal", "quality", "--output", "-", "--ram", ram)
    candidates = tight["candidates"]
    assert [c["ok"] for c in candidates] == [c["memory_bytes"]["needed"] <= ram for c in candidates]
    if tight["ok"]:
        assert tight["chosen"] == [c["ok"] for c in candidates].index(True)


def test_where_memory_does_not_suffice_experts_stay_in_files(run: Run, run_json: RunJson, tmp_path: Path) -> None:
    folder, file = tmp_path / "large", tmp_path / "rules.yaml"
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 2}
    Qwen3MoeConfig(**sizes, vocab_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=64).save_pretrained(folder)
    plenty = run_json("init", "--model", folder, "--context", 64, "--output", "-")["candidates"]
    assert not any(candidate["in_files"] for candidate in plenty)
    smallest = min((each["memory_bytes"] for each in plenty), key=lambda each: each["needed"])
    # Python and its libraries grow from call to call, by less than half of the smallest experts.
    ram = smallest["program"] + smallest["weights"] // 2
    found = run_json("init", "--model", folder, "--context", 64, "--output", file, "--ram", ram)
    best = chosen(found)
    assert best["in_files"]
    kwargs = yaml.safe_load(file.read_text())["rules"][0]["replace"]["kwargs"]
    assert (kwargs["memory"], kwargs["cache_dir"]) == ("auto", str(tmp_path / "cache" / "moegraft" / "experts"))
    assert "experts in files" in file.read_text()
    planned = run_json("plan", file, "--model", folder, "--context", 64, "--ram", ram)
    assert planned["exit_code"] == 0 and 0 < planned["memory_bytes"]["frames"] < smallest["weights"]
    shown = run("plan", file, "--model", folder, "--context", 64, "--ram", ram).stdout
    assert " in files\n" in shown and "with experts read from the disk" in shown
    in_memory = next(each for each in plenty if (each["experts"], each["linears"]) == (best["experts"], best["linears"]))
    # The disk is slower than memory, whatever share is read from it.
    assert 0 < best["speed"]["decode_tokens_s"] < in_memory["speed"]["decode_tokens_s"]
    store.save(RATES)
    assert "doctor --measure --disk FOLDER" in run_json("plan", file, "--model", folder, "--ram", ram)["no_speed"]


def test_nothing_fits(run: Run, run_json: RunJson, config_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    result = run("init", "--model", config_folder, "--ram", "1MiB", "--output", file)
    assert result.exit_code == 1 and not file.exists()
    assert result.stdout.startswith("nothing fits: for the smallest of 12 candidates, ")
    assert run_json("init", "--model", config_folder, "--ram", "1MiB", "--output", file)["rules"] is None


def test_a_file_that_is_there_is_kept(run: Run, config_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    refused = run("init", "--model", config_folder, "--output", file)
    assert (refused.exit_code, file.read_text()) == (2, "mine")
    assert "--force" in refused.stderr
    lost = run("init", "--model", config_folder, "--output", tmp_path / "absent" / "rules.yaml")
    assert lost.exit_code == 2 and "create it first" in lost.stderr
    assert run("init", "--model", config_folder, "--output", file, "--force").exit_code == 0
    assert file.read_text() != "mine"


def test_a_model_without_experts_is_refused(run: Run, tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=2).save_pretrained(tmp_path / "dense")
    result = run("init", "--model", tmp_path / "dense", "--output", "-")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no rules can be written for LlamaForCausalLM" in result.stderr


def test_a_name_cannot_leave_its_comment(run: Run, config_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a\nrules: []"
    folder.mkdir()
    (folder / "config.json").write_text((config_folder / "config.json").read_text())
    data = yaml.safe_load(run("init", "--model", folder, "--output", "-").stdout)
    assert len(data["rules"]) == 5


def test_a_gpu_budget_results_in_a_hybrid_file(run: Run, run_json: RunJson, config_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    options = ("--model", config_folder, "--gpu-memory", "24GiB", "--ram", "64GiB", "--context", 1000)
    found = run_json("init", *options, "--goal", "prefill", "--output", file, "--gpu-bandwidth", 900, "--link-bandwidth", 20)
    best = chosen(found)
    assert best["gpu"] and best["gpu_bytes"]["experts_with_slot"] == 11 * 4
    assert (best["gpu_rates"]["gbps"], best["gpu_rates"]["link_gbps"]) == (900, 20)
    assert "planned as a GPU of 900 GB/s" in file.read_text() and "stated by --gpu-bandwidth and --link-bandwidth" in file.read_text()
    experts = yaml.safe_load(file.read_text())["rules"][0]["replace"]["kwargs"]
    assert (experts["gpu"], experts["cache"], experts["schedule"]) == (
        "auto",
        {"policy": "score_frequency", "context": 1000},
        "two_threshold",
    )
    assert run("check", file, "--model", config_folder, "--strict").exit_code == 0
    rates = ("--gpu-memory", "24GiB", "--gpu-bandwidth", 900, "--link-bandwidth", 20, "--context", 1000, "--prompt", 512)
    planned = run_json("plan", file, "--model", config_folder, *rates)
    assert (planned["speed"], planned["gpu_bytes"]) == (best["speed"], best["gpu_bytes"]), "plan says of the file what init said"


def test_quality_keeps_weights_exact_with_a_gpu(run_json: RunJson, config_folder: Path) -> None:
    best = chosen(run_json("init", "--model", config_folder, "--goal", "quality", "--gpu-memory", "24GiB", "--output", "-"))
    assert (best["experts"], best["linears"]) == ("stored", None)
    assert "sparsity" not in run_json("init", "--model", config_folder, "--gpu-memory", "24GiB", "--output", "-")["rules"], (
        "lossy: never unasked"
    )


def test_several_gpus_keep_linear_layers_where_they_are(run_json: RunJson, config_folder: Path) -> None:
    found = run_json("init", "--model", config_folder, "--gpu-memory", "12GiB,12GiB", "--output", "-")
    shared = [candidate for candidate in found["candidates"] if candidate["gpu"]]
    assert [candidate["linears"] for candidate in shared] == [None] * 3
    assert {candidate["gpu_bytes"]["count"] for candidate in shared} == {2}


def test_no_gpu_is_wanted(run_json: RunJson, config_folder: Path) -> None:
    found = run_json("init", "--model", config_folder, "--gpu-memory", "0", "--output", "-")
    assert not any(candidate["gpu"] for candidate in found["candidates"])


def test_a_bandwidth_of_no_gpu_is_refused(run: Run, config_folder: Path) -> None:
    refused = run("init", "--model", config_folder, "--link-bandwidth", 20, "--output", "-")
    assert refused.exit_code == 2 and "state its memory as well, with --gpu-memory 24GiB" in refused.stderr
