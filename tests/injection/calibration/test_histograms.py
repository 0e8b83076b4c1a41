"""Quantiles of the histogram are those of the activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from moegraft.injection.calibration import BINS, LOWEST, PER_OCTAVE, ActivationHistogram, all_bins, collect, quantiles
from moegraft.injection.injected import sparse_layers
from moegraft.injection.meta_model import find_model, meta_skeleton
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.sparsity import experts_layer

SHARES = [0.0, 0.01, 0.3, 0.5, 0.85, 0.95, 0.99, 0.999]
BIN = 2 ** (1 / PER_OCTAVE)


def drawn(tokens: int, top_k: int, intermediate: int, num_experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (T, K) with some padded slots, and silu activations (T, K, I) over many octaves."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, num_experts, generator=generator).topk(top_k, dim=-1).indices
    index[::7, 0] = -1
    index[::5, -1] = num_experts
    rows = torch.randn(tokens, top_k, intermediate, generator=generator) * torch.logspace(-3, 1, intermediate)
    return index, rows * torch.sigmoid(rows)


def test_quantiles_are_those_of_numpy_to_one_bin() -> None:
    histogram = ActivationHistogram(6)
    stored = []
    for seed in range(4):  # in one pass, without keeping any
        index, acted = drawn(40, 3, 50, 6, seed)
        histogram.add(index, acted)
        stored.append(acted[(index >= 0) & (index < 6)].abs().flatten().numpy())
    magnitudes = np.concatenate(stored)
    assert histogram.bins.sum() == len(magnitudes)
    for share, found in zip(SHARES, quantiles(histogram.bins, SHARES), strict=True):
        exact = max(float(np.quantile(magnitudes, share, method="inverted_cdf")), 2.0**LOWEST)  # smaller ones share a bin
        assert exact < found <= exact * BIN * (1 + 1e-6), share
        assert (magnitudes < found).mean() >= share


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 2.0 ** (LOWEST + 1 / PER_OCTAVE)), (2.0**-30, 2.0 ** (LOWEST + 1 / PER_OCTAVE)), (1e6, 2.0**8)],
    ids=["zero", "below", "above"],
)
def test_values_outside_the_range_are_counted_in_the_outer_bins(value: float, expected: float) -> None:
    histogram = ActivationHistogram(1)
    histogram.add(torch.zeros(2, 1, dtype=torch.int64), torch.full((2, 1, 4), -value))
    assert histogram.bins.sum() == 8
    assert quantiles(histogram.bins, [0.5]) == pytest.approx((expected,))


def test_no_token_adds_nothing() -> None:
    histogram = ActivationHistogram(2)
    histogram.add(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, 4))
    assert histogram.bins.sum() == 0
    with pytest.raises(ValueError, match="no activation was counted"):
        quantiles(histogram.bins, [0.5])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(UnsupportedModelError, match="an activation is not finite"):
        ActivationHistogram(1).add(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[[1.0, value]]]))


def test_collecting_restores_the_thresholds(load: Callable[[str], PreTrainedModel], folder: Path) -> None:
    model = load("target: 0.5, scope: routed")
    states = sparse_layers(model)
    before = {path: (layer.threshold, layer.routed_target, layer.counts.tolist()) for path, layer in states.items()}
    skeleton = meta_skeleton(find_model(folder), torch.float32)
    seen: list[float] = []

    def advance(tokens: int) -> None:
        seen.extend(layer.threshold for layer in states.values())

    routed = [experts_layer(path, skeleton) for path in states]
    made = collect(model, routed, [torch.arange(5), torch.arange(3)], advance)
    assert seen == [0.0] * 2 * len(states)
    assert [made[layer.path].bins.sum() for layer in routed] == [8 * layer.top_k * layer.intermediate for layer in routed]
    assert all_bins(made).sum() == sum(each.bins.sum() for each in made.values()) and len(all_bins(made)) == BINS
    assert all(threshold > 0 for threshold, *_ in before.values())
    for path, layer in states.items():
        assert (layer.threshold, layer.routed_target, layer.counts.tolist()) == before[path]
        assert layer.observer is None
