"""Rounds over the engine on the virtual clock: where drafting cannot pay, a long answer takes at most three percent longer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support import ROOT, combinations
from support.model_shapes import MODELS
from support.virtual_device import PROFILES

from moegraft.operators.decode.schedule import FixedSchedule, MarginalSchedule

BENCHMARKS = ROOT / "benchmarks"
TOKENS, FEW = 500, 50
SHAPES = {name: dataclasses.replace(shape, layers=2) for name, shape in MODELS.items()}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module with routing for models of a few layers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import speculative_modelled
    from harness import routing

    monkeypatch.setattr(routing, "MODELS", SHAPES)
    return speculative_modelled


def played(bench: Any, model: str, engine: str, ratio: float, way: Any, schedule: Any, tokens: int = TOKENS) -> Any:
    case = bench.Case(SHAPES[model], PROFILES["a6000_10core"], 4.5, ratio, TOKENS, 0)
    warm, text = case.traces()
    system = next(system for system in bench.ENGINES if system.name == engine)
    return bench.DraftSimulation(case.simulation(system, warm, ratio), text, way, schedule).run(tokens)


@pytest.mark.parametrize(("engine", "model"), combinations(["gpu", "hybrid"], ["mixtral-8x7b", "deepseek-v2-lite"]))
def test_the_schedule_loses_little_where_drafts_lose_much(bench: Any, engine: str, model: str) -> None:
    plain = played(bench, model, engine, 0.25, None, None)
    top_k = SHAPES[model].top_k
    for way in (bench.DraftWay(top_k, "resident"), bench.DraftWay(max(1, top_k // 2), "any")):
        always = played(bench, model, engine, 0.25, way, FixedSchedule(4), FEW)
        assert always.ms_per_token > 1.05 * plain.ms_per_token, "drafts that pay show nothing here"
        found = played(bench, model, engine, 0.25, way, MarginalSchedule(6))
        assert found.ms_per_token <= 1.03 * plain.ms_per_token
        assert way.resident <= (found.draft_demands == 0), "drafts of experts that are there bring none"


def test_rounds_take_at_least_the_computed_bound(bench: Any) -> None:
    model = SHAPES["mixtral-8x7b"]
    case = bench.Case(model, PROFILES["a6000_10core"], 4.5, 0.25, TOKENS, 0)
    plain = played(bench, model.name, "hybrid", 0.25, None, None)
    bound = bench.bound_of(case, bench.ENGINES[1], *case.traces(), plain)
    way = bench.DraftWay(model.top_k, "resident")
    for length in (1, 4):
        found = played(bench, model.name, "hybrid", 0.25, way, FixedSchedule(length), FEW)
        limits = bench.limits_of(bound, found)
        assert plain.ms_per_token / found.ms_per_token <= limits["bound"]
        assert found.statistics.draft_ms / found.statistics.drafted >= model.layers * bound.draft_ms * 0.99
        assert found.statistics.verify_ms / found.statistics.rounds >= model.layers * bound.verify_ms(length)


def test_the_bound_matches_hand_computed_times(bench: Any) -> None:
    costs = bench.Costs(plain=3.0, rest=[0.5, 0.5], gpu=0.25, cpu=2.0, first_cpu=1.0, link=4.0)
    bound = bench.DraftBound(costs, [bench.Verification(experts=3, missing=1.75)], top_k=2)
    assert bound.draft_ms == 1.0
    assert bound.verify_ms(1) == pytest.approx(0.5 + 3.0)  # one on the CPU until 3 ms, three quarters of one over the link
    assert bound.gain(1.0, 1) == pytest.approx(2 * 3 / 4.5)
    assert bound.gain(0.0, 1) < 1 < bound.best_gain(1.0)
    needed = bound.acceptance_for(1.2)
    assert needed is not None and bound.best_gain(needed) >= 1.2 > bound.best_gain(needed - 0.01)
    assert bound.acceptance_for(1.5) is None


def test_a_cpu_whose_first_expert_is_slower_than_the_link_is_not_used(bench: Any) -> None:
    costs = bench.Costs(plain=3.0, rest=[0.5, 0.5], gpu=0.25, cpu=2.0, first_cpu=50.0, link=4.0)
    assert bench.DraftBound(costs, [bench.Verification(3, 1.0)], top_k=2).verify_ms(1) == pytest.approx(0.5 + 4.0)
