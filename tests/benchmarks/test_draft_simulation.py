"""Rounds over the engine on the virtual clock: a long answer where drafting cannot pay costs under three percent."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moegraft.operators.experts.devices.profiles import MODELS, PROFILES
from moegraft.operators.speculative.schedule import FixedSchedule, MarginalSchedule

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOKENS, FEW = 500, 50
SHAPES = {name: dataclasses.replace(shape, layers=2) for name, shape in MODELS.items()}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module, its routing drawn for models of a few layers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _synthetic_routing
    import speculative_modelled

    monkeypatch.setattr(_synthetic_routing, "MODELS", SHAPES)
    return speculative_modelled


def played(bench: Any, model: str, engine: str, ratio: float, way: Any, schedule: Any, tokens: int = TOKENS) -> Any:
    case = bench.Case(SHAPES[model], PROFILES["a6000_10core"], 4.5, ratio, TOKENS, 0)
    warm, text = case.traces()
    system = next(system for system in bench.ENGINES if system.name == engine)
    return bench.DraftSimulation(case.simulation(system, warm, ratio), text, way, schedule).run(tokens)


@pytest.mark.parametrize("engine", ["gpu", "hybrid"])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_the_schedule_loses_next_to_nothing_where_drafts_lose_much(bench: Any, model: str, engine: str) -> None:
    plain = played(bench, model, engine, 0.25, None, None)
    top_k = SHAPES[model].top_k
    for way in (bench.DraftWay(top_k, True, True), bench.DraftWay(max(1, top_k // 2), False, True)):
        always = played(bench, model, engine, 0.25, way, FixedSchedule(4), FEW)
        assert always.ms_per_token > 1.1 * plain.ms_per_token, "drafts that pay show nothing here"
        found = played(bench, model, engine, 0.25, way, MarginalSchedule(6))
        assert found.ms_per_token <= 1.03 * plain.ms_per_token
        assert way.resident <= (found.draft_demands == 0), "drafts of experts that are there bring none"
