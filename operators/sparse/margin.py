"""How far below the threshold a sketched activation may lie before its neuron is not looked at: from a calibration's activations."""

from __future__ import annotations

import torch

MISSED = 1e-3  # share of the active neurons that a sketch may miss
MOST_A_CALL = 1 << 15  # activations that are kept of a call, evenly spread
DEFAULT_MARGIN = 0.8  # without a calibration; found with synthetic weights


class SketchSamples:
    """Activations by exact gates and by sketched ones, side by side, of a part of a calibration's neurons."""

    def __init__(self) -> None:
        self._exact: list[torch.Tensor] = []
        self._sketched: list[torch.Tensor] = []

    def add(self, exact: torch.Tensor, sketched: torch.Tensor) -> None:
        """What `sample` gave of one call, both ways."""
        assert exact.shape == sketched.shape, "both are of the same neurons"
        self._exact.append(exact)
        self._sketched.append(sketched)

    def margin(self, threshold: float) -> float | None:
        """The share of the threshold that all but MISSED of the active neurons reach when sketched, at most 1; None: none is active."""
        if not self._exact or threshold <= 0:
            return None
        exact, sketched = torch.cat(self._exact), torch.cat(self._sketched)
        active = sketched[exact >= threshold].sort().values
        if not len(active):
            return None
        reached = float(active[int(MISSED * len(active))]) / threshold
        return min(1.0, max(reached, 1e-6))


def sample(ids: torch.Tensor, acted: torch.Tensor) -> torch.Tensor:
    """Some of the magnitudes of `acted (T, K, I)`, those of padded slots in `ids (T, K)` left out: always the same places. On the CPU."""
    magnitudes = acted[ids >= 0].abs().flatten()
    step = max(1, magnitudes.numel() // MOST_A_CALL) | 1  # odd: not always the same neurons
    return magnitudes[::step].float().to("cpu", copy=True)
