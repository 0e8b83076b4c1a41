"""`moegraft plan`: the cache is as large as the real one, the figures add up, and what is said to fit does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.families import build_model, served_cases
from support.family_rows import FamilyCase
from typer.testing import Result

from moegraft.injection.cli.options import OptionsError, parse_size
from moegraft.injection.estimate import measure as store
from moegraft.injection.estimate.forecast import TargetMachine, Work, forecast, predict, work_of
from moegraft.injection.estimate.measure import Link, Measurements, Network, save
from moegraft.injection.estimate.memory import PlannedModel, Workload
from moegraft.injection.meta_model import build_meta_model
from moegraft.injection.planning import plan
from moegraft.injection.rules import read_rules
from moegraft.operators.base import Rate
from moegraft.operators.cache_form import KvCache, LayerCache, kv_cache
from moegraft.operators.cpu import kernel_in_use
from moegraft.operators.errors import MoegraftError
from moegraft.operators.registry import load_registry

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
# Plain heads, sliding windows in every other layer, compressed (MLA), and linear attention beside full.
CACHES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
CASES = [case for case in served_cases() if case.model_type in CACHES]


@pytest.fixture(autouse=True)
def constant_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a process of tests grows from one plan to the next, to more than a gigabyte."""
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=400 << 20))


def size_of(value: Any) -> int:
    """Bytes of every tensor in a layer of a cache, also in the states by name that linear attention keeps."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(size_of, value.values())) if isinstance(value, dict) else 0


def meta(model: torch.nn.Module) -> Any:
    return model.to("meta")


@pytest.mark.parametrize("tokens", [5, 40], ids=["inside the window", "past the window of 16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model_type)
def test_the_cache_is_as_large_as_the_real_one(case: FamilyCase, tokens: int) -> None:
    model = build_model(case)
    with torch.no_grad():
        cache = model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=True).past_key_values
    real = sum(size_of(vars(layer)) for layer in cache.layers)
    found = kv_cache(meta(model))
    window = max((layer.window or 0 for layer in found.layers), default=0)
    # A full window keeps one token less than it spans: the token that comes next is the last of it.
    slack = sum(layer.bytes_per_token for layer in found.layers if layer.window) if window and tokens > window else 0
    assert found.exact
    assert real <= found.nbytes(tokens) <= real + slack + real // 50


def test_the_cache_by_hand() -> None:
    cache = KvCache((LayerCache(100, 0, None), LayerCache(10, 7, 16)), True, 4)
    assert cache.nbytes(8) == 800 + 80 + 7
    assert cache.nbytes(1000, batch=3) == 3 * (100_000 + 160 + 7)


def test_a_model_that_meta_cannot_run_goes_by_its_config(config_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = build_meta_model(config_folder).skeleton
    exact = kv_cache(skeleton)
    monkeypatch.setattr(type(skeleton), "forward", lambda self, **given: given["input_ids"].sum().item())
    assert exact.exact and not kv_cache(skeleton).exact
    assert kv_cache(skeleton).nbytes(100) == exact.nbytes(100)


EVEN = Rate(decode_gbps=1.0, prefill_gflops=1.0)
MEASURED = Measurements(2.0, {"int8": EVEN}, {"bfloat16": Rate(10.0, 100.0)}, 1.0, 0.0)


def test_speed_by_hand() -> None:
    """A layer of 1 ms; experts of 1 GB of which a token reads a quarter, 250 ms; a cache of 1 GB at 2 GB/s, 500 ms."""
    experts = Work("experts", "int8", 10**9, 10**9, 0.25)
    load = Workload(context=1, batch=1, prompt=1)
    (found,) = [predict([experts], MEASURED, layers=1, kv_bytes=10**9, load=load)]
    assert found.decode_tokens_s == pytest.approx(1 / (0.001 + 0.5 + 0.5)), "2 x 250 million operations take longer than reading"
    linear = Work("linear", "bfloat16", 10**9, 5 * 10**8, 1.0)
    found = predict([linear], MEASURED, layers=0, kv_bytes=0, load=Workload(1, 1, 1000))
    assert found.decode_tokens_s == pytest.approx(10), "1 GB at 10 GB/s"
    assert found.prefill_tokens_s == pytest.approx(1000 / (2 * 5e8 * 1000 / 100e9))


def test_more_sequences_share_what_is_read() -> None:
    works = [Work("linear", "bfloat16", 10**9, 10**6, 1.0)]
    one, four = (predict(works, MEASURED, layers=0, kv_bytes=0, load=Workload(1, batch, 1)).decode_tokens_s for batch in (1, 4))
    assert one is not None and four == pytest.approx(4 * one)


def test_a_rate_that_is_missing_is_named() -> None:
    found = predict([Work("experts", "ternary", 1, 1, 1.0)], MEASURED, layers=1, kv_bytes=0, load=Workload(1, 1, 1))
    assert (found.decode_tokens_s, found.missing) == (None, ("experts, ternary",))


def test_work_counts_every_weight_once(experts_rules: Path, config_folder: Path) -> None:
    meta_model = build_meta_model(config_folder)
    registry = load_registry()
    works = work_of(PlannedModel(meta_model, plan(meta_model, read_rules(experts_rules, registry=registry), registry=registry), registry))
    embedding = meta_model.skeleton.get_input_embeddings().weight.numel()
    assert sum(work.weight_count for work in works) == sum(p.numel() for p in meta_model.skeleton.parameters()) - embedding
    (experts,) = [work for work in works if work.kind == "experts"]
    assert (experts.weights, experts.share, experts.weight_count) == ("int8", 0.5, 11 * 4 * 3 * 64 * 32)


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_figures_add_up(experts_rules: Path, run_json: RunJson, run: Run, config_folder: Path, cache_home: None) -> None:
    found = run_json("plan", experts_rules, "--model", config_folder, "--context", 1000, "--batch", 2)
    memory = found["memory_bytes"]
    assert found["exit_code"] == 0 and found["ok"]
    assert memory["weights"] == run_json("explain", experts_rules, "--model", config_folder)["bytes_by_device"]["cpu"]
    assert memory["kv_cache"] == 2 * 1000 * 12 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, float32
    assert memory["at_rest"] == memory["weights"] + memory["program"] < memory["peak_loading"]
    assert memory["running"] == memory["at_rest"] + memory["kv_cache"] + memory["activations"]
    assert memory["needed"] == max(memory["peak_loading"], memory["running"])
    assert found["speed"] is None and "doctor --measure" in found["no_speed"]
    assert "speed: this machine is not measured" in run("plan", experts_rules, "--model", config_folder).stdout


def test_measured_rates_give_a_speed(experts_rules: Path, run_json: RunJson, run: Run, config_folder: Path, cache_home: None) -> None:
    store.save(Measurements(2.0, {"int8": EVEN}, {"float32": EVEN}, 1.0, 0.0))
    slow = run_json("plan", experts_rules, "--model", config_folder)["speed"]
    store.save(Measurements(2.0, {"int8": EVEN}, {"float32": EVEN}, 0.5, 0.0))
    fast = run_json("plan", experts_rules, "--model", config_folder)["speed"]
    assert 0 < slow["decode_tokens_s"] < fast["decode_tokens_s"] and 0 < slow["prefill_tokens_s"] < fast["prefill_tokens_s"]
    assert "predicted: decode " in run("plan", experts_rules, "--model", config_folder).stdout
    assert "rough" not in run("plan", experts_rules, "--model", config_folder).stdout
    store.save(Measurements(2.0, {"int8": EVEN}, {"float32": EVEN}, 0.5, load=2.0))
    assert "rough: other programs ran" in run("plan", experts_rules, "--model", config_folder).stdout
    unknown = run_json("plan", experts_rules, "--model", config_folder, "--var", "weights=int4")
    assert unknown["no_speed"] == "no rate is measured for experts, int4"


def test_memory_nodes_are_shown(
    run: Run, run_json: RunJson, experts_rules: Path, config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEGRAFT_NODES", "2")
    nodes = run_json("plan", experts_rules, "--model", config_folder)["memory_nodes"]
    assert nodes == kernel_in_use().memory_nodes
    shown = run("plan", experts_rules, "--model", config_folder).stdout
    assert ("on 2 memory nodes, with a part of each matrix in memory" in shown) == (nodes == 2)
    monkeypatch.setenv("MOEGRAFT_NODES", "1")
    assert "memory nodes" not in run("plan", experts_rules, "--model", config_folder).stdout


def test_a_wrong_variable_is_no_missing_measurement(monkeypatch: pytest.MonkeyPatch, cache_home: None) -> None:
    store.save(Measurements(2.0, {"int8": EVEN}, {"float32": EVEN}, 1.0, 0.0))
    monkeypatch.setenv("MOEGRAFT_NODES", "both")
    with pytest.raises(MoegraftError, match="MOEGRAFT_NODES is 'both'"):
        store.load()
    monkeypatch.setenv("MOEGRAFT_NODES", "2")
    assert store.load() is None  # rates of one node are not those of two


def test_too_little_memory_is_refused_with_what_would_fit(
    experts_rules: Path, run_json: RunJson, run: Run, config_folder: Path, cache_home: None
) -> None:
    def needed(weights: str) -> int:
        found = run_json("plan", experts_rules, "--model", config_folder, "--var", f"weights={weights}", "--ram", "1TiB")
        return int(found["memory_bytes"]["needed"] - found["memory_bytes"]["program"])

    program = run_json("plan", experts_rules, "--model", config_folder)["memory_bytes"]["program"]
    ram = program + (needed("int8") + needed("int4")) // 2
    found = run_json("plan", experts_rules, "--model", config_folder, "--ram", ram)
    # The process grows from test to test, and its own size counts: only what does not depend on it is held to figures.
    assert (found["exit_code"], found["ok"]) == (1, False)
    assert found["memory_bytes"]["available"] == ram < found["memory_bytes"]["needed"]
    assert "more free memory" in found["would_fit"][-1]
    assert "it does not fit: " in run("plan", experts_rules, "--model", config_folder, "--ram", ram).stdout


def test_a_suggested_shorter_context_fits(experts_rules: Path, run_json: RunJson, config_folder: Path, cache_home: None) -> None:
    long = run_json("plan", experts_rules, "--model", config_folder, "--context", 1 << 20, "--ram", "1TiB")["memory_bytes"]
    ram = long["needed"] - long["kv_cache"] // 2
    refused = run_json("plan", experts_rules, "--model", config_folder, "--context", 1 << 20, "--ram", ram)
    assert refused["exit_code"] == 1
    assert refused["would_fit"][0].startswith("a context of ")
    context = int(refused["would_fit"][0].split()[3].replace(",", ""))
    assert run_json("plan", experts_rules, "--model", config_folder, "--context", context, "--ram", ram)["exit_code"] == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 << 30), ("64G", 64 << 30), ("64gb", 64 << 30), ("1.5 TiB", 3 << 39), ("512m", 512 << 20), ("1048576", 1 << 20), ("0", 0)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--ram") == size


def test_a_size_that_is_none(run: Run) -> None:
    assert parse_size(None, "--ram") is None
    for text in ("much", "-3G", "3X", ""):
        with pytest.raises(OptionsError, match="give a size such as 24GiB"):
            parse_size(text, "--ram")
    with pytest.raises(OptionsError, match="--gpu-memory 24: 24 bytes are too few; give a size with its unit, such as 24GiB"):
        parse_size("24", "--gpu-memory")
    assert run("plan", "--ram", "much").exit_code == 2


def test_neurons_that_are_left_out_are_not_read() -> None:
    measured = Measurements(10.0, {"int8": Rate(10.0, 1e9)}, {"int8": Rate(10.0, 1e9)}, 0.0, 0.0)
    works = [Work("experts", "int8", 3 << 30, 3 << 30, 0.125, left_out) for left_out in (0.0, 0.9)]

    def decode(batch: int) -> list[float]:
        speeds = [predict([work], measured, layers=0, kv_bytes=0, load=Workload(1, batch, 1)).decode_tokens_s for work in works]
        return [speed for speed in speeds if speed is not None]

    dense, sparse = decode(1)
    assert sparse / dense == pytest.approx(3 / 1.2)  # the gate, and a tenth of the rest
    dense, sparse = decode(64)
    assert 1 < sparse / dense < 1.5  # eight tokens an expert need most of it together


def test_decode_steps_are_predicted_as_programs(config_folder: Path, rules: Callable[[str], Path]) -> None:
    """Where operators, batch and cache allow it; prompts never are."""
    rates = dict.fromkeys(("float32", "bfloat16", "int8"), EVEN)
    measured = Measurements(10.0, rates, rates, 100.0, 0.0, step_overhead_ms=1.0)
    meta_model, registry = build_meta_model(config_folder), load_registry()
    experts = "- {{match: {{kind: experts}}, replace: {{class: hybrid_experts, kwargs: {{weights: int8{}}}}}}}\n"
    cache = "- {match: {kind: model}, replace: {class: quantized_kv_cache, kwargs: {backend: fp8}}}\n"

    def speed(text: str, batch: int, measured: Measurements = measured) -> Any:
        read = plan(meta_model, read_rules(rules(text), registry=registry), registry=registry)
        return forecast(meta_model, read, Workload(64, batch, 64), TargetMachine(1 << 40, measured), registry).speed

    usual = [speed(experts.format(", decode: eager"), batch) for batch in (1, 8, 9)]
    program = [speed(experts.format(""), batch) for batch in (1, 8, 9)]
    assert [found.decode_tokens_s / other.decode_tokens_s > 50 for found, other in zip(program, usual, strict=True)] == [True, True, False]
    assert [found.prefill_tokens_s for found in program] == [other.prefill_tokens_s for other in usual]
    assert speed(experts.format("") + cache, 1).decode_tokens_s == usual[0].decode_tokens_s
    assert speed(experts.format(""), 1, replace(measured, step_overhead_ms=None)).decode_tokens_s == usual[0].decode_tokens_s


def test_a_sparse_plan(config_folder: Path, rules: Callable[[str], Path], run: Run, run_json: RunJson) -> None:
    text = "- {{match: {{kind: experts}}, replace: {{class: hybrid_experts, kwargs: {{weights: int8{}}}}}}}\n"
    dense = run_json("explain", rules(text.format("")), "--model", config_folder)
    path = rules(text.format(", sparsity: {target: 0.8, scope: routed}"))
    found = run_json("explain", path, "--model", config_folder)
    # Down's groups of 32 run along H, and its rows along I are padded to whole groups as the gate's are.
    assert found["exit_code"] == 0 and found["bytes_by_device"]["cpu"] >= dense["bytes_by_device"]["cpu"]
    assert found["modules"][0]["options"]["sparsity"] == {"target": 0.8, "scope": "routed", "thresholds": None, "mode": "layer"}
    assert "sparsity.target=0.8 sparsity.scope=routed" in run("explain", path, "--model", config_folder).stdout
    meta_model, registry = build_meta_model(config_folder), load_registry()
    works = work_of(PlannedModel(meta_model, plan(meta_model, read_rules(path, registry=registry), registry=registry), registry))
    assert [work.left_out for work in works if work.kind == "experts"] == [0.8]


def test_machines_that_share_the_experts_hold_them_all(
    experts_rules: Path, run_json: RunJson, run: Run, config_folder: Path, cache_home: None
) -> None:
    store.save(Measurements(2.0, {"int8": EVEN}, {"float32": EVEN}, 1.0, 0.0))
    arguments = ["plan", str(experts_rules), "--model", str(config_folder)]
    alone = run_json(*arguments)
    found = run_json(*arguments, "--nodes", "2GiB,1GiB,1GiB")
    assert found["ok"] and [node["rank"] for node in found["nodes"]] == [0, 1, 2]
    assert sum(node["share"] for node in found["nodes"]) == pytest.approx(1)
    program = alone["memory_bytes"]["program"]
    held = [node["needed_bytes"] - program for node in found["nodes"][1:]]
    assert 0 < sum(held) < alone["memory_bytes"]["weights"]
    slow = run_json(*arguments, "--nodes", "3", "--network", "0.01")["speed"]
    assert slow["prefill_tokens_s"] < found["speed"]["prefill_tokens_s"]
    save(Network((Link("there", 5000.0, 0.01),), 5000.0))
    measured = run_json(*arguments, "--nodes", "3")["speed"]
    assert measured["prefill_tokens_s"] < found["speed"]["prefill_tokens_s"], "the saved measurement of the network is used"
    assert measured["decode_tokens_s"] < slow["decode_tokens_s"]
    assert run(*arguments, "--nodes", "2GiB,1MiB").exit_code == 1
    assert "give a size such as" in run(*arguments, "--nodes", "some").output
    divided = experts_rules.with_name("divided.yaml")
    divided.write_text(f"extends: {experts_rules}\nparallel: {{shares: [2, 1]}}\n")
    assert run("plan", str(divided), *arguments[2:], "--nodes", "2").exit_code == 0
    assert "2 numbers, for 3 machines" in run("plan", str(divided), *arguments[2:], "--nodes", "3").output
