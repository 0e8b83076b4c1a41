"""Replays of cache policies match a plain loop that evicts one expert at a time, and hand-computed counts."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="an extra for tests: pip install 'moegraft[test]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import import_benchmark
from support.routing_traces import random_trace

from moegraft.cpu_backend import CachePolicy
from moegraft.operators.offload.scheduler import Ids
from moegraft.operators.routing_trace import Trace

_cache_replay = import_benchmark("harness.cache_replay")
ReplayCounts, ReplaySettings = _cache_replay.ReplayCounts, _cache_replay.ReplaySettings
replay = _cache_replay.replay
Slot = tuple[int, int]  # layer, expert


def loop_replay(trace: Trace, policy: CachePolicy, setting: ReplaySettings) -> ReplayCounts:
    """Replay with sets, evicting one expert at a time."""
    counts, cache = ReplayCounts(), set[Slot]()
    capacity = min(setting.capacity, trace.num_experts * (trace.num_layers if setting.shared else 1))

    def pool(layer: int) -> set[Slot]:
        return {slot for slot in cache if setting.shared or slot[0] == layer}

    def rank(slot: Slot) -> tuple[float, Slot]:
        return float(policy.priority(slot[0])[slot[1]]), slot

    for first in range(trace.num_tokens):
        counted = first >= setting.warm_tokens
        uses = {(layer, expert) for layer in range(trace.num_layers) for expert in trace.chosen[first : first + 1, layer].ravel().tolist()}
        for layer in range(trace.num_layers):
            active = {slot for slot in uses if slot[0] == layer and slot[1] >= 0}
            fetched, wanted = set[Slot](), set[Slot]()
            for depth in range(setting.lookahead if setting.prefetch else 0):
                ahead = layer + depth
                if ahead == trace.num_layers:
                    break
                by_rank = trace.predicted[depth, first : first + 1, ahead].T.ravel().tolist()
                named = [(ahead, expert) for expert in dict.fromkeys(by_rank) if expert >= 0]
                wanted |= set(named)
                for slot in [slot for slot in named if slot not in cache]:
                    if len(fetched) == setting.prefetch:
                        break
                    if len(pool(ahead)) >= capacity:
                        victims = pool(ahead) - wanted
                        if not victims:
                            break
                        cache.remove(min(victims, key=rank))
                    cache.add(slot)
                    fetched.add(slot)
            if counted:
                counts.prefetched += len(fetched)
                counts.prefetched_in_use += len(fetched & uses)
                counts.accesses += len(active)
                counts.hits += len(active & cache)
            policy.update([layer], trace.scores[None, first : first + 1, layer], trace.chosen[None, first : first + 1, layer])
            before = set(cache)
            if active - cache:
                cache |= active
                while len(pool(layer)) > capacity:
                    idle = pool(layer) - active
                    cache.remove(min(idle if idle and not setting.bypass else pool(layer), key=rank))
            if counted:
                counts.admitted += len(cache - before)
    return counts


SETTINGS = st.builds(
    ReplaySettings,
    capacity=st.integers(0, 20),
    shared=st.booleans(),
    bypass=st.booleans(),
    prefetch=st.integers(0, 3),
    lookahead=st.integers(1, 3),
    warm_tokens=st.integers(0, 12),
)


@given(seed=st.integers(0, 10_000), setting=SETTINGS, name=st.sampled_from(["lru", "lfu", "mrs", "profile"]))
@settings(max_examples=150, deadline=None)
def test_replay_equals_the_loop(seed: int, setting: ReplaySettings, name: str) -> None:
    trace = random_trace(25, layers=3, seed=seed, padded=0.1)
    policies = {
        "lru": lambda: CachePolicy("lru", 3, 6),
        "lfu": lambda: CachePolicy("lfu", 3, 6),
        "mrs": lambda: CachePolicy("mrs", 3, 6, alpha=0.3, top_p=4),
        "profile": lambda: CachePolicy("static", 3, 6, profile=trace.loads()),
    }
    assert replay(trace, policies[name](), setting) == loop_replay(trace, policies[name](), setting)


class InOrder:
    """Ranks experts by their ids."""

    def update(self, layers: list[int], scores: NDArray[np.float32], chosen: Ids) -> None: ...

    def priority(self, layer: int) -> NDArray[np.float64]:
        return np.arange(4.0)


def by_hand(*chosen: list[int]) -> Trace:
    """One layer of four experts."""
    tokens, top_k = len(chosen), len(chosen[0])
    return Trace(
        scores=np.full((tokens, 1, 4), 0.25, np.float32),
        chosen=np.array(chosen)[:, None],
        weights=np.ones((tokens, 1, top_k), np.float32),
        predicted=np.empty((0, tokens, 1, top_k), np.int64),
        starts=np.arange(tokens) == 0,
        layers=("experts",),
        source="by hand",
    )


def test_a_replay_matches_hand_computed_counts() -> None:
    # Two slots, the lower id leaves: 3 0, a hit on 3, then 1 replaces 0, 0 replaces 1, and 2 replaces 0.
    trace = by_hand([3], [0], [3], [1], [0], [2])
    counts = replay(trace, InOrder(), ReplaySettings(2))
    assert counts == ReplayCounts(hits=1, accesses=6, admitted=5)
    assert counts.hit_rate == pytest.approx(1 / 6)
    assert counts.misses == 5


def test_predictions_are_needed_to_prefetch() -> None:
    with pytest.raises(ValueError, match="prefetch needs a trace with predictions"):
        replay(random_trace(4, depths=0), CachePolicy("lru", 2, 6), ReplaySettings(2, prefetch=1))


@pytest.mark.parametrize("wrong", [{"capacity": -1}, {"prefetch": -1}, {"lookahead": 0}, {"warm_tokens": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        ReplaySettings(**({"capacity": 1} | wrong))
