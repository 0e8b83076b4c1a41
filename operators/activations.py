"""Quantiles of `|act(gate)|` from one pass over a text, without storing activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.sparsity import LayerSparsity, whole

LOWEST, HIGHEST = -24, 8  # log2 of the range of magnitudes that the bins cover
PER_OCTAVE = 256  # bins per factor of two: a threshold is exact to 0.27 %
BINS = (HIGHEST - LOWEST) * PER_OCTAVE


class ActivationHistogram:
    """Histogram of `|act(gate)|` of one layer in logarithmic bins, with counts of how often each neuron is among the largest.

    Attributes:
        bins: (BINS,) int64. The first bin also counts all smaller magnitudes, zeros included; the last bin all larger ones.
        hot: the quantile that an activation must reach to count in `active`.
        active: (E, I) int64, how often each neuron reached the layer's `hot` quantile of the text seen so far.
        routed: (E,) int64, tokens routed to each expert.
    """

    def __init__(self, num_experts: int, intermediate: int, hot: float = 0.9) -> None:
        self.bins: NDArray[np.int64] = np.zeros(BINS, np.int64)
        self.active = torch.zeros(num_experts, intermediate, dtype=torch.int64)
        self.routed = torch.zeros(num_experts, dtype=torch.int64)
        self.hot = hot

    def add(self, top_k_index: torch.Tensor, acted: torch.Tensor) -> None:
        """Count the activations of one forward pass.

        Args:
            top_k_index: (T, K) expert ids; -1 and E are padded slots.
            acted: (T, K, I) float32, `act(gate)`.

        Raises:
            UnsupportedModelError: an activation is not finite.
        """
        index = top_k_index.flatten().to("cpu")
        real = (index >= 0) & (index < len(self.routed))
        magnitudes = acted.flatten(0, 1)[real.to(acted.device)].abs().float()
        if not bool(torch.isfinite(magnitudes).all()):
            raise UnsupportedModelError("an activation is not finite: thresholds cannot be found for a model that computes NaN or infinity")
        # Zeros become a magnitude of the first bin, so that their logarithm is finite.
        octaves = magnitudes.clamp_min(2.0 ** (LOWEST - 1)).log2_().sub_(LOWEST).mul_(PER_OCTAVE)
        numbers = octaves.floor_().clamp_(0, BINS - 1).to(torch.int64).flatten()
        self.bins += torch.bincount(numbers, minlength=BINS).cpu().numpy()
        if not self.bins.any():
            return
        # One pass cannot know the quantile of the whole text; the quantile of the text so far ranks neurons equally well.
        reached = (magnitudes >= self.quantile(self.hot)).to("cpu", torch.int64)
        self.active.index_add_(0, index[real], reached)
        self.routed.index_add_(0, index[real], torch.ones_like(index[real]))

    @property
    def count(self) -> int:
        """Number of activations counted."""
        return int(self.bins.sum())

    def quantile(self, share: float) -> float:
        """Return the upper edge of the first bin at or below which at least `share` of the magnitudes lie."""
        return quantiles(self.bins, [share])[0]


def quantiles(bins: NDArray[np.int64], shares: Sequence[float]) -> tuple[float, ...]:
    """Return, for each share, the threshold below which at least that share of the magnitudes in `bins` lies, exact to one bin.

    Raises:
        ValueError: nothing was counted.
    """
    total = int(bins.sum())
    if not total:
        raise ValueError("no activation was counted")
    wanted = np.ceil(np.asarray(shares) * total)
    found = np.searchsorted(np.cumsum(bins), np.maximum(wanted, 1))
    return tuple((2.0 ** (LOWEST + (found + 1) / PER_OCTAVE)).tolist())


@dataclass(frozen=True, slots=True)
class Calibration:
    """The histograms of all layers, by the path of their experts module."""

    layers: Mapping[str, ActivationHistogram]

    def all_bins(self) -> NDArray[np.int64]:
        """Return the histogram of all layers together, (BINS,) int64."""
        total = np.zeros(BINS, np.int64)
        for layer in self.layers.values():
            total += layer.bins
        return total


@contextmanager
def calibrating(layers: Mapping[str, LayerSparsity], sizes: Mapping[str, tuple[int, int]]) -> Iterator[Calibration]:
    """Compute all neurons in every forward pass of the body, and add their activations to the histograms it yields.

    Args:
        layers: the layers of one model, by module path.
        sizes: (num_experts, intermediate) of each layer, by module path.
    """
    calibration = Calibration({path: ActivationHistogram(*sizes[path]) for path in layers})
    with whole(layers.values()):
        for path, layer in layers.items():
            layer.observer = calibration.layers[path].add
        try:
            yield calibration
        finally:
            for layer in layers.values():
                layer.observer = None
