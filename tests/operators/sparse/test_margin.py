"""The margin of a sketch is the share of the threshold that 99.9 % of the active neurons reach."""

from __future__ import annotations

import pytest
import torch

from moegraft.operators.thresholds import MAX_SAMPLES, MISSED, SketchSamples, sample


def noisy(count: int = 200_000, noise: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    """Return magnitudes and their sketched values."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(count, generator=generator).abs()
    return exact, (exact + noise * torch.randn(count, generator=generator)).abs()


@pytest.mark.parametrize("threshold", [0.5, 1.5])
def test_the_margin_misses_one_active_neuron_in_a_thousand(threshold: float) -> None:
    exact, sketched = noisy()
    samples = SketchSamples()
    for part in zip(exact.split(50_000), sketched.split(50_000), strict=True):
        samples.add(*part)
    margin = samples.margin(threshold)
    assert margin is not None
    missed = float((sketched[exact >= threshold] < margin * threshold).double().mean())
    assert 0.8 * MISSED < missed <= MISSED
    larger = SketchSamples()
    larger.add(*noisy(noise=0.2))
    assert (larger.margin(threshold) or 1.0) < margin, "a worse sketch needs more room"


def test_a_perfect_sketch_has_margin_one_and_no_samples_give_none() -> None:
    samples = SketchSamples()
    assert samples.margin(1.0) is None
    exact, _ = noisy(1000)
    samples.add(exact, exact)
    assert samples.margin(1.0) == 1.0
    assert samples.margin(0.0) is None and samples.margin(1e9) is None


def test_samples_are_at_fixed_positions_and_bounded() -> None:
    ids = torch.tensor([[0, -1], [2, 1]])
    acted = torch.arange(2 * 2 * 100_000, dtype=torch.float32).view(2, 2, 100_000)
    first, second = sample(ids, acted), sample(ids, -2 * acted)
    assert torch.equal(2 * first, second) and len(first) <= 2 * MAX_SAMPLES
    assert not ((first >= 100_000) & (first < 200_000)).any(), "padded slots hold anything"
