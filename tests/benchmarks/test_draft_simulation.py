"""Rounds over the engine on the virtual clock: where drafting cannot pay, a long answer takes at most three percent longer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support import ROOT
from support.model_shapes import MODELS
from support.virtual_device import PROFILES

from moegraft.operators.schedule import FixedSchedule, MarginalSchedule

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


def case_of(bench: Any, model: str, tokens: int) -> Any:
    return bench.Case(SHAPES[model], PROFILES["a6000_10core"], 4.5, tokens, 0)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_the_schedule_loses_little_where_drafts_lose_much(bench: Any, model: str) -> None:
    case = case_of(bench, model, TOKENS)
    texts = case.traces()
    plain, way = case.plain(*texts), bench.DraftWay(0.3)
    always = case.drafted(*texts, way, FixedSchedule(4), FEW)
    assert always.ms_per_token > 1.05 * plain.ms_per_token, "drafts that pay show nothing here"
    found = case.drafted(*texts, way, MarginalSchedule(6), TOKENS)
    assert found.ms_per_token <= 1.03 * plain.ms_per_token


@pytest.mark.parametrize("length", [1, 4])
def test_rounds_take_at_least_the_computed_bound(bench: Any, length: int) -> None:
    case = case_of(bench, "mixtral-8x7b", FEW)
    found = case.drafted(*case.traces(), bench.DraftWay(1.0), FixedSchedule(length), FEW)
    assert found.statistics.tokens_per_round == length + 1
    assert 0.5 * found.took_ms < found.least_ms <= found.took_ms


def test_the_bound_matches_hand_computed_times(bench: Any) -> None:
    from harness.draft_simulation import least_round_ms

    one, none, cpu, link = [np.array([1.0])], [np.array([0.0])], [np.array([2.0])], [np.array([4.0])]
    assert least_round_ms(1.0, cpu, none, link, 0.0) == pytest.approx(2.0, rel=0.02), "the CPU does half from 1 ms on"
    assert 3.7 < least_round_ms(1.0, cpu, none, link, 50.0) <= 4.0, "nearly the link alone"
    assert least_round_ms(1.0, [np.array([1e9])], one, none, 0.0) == pytest.approx(2.0, rel=0.02), "the GPU alone"
    bound = bench.DraftBound(3.0, [4.5])
    assert bound.gain(1.0, 1) == pytest.approx(2 * 3 / 4.5)
    assert bound.gain(0.0, 1) < 1 < bound.best_gain(1.0)
    needed = bound.acceptance_for(1.2)
    assert needed is not None and bound.best_gain(needed) >= 1.2 > bound.best_gain(needed - 0.01)
    assert bound.acceptance_for(1.5) is None


def test_states_of_an_mtp_layer_let_a_verification_find_more_experts(bench: Any) -> None:
    case = case_of(bench, "deepseek-v2-lite", FEW)
    warm, text = case.traces()

    def missing(*, looks_ahead: bool) -> float:
        base = case.simulation(warm, drafts=True)
        way = bench.DraftWay(1.0, looks_ahead=looks_ahead)
        found = bench.DraftSimulation(base, text, way, FixedSchedule(3)).run(FEW).parts["verify"]
        assert (base.engine.statistics.loaded_for_verification > 0) == looks_ahead
        return float(found.missing / found.layers)

    assert missing(looks_ahead=True) < missing(looks_ahead=False)
