"""Cache policies: they learn from every token's routing and rank the experts of a layer by how much the cache should keep them.

Shapes: L layers, E experts, T tokens of one step in order, K experts per token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.routing_trace import Trace, TraceError

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]
Priority = NDArray[np.float64]
Rows = TypeVar("Rows", Scores, Ids)
PolicyName = Literal["mrs", "lru", "lfu", "score_frequency", "static"]
TOP_P_FACTOR = 2  # times the experts per token: HybriMoE sets p to twice the number of activated experts
NEGLIGIBLE = 1e-12  # a token's weight at which it no longer changes a float64 average


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The cache policy. In `benchmarks/results/cache_sweep.csv` only the defaults are best or near the best on every trace.

    Attributes:
        policy: `mrs`, a moving average of router scores (HybriMoE, section IV-D); `lru`, the latest use; `lfu`, the total of uses;
            `score_frequency`, the averages of scores and of uses in equal parts; `static`, the uses in `profile`, fixed.
        alpha: the newest token's weight in the average of scores, eq. (3).
        top_p: how many of a token's largest scores count, eq. (3); by default twice the experts per token.
        frequency_alpha: the newest token's weight in the average of uses.
        profile: a routing trace (`moegraft calibrate --routing`), for `static`.
    """

    policy: PolicyName = "score_frequency"
    alpha: float = 0.1
    top_p: int | None = None
    frequency_alpha: float = 0.01
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "frequency_alpha"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if self.top_p is not None and self.top_p < 1:
            raise ValueError(f"top_p must be 1 or more, not {self.top_p}")
        if (self.policy == "static") != (self.profile is not None):
            raise ValueError("policy 'static' needs 'profile', and only it takes one")

    @property
    def bypasses(self) -> bool:
        """Whether a miss stays out of the cache unless it ranks above a resident expert."""
        return self.policy == "static"


class CachePolicy(ABC):
    """Ranks the experts of each layer by the routing it has observed."""

    @abstractmethod
    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        """Observe one step of a layer.

        Args:
            scores: (T, E) float32, `routing.scores_of` the layer's router.
            chosen: (T, K) int64, the experts that are computed; -1 for a padded slot.
        """

    def update_layers(self, layers: NDArray[np.intp], scores: NDArray[np.float32], chosen: NDArray[np.int64]) -> None:
        """`update` each of N layers, with scores (N, T, E) and choices (N, T, K)."""
        for number, layer in enumerate(layers.tolist()):
            self.update(layer, scores[number], chosen[number])

    @abstractmethod
    def priority(self, layer: int) -> Priority:
        """Return (E,) float64, larger: keep; comparable among layers. Read-only, and valid until the next update of the layer."""

    @abstractmethod
    def priorities(self) -> NDArray[np.float64]:
        """Return `priority` of all layers, (L, E)."""


class _ExpertRanks(CachePolicy):
    """A policy that keeps one up-to-date rank per expert."""

    def __init__(self, layers: int, num_experts: int) -> None:
        self._rank = np.zeros((layers, num_experts))
        self._read_only = self._rank.view()
        self._read_only.flags.writeable = False

    def priorities(self) -> NDArray[np.float64]:
        return self._read_only

    def priority(self, layer: int) -> Priority:
        row: Priority = self._read_only[layer]
        return row


class LeastRecentlyUsed(_ExpertRanks):
    """Keep what was used last; the experts of one token are equally recent."""

    def __init__(self, layers: int, num_experts: int) -> None:
        super().__init__(layers, num_experts)
        self._clock = 0

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        tokens, top_k = chosen.shape
        ids, times = chosen.ravel(), np.repeat(np.arange(1, tokens + 1), top_k) + self._clock
        real = ids >= 0
        self._rank[layer][ids[real]] = times[real]  # of a repeated id the later time is kept
        self._clock += tokens


class LeastFrequentlyUsed(CachePolicy):
    """Keep what was used most often since the start; of equals, what was used last."""

    def __init__(self, layers: int, num_experts: int) -> None:
        self._uses = np.zeros((layers, num_experts))
        self._last = LeastRecentlyUsed(layers, num_experts)
        self._latest = 1.0

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        self._last.update(layer, scores, chosen)
        self._latest += len(chosen)
        self._uses[layer] += _uses(chosen, self._uses.shape[1])

    def priority(self, layer: int) -> Priority:
        return np.asarray(self._uses[layer] + self._last.priority(layer) / (2 * self._latest))

    def priorities(self) -> NDArray[np.float64]:
        return np.asarray(self._uses + self._last.priorities() / (2 * self._latest))


class MinusRecentScore(_ExpertRanks):
    """HybriMoE's MRS, eq. (3), applied per token: `S = alpha * TopP(s) + (1 - alpha) * S`."""

    def __init__(self, layers: int, num_experts: int, alpha: float, top_p: int | None = None) -> None:
        super().__init__(layers, num_experts)
        self._average = _MovingAverage(alpha)
        self._dropped = 0 if top_p is None else max(num_experts - top_p, 0)

    def update_layers(self, layers: NDArray[np.intp], scores: NDArray[np.float32], chosen: NDArray[np.int64]) -> None:
        gain = self._average.gain(min(scores.shape[1], self._average.length))
        recent = scores[:, scores.shape[1] - len(gain) :]
        finite = np.isfinite(recent.sum(axis=(1, 2)))
        if not finite.all():
            layers, recent = layers[finite], recent[finite]
        rank = self._rank[layers] * self._average.decay(scores.shape[1])
        if not self._dropped:
            rank += (recent * gain[:, None]).sum(axis=1)
        elif len(recent):
            top = recent.argpartition(self._dropped, axis=2)[..., self._dropped :]
            values = np.take_along_axis(recent, top, axis=2) * gain[:, None]
            places = top + np.arange(len(layers))[:, None, None] * rank.shape[1]
            rank += np.bincount(places.ravel(), values.ravel(), rank.size).reshape(rank.shape)
        self._rank[layers] = rank

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        recent = self._average.recent(scores)
        if not math.isfinite(recent.sum()):
            return  # a NaN would stay in the average forever
        row = self._rank[layer]
        gain = self._average.gain(len(recent))
        if not self._dropped:
            fresh: Priority = gain @ recent
        else:
            top = recent.argpartition(self._dropped, axis=1)[:, self._dropped :]
            values = gain[:, None] * np.take_along_axis(recent, top, axis=1)
            fresh = np.bincount(top.ravel(), values.ravel(), minlength=len(row)).astype(np.float64)
        row *= self._average.decay(len(scores))
        row += fresh


class ScoreAndFrequency(CachePolicy):
    """The sum of a fast average of scores and a slow average of uses, each divided by its mean in the layer."""

    def __init__(self, layers: int, num_experts: int, alpha: float, top_p: int | None = None, frequency_alpha: float = 0.01) -> None:
        self._scores = MinusRecentScore(layers, num_experts, alpha, top_p)
        self._average = _MovingAverage(frequency_alpha)
        self._uses = np.zeros((layers, num_experts))
        # Each expert that lands asks for a layer's ranks, which only an update changes: they are kept with the number of updates before. An
        # expert may land during an update, on another thread; the ranks that it is given are not used after it.
        self._updates = [0] * layers
        self._known: dict[int, tuple[int, Priority]] = {}

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        self._scores.update(layer, scores, chosen)
        recent = self._average.recent(chosen)
        row = self._uses[layer]
        row *= self._average.decay(len(chosen))
        row += _uses(recent, len(row), self._average.gain(len(recent)))
        self._updates[layer] += 1

    def update_layers(self, layers: NDArray[np.intp], scores: NDArray[np.float32], chosen: NDArray[np.int64]) -> None:
        self._scores.update_layers(layers, scores, chosen)
        gain = self._average.gain(min(chosen.shape[1], self._average.length))
        recent = chosen[:, chosen.shape[1] - len(gain) :]
        count, num_experts = len(layers), self._uses.shape[1]
        places = (recent + 1 + np.arange(count)[:, None, None] * (num_experts + 1)).ravel()  # the first of a layer counts padded slots
        weights = np.broadcast_to(gain[:, None], recent.shape).ravel()
        uses = np.bincount(places, weights, count * (num_experts + 1)).reshape(count, -1)[:, 1:]
        self._uses[layers] = self._uses[layers] * self._average.decay(chosen.shape[1]) + uses
        for layer in layers.tolist():
            self._updates[layer] += 1

    def priorities(self) -> NDArray[np.float64]:
        scores, uses = self._scores.priorities(), self._uses
        means = (np.where(total == 0, 1.0, total) for total in (scores.mean(axis=1, keepdims=True), uses.mean(axis=1, keepdims=True)))
        return np.asarray(scores / next(means) + uses / next(means))

    def priority(self, layer: int) -> Priority:
        updates = self._updates[layer]
        known = self._known.get(layer)
        if known is None or known[0] != updates:
            scores, uses = self._scores.priority(layer), self._uses[layer]
            ranks: Priority = np.asarray(scores / (scores.mean() or 1.0) + uses / (uses.mean() or 1.0))
            ranks.flags.writeable = False
            known = self._known[layer] = updates, ranks
        return known[1]


class StaticProfile(_ExpertRanks):
    """Keep what was used most in a profile (L, E), regardless of later use: KTransformers' map of hot experts."""

    def __init__(self, profile: NDArray[np.int64]) -> None:
        super().__init__(*profile.shape)
        self._rank += profile

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        pass


class _MovingAverage:
    """The weights of `x = alpha * new + (1 - alpha) * x`, applied to all tokens of a step at once."""

    def __init__(self, alpha: float) -> None:
        self._keep = 1 - alpha
        length = 1 if alpha == 1 else min(math.ceil(math.log(NEGLIGIBLE) / math.log(self._keep)), 1 << 16)
        self._gains = alpha * self._keep ** np.arange(length - 1, -1, -1.0)

    @property
    def length(self) -> int:
        """The number of tokens whose weight is not negligible."""
        return len(self._gains)

    def recent(self, rows: Rows) -> Rows:
        """Return the rows of a step whose weight is not negligible at its end."""
        return rows[-len(self._gains) :]

    def gain(self, tokens: int) -> NDArray[np.float64]:
        """Return (tokens,): the weights of the last tokens of a step at its end."""
        return self._gains[len(self._gains) - tokens :]

    def decay(self, tokens: int) -> float:
        """Return the factor on the average before these tokens."""
        return float(self._keep**tokens)


def _uses(chosen: Ids, num_experts: int, gain: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return (E,): how often each expert is chosen; with `gain` (T,) the sum of its tokens' gains."""
    weights = None if gain is None else np.repeat(gain, chosen.shape[1])
    return np.asarray(np.bincount(chosen.ravel() + 1, weights, num_experts + 1)[1:], dtype=np.float64)  # the first counts padded slots


def make_policy(options: CacheOptions, layers: int, num_experts: int, top_k: int) -> CachePolicy:
    """Return the policy that `options` ask for, for a model that routes each token to `top_k` of `num_experts` experts per layer.

    Raises:
        OSError, TraceError: the profile cannot be read, or is for another model.
    """
    top_p = options.top_p or TOP_P_FACTOR * top_k
    match options.policy:
        case "mrs":
            return MinusRecentScore(layers, num_experts, options.alpha, top_p)
        case "lru":
            return LeastRecentlyUsed(layers, num_experts)
        case "lfu":
            return LeastFrequentlyUsed(layers, num_experts)
        case "score_frequency":
            return ScoreAndFrequency(layers, num_experts, options.alpha, top_p, options.frequency_alpha)
    assert options.profile is not None, "CacheOptions checks that static has a profile"
    profile = Trace.load(options.profile).loads()
    if profile.shape != (layers, num_experts):
        raise TraceError(f"{options.profile}: expected a profile of {(layers, num_experts)} layers and experts, found {profile.shape}")
    return StaticProfile(profile)
