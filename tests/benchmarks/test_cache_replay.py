"""Replays of cache policies match a plain loop that evicts one expert at a time, and hand-computed counts."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="an extra for tests: pip install 'moegraft[test]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from support import import_benchmark
from support.routing_traces import random_trace

from moegraft.operators.offload.cache import (
    CachePolicy,
    Ids,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    MinusRecentScore,
    Priority,
    Scores,
    StaticProfile,
)
from moegraft.operators.routing_trace import Trace

_cache_replay = import_benchmark("harness.cache_replay")
ReplayCounts, ReplaySettings = _cache_replay.ReplayCounts, _cache_replay.ReplaySettings
replay, used_by_step = _cache_replay.replay, _cache_replay.used_by_step
after_admission, after_prefetch = _cache_replay.after_admission, _cache_replay.after_prefetch
Slot = tuple[int, int]  # layer, expert


def loop_replay(trace: Trace, policy: CachePolicy, setting: ReplaySettings) -> ReplayCounts:
    """Replay with sets, evicting one expert at a time."""
    counts, cache = ReplayCounts(), set[Slot]()
    size = setting.tokens_per_step
    capacity = min(setting.capacity, trace.num_experts) * (trace.num_layers if setting.shared else 1)

    def pool(layer: int) -> set[Slot]:
        return {slot for slot in cache if setting.shared or slot[0] == layer}

    def rank(slot: Slot) -> tuple[float, Slot]:
        return float(policy.priority(slot[0])[slot[1]]), slot

    for first in range(0, trace.num_tokens, size):
        counted = first >= setting.warm_tokens
        for layer in range(trace.num_layers):
            active = {(layer, expert) for expert in trace.chosen[first : first + size, layer].ravel().tolist() if expert >= 0}
            fetched = set[Slot]()
            if setting.prefetch:
                by_rank = trace.predicted[0, first : first + size, layer].T.ravel().tolist()
                wanted = [(layer, expert) for expert in dict.fromkeys(by_rank) if expert >= 0]
                missing = [slot for slot in wanted if slot not in cache][: setting.prefetch]
                for slot in missing:
                    if len(pool(layer)) >= capacity:
                        victims = pool(layer) - set(wanted) - fetched
                        if not victims:
                            break
                        cache.remove(min(victims, key=rank))
                    cache.add(slot)
                    fetched.add(slot)
            if counted:
                counts.prefetched += len(fetched)
                counts.prefetched_in_use += len(fetched & active)
                counts.accesses += len(active)
                counts.hits += len(active & cache)
            policy.update(layer, trace.scores[first : first + size, layer], trace.chosen[first : first + size, layer])
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
    capacity=st.integers(0, 7),
    shared=st.booleans(),
    bypass=st.booleans(),
    prefetch=st.integers(0, 3),
    warm_tokens=st.integers(0, 12),
    tokens_per_step=st.sampled_from([1, 1, 4]),
)


@given(seed=st.integers(0, 10_000), setting=SETTINGS, name=st.sampled_from(["lru", "lfu", "mrs"]))
@settings(max_examples=150, deadline=None)
def test_replay_equals_the_loop(seed: int, setting: ReplaySettings, name: str) -> None:
    trace = random_trace(25, layers=3, seed=seed, padded=0.1)
    policies = {
        "lru": lambda: LeastRecentlyUsed(3, 6),
        "lfu": lambda: LeastFrequentlyUsed(3, 6),
        "mrs": lambda: MinusRecentScore(3, 6, 0.3, 4),
    }
    assert replay(trace, policies[name](), setting) == loop_replay(trace, policies[name](), setting)


class InOrder:
    """Ranks experts by their ids."""

    def update(self, layer: int, scores: Scores, chosen: Ids) -> None: ...

    def priority(self, layer: int) -> Priority:
        return np.arange(4.0)


def by_hand(*chosen: list[int], predicted: list[int] | None = None) -> Trace:
    """One layer of four experts; the predictions are equal for all tokens."""
    tokens, top_k = len(chosen), len(chosen[0])
    guesses = np.array([[[predicted]] * tokens]).reshape(1, tokens, 1, -1) if predicted else np.empty((0, tokens, 1, top_k), np.int64)
    return Trace(
        scores=np.full((tokens, 1, 4), 0.25, np.float32),
        chosen=np.array(chosen)[:, None],
        weights=np.ones((tokens, 1, top_k), np.float32),
        predicted=guesses,
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


def test_a_replay_with_bypass_matches_hand_computed_counts() -> None:
    # After 3 and 1 enter, 0 stays out; 2 replaces 1.
    counts = replay(by_hand([3], [0], [3], [1], [0], [2]), InOrder(), ReplaySettings(2, bypass=True))
    assert counts == ReplayCounts(hits=1, accesses=6, admitted=4)


def test_warm_up_tokens_are_replayed_and_not_counted() -> None:
    assert replay(by_hand([3], [0], [3]), InOrder(), ReplaySettings(2, warm_tokens=2)) == ReplayCounts(hits=1, accesses=1)


def test_an_expert_of_several_tokens_of_a_step_counts_once() -> None:
    assert replay(by_hand([3, 1], [3, 0], [1, 3], [3, 1]), InOrder(), ReplaySettings(4, tokens_per_step=2)) == ReplayCounts(2, 5, 3)


def test_prefetches_match_hand_computed_counts() -> None:
    trace = by_hand([0], [1], [1], predicted=[1, 2])
    # One at a time: 1 into a free slot, 0 misses into the other; then 2 over 0, since 1 is predicted itself.
    assert replay(trace, InOrder(), ReplaySettings(2, prefetch=1)) == ReplayCounts(hits=2, accesses=3, admitted=1, prefetched=2)
    # Two: 1 and 2, of which 0 replaces 1; then 1 replaces 0 again, and is used.
    assert replay(trace, InOrder(), ReplaySettings(2, prefetch=2)) == ReplayCounts(
        hits=2, accesses=3, admitted=1, prefetched=3, prefetched_in_use=1
    )
    assert replay(by_hand([1], predicted=[1, 2]), InOrder(), ReplaySettings(2, prefetch=1)).prefetched_in_use == 1


def test_with_room_for_all_each_expert_misses_once() -> None:
    trace = random_trace(80, padded=0.1)
    for shared in (False, True):
        counts = replay(trace, LeastRecentlyUsed(2, 6), ReplaySettings(6, shared=shared))
        assert counts.misses == counts.admitted == int(trace.used().any(axis=0).sum())


def test_without_slots_nothing_hits() -> None:
    trace = random_trace(20)
    for bypass in (False, True):
        counts = replay(trace, LeastRecentlyUsed(2, 6), ReplaySettings(0, bypass=bypass, prefetch=2))
        assert (counts.hits, counts.admitted, counts.prefetched) == (0, 0, 0)
        assert counts.accesses == int(trace.used().sum())


def test_more_slots_than_experts_change_nothing() -> None:
    trace = random_trace(40, layers=3)
    for shared in (False, True):
        found = [replay(trace, LeastRecentlyUsed(3, 6), ReplaySettings(capacity, shared=shared)) for capacity in (6, 100)]
        assert found[0] == found[1]


def test_correct_predictions_leave_misses_only_in_the_first_layer() -> None:
    trace = random_trace(40, layers=3)
    known = np.full_like(trace.predicted, -1)
    known[0, :, 1:] = trace.chosen[:, 1:]
    sure = Trace(trace.scores, trace.chosen, trace.weights, known, trace.starts, trace.layers, trace.source)
    alone = replay(sure.part(0, 40), LeastRecentlyUsed(3, 6), ReplaySettings(2))
    counts = replay(sure, LeastRecentlyUsed(3, 6), ReplaySettings(2, prefetch=2))
    first = replay(_first_layer(trace), LeastRecentlyUsed(1, 6), ReplaySettings(2))
    assert counts.misses == first.misses < alone.misses
    assert counts.prefetched == counts.prefetched_in_use == alone.misses - first.misses


def _first_layer(trace: Trace) -> Trace:
    arrays = (trace.scores[:, :1], trace.chosen[:, :1], trace.weights[:, :1], trace.predicted[:, :, :1])
    return Trace(*arrays, trace.starts, trace.layers[:1], trace.source)


def test_shared_slots_change_nothing_for_one_layer() -> None:
    trace = _first_layer(random_trace(60))
    for capacity in range(7):
        found = [replay(trace, MinusRecentScore(1, 6, 0.2), ReplaySettings(capacity, shared=shared)) for shared in (False, True)]
        assert found[0] == found[1]


def test_shared_slots_go_to_the_layer_that_needs_them() -> None:
    """One layer alternates between two experts, the other always uses the same one: three slots hold all."""
    chosen = np.array([[[token % 2], [5]] for token in range(20)])
    trace = random_trace(20, num_experts=6, top_k=1)
    fixed = Trace(trace.scores, chosen, trace.weights, trace.predicted, trace.starts, trace.layers, trace.source)
    assert replay(fixed, LeastRecentlyUsed(2, 6), ReplaySettings(2, shared=True)).misses == 3
    assert replay(fixed, LeastRecentlyUsed(2, 6), ReplaySettings(1)).misses == 21


def test_a_static_profile_keeps_its_set() -> None:
    trace = random_trace(200)
    counts = replay(trace, StaticProfile(trace.loads()), ReplaySettings(3, bypass=True, warm_tokens=100))
    hot = np.argsort(trace.loads(), axis=1, kind="stable")[:, 3:]
    hits = sum(int(trace.used()[100:, layer][:, hot[layer]].sum()) for layer in range(2))
    assert counts.hits == hits
    assert counts.admitted == 0


def test_predictions_are_needed_to_prefetch() -> None:
    with pytest.raises(ValueError, match="prefetch needs a trace with predictions"):
        replay(random_trace(4, depths=0), LeastRecentlyUsed(2, 6), ReplaySettings(2, prefetch=1))


@pytest.mark.parametrize("wrong", [{"capacity": -1}, {"prefetch": -1}, {"warm_tokens": -1}, {"tokens_per_step": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        ReplaySettings(**({"capacity": 1} | wrong))


def test_used_by_step_joins_the_tokens_of_a_step() -> None:
    trace = random_trace(7, padded=0.1)
    used = trace.used()
    np.testing.assert_array_equal(used_by_step(trace, 1), used)
    joined = used_by_step(trace, 3)
    assert len(joined) == 3
    np.testing.assert_array_equal(joined[1], used[3:6].any(axis=0))
    np.testing.assert_array_equal(joined[2], used[6])


class TestAdmission:
    def test_always(self) -> None:
        priority = np.array([5.0, 4.0, 3.0, 2.0])
        marks = np.array([True, True, False, False]), np.array([False, False, True, True])
        assert after_admission(priority, *marks, 3, bypass=False).tolist() == [True, False, True, True]
        assert after_admission(priority, *marks, 1, bypass=False).tolist() == [False, False, True, False]  # more active than slots

    def test_bypass(self) -> None:
        priority = np.array([5.0, 1.0, 3.0, 2.0])
        marks = np.array([True, True, False, False]), np.array([False, False, True, True])
        assert after_admission(priority, *marks, 2, bypass=True).tolist() == [True, False, True, False]

    def test_prefetched_experts_never_replace_each_other(self) -> None:
        priority, resident = np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, True, False, False])
        assert after_prefetch(priority, resident, np.array([2, 3]), 2, 2).tolist() == [False, False, True, True]
        assert after_prefetch(priority, resident, np.array([0, 2, 3]), 2, 2).tolist() == [True, False, True, False]
        assert after_prefetch(priority, resident, np.array([2]), 3, 1).tolist() == [True, True, True, False]
