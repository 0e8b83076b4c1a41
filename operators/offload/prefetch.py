"""What to load before it is asked for: the next layers' experts, by what having them there is worth.

HybriMoE, section IV-C: the routers of later layers are applied to the hidden states at hand, and the scheduler's own simulation says
what each of the experts they name would save there. How often such predictions are right, which falls with the distance, is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.queue import TransferQueue
from moegraft.operators.offload.slots import SlotTable
from moegraft.operators.offload.step import LayerStep, Prediction
from moegraft.operators.offload.transfers import Urgency

PrefetchName = Literal["impact", "next_layer", "none"]
MOST_WANTED = 6  # more cannot land before the prediction is made anew, one layer later
LEAST_GAIN_MS = 1e-6
PRECISION_ALPHA = 0.02  # the newest layer's weight in the average
FIRST_PRECISION = (0.70, 0.58, 0.51)  # at depths 1 to 3 until measured: of a small trained model


@dataclass(frozen=True, slots=True)
class PrefetchOptions:
    """What is loaded before it is asked for.

    Attributes:
        policy: `impact`, what saves most by the scheduler's simulation; `next_layer`, all that the next layer is expected to choose;
            `none`.
        lookahead: how many layers ahead `impact` looks.
        promote: whether experts that the CPU served move up while the link is idle. Without it a cache changes only where transfers
            are planned or predicted.
    """

    policy: PrefetchName = "impact"
    lookahead: int = 3
    promote: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.lookahead <= 3:
            raise ValueError(f"lookahead is 1 to 3 layers, not {self.lookahead}")

    @property
    def depth(self) -> int:
        """Layers that must be predicted."""
        return {"impact": self.lookahead, "next_layer": 1, "none": 0}[self.policy]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An expert worth loading; `gain_ms` is what it is expected to save."""

    layer: int
    expert: int
    depth: int
    gain_ms: float


class Gains(Protocol):
    """What having each of a later layer's experts would save, one after another: (P,) ms, 0 for those that are there."""

    def __call__(self, prediction: Prediction, there: NDArray[np.bool_]) -> NDArray[np.float64]: ...


class Precision:
    """How often an expert predicted at a distance and a place was really chosen: moving averages.

    The likeliest of a prediction is right far more often than its last, and near ones more often than far ones.
    """

    def __init__(self, num_experts: int) -> None:
        self._chosen = np.zeros(num_experts, bool)
        self._averages = [np.full(1, first) for first in FIRST_PRECISION]  # by place
        self._predicted: dict[tuple[int, int], Prediction] = {}

    def expect(self, depth: int, prediction: Prediction) -> None:
        self._predicted[prediction.layer, depth] = prediction
        places = int(prediction.ranks.max(initial=0)) + 1
        known = self._averages[depth - 1]
        if places > len(known):
            self._averages[depth - 1] = np.concatenate([known, np.full(places - len(known), known[-1])])

    def compare(self, step: LayerStep) -> None:
        """Takes in what a layer has really chosen."""
        self._chosen[:] = False
        self._chosen[step.experts] = True
        for depth, averages in enumerate(self._averages, 1):
            predicted = self._predicted.pop((step.layer, depth), None)
            if predicted is None or not len(predicted.experts):
                continue
            right = self._chosen[predicted.experts]
            seen = np.bincount(predicted.ranks, minlength=len(averages))
            found = np.bincount(predicted.ranks, right, minlength=len(averages))
            there = seen > 0
            averages[there] += PRECISION_ALPHA * (found[there] / seen[there] - averages[there])

    def of(self, depth: int, prediction: Prediction) -> NDArray[np.float64]:
        """(P,): the chance that each expert is chosen."""
        return np.asarray(self._averages[depth - 1][prediction.ranks])

    def average(self, depth: int) -> float:
        """Over all places of that distance."""
        return float(self._averages[depth - 1].mean())


class Prefetcher:
    """Keeps the queue filled with what is worth loading."""

    def __init__(self, options: PrefetchOptions, slots: SlotTable, queue: TransferQueue, gains: Gains) -> None:
        self.options = options
        self.precision = Precision(slots.num_experts)
        self._slots = slots
        self._queue = queue
        self._gains = gains

    def look_ahead(self, step: LayerStep) -> None:
        """Asks for what later layers are expected to need, and drops what was asked for and is not worth it any more."""
        self.precision.compare(step)
        if self.options.policy == "none":
            return
        wanted: list[Wanted] = []
        for depth, prediction in enumerate(step.predictions[: self.options.depth], 1):
            self.precision.expect(depth, prediction)
            self._slots.set_keep(prediction.layer, self._worth_keeping(prediction))
            wanted += self._worth_loading(depth, prediction)
        self._slots.set_keep(step.layer, ())
        wanted.sort(key=lambda each: (-each.gain_ms, each.depth))
        del wanted[MOST_WANTED:]
        self._queue.replan({(each.layer, each.expert) for each in wanted}, started=True)
        for each in wanted:
            self._queue.request(each.layer, each.expert, Urgency.NEXT if each.depth == 1 else Urgency.DEEPER)

    def _worth_keeping(self, prediction: Prediction) -> list[int]:
        """As many as the layer has slots: the ones with the most tokens, of equals the likeliest."""
        order = np.lexsort((prediction.ranks, -prediction.loads))
        best: list[int] = prediction.experts[order[: self._slots.capacity_of(prediction.layer)]].tolist()
        return best

    def _worth_loading(self, depth: int, prediction: Prediction) -> list[Wanted]:
        there = self._slots.slot_of(prediction.layer)[prediction.experts] >= 0
        for expert in self._queue.in_flight(prediction.layer):
            there |= prediction.experts == expert
        if there.all():
            return []
        if self.options.policy == "next_layer":
            gains = prediction.loads.astype(np.float64)
        else:
            gains = self._gains(prediction, there) * self.precision.of(depth, prediction)
        worth = np.flatnonzero(~there & (gains > LEAST_GAIN_MS))
        return [Wanted(prediction.layer, int(prediction.experts[at]), depth, float(gains[at])) for at in worth]

    def promote(self, layer: int, served: Sequence[int], priority: Callable[[int], NDArray[np.float64]]) -> None:
        """Asks for the best of the experts that the CPU served, if the link is idle and it ranks above one that is there."""
        if not self.options.promote or not served or not self._queue.idle or self._slots.capacity_of(layer) == 0:
            return
        ranks = priority(layer)
        best = max(served, key=ranks.__getitem__)
        there = self._slots.slot_of(layer) >= 0
        if not self._slots.full(layer) or (there.any() and ranks[best] > ranks[there].min()):
            self._queue.request(layer, best, Urgency.PROMOTION)
