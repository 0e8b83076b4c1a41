"""Which experts a cache keeps: pure policies that learn from every token's routing and rank the experts of a layer.

Shapes: L layers, E experts, T tokens of one step in their order, K experts a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.routing_trace import Trace, TraceError

Scores = NDArray[np.float32]
Ids = NDArray[np.int64]
Priority = NDArray[np.float64]
Rows = TypeVar("Rows", Scores, Ids)
PolicyName = Literal["mrs", "lru", "lfu", "score_frequency", "static"]
PAPERS_TOP_P = 2  # times the experts a token takes: "Typically, we set p to twice the number of activated experts"
FORGOTTEN = 1e-12  # what is left of a token's weight when it no longer changes a float64 average


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Which experts are kept. By `benchmarks/results/cache_sweep.csv` the defaults are best or near it on every trace; no others are.

    Attributes:
        policy: `mrs`, a moving average of router scores (HybriMoE, section IV-D); `lru`, the latest use; `lfu`, uses in all;
            `score_frequency`, the averages of scores and of uses in equal parts; `static`, uses in `profile`, for good.
        alpha: the newest token's weight in the average of scores, eq. (3).
        top_p: so many of a token's largest scores count, eq. (3); twice the experts a token takes where it is not given.
        frequency_alpha: the newest token's weight in the average of uses.
        admission: `always` lets an expert in that computed and was not there; `bypass` only where it ranks above one that is
            there, since the CPU serves a miss as well. `auto` is `bypass` for `static` and `always` for the others.
        scope: `layer` gives every layer as many slots, `global` shares them among the layers.
        profile: a routing trace (`moegraft calibrate --routing`), for `static`.
    """

    policy: PolicyName = "score_frequency"
    alpha: float = 0.1
    top_p: int | None = None
    frequency_alpha: float = 0.01
    admission: Literal["auto", "always", "bypass"] = "auto"
    scope: Literal["layer", "global"] = "layer"
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "frequency_alpha"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a weight above 0 and at most 1, not {getattr(self, name)}")
        if self.top_p is not None and self.top_p < 1:
            raise ValueError(f"top_p must be 1 or more, not {self.top_p}")
        if (self.policy == "static") != (self.profile is not None):
            raise ValueError("policy static and 'profile' need each other")
        if self.policy == "static" and self.admission == "always":
            raise ValueError("policy static never lets an expert in; 'admission: always' cannot go with it")

    @property
    def bypasses(self) -> bool:
        """Whether a miss may stay out of the cache."""
        return self.admission == "bypass" or (self.admission == "auto" and self.policy == "static")


class CachePolicy(Protocol):
    """Ranks the experts of each layer by what it saw."""

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        """Takes in one step of a layer.

        Args:
            scores: (T, E) float32, `routing.scores_of` the layer's router.
            chosen: (T, K) int64, the experts that compute; -1 for a padded slot.
        """
        ...

    def priority(self, layer: int) -> Priority:
        """(E,) float64, larger: keep. Comparable among layers. Read-only, and true until the next update of the layer."""
        ...


class _Ranked:
    """A policy whose ranking is one number an expert, kept up to date."""

    def __init__(self, layers: int, num_experts: int) -> None:
        self._rank = np.zeros((layers, num_experts))
        self._shown = self._rank.view()
        self._shown.flags.writeable = False

    def priority(self, layer: int) -> Priority:
        shown: Priority = self._shown[layer]
        return shown


class LeastRecentlyUsed(_Ranked):
    """Keeps what was used last; experts of one token are as recent as each other."""

    def __init__(self, layers: int, num_experts: int) -> None:
        super().__init__(layers, num_experts)
        self._clock = 0

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        tokens, top_k = chosen.shape
        ids, times = chosen.ravel(), np.repeat(np.arange(1, tokens + 1), top_k) + self._clock
        real = ids >= 0
        self._rank[layer][ids[real]] = times[real]  # of an id that comes twice the later one is kept
        self._clock += tokens


class LeastFrequentlyUsed:
    """Keeps what was used most often since the start; of equals, what was used last."""

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


class MinusRecentScore(_Ranked):
    """HybriMoE's MRS, eq. (3), once a token: `S = alpha * TopP(s) + (1 - alpha) * S`."""

    def __init__(self, layers: int, num_experts: int, alpha: float, top_p: int | None = None) -> None:
        super().__init__(layers, num_experts)
        self._average = _MovingAverage(alpha)
        self._dropped = 0 if top_p is None else max(num_experts - top_p, 0)

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        recent = self._average.recent(scores)
        if not math.isfinite(recent.sum()):
            return  # a NaN would stay in the average for ever
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


class ScoreAndFrequency:
    """The averages of scores, fast, and of uses, slow, each over its own mean in the layer."""

    def __init__(self, layers: int, num_experts: int, alpha: float, top_p: int | None = None, frequency_alpha: float = 0.01) -> None:
        self._scores = MinusRecentScore(layers, num_experts, alpha, top_p)
        self._average = _MovingAverage(frequency_alpha)
        self._uses = np.zeros((layers, num_experts))

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        self._scores.update(layer, scores, chosen)
        recent = self._average.recent(chosen)
        row = self._uses[layer]
        row *= self._average.decay(len(chosen))
        row += _uses(recent, len(row), self._average.gain(len(recent)))

    def priority(self, layer: int) -> Priority:
        scores, uses = self._scores.priority(layer), self._uses[layer]
        return np.asarray(scores / (scores.mean() or 1.0) + uses / (uses.mean() or 1.0))


class StaticProfile(_Ranked):
    """Keeps what was used most in a profile (L, E), whatever happens since: KTransformers' map of hot experts."""

    def __init__(self, profile: NDArray[np.int64]) -> None:
        super().__init__(*profile.shape)
        self._rank += profile

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        pass


class _MovingAverage:
    """Weights of `x = alpha * new + (1 - alpha) * x` over the tokens of a step taken at once."""

    def __init__(self, alpha: float) -> None:
        self._keep = 1 - alpha
        length = 1 if alpha == 1 else min(math.ceil(math.log(FORGOTTEN) / math.log(self._keep)), 1 << 16)
        self._gains = alpha * self._keep ** np.arange(length - 1, -1, -1.0)

    def recent(self, rows: Rows) -> Rows:
        """The rows of a step that still weigh something at its end."""
        return rows[-len(self._gains) :]

    def gain(self, tokens: int) -> NDArray[np.float64]:
        """(tokens,), the weight of each at the end of a step that ends with them."""
        return self._gains[len(self._gains) - tokens :]

    def decay(self, tokens: int) -> float:
        """What is left of the average before."""
        return float(self._keep**tokens)


def _uses(chosen: Ids, num_experts: int, gain: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """(E,), how often each is chosen; with `gain` (T,) each token counts that much."""
    weights = None if gain is None else np.repeat(gain, chosen.shape[1])
    return np.asarray(np.bincount(chosen.ravel() + 1, weights, num_experts + 1)[1:], dtype=np.float64)  # padded slots count in the first


def make_policy(options: CacheOptions, layers: int, num_experts: int, top_k: int) -> CachePolicy:
    """The policy that `options` ask for, of a model whose tokens take `top_k` of `num_experts` experts in each layer.

    Raises:
        OSError, TraceError: the profile cannot be read, or is of another model.
    """
    top_p = options.top_p or PAPERS_TOP_P * top_k
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
        raise TraceError(f"{options.profile}: a profile of {profile.shape} layers and experts for a model of {(layers, num_experts)}")
    return StaticProfile(profile)
