"""`moegraft plan` with a GPU to plan for: bytes add up, what does not fit is refused with what would, speed follows rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_device import PROFILES
from typer.testing import Result

from moegraft.injection.estimate import measure as measure_module
from moegraft.injection.estimate import measure as store
from moegraft.injection.estimate.measure import Measurements, measure_gpu
from moegraft.injection.estimate.memory import ASSUMED_RATES, budget_of
from moegraft.injection.meta_model import build_meta_model
from moegraft.operators.base import GPU_MARGIN_BYTES, GpuRates, Rate, RoutedExperts
from moegraft.operators.experts.forecast import SharedSlots
from moegraft.operators.machine import Gpu, Machine
from moegraft.operators.offload.options import STAGING

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
Write = Callable[[str], Path]
SLOW = Rate(1.0, 10.0)
MEASURED = Measurements(10.0, {"int8": SLOW, "int4": SLOW}, {"float32": SLOW, "int8": SLOW}, 0.1, 0.0)
EXPERTS = "- {{match: {{kind: experts}}, replace: {{class: hybrid_experts, kwargs: {{weights: int8, gpu: {gpu}, cache: {{{cache}}}}}}}}}\n"
LINEARS = "- {match: {kind: linear}, replace: {class: quantized_linear, kwargs: {weights: int8, gpu: auto}}}\n"
LAYERS, NUM_EXPERTS = 11, 4


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store.save(MEASURED)


@pytest.fixture
def planned(run_json: RunJson, rules: Write, config_folder: Path) -> Callable[..., dict[str, Any]]:
    """The plan of experts with this `cache`, on GPUs of these sizes; `more` are rules behind theirs."""

    def plan(*options: object, gpu: str = "auto", cache: str = "", more: str = "") -> dict[str, Any]:
        path = rules(EXPERTS.format(gpu=gpu, cache=cache) + more)
        return run_json("plan", path, "--model", config_folder, "--ram", "8GiB", *options)

    return plan


Planned = Callable[..., dict[str, Any]]


def test_bytes_are_where_they_go(planned: Planned, run_json: RunJson, config_folder: Path, rules: Write) -> None:
    stock = build_meta_model(config_folder).skeleton
    all_bytes = sum(tensor.nbytes for tensor in (*stock.parameters(), *stock.buffers()))
    experts = sum(p.nbytes for name, p in stock.named_parameters() if ".experts." in name)
    found = planned("--gpu-memory", "24GiB", "--context", 100, "--batch", 3)
    gpu, host = found["gpu_bytes"], found["memory_bytes"]
    assert found["ok"] and gpu["weights"] == all_bytes - experts
    assert gpu["kv_cache"] == 3 * 100 * 12 * 2 * 2 * 16 * 4 and host["kv_cache"] == 0
    explained = run_json("explain", rules(EXPERTS.format(gpu="none", cache="")), "--model", config_folder)
    assert host["weights"] == sum(row["bytes_by_device"]["cpu"] for row in explained["modules"]) == gpu["slots"]
    assert (gpu["experts_with_slot"], gpu["experts"]) == (LAYERS * NUM_EXPERTS, LAYERS * NUM_EXPERTS)
    assert gpu["needed"] == gpu["weights"] + gpu["kv_cache"] + gpu["reserve"] + gpu["slots"] < gpu["available"] == 24 << 30
    assert found["bytes_by_device"] == {"cpu": host["weights"], "gpu": gpu["weights"] + gpu["slots"]}
    packed = planned("--gpu-memory", "24GiB", more=LINEARS)
    assert packed["gpu_bytes"]["weights"] < gpu["weights"] and packed["memory_bytes"]["weights"] == host["weights"]


def test_slots_take_what_is_left(planned: Planned) -> None:
    whole = planned("--gpu-memory", "24GiB", cache="context: 50")["gpu_bytes"]
    expert_bytes = whole["slots"] // whole["experts"]
    kept = 50 * 12 * 2 * 2 * 16 * 4
    tight = whole["weights"] + kept + GPU_MARGIN_BYTES + (10 + STAGING) * expert_bytes + expert_bytes // 2
    found = planned("--gpu-memory", tight, "--context", 50, cache="context: 50")
    assert found["ok"] and found["gpu_bytes"]["experts_with_slot"] == 10
    assert found["gpu_bytes"]["slots"] == (10 + STAGING) * expert_bytes
    half = planned("--gpu-memory", f"{tight},{tight}", cache="ratio: 0.5")["gpu_bytes"]
    assert (half["count"], half["experts_with_slot"]) == (2, LAYERS * NUM_EXPERTS // 2)
    assert half["weights"] == -(-whole["weights"] // 2)


def test_slots_that_do_not_fit_are_refused_with_how_many_would(planned: Planned, run: Run, rules: Write, config_folder: Path) -> None:
    whole = planned("--gpu-memory", "24GiB", "--context", 50, cache="ratio: 1.0")["gpu_bytes"]
    size = whole["needed"] - whole["reserve"] + GPU_MARGIN_BYTES - whole["slots"] // 2
    found = planned("--gpu-memory", size, "--context", 50, cache="ratio: 1.0")
    assert (found["exit_code"], found["ok"]) == (1, False)
    (ratio,) = [sentence for sentence in found["would_fit"] if "ratio" in sentence]
    share = float(ratio.partition("ratio: ")[2].partition("}")[0])
    assert 0.2 < share < 0.5
    assert planned("--gpu-memory", size, "--context", 50, cache=f"ratio: {share}")["ok"]
    assert not planned("--gpu-memory", size, "--context", 50, cache=f"ratio: {share + 1 / NUM_EXPERTS}")["ok"]
    assert "more free memory" in found["would_fit"][-1]
    text = run("plan", rules(EXPERTS.format(gpu="auto", cache="ratio: 1.0")), "--model", config_folder, "--gpu-memory", size).stdout
    assert "of the GPU are needed and" in text and "expert slots" in text and "it does not fit" in text


def test_a_context_that_the_rule_does_not_know_of_leaves_no_room_beside_the_slots(planned: Planned) -> None:
    whole = planned("--gpu-memory", "24GiB")["gpu_bytes"]
    kept = 10 * 12 * 2 * 2 * 16 * 4
    size = whole["weights"] + GPU_MARGIN_BYTES + kept + whole["slots"] * 40 // 44
    assert planned("--gpu-memory", size, "--context", 10, cache="context: 10")["ok"]
    refused = planned("--gpu-memory", size, "--context", 60, cache="context: 10")
    assert not refused["ok"]
    assert "'cache: {context: 60}' in the rule of the experts, so that slots leave memory for this many tokens" in refused["would_fit"]
    assert planned("--gpu-memory", size, "--context", 60, cache="context: 60")["ok"]


def test_packed_linear_layers_are_suggested_for_a_model_too_large_for_the_gpu(planned: Planned) -> None:
    roomy = planned("--gpu-memory", "24GiB", "--context", 50)["gpu_bytes"]
    packed = planned("--gpu-memory", "24GiB", "--context", 50, more=LINEARS)["gpu_bytes"]
    size = GPU_MARGIN_BYTES + roomy["kv_cache"] + (roomy["weights"] + packed["weights"]) // 2
    found = planned("--gpu-memory", size, "--context", 50, cache="context: 50")
    assert not found["ok"] and found["gpu_bytes"]["experts_with_slot"] == 0
    assert any("'quantized_linear' with 'weights: int8' and 'gpu: auto'" in sentence for sentence in found["would_fit"])
    assert planned("--gpu-memory", size, "--context", 50, cache="context: 50", more=LINEARS)["ok"]


def test_a_faster_gpu_and_link_are_predicted_so(planned: Planned) -> None:
    few = {"cache": "slots: 1"}
    slow = planned("--gpu-memory", "24GiB", "--gpu-bandwidth", 100, "--link-bandwidth", 0.5, **few)
    fast = planned("--gpu-memory", "24GiB", "--gpu-bandwidth", 1000, "--link-bandwidth", 50, **few)
    most = planned("--gpu-memory", "24GiB", "--gpu-bandwidth", 1000, "--link-bandwidth", 50, cache="slots: 4")
    for key in ("decode_tokens_s", "prefill_tokens_s"):
        assert 0 < slow["speed"][key] < fast["speed"][key] <= most["speed"][key]
    assert slow["gpu_rates"]["origin"] == "stated by --gpu-bandwidth and --link-bandwidth"
    assert "assumed" in planned("--gpu-memory", "24GiB")["gpu_rates"]["origin"]


def test_without_a_gpu_the_plan_is_the_cpus_and_says_so(planned: Planned, run: Run, rules: Write, config_folder: Path) -> None:
    asked, plain = planned("--gpu-memory", 0), planned(gpu="none")
    assert asked["gpu_bytes"] is None and asked["speed"] == plain["speed"]
    assert asked["memory_bytes"]["weights"] == plain["memory_bytes"]["weights"]
    text = run("plan", rules(EXPERTS.format(gpu="auto", cache="")), "--model", config_folder, "--gpu-memory", 0).stdout
    assert "the rules ask for a GPU, and this machine has none" in text
    assert "no GPU" not in run("plan", rules(EXPERTS.format(gpu="none", cache="")), "--model", config_folder).stdout


def test_experts_beside_those_on_the_gpu_stay_on_the_cpu(planned: Planned) -> None:
    more = "- {match: {kind: linear, name: q_proj}, replace: {class: quantized_linear}}\n"
    assert (
        planned("--gpu-memory", "24GiB", more=more)["speed"]["decode_tokens_s"]
        < planned("--gpu-memory", "24GiB")["speed"]["decode_tokens_s"]
    )


@pytest.mark.parametrize("size", ["much", "24GiB,lots", ","])
def test_a_size_that_is_none(size: str, run: Run) -> None:
    assert run("plan", "cpu", "--gpu-memory", size).exit_code == 2


def test_a_plan_includes_sparsity(run_json: RunJson, rules: Write, config_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RoutedExperts] = []
    monkeypatch.setattr(SharedSlots, "layer_ms", lambda rule, layer, *more: seen.append(layer) or 1.0)
    for sparsity, expected in (("", 0.0), ("sparsity: {target: 0.9, scope: routed}, ", 0.9)):
        path = rules(EXPERTS.format(gpu="auto", cache="ratio: 0.5").replace("cache:", f"{sparsity}cache:"))
        run_json("plan", path, "--model", config_folder, "--ram", "8GiB", "--gpu-memory", "24GiB")
        assert seen and {(layer.left_out, layer.gated) for layer in seen} == {(expected, True)}
        seen.clear()


def test_the_gpus_here_are_planned_for() -> None:
    machine = Machine(2, 1 << 33, (Gpu("a", 24 << 30, 20 << 30), Gpu("a", 24 << 30, 22 << 30)))
    rates = GpuRates(900.0, 80.0, 25.0, "measured here")
    found = budget_of(machine, None, rates, gbps=None, link_gbps=12.0)
    assert found is not None and (found.available_bytes, found.count) == (20 << 30, 2)
    assert found.rates == replace(rates, link_gbps=12.0, origin="stated by --link-bandwidth, else measured here")
    assert budget_of(machine, (0,), rates, gbps=None, link_gbps=None) is None
    other = budget_of(Machine(2, 1 << 33), (1 << 34,), None, gbps=None, link_gbps=None)
    assert other is not None and other.rates == ASSUMED_RATES
    profile = PROFILES["a6000_10core"]
    assert (ASSUMED_RATES.gbps, ASSUMED_RATES.tflops, ASSUMED_RATES.link_gbps) == (profile.gpu_gb_s, profile.gpu_tflop_s, profile.link_gb_s)


def test_a_gpu_is_measured_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU as the device: what a GPU reaches only one can tell."""
    for name, value in (("READ_BYTES", 1 << 20), ("MANY_TOKENS", 8), ("LINK_BYTES", 1 << 16)):
        monkeypatch.setattr(measure_module, name, value)
    found = measure_gpu(torch.device("cpu"))
    assert min(found.gbps, found.tflops, found.link_gbps) > 0
    store.save(replace(MEASURED, gpu=found))
    loaded = store.load()
    assert loaded is not None and asdict(loaded)["gpu"] == asdict(found)
