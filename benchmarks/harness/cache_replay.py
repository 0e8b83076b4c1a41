"""Replay a cache policy over a routing trace: the hit rate at a capacity, with or without prefetching.

`Belady` is the policy that knows the future (MIN, Belady 1966); its hit rate is the upper bound of all policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moegraft.cpu_backend import CachePolicy
from moegraft.operators.offload.scheduler import Ids
from moegraft.operators.routing_trace import NO_EXPERT, Trace

Mask = NDArray[np.bool_]
Scores = NDArray[np.float32]
Priority = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a trace is replayed.

    Attributes:
        capacity: slots of each layer; with `shared`, of all layers together.
        bypass: whether a miss may stay out of the cache (`CacheOptions.bypasses`).
        prefetch: the most experts fetched before each layer, among those predicted on the layer before.
        lookahead: the layers that they are of: the layer itself first, then the layers after it.
        warm_tokens: tokens at the start that train the policy and fill the cache, and are not counted.
    """

    capacity: int
    shared: bool = False
    bypass: bool = False
    prefetch: int = 0
    lookahead: int = 1
    warm_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (("capacity", 0), ("prefetch", 0), ("lookahead", 1), ("warm_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, not {getattr(self, name)}")


@dataclass(slots=True)
class ReplayCounts:
    """The counters of a replay after its warm-up."""

    hits: int = 0
    accesses: int = 0
    admitted: int = 0  # misses whose expert entered the cache
    prefetched: int = 0
    prefetched_in_use: int = 0  # of these, used in the step they were fetched for

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.accesses, 1)

    @property
    def misses(self) -> int:
        return self.accesses - self.hits


def replay(trace: Trace, policy: CachePolicy, settings: ReplaySettings) -> ReplayCounts:
    """Replay `trace` in decoding from an empty cache under a fresh `policy`.

    At each layer of a token: prefetching as predicted on the layer before, the accesses, the policy's update, admission.

    Raises:
        ValueError: `settings` prefetch, and the trace has no predictions so far ahead.
    """
    if settings.prefetch and trace.depths < settings.lookahead:
        raise ValueError(f"prefetch needs a trace with predictions {settings.lookahead} layers ahead; this one has {trace.depths}")
    cache = ReplayCache(trace.num_layers, trace.num_experts, policy, settings)
    counts, warm_up = ReplayCounts(), ReplayCounts()
    for token, used in enumerate(trace.used()):
        this = slice(token, token + 1)
        cache.counts = counts if token >= settings.warm_tokens else warm_up
        for layer in range(trace.num_layers):
            if settings.prefetch:
                cache.prefetch(layer, trace.predicted[:, this], used)
            cache.access(layer, used[layer])
            policy.update([layer], trace.scores[None, this, layer], trace.chosen[None, this, layer])
            cache.admit(layer, used[layer])
    return counts


class ReplayCache:
    """The resident experts as marks, (L, E), or one row of all layers where these share slots."""

    def __init__(self, layers: int, num_experts: int, policy: CachePolicy, settings: ReplaySettings) -> None:
        self.counts = ReplayCounts()
        self.resident = np.zeros((layers, num_experts), dtype=np.bool_)
        self._policy = policy
        self._settings = settings
        self._row = self.resident.reshape(-1)
        self._capacity = min(settings.capacity, num_experts * (layers if settings.shared else 1))

    def prefetch(self, layer: int, predicted: NDArray[np.int64], used: Mask) -> None:
        """Fetch experts of a layer and of those after it.

        Args:
            predicted: (D, T, L, K), as in a trace, each token's likeliest expert first.
            used: (L, E), to count those that the step uses.
        """
        budget, wanted = self._settings.prefetch, np.empty(0, np.int64)
        for depth, ahead in enumerate(range(layer, min(layer + self._settings.lookahead, len(self.resident)))):
            ids = predicted[depth, :, ahead].T.ravel()
            ids = np.array(list(dict.fromkeys(ids[ids != NO_EXPERT].tolist())), np.int64)
            wanted = np.concatenate([wanted, ids + ahead * self.resident.shape[1]])
            before = self.resident[ahead].copy()
            if not budget or before[ids].all():
                continue
            if self._settings.shared:
                self._row[:] = after_prefetch(self._priorities(), self._row, wanted, self._capacity, budget)
            else:
                self.resident[ahead] = after_prefetch(self._policy.priority(ahead), before, ids, self._capacity, budget)
            fetched = self.resident[ahead] & ~before
            budget -= int(fetched.sum())
            self.counts.prefetched += int(fetched.sum())
            self.counts.prefetched_in_use += int((fetched & used[ahead]).sum())

    def access(self, layer: int, used: Mask) -> None:
        self.counts.accesses += int(used.sum())
        self.counts.hits += int((used & self.resident[layer]).sum())

    def admit(self, layer: int, used: Mask) -> None:
        before = self.resident[layer].copy()
        if not (used & ~before).any():
            return
        bypass = self._settings.bypass
        if self._settings.shared:
            marks = np.zeros_like(self.resident)
            marks[layer] = used
            self._row[:] = after_admission(self._priorities(), self._row, marks.reshape(-1), self._capacity, bypass=bypass)
        else:
            self.resident[layer] = after_admission(self._policy.priority(layer), before, used, self._capacity, bypass=bypass)
        self.counts.admitted += int((self.resident[layer] & ~before).sum())

    def _priorities(self) -> Priority:
        return np.concatenate([self._policy.priority(layer) for layer in range(len(self.resident))])


def after_admission(priority: Priority, resident: Mask, used: Mask, capacity: int, *, bypass: bool) -> Mask:
    """Return the resident experts after a step; all arrays are (E,), or the concatenation of all layers where these share slots.

    Without `bypass`, used experts enter the cache and others are evicted by priority; if more experts are used than there are slots, those
    of highest priority stay. With `bypass`, all experts compete by priority. Of equal priorities, the higher id stays.

    Args:
        priority: experts of higher priority are kept.
        resident: the experts before the step, at most `capacity` of them.
    """
    candidates = np.flatnonzero(resident | used)
    if len(candidates) > capacity:
        keys = (priority[candidates],) if bypass else (priority[candidates], used[candidates])
        candidates = candidates[np.lexsort(keys)[len(candidates) - capacity :]]
    kept = np.zeros_like(resident)
    kept[candidates] = True
    return kept


def after_prefetch(priority: Priority, resident: Mask, wanted: NDArray[np.int64], capacity: int, budget: int) -> Mask:
    """Return the resident experts after prefetching, in order, the first `budget` of the `wanted` ids that are missing.

    They take free slots, then the slots of the experts of lowest priority that are not in `wanted`.
    """
    missing = wanted[~resident[wanted]][:budget]
    kept = resident.copy()
    free = capacity - int(kept.sum())
    if len(missing) > free:
        victims = kept.copy()
        victims[wanted] = False
        leaving = np.flatnonzero(victims)
        leaving = leaving[np.argsort(priority[leaving], kind="stable")][: len(missing) - free]
        kept[leaving] = False
        missing = missing[: free + len(leaving)]
    kept[missing] = True
    return kept


class Belady:
    """Keep the experts that are used soonest.

    With slots of one size the policy is optimal, per layer and for slots that layers share, both when every miss must enter the cache
    (`bypass=False`: the experts of a step stay until its end) and when a miss may stay outside. With prefetching it is not optimal, since
    it does not choose the prefetched experts.

    Args:
        used: (S, L, E), the experts that each step uses (`Trace.used`); steps are replayed in order, and the layers of a step in order.
    """

    def __init__(self, used: NDArray[np.bool_]) -> None:
        steps, layers, num_experts = used.shape
        self._layers = layers
        self._next = np.full((steps + 1, layers, num_experts), steps, dtype=np.int32)  # (S + 1, L, E): the first use at step s or later
        for step in range(steps - 1, -1, -1):
            self._next[step] = np.where(used[step], step, self._next[step + 1])
        self._step = np.zeros(layers, dtype=np.int64)

    def update(self, layers: list[int], scores: Scores, chosen: Ids) -> None:
        self._step[layers] += 1

    def priority(self, layer: int) -> Priority:
        """Return minus the position of the next use in the order of all layers' steps."""
        assert self._step[layer] < len(self._next), "the trace is longer than the steps given"
        following = self._next[self._step[layer], layer].astype(np.float64)
        return np.asarray(-(following * self._layers + layer))
