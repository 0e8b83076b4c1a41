"""The API: what a calibration says of a model is what the stock model says when the same neurons are left out by plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.sparse_models import left_out, stock
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.calibration import CalibrationOptions, calibrate, cut, sparse_rules, work_tokens
from moegraft.injection.meta_model import find_model
from moegraft.injection.rules import read_rules
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import load_registry
from moegraft.operators.sparsity import Thresholds

Calibrate = Callable[..., Thresholds]


def nats(model: PreTrainedModel, windows: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Mean negative log likelihood a token, and the likeliest tokens."""
    total, likeliest = 0.0, []
    with torch.no_grad():
        for window in windows:
            logits = model(window[None]).logits[0].double()
            total += float(torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum"))
            likeliest.append(logits.argmax(-1))
    return total / sum(len(window) - 1 for window in windows), likeliest


def test_the_cost_is_that_of_the_stock_model_with_the_same_neurons_out(
    folder: Path, text_ids: torch.Tensor, calibrate_folder: Calibrate
) -> None:
    options = {"targets": (0.5, 0.6), "scope": "total", "window": 128}
    found = calibrate_folder(folder, text_ids, **options)
    model = stock(folder)
    making, judging = cut(model, text_ids, CalibrationOptions(**options))  # type: ignore[arg-type]
    assert (found.tokens, found.held_out_tokens) == (sum(map(len, making)), sum(map(len, judging)))
    dense, dense_tokens = nats(model, judging)
    for row in found.held_out:
        routed = row.target * 3 / 2  # two routed experts and a shared one of the same width
        thresholds = {path: found.threshold(path, routed, "layer") for path in found.layers}
        seen: dict[str, list[torch.Tensor]] = {}
        with left_out(model, thresholds, seen):
            sparse, tokens = nats(model, judging)
        inactive = sum(int((torch.cat(all_) < thresholds[path]).sum()) for path, all_ in seen.items())
        neurons = sum(len(torch.cat(all_)) for all_ in seen.values())
        assert row.achieved == pytest.approx(inactive / neurons * 2 / 3, abs=1e-3)
        assert row.achieved == pytest.approx(row.target, abs=0.03)  # on text that it was not made from
        assert row.dense_perplexity == pytest.approx(math.exp(dense), rel=1e-3)
        assert row.perplexity == pytest.approx(math.exp(sparse), rel=1e-3)
        assert row.perplexity != pytest.approx(row.dense_perplexity, rel=1e-3)
        agreed = torch.cat(tokens) == torch.cat(dense_tokens)
        assert row.agreement == pytest.approx(float(agreed.float().mean()), abs=2 / len(agreed))


def test_progress_adds_up(folder: Path, text_ids: torch.Tensor) -> None:
    registry = load_registry()
    model = optimize_and_load(folder, sparse_rules(read_rules("cpu-exact", registry=registry), registry), progress=False, threads=1)
    options = CalibrationOptions(targets=(0.5, 0.9), window=100)
    done: list[int] = []
    calibrate(model, find_model(folder), text_ids[:500], options, done.append, name="tiny", text_sha256="f")
    assert sum(done) == work_tokens(model, text_ids[:500], options) == 400 + 100 * 3


def test_the_file_records_its_model_and_text(thresholds: Thresholds) -> None:
    assert (thresholds.model, thresholds.model_type, thresholds.top_k) == ("tiny", "qwen2_moe", 2)
    assert list(thresholds.layers) == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    first, second = thresholds.layers.values()
    assert (first.num_experts, first.hidden, first.intermediate, first.shared_intermediate) == (5, 64, 24, 24)
    assert first.weights != second.weights
    assert [row.target for row in thresholds.held_out] == [0.5, 0.7, 0.85]


@pytest.mark.parametrize(
    ("tokens", "window", "making", "judging"),
    [
        (1000, 100, 800, 200),
        (1001, 100, 800, 200),  # a window of one token predicts nothing
        (64, 512, 48, 16),  # four windows at least
        (90, 512, 66, 24),
    ],
)
def test_how_a_text_is_cut(folder: Path, tokens: int, window: int, making: int, judging: int) -> None:
    first, second = cut(stock(folder), torch.arange(tokens), CalibrationOptions(window=window))
    assert (sum(map(len, first)), sum(map(len, second))) == (making, judging)
    assert max(map(int, map(torch.max, first))) < min(map(int, map(torch.min, second)))


def test_windows_do_not_exceed_what_the_model_was_made_for(folder: Path) -> None:
    first, _ = cut(stock(folder), torch.arange(10000), CalibrationOptions(window=4096))
    assert len(first[0]) == 512


def test_too_little_text(folder: Path, calibrate_folder: Calibrate) -> None:
    with pytest.raises(UnsupportedModelError, match="the text has 63 tokens; at least 64 are needed"):
        calibrate_folder(folder, torch.arange(63))


def test_a_target_that_shared_experts_keep_out_of_reach(folder: Path, text_ids: torch.Tensor, calibrate_folder: Calibrate) -> None:
    with pytest.raises(UnsupportedModelError, match=r"target 0.8 of all neurons cannot be reached"):
        calibrate_folder(folder, text_ids, targets=(0.8,), scope="total")


@pytest.mark.parametrize("options", [{"targets": (0.0,)}, {"targets": (1.5,)}, {"window": 1}], ids=str)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"target|window"):
        CalibrationOptions(**options)  # type: ignore[arg-type]


def test_a_model_that_leaves_nothing_out_is_refused(folder: Path) -> None:
    model = optimize_and_load(folder, "cpu-exact", progress=False, threads=1)
    with pytest.raises(UnsupportedModelError, match="no layer of this model can leave neurons out"):
        calibrate(model, find_model(folder), torch.zeros(0), CalibrationOptions(), name="tiny", text_sha256="f")


def test_rules_without_such_an_operator(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("- match: {kind: linear}\n  replace: {class: quantized_linear}\n")
    registry = load_registry()
    with pytest.raises(UnsupportedModelError, match="no operator of these rules can leave neurons out"):
        sparse_rules(read_rules(path, registry=registry), registry)


def test_rules_keep_all_else(tmp_path: Path) -> None:
    registry = load_registry()
    before = read_rules("cpu", vars={"weights": "int4"}, registry=registry)
    after = sparse_rules(before, registry)
    assert [rule.operator for rule in after.rules] == [rule.operator for rule in before.rules]
    assert after.rules[0].options.weights == "int4" and after.rules[0].options.sparsity.target == 0  # type: ignore[attr-defined]
    assert after.rules[1] == before.rules[1]


def test_experts_in_slots_are_calibrated_on_the_cpu(folder: Path, text_ids: torch.Tensor, thresholds: Thresholds, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {gpu: emulated, cache: {slots: 2}}}\n")
    registry = load_registry()
    model = optimize_and_load(folder, sparse_rules(read_rules(path, registry=registry), registry), progress=False, threads=1)
    assert any("emulated:0" in line for line in model.moegraft.placement())
    found = calibrate(model, find_model(folder), text_ids, CalibrationOptions(targets=(0.5,)), name="tiny", text_sha256="f")
    for name, layer in found.layers.items():
        assert layer.quantiles == pytest.approx(thresholds.layers[name].quantiles, rel=0.02, abs=1e-5)
    (row,) = found.held_out
    assert row.achieved == pytest.approx(thresholds.held_out[0].achieved, abs=0.02)  # the trials run in the slots
