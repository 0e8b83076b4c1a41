"""Belady's MIN is optimal: no sequence of evictions has more hits, by exhaustive search, and no policy exceeds it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="an extra for tests: pip install 'moegraft[test]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import import_benchmark
from support.routing_traces import random_trace

from moegraft.cpu_backend import CachePolicy
from moegraft.operators.routing_trace import Trace

_cache_replay = import_benchmark("harness.cache_replay")
Belady, ReplaySettings, replay = (getattr(_cache_replay, name) for name in ("Belady", "ReplaySettings", "replay"))
Item = Hashable


def subsets(items: Iterable[Item], most: int) -> Iterable[frozenset[Item]]:
    pool = list(items)
    for size in range(min(most, len(pool)) + 1):
        yield from (frozenset(some) for some in combinations(pool, size))


def fewest_misses(requests: Sequence[frozenset[Item]], capacity: int, *, bypass: bool) -> int:
    """Return the least misses over all contents that the cache could have after each request, by exhaustive search."""
    costs: dict[frozenset[Item], int] = {frozenset(): 0}
    for request in requests:
        following: dict[frozenset[Item], int] = {}
        for content, cost in costs.items():
            missed = cost + len(request - content)
            if bypass:
                contents = subsets(content | request, capacity)
            elif len(request) >= capacity:
                contents = (some for some in subsets(request, capacity) if len(some) == capacity)
            else:
                contents = (request | some for some in subsets(content - request, capacity - len(request)))
            for after in contents:
                following[after] = min(following.get(after, missed), missed)
        costs = following
    return min(costs.values())


def requests_of(used: NDArray[np.bool_]) -> list[frozenset[Item]]:
    """Return the experts that each layer of each step uses; `used` is (steps, layers, E)."""
    return [frozenset((layer, int(expert)) for expert in np.flatnonzero(marks)) for step in used for layer, marks in enumerate(step)]


@given(seed=st.integers(0, 10_000), capacity=st.integers(0, 5), bypass=st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_cache_of_one_layer_misses_less(seed: int, capacity: int, bypass: bool) -> None:
    trace = random_trace(10, layers=1, num_experts=5, seed=seed, padded=0.1)
    used = trace.used()
    found = replay(trace, Belady(used), ReplaySettings(capacity, bypass=bypass))
    assert found.misses == fewest_misses(requests_of(used), capacity, bypass=bypass)


@given(seed=st.integers(0, 10_000), capacity=st.integers(0, 2), bypass=st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_cache_that_layers_share_misses_less(seed: int, capacity: int, bypass: bool) -> None:
    trace = random_trace(5, layers=2, num_experts=4, seed=seed)
    used = trace.used()
    found = replay(trace, Belady(used), ReplaySettings(2 * capacity, shared=True, bypass=bypass))
    assert found.misses == fewest_misses(requests_of(used), 2 * capacity, bypass=bypass)


POLICIES: dict[str, Callable[[Trace], CachePolicy]] = {
    "lru": lambda trace: CachePolicy("lru", trace.num_layers, trace.num_experts),
    "lfu": lambda trace: CachePolicy("lfu", trace.num_layers, trace.num_experts),
    "mrs": lambda trace: CachePolicy("mrs", trace.num_layers, trace.num_experts, alpha=0.3, top_p=4),
    "score_frequency": lambda trace: CachePolicy("score_frequency", trace.num_layers, trace.num_experts, alpha=0.3, top_p=4),
    "static": lambda trace: CachePolicy("static", trace.num_layers, trace.num_experts, profile=trace.loads()),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bypass", [False, True])
def test_no_policy_hits_more(name: str, shared: bool, bypass: bool) -> None:
    for seed in range(5):
        trace = random_trace(60, layers=3, num_experts=8, seed=seed)
        for capacity in (1, 2, 4, 7):
            setting = ReplaySettings(capacity, shared=shared, bypass=bypass)
            assert replay(trace, POLICIES[name](trace), setting).hits <= replay(trace, Belady(trace.used()), setting).hits


def test_more_slots_and_bypassing_never_hit_less() -> None:
    for seed in range(5):
        trace = random_trace(60, num_experts=8, seed=seed)
        hits = {
            bypass: [replay(trace, Belady(trace.used()), ReplaySettings(capacity, bypass=bypass)).hits for capacity in range(9)]
            for bypass in (False, True)
        }
        assert hits[False] == sorted(hits[False])
        assert hits[True] == sorted(hits[True])
        assert all(free >= bound for bound, free in zip(hits[False], hits[True], strict=True))
        assert hits[True] != hits[False], "bypassing should matter at a capacity of 1"


def test_a_trace_longer_than_the_known_steps_is_rejected() -> None:
    trace = random_trace(6)
    with pytest.raises(AssertionError, match="the trace is longer than the steps given"):
        replay(trace, Belady(trace.part(0, 3).used()), ReplaySettings(1))
