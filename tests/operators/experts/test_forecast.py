"""The predicted time of a layer's experts on a CPU and a GPU together."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
from support import ROOT
from support.model_shapes import MODELS
from support.virtual_device import PROFILES

from moegraft.operators.base import RoutedExperts
from moegraft.operators.experts.forecast import experts_ms


def modelled() -> list[dict[str, str]]:
    path = ROOT / "benchmarks" / "results" / "hybrid_modelled.csv"
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["system"] == "all" and row["model"] in MODELS]
    return [row for row in rows if row["tokens"] in ("1", "512")]


@pytest.mark.parametrize("row", modelled(), ids=lambda row: f"{row['model']}-{row['phase']}-{row['cache_ratio']}")
def test_the_prediction_is_near_the_engine_on_a_virtual_clock(row: dict[str, str]) -> None:
    """The prediction assumes hits by chance and no prefetch, so its decode is slower than the engine's, at most by half. Its prompts are
    faster by less than a third, since the engine's transfers do not always fill the link."""
    model, machine = MODELS[row["model"]], PROFILES[row["device"].removeprefix("modelled ")]
    tokens = int(row["tokens"])
    rest_ms = model.rest_ms + (tokens - 1) * 2 * 12 * model.hidden**2 / (machine.gpu_tflop_s * 1e9)
    shared_ms = rest_ms * model.shared_share
    layer = RoutedExperts(model.num_experts, model.top_k, model.expert_bytes(), 4.5, float(row["cache_ratio"]))
    experts = experts_ms(layer, tokens, machine, "two_threshold", shared_ms)
    predicted_over_run = model.layers * (rest_ms - shared_ms + experts) / float(row["mean_ms"])
    assert 0.7 < predicted_over_run < 1.5


@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
def test_left_out_neurons_reduce_the_predicted_time(resident: float) -> None:
    model, machine = MODELS["mixtral-8x7b"], PROFILES["a6000_10core"]
    whole = RoutedExperts(model.num_experts, model.top_k, model.expert_bytes(), 4.5, resident)
    times = {share: experts_ms(replace(whole, left_out=share), 1, machine, "fixed") for share in (0.0, 1e-9, 0.9)}
    assert 0.4 < times[0.9] / times[0.0] < 0.6  # gates and a tenth of up and down are 0.4, and launches cost the same
    assert times[1e-9] == pytest.approx(times[0.0], rel=1e-6)
