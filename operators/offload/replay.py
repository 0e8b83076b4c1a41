"""Plays a cache policy over a routing trace: the hit rate at a capacity, with or without prefetching.

Who enters a full cache: every expert that computed, or only one that ranks above what it would replace.

MIN (Belady 1966): the policy that knows the future, and so the hit rate that no other can pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.offload.cache import CachePolicy, Ids, Priority, Scores
from moegraft.operators.routing_trace import NO_EXPERT, Trace

Mask = NDArray[np.bool_]


def retained(priority: NDArray[np.float64], resident: Mask, active: Mask, capacity: int, *, bypass: bool) -> Mask:
    """The experts in the cache after a step, all arrays (E,), or those of every layer one after another where they share slots.

    Without `bypass` the active experts are in, and the others leave by their priority; of more active experts than slots the best
    ones stay. With it all compete alike. Of equals the later id stays.

    Args:
        priority: larger: keep.
        resident: in the cache before the step; `capacity` at most.
        active: computed in the step.
    """
    candidates = np.flatnonzero(resident | active)
    kept = np.zeros_like(resident)
    if len(candidates) > capacity:
        keys = (priority[candidates],) if bypass else (priority[candidates], active[candidates])
        candidates = candidates[np.lexsort(keys)[len(candidates) - capacity :]]
    kept[candidates] = True
    return kept


def with_prefetched(priority: NDArray[np.float64], resident: Mask, wanted: NDArray[np.int64], capacity: int, budget: int) -> Mask:
    """The cache after prefetching, in order, the first `budget` of the `wanted` experts that are not in it.

    They take free slots, then those of the lowest-ranked experts that are not wanted themselves.

    Args:
        wanted: ids, the likeliest first.
    """
    missing = wanted[~resident[wanted]][:budget]
    held = resident.copy()
    free = capacity - int(held.sum())
    if len(missing) > free:
        victims = held.copy()
        victims[wanted] = False
        leaving = np.flatnonzero(victims)
        leaving = leaving[np.argsort(priority[leaving], kind="stable")][: len(missing) - free]
        held[leaving] = False
        missing = missing[: free + len(leaving)]
    held[missing] = True
    return held


@dataclass(frozen=True, slots=True)
class Setting:
    """What is played.

    Attributes:
        capacity: slots of each layer; with `shared`, as many in all but shared by the layers.
        bypass: whether a miss may stay out of the cache (`CacheOptions.bypasses`).
        prefetch: experts fetched before each layer at most, of those predicted on the layer before.
        warm_tokens: tokens at the start that teach the policy and fill the cache, and are not counted.
        tokens_per_step: tokens that go through a layer at once: 1 in decoding, more in a prompt. The last step may have fewer.
    """

    capacity: int
    shared: bool = False
    bypass: bool = False
    prefetch: int = 0
    warm_tokens: int = 0
    tokens_per_step: int = 1

    def __post_init__(self) -> None:
        for name, least in (("capacity", 0), ("prefetch", 0), ("warm_tokens", 0), ("tokens_per_step", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, not {getattr(self, name)}")


@dataclass(slots=True)
class Tally:
    """What a replay counted after warming up. An expert that several tokens of a step share is one access."""

    hits: int = 0
    accesses: int = 0
    admitted: int = 0  # misses that entered the cache
    prefetched: int = 0
    prefetched_in_use: int = 0  # of these, used in the step they were fetched for

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.accesses, 1)

    @property
    def misses(self) -> int:
        return self.accesses - self.hits


def steps_of(trace: Trace, tokens_per_step: int) -> NDArray[np.bool_]:
    """(steps, L, E): the experts that each step uses, as `Optimal` takes them."""
    used = trace.used()
    firsts = np.arange(0, trace.num_tokens, tokens_per_step)
    return np.logical_or.reduceat(used, firsts, axis=0)


def replay(trace: Trace, policy: CachePolicy, setting: Setting) -> Tally:
    """Plays a fresh `policy` over `trace` from an empty cache.

    At each layer of a step: prefetching as predicted on the layer before, the accesses, the policy's update, admission.

    Raises:
        ValueError: prefetching is asked for and the trace has no predictions.
    """
    if setting.prefetch and not trace.depths:
        raise ValueError("prefetch needs a trace with predictions; this one has none")
    cache = _Slots(trace, policy, setting)
    tally = Tally()
    active = steps_of(trace, setting.tokens_per_step)
    for step, first in enumerate(range(0, trace.num_tokens, setting.tokens_per_step)):
        tokens = slice(first, first + setting.tokens_per_step)
        counted = tally if first >= setting.warm_tokens else Tally()
        for layer in range(trace.num_layers):
            if setting.prefetch:
                cache.prefetch(layer, trace.predicted[0, tokens, layer], active[step, layer], counted)
            cache.access(layer, active[step, layer], counted)
            policy.update(layer, trace.scores[tokens, layer], trace.chosen[tokens, layer])
            cache.admit(layer, active[step, layer], counted)
    return tally


class _Slots:
    """The experts in the cache, as marks (L, E) and, for slots that layers share, as one row of all."""

    def __init__(self, trace: Trace, policy: CachePolicy, setting: Setting) -> None:
        self._policy = policy
        self._setting = setting
        self._resident = np.zeros((trace.num_layers, trace.num_experts), dtype=np.bool_)
        self._row = self._resident.reshape(-1)
        self._capacity = min(setting.capacity, trace.num_experts) * (trace.num_layers if setting.shared else 1)

    def _priorities(self) -> NDArray[np.float64]:
        return np.concatenate([self._policy.priority(layer) for layer in range(len(self._resident))])

    def prefetch(self, layer: int, predicted: NDArray[np.int64], active: NDArray[np.bool_], tally: Tally) -> None:
        """Fetches for one layer; `predicted` (T, K), of which the tokens' likeliest experts come first."""
        wanted = predicted.T.ravel()
        wanted = wanted[wanted != NO_EXPERT]
        if not len(wanted):
            return
        wanted = wanted[np.sort(np.unique(wanted, return_index=True)[1])]
        before = self._resident[layer].copy()
        budget = self._setting.prefetch
        if self._setting.shared:
            offset = layer * self._resident.shape[1]
            self._row[:] = with_prefetched(self._priorities(), self._row, wanted + offset, self._capacity, budget)
        else:
            self._resident[layer] = with_prefetched(self._policy.priority(layer), before, wanted, self._capacity, budget)
        fresh = self._resident[layer] & ~before
        tally.prefetched += int(fresh.sum())
        tally.prefetched_in_use += int((fresh & active).sum())

    def access(self, layer: int, active: NDArray[np.bool_], tally: Tally) -> None:
        tally.accesses += int(active.sum())
        tally.hits += int((active & self._resident[layer]).sum())

    def admit(self, layer: int, active: NDArray[np.bool_], tally: Tally) -> None:
        if not (active & ~self._resident[layer]).any():
            return
        before = self._resident[layer].copy()
        bypass = self._setting.bypass
        if self._setting.shared:
            marks = np.zeros_like(self._resident)
            marks[layer] = active
            self._row[:] = retained(self._priorities(), self._row, marks.reshape(-1), self._capacity, bypass=bypass)
        else:
            priority = self._policy.priority(layer)
            self._resident[layer] = retained(priority, before, active, self._capacity, bypass=bypass)
        tally.admitted += int((self._resident[layer] & ~before).sum())


class Optimal:
    """Keeps what is used soonest.

    With slots of one size this is exact, per layer and for slots that layers share, when every miss must enter the cache
    (`bypass=False`: the experts of a step stay until its end) and when a miss may stay outside. Played with prefetching it is only a
    good policy: what a prefetch brings in is not its choice.
    """

    def __init__(self, used: NDArray[np.bool_]) -> None:
        """
        Args:
            used: (S, L, E), the experts that each step uses; steps are played in order, and the layers of a step in order.
        """
        steps, layers, num_experts = used.shape
        self._layers = layers
        self._next = np.full((steps + 1, layers, num_experts), steps, dtype=np.int32)  # (S + 1, L, E): the first use at step s or later
        for step in range(steps - 1, -1, -1):
            self._next[step] = np.where(used[step], step, self._next[step + 1])
        self._step = np.zeros(layers, dtype=np.int64)

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None:
        self._step[layer] += 1

    def priority(self, layer: int) -> Priority:
        """Minus the place of the next use in the order of all layers' steps."""
        assert self._step[layer] < len(self._next), "more steps were played than are known"
        following = self._next[self._step[layer], layer].astype(np.float64)
        rank: Priority = -(following * self._layers + layer)
        return rank
