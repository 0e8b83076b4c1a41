"""Prefetching: which experts to load before they are needed, by what having them resident is worth.

HybriMoE, section IV-C: the routers of later layers are applied to the current hidden states, and the scheduler's own simulation
estimates what each predicted expert would save if it were resident. How often such predictions are right, which falls with the
distance, is measured.

SS-MoE, section 3.3: a draft uses few experts and leaves the link idle. A verification routes every drafted token again, but mostly
to the experts that the draft's own routers named for it, of which the draft ran only the first; those are loaded while later tokens
are drafted.

MoE-SpAc (arXiv:2603.09983): drafted tokens show which experts their verification will need. Drafters that do not run the model's layers,
such as an MTP layer, have hidden states for these tokens, on which the routers of all layers are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.queue import TransferQueue
from moegraft.operators.offload.scheduler import DraftStep, LayerStep, Prediction
from moegraft.operators.offload.slots import SlotTable
from moegraft.operators.offload.statistics import EngineStatistics
from moegraft.operators.offload.transfers import Urgency

PrefetchName = Literal["impact", "next_layer", "none"]
# A step of more, a prompt, uses most experts of every layer. Predictions further ahead, and their simulation, cost the host a millisecond a
# layer there, and those with most tokens are worth most.
LONG_TOKENS = 16
MAX_REQUESTS = 6  # more cannot land before the requests are chosen again, one layer later
MIN_GAIN_MS = 1e-6
PRECISION_ALPHA = 0.02  # the newest layer's weight in the average
INITIAL_PRECISION = (0.70, 0.58, 0.51)  # at depths 1 to 3 until measured: of a small trained model

Gains = Callable[[Prediction, NDArray[np.bool_]], NDArray[np.float64]]
"""`gains(prediction, resident)`: what making each predicted expert resident would save, one after another, (P,) ms; 0 for resident ones."""


@dataclass(frozen=True, slots=True)
class PrefetchOptions:
    """What is loaded before it is asked for.

    Attributes:
        policy: `impact`, what saves most by the scheduler's simulation; `next_layer`, all that the next layer is expected to choose;
            `none`.
        lookahead: how many layers ahead `impact` looks.
        promote: whether experts that the CPU served move up while the link is idle. Without it a cache changes only where transfers
            are planned or predicted.
        maps: a file of `moegraft calibrate --router-maps`, whose maps name the experts of later layers in place of their routers. Experts
            in `memory` are predicted by it as well.
    """

    policy: PrefetchName = "impact"
    lookahead: int = 3
    promote: bool = True
    maps: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.lookahead <= 3:
            raise ValueError(f"lookahead is 1 to 3 layers, not {self.lookahead}")

    def depth(self, tokens: int) -> int:
        """The number of layers that must be predicted, for a step of so many tokens."""
        return {"impact": self.lookahead if tokens <= LONG_TOKENS else 1, "next_layer": 1, "none": 0}[self.policy]


class _Precision:
    """How often an expert predicted at a depth and rank was chosen: moving averages.

    The likeliest of a prediction is right far more often than its last, and near predictions more often than far ones.
    """

    def __init__(self, num_experts: int) -> None:
        self._chosen = np.zeros(num_experts, bool)
        self._averages = [np.full(1, first) for first in INITIAL_PRECISION]  # by rank
        self._predicted: dict[tuple[int, int], Prediction] = {}

    def expect(self, depth: int, prediction: Prediction) -> None:
        self._predicted[prediction.layer, depth] = prediction
        ranks = int(prediction.ranks.max(initial=0)) + 1
        known = self._averages[depth - 1]
        if ranks > len(known):
            self._averages[depth - 1] = np.concatenate([known, np.full(ranks - len(known), known[-1])])

    def compare(self, step: LayerStep) -> None:
        """Learn from what a layer really chose."""
        self._chosen[:] = False
        self._chosen[step.experts] = True
        for depth, averages in enumerate(self._averages, 1):
            predicted = self._predicted.pop((step.layer, depth), None)
            if predicted is None or not len(predicted.experts):
                continue
            right = self._chosen[predicted.experts]
            totals = np.bincount(predicted.ranks, minlength=len(averages))
            hits = np.bincount(predicted.ranks, right, minlength=len(averages))
            seen = totals > 0
            averages[seen] += PRECISION_ALPHA * (hits[seen] / totals[seen] - averages[seen])

    def of(self, depth: int, prediction: Prediction) -> NDArray[np.float64]:
        """The probability that each expert is chosen, (P,)."""
        return np.asarray(self._averages[depth - 1][prediction.ranks])


class Prefetcher:
    """Keeps the queue filled with the experts that are worth loading for later layers.

    Args:
        verification: what verifications of drafts need in layers of which a step predicts nothing.
    """

    def __init__(
        self, options: PrefetchOptions, slots: SlotTable, queue: TransferQueue, gains: Gains, verification: VerificationPrefetcher
    ) -> None:
        self.options = options
        self._verification = verification
        self._precision = _Precision(slots.num_experts)
        self._slots = slots
        self._queue = queue
        self._gains = gains

    def look_ahead(self, step: LayerStep) -> None:
        """Request what later layers are expected to need, and drop requests that are not worth it any more."""
        self._precision.compare(step)
        if self.options.policy == "none":
            return
        wanted: list[tuple[float, int, int, int]] = []  # -gain, depth, layer, expert
        for depth, prediction in enumerate(step.predictions[: self.options.depth(len(step.chosen))], 1):
            self._precision.expect(depth, prediction)
            self._slots.protect(prediction.layer, prediction.experts.tolist())
            wanted += self._worth_loading(depth, prediction, simulated=self.options.policy == "impact" and len(step.chosen) <= LONG_TOKENS)
        self._slots.protect(step.layer, ())
        wanted = sorted(wanted, key=lambda each: each[:2])[:MAX_REQUESTS]
        predicted = {step.layer, *(each.layer for each in step.predictions)}
        later = self._verification.missing(predicted)[: MAX_REQUESTS - len(wanted)]
        self._queue.replan({*((layer, expert) for _, _, layer, expert in wanted), *later}, started=True)
        for urgency in (Urgency.NEXT, Urgency.DEEPER):
            self._queue.prefetch(
                [(layer, expert) for _, depth, layer, expert in wanted if (depth == 1) is (urgency is Urgency.NEXT)], urgency
            )
        self._verification.request(later)

    def _worth_loading(self, depth: int, prediction: Prediction, *, simulated: bool) -> list[tuple[float, int, int, int]]:
        """Return what is worth loading, as `look_ahead` sorts it: what saves most, or, where that is not simulated, has most tokens."""
        resident = self._slots.slot_of(prediction.layer)[prediction.experts] >= 0
        for expert in self._queue.in_flight(prediction.layer):
            resident |= prediction.experts == expert
        if resident.all():
            return []
        if simulated:
            gains = self._gains(prediction, resident) * self._precision.of(depth, prediction)
        else:
            gains = prediction.loads.astype(np.float64)
        worth = np.flatnonzero(~resident & (gains > MIN_GAIN_MS))
        return [(-float(gains[at]), depth, prediction.layer, int(prediction.experts[at])) for at in worth]

    def promote(self, layer: int, served: Sequence[int], priority: Callable[[int], NDArray[np.float64]]) -> None:
        """Request the best of the experts that the CPU served, if the link is idle and it ranks above a resident one."""
        if not self.options.promote or not served or not self._queue.idle or self._slots.capacity_of(layer) == 0:
            return
        ranks = priority(layer)
        best = max(served, key=ranks.__getitem__)
        resident = self._slots.slot_of(layer) >= 0
        if not self._slots.full(layer) or (resident.any() and ranks[best] > ranks[resident].min()):
            self._queue.request(layer, best, Urgency.PROMOTION)


class VerificationPrefetcher:
    """While a draft is drawn, loads what its next layer needs, then what the draft's verification will need.

    What it expects of a layer holds until the full model has computed the layer.
    """

    def __init__(self, slots: SlotTable, queue: TransferQueue, statistics: EngineStatistics) -> None:
        self._slots = slots
        self._queue = queue
        self._statistics = statistics
        # Of each layer and expert: the drafted tokens that will need it, and whether it was requested.
        self._tokens: NDArray[np.int64] = np.zeros((slots.layers, slots.num_experts), np.int64)
        self._requested: NDArray[np.bool_] = np.zeros((slots.layers, slots.num_experts), np.bool_)

    def drafted(self, step: LayerStep, draft: DraftStep) -> None:
        """Learn from a layer of a draft, and request what is worth loading now."""
        self._tokens[step.layer] += np.bincount(draft.chosen[draft.chosen >= 0], minlength=self._slots.num_experts)
        soon = self._for_draft(step, draft)
        wanted = [*soon, *(each for each in self.missing() if each not in soon)][:MAX_REQUESTS]
        self._queue.replan(set(wanted), started=True)
        for layer, expert in wanted:
            self._requested[layer, expert] = True
            self._queue.request(layer, expert, Urgency.NEXT if (layer, expert) in soon else Urgency.DEEPER)

    def expect(self, predictions: Sequence[Prediction]) -> None:
        """Learn what the verification of a drafted token is expected to need, and request what is worth loading now."""
        for each in predictions:
            self._tokens[each.layer, each.experts] += each.loads
        wanted = self.missing()[:MAX_REQUESTS]
        self._queue.replan(set(wanted), started=True)
        self.request(wanted)

    def request(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Request (layer, expert) pairs for the verification alone."""
        for layer, expert in wanted:
            self._requested[layer, expert] = True
            self._queue.request(layer, expert, Urgency.DEEPER)

    def verified(self, step: LayerStep) -> None:
        """Count what helped a layer that computes with all its experts, and forget what was expected of it."""
        requested, tokens = self._requested[step.layer], self._tokens[step.layer]
        if not tokens.any() and not requested.any():
            return
        resident = self._slots.slot_of(step.layer)[step.experts] >= 0
        self._statistics.loaded_for_verification += int((requested[step.experts] & resident).sum())
        if tokens.any():
            self._statistics.shared_in_verification += int((step.loads[~resident] - 1).sum())
        requested[:], tokens[:] = False, 0

    def _for_draft(self, step: LayerStep, draft: DraftStep) -> list[tuple[int, int]]:
        """The (layer, expert) pairs that the next layer will draft with."""
        if not step.predictions:
            return []
        following = step.predictions[0]
        missing = (following.ranks < draft.top_k) & (self._slots.slot_of(following.layer)[following.experts] < 0)
        return [(following.layer, expert) for expert in following.experts[missing].tolist()]

    def missing(self, known: Container[int] = ()) -> list[tuple[int, int]]:
        """Return the missing (layer, expert) pairs, most drafted tokens first; per layer as many as it has slots.

        Args:
            known: layers that others load for.
        """
        resident = self._slots.table >= 0
        found: list[tuple[int, int, int]] = []
        for layer in np.flatnonzero((self._tokens > 0).any(axis=1)).tolist():
            if layer in known:
                continue
            tokens = self._tokens[layer]
            # Of equals the resident ones, which cost nothing.
            order = np.lexsort((~resident[layer], -tokens))[: self._slots.capacity_of(layer)]
            best = order[tokens[order] > 0]
            self._slots.protect(layer, best.tolist())
            found += [(-int(tokens[expert]), layer, expert) for expert in best[~resident[layer][best]].tolist()]
        return [(layer, expert) for _, layer, expert in sorted(found)]
