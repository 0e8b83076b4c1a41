"""Quantiles of the histogram are those of the activations, and neurons are counted by expert."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moegraft.injection.calibration import BINS, LOWEST, PER_OCTAVE, ActivationHistogram, calibrating, quantiles
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.sparsity import SparseLayers
from moegraft.operators.thresholds import SparsityOptions

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
    histogram = ActivationHistogram(6, 50)
    stored = []
    for seed in range(4):  # in one pass, without keeping any
        index, acted = drawn(40, 3, 50, 6, seed)
        histogram.add(index, acted)
        stored.append(acted[(index >= 0) & (index < 6)].abs().flatten().numpy())
    magnitudes = np.concatenate(stored)
    assert histogram.count == len(magnitudes)
    for share, found in zip(SHARES, quantiles(histogram.bins, SHARES), strict=True):
        exact = max(float(np.quantile(magnitudes, share, method="inverted_cdf")), 2.0**LOWEST)  # smaller ones share a bin
        assert exact < found <= exact * BIN * (1 + 1e-6), share
        assert found == histogram.quantile(share)
        assert (magnitudes < found).mean() >= share


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 2.0 ** (LOWEST + 1 / PER_OCTAVE)), (2.0**-30, 2.0 ** (LOWEST + 1 / PER_OCTAVE)), (1e6, 2.0**8)],
    ids=["zero", "below", "above"],
)
def test_values_outside_the_range_are_counted_in_the_outer_bins(value: float, expected: float) -> None:
    histogram = ActivationHistogram(1, 4)
    histogram.add(torch.zeros(2, 1, dtype=torch.int64), torch.full((2, 1, 4), -value))
    assert histogram.bins.sum() == 8
    assert histogram.quantile(0.5) == pytest.approx(expected)


def test_neurons_are_counted_by_expert() -> None:
    histogram = ActivationHistogram(3, 4, hot=0.5)
    acted = torch.tensor([[[4.0, 0.1, -3.0, 0.2]], [[0.1, 0.2, -3.0, 0.3]], [[9.0, 9.0, 9.0, 9.0]]])
    histogram.add(torch.tensor([[1], [1], [-1]]), acted)  # the last is padded
    assert histogram.routed.tolist() == [0, 2, 0]
    # Of the eight values 4, 3, 3 and 0.3 are the larger half; the threshold is the upper edge of the fourth's bin, 0.2.
    assert histogram.active.tolist() == [[0, 0, 0, 0], [1, 0, 2, 1], [0, 0, 0, 0]]


def test_no_token_adds_nothing() -> None:
    histogram = ActivationHistogram(2, 4)
    histogram.add(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, 4))
    assert histogram.count == 0
    with pytest.raises(ValueError, match="no activation was counted"):
        histogram.quantile(0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(UnsupportedModelError, match="an activation is not finite"):
        ActivationHistogram(1, 2).add(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[[1.0, value]]]))


def test_calibrating_restores_the_thresholds() -> None:
    layers = SparseLayers()
    layer = layers.join(SparsityOptions(0.5, "routed"))
    layer.set_threshold(0.3, 0.5)
    layer.counts[:] = (5, 10)
    with calibrating({"a": layer}, {"a": (2, 4)}) as made:
        assert (layer.threshold, layer.routed_target) == (0.0, 0.0)
        layer.counts[:] += 7
        assert layer.observer is not None
        layer.observer(torch.tensor([[0, 1]]), torch.ones(1, 2, 4))
    assert made.layers["a"].count == 8 and made.all_bins().sum() == 8 and len(made.all_bins()) == BINS
    assert (layer.threshold, layer.routed_target, layer.observer) == (0.3, 0.5, None)
    assert layer.counts.tolist() == [5, 10]
