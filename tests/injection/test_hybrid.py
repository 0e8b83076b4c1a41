"""Rules that give experts a GPU: the same answers on emulated devices under every setting, and a notice where there is no GPU."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch
from support import combinations
from support.families import build_model, case_of, prompt
from support.gpus import emulated_only, limit, placed, where
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import RuleFileError
from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.devices.cuda import why_no_cuda
from moegraft.operators.offload.engine import Engine

RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}, gpu: "{gpu}", {more}}}}}
"""
# Each a form of routing and of storage of its own.
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe", "nemotron_h", "minimax", "glm4_moe", "llama4_text")


@pytest.fixture
def rules(tmp_path: Path, gpu: str):  # type: ignore[no-untyped-def]
    def write(more: str = "cache: {ratio: 0.5}", *, weights: str = "stored", gpu: str = gpu) -> Path:
        path = tmp_path / "rules.yaml"
        path.write_text(RULES.format(weights=weights, gpu=gpu, more=more))
        return path

    return write


def load(model: Path | PreTrainedModel, rules: Path | str, gpu: str = "emulated") -> PreTrainedModel:
    options = where(gpu) if isinstance(model, Path) else {}
    source = model if isinstance(model, Path) else placed(model, gpu)
    injected: PreTrainedModel = optimize_and_load(source, rules, progress=False, threads=1, **options)
    return injected


def engines_of(model: PreTrainedModel) -> list[Engine]:
    return list(model.moegraft.context.gpu_engines)


@torch.no_grad()
def outputs(model: PreTrainedModel) -> tuple[torch.Tensor, list[int]]:
    logits = model(input_ids=prompt(9, batch=2).to(model.device)).logits.double().cpu()
    return logits, model.generate(prompt(5).to(model.device), max_new_tokens=16, do_sample=False)[0].tolist()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_answers_as_it_does_in_stock(model_type: str, tmp_path: Path, rules, gpu: str) -> None:  # type: ignore[no-untyped-def]
    stock = build_model(case_of(model_type))
    logits, answer = outputs(stock)
    stock.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", rules(), gpu)
    found, found_answer = outputs(model)
    assert (found - logits).abs().max() / logits.abs().max() < limit(gpu)
    assert found_answer == answer
    statistics = [engine.statistics for engine in engines_of(model)]
    assert sum(each.used - each.on_cpu for each in statistics) > 0, "the device computed something"


SETTINGS = [
    "cache: {slots: 0}, schedule: two_threshold",
    "cache: {slots: 1}, schedule: greedy, prefetch: {policy: next_layer}",
    "cache: {gpu_memory: 64KiB}, schedule: on_demand",
    "cache: {ratio: 1.0, policy: lfu}, schedule: fixed",
    "cache: {ratio: 0.5, policy: score_frequency}, prefetch: {lookahead: 1, promote: false}",
    "cache: {ratio: 0.6}, schedule: layer_map",
    "cache: {ratio: 0.5}, schedule: all_cpu",
]


@pytest.mark.parametrize(("weights", "more"), combinations(["stored", "int8"], SETTINGS))
def test_every_setting_answers_the_same(weights: str, more: str, rules, gpu: str) -> None:  # type: ignore[no-untyped-def]
    stock = build_model(case_of("qwen3_moe"))
    lossy = gpu.startswith("cuda") and weights == "int8"  # the CPU's kernel quantises activations too
    logits, answer = outputs(load(build_model(case_of("qwen3_moe")), rules(weights=weights, gpu="none", more="")))
    model = load(stock, rules(more, weights=weights), gpu)
    found, found_answer = outputs(model)
    assert (found - logits).abs().max() / logits.abs().max() < (5e-2 if lossy else limit(gpu))
    assert lossy or found_answer == answer


@emulated_only
def test_layers_are_split_over_two_devices(rules) -> None:  # type: ignore[no-untyped-def]
    stock = build_model(case_of("mixtral"))
    logits, answer = outputs(stock)
    model = load(stock, rules(gpu="emulated:0,emulated:1"))
    found, found_answer = outputs(model)
    assert (found - logits).abs().max() / logits.abs().max() < 1e-5
    assert found_answer == answer
    engines = engines_of(model)
    assert [engine.device.name for engine in engines] == ["emulated:0", "emulated:1"]
    layers = [engine.cache.slots.layers for engine in engines]
    assert sum(layers) == 3 and abs(layers[0] - layers[1]) == 1
    assert all(engine.statistics.steps > 0 for engine in engines)


@emulated_only
@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU")
def test_with_no_gpu_the_rules_mean_the_same_on_the_cpu(rules, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    stock = build_model(case_of("qwen3_moe"))
    logits, answer = outputs(stock)
    with caplog.at_level(logging.WARNING):
        model = load(stock, rules(gpu="auto"))
    said = [record.message for record in caplog.records if "run on the CPU" in record.message]
    assert len(said) == 1 and said[0].startswith("all experts run on the CPU (gpu: auto): PyTorch")
    found, found_answer = outputs(model)
    assert found_answer == answer and (found - logits).abs().max() / logits.abs().max() < 1e-5
    assert not engines_of(model)
    assert model.moegraft.statistics()["decode_steps"]["replayed_steps"] > 5  # type: ignore[index]


def test_the_shipped_file_runs_here() -> None:
    model = load(build_model(case_of("mixtral")), "hybrid")
    logits, answer = outputs(model)
    assert torch.isfinite(logits).all() and len(answer) > 5


def test_placement_reports_the_devices_of_experts(rules, gpu: str) -> None:  # type: ignore[no-untyped-def]
    model = load(build_model(case_of("qwen3_moe")), rules("cache: {slots: 2}"), gpu)
    placements = {operator.placement() for operator in model.moegraft.operators.values()}
    assert len(placements) == 1
    (placement,) = placements
    assert " and 2 of " in placement and f"in slots of {gpu.removesuffix(':0')}:0, two_threshold" in placement


def test_a_model_that_is_let_go_is_freed(rules, gpu: str) -> None:  # type: ignore[no-untyped-def]
    model = load(build_model(case_of("mixtral")), rules(), gpu)
    outputs(model)
    watched = weakref.ref(model)
    (engine,) = engines_of(model)
    device = engine.device
    del model, engine
    gc.collect()
    assert watched() is None
    with pytest.raises(DeviceError, match="closed"):
        device.allocate(1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("cache: {ratio: 0.5, slots: 2}", "the cache has one size, not ratio and slots"),
        ("cache: {ratio: 1.5}", "ratio is a share from 0 to 1, not 1.5"),
        ("cache: {gpu_memory: 12}", "must be text or null"),
        ("cache: {gpu_memory: lots}", "'lots' is no amount of memory"),
        (f"cache: {{gpu_memory: {'9' * 400} GiB}}", "more memory than there is"),
        ("cache_dir: ~nobody-of-this-name/experts", r":\d+:\d+: error: .*'~nobody-of-this-name/experts': this machine has no user of that"),
        ("cache: {policy: mrr}", "did you mean 'mrs'"),
        ("schedule: twothreshold", "did you mean 'two_threshold'"),
        ("prefetch: {lookahead: 9}", "lookahead is 1 to 3 layers, not 9"),
    ],
)
@emulated_only
def test_mistakes_are_reported_at_their_place(more: str, message: str, rules) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuleFileError, match=message):
        load(build_model(case_of("mixtral")), rules(more))


@pytest.mark.parametrize("gpu", ["cuda:x", "gpu0", "cuda:0,none", "cuda:0,cuda:0"])
def test_a_device_that_is_none(gpu: str, rules) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuleFileError, match="gpu is auto, none, cuda:N or several of them separated by commas"):
        load(build_model(case_of("mixtral")), rules(gpu=gpu))
