"""Experts without some of their neurons on the CPU and a GPU together: what the CPU alone computes, and the reference."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support import combinations
from support.families import build_model, case_of, prompt
from support.gpus import CUDA_GPU, limit, placed
from support.sparse_models import left_out
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.injected import sparse_layers
from moegraft.operators.offload.statistics import EngineStatistics
from moegraft.operators.sparsity import WINDOW_TOKENS

RULES = """
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}, sparsity: {{target: 0, scope: routed}}, {more}}}}}
"""
# Plain, with shared experts, with biases and a clamp, ungated, and called with rows of chosen experts.
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "olmoe", "llama4_text")
SHARE = 0.6


def load(model_type: str, folder: Path, more: str, weights: str = "stored") -> PreTrainedModel:
    rules = folder / "rules.yaml"
    rules.write_text(RULES.format(weights=weights, more=more))
    model = build_model(case_of(model_type))
    if CUDA_GPU in more:
        model = placed(model, CUDA_GPU)
    return optimize_and_load(model, rules, progress=False, threads=1)


@torch.no_grad()
def thresholds_for(model: PreTrainedModel) -> dict[str, float]:
    """Those that leave out about SHARE of each layer's neurons."""
    seen: dict[str, torch.Tensor] = {}
    for path, layer in sparse_layers(model).items():
        layer.observer = lambda index, acted, path=path: seen.__setitem__(path, acted[index >= 0].abs().flatten())  # type: ignore[misc]
    model(input_ids=prompt(9, batch=2))
    for layer in sparse_layers(model).values():
        layer.observer = None
    return {path: float(found.quantile(SHARE)) for path, found in seen.items()}


def take(model: PreTrainedModel, thresholds: Mapping[str, float]) -> None:
    for path, layer in sparse_layers(model).items():
        layer.set_threshold(thresholds[path], SHARE)


@torch.no_grad()
def outputs(model: PreTrainedModel) -> tuple[torch.Tensor, list[int]]:
    logits = model(input_ids=prompt(9, batch=2).to(model.device)).logits.double().cpu()
    return logits, model.generate(prompt(5).to(model.device), max_new_tokens=8, do_sample=False)[0].tolist()


def counts_of(model: PreTrainedModel) -> list[list[int]]:
    return [layer.counts.tolist() for layer in sparse_layers(model).values()]


def assert_same_counts(found: list[list[int]], expected: list[list[int]], gpu: str) -> None:
    """Active neurons and all, by layer; on CUDA a neuron at the threshold is in or out by rounding."""
    if gpu.startswith("cuda"):
        assert [neurons for _, neurons in found] == [neurons for _, neurons in expected]
        assert [active for active, _ in found] == [pytest.approx(active, rel=0.01) for active, _ in expected]
    else:
        assert found == expected


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def engines_of(model: PreTrainedModel) -> list[EngineStatistics]:
    return [engine.statistics for engine in model.moegraft.context.gpu_engines]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_the_reference(model_type: str, tmp_path: Path, gpu: str) -> None:
    alone = load(model_type, tmp_path, "gpu: none")
    thresholds = thresholds_for(alone)
    stock = build_model(case_of(model_type))
    with left_out(stock, thresholds):
        expected, answer = outputs(stock)
    take(alone, thresholds)
    # Divided by residency: any other schedule may find that one of a fast machine's devices is quicker alone.
    together = load(model_type, tmp_path, f'gpu: "{gpu}", cache: {{slots: 2}}, schedule: fixed')
    take(together, thresholds)
    for model in (alone, together):
        found, found_answer = outputs(model)
        assert error(found, expected) < limit(gpu, 1e-4)
        assert found_answer == answer
    assert_same_counts(counts_of(together), counts_of(alone), gpu)
    assert all(0.3 < 1 - active / neurons < 0.9 for active, neurons in counts_of(together))
    computed = engines_of(together)
    assert sum(each.on_cpu for each in computed) > 0 and sum(each.used - each.on_cpu for each in computed) > 0, "both took a part"


SETTINGS = [
    "cache: {slots: 0}, schedule: two_threshold",
    "cache: {slots: 1}, schedule: greedy",
    "cache: {ratio: 0.5}, schedule: on_demand, prefetch: {policy: next_layer}",
    "cache: {ratio: 1.0, policy: lfu}, schedule: fixed",
    "cache: {ratio: 0.6}, schedule: layer_map",
    "cache: {ratio: 0.5}, schedule: all_cpu",
]


@pytest.mark.parametrize(("weights", "more"), combinations(["stored", "int8"], SETTINGS))
def test_every_setting_is_the_cpu_alone(weights: str, more: str, tmp_path: Path, gpu: str) -> None:
    alone = load("qwen3_moe", tmp_path, "gpu: none", weights)
    thresholds = thresholds_for(alone)
    take(alone, thresholds)
    expected, answer = outputs(alone)
    model = load("qwen3_moe", tmp_path, f'gpu: "{gpu}", {more}', weights)
    take(model, thresholds)
    found, found_answer = outputs(model)
    lossy = gpu.startswith("cuda") and weights == "int8"  # the CPU's kernel quantises activations too
    assert error(found, expected) < (5e-2 if lossy else limit(gpu))
    assert lossy or found_answer == answer
    assert_same_counts(counts_of(model), counts_of(alone), gpu)


def test_statistics_and_drift_count_every_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load("qwen3_moe", tmp_path, "gpu: emulated, cache: {ratio: 1.0}, schedule: on_demand")
    take(model, thresholds_for(load("qwen3_moe", tmp_path, "gpu: none")))
    with torch.no_grad():
        model(input_ids=prompt(9, batch=2))
    (shown,) = model.moegraft.context.sparse_layers.statistics()
    assert shown["routed_sparsity"] == pytest.approx(SHARE, abs=0.1)
    assert sum(each.on_cpu for each in engines_of(model)) == 0
    for layer in sparse_layers(model).values():
        layer.set_threshold(0.0, SHARE)  # leaves nothing out of what is to be left out
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(WINDOW_TOKENS // 64 + 2):
            model(input_ids=prompt(32, batch=2))
    assert any(f"where the target is {100 * SHARE:.1f} %" in record.getMessage() for record in caplog.records)
