"""The planner's arithmetic: makespans against every order, the optimum against every split, and refused problems."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.optimum import needs_optimum, optimum
from support.schedule_cases import (
    INF,
    loose_problem,
    make_problem,
    makespan_by_definition,
    modelled_problem,
    optimum_over_integers,
    splits,
    wild_problem,
)

from moegraft.cpu_backend import Planner, check_problem


def test_makespan_is_the_best_over_all_orders() -> None:
    random = np.random.default_rng(0)
    planner = Planner("two_threshold")
    for _ in range(300):
        problem = wild_problem(random, int(random.integers(0, 5)))
        for split in splits(problem):
            found = planner.makespan(problem, np.array(split, bool))
            assert found == pytest.approx(makespan_by_definition(problem, split)), (problem, split)


@needs_optimum
def test_optimum_is_the_best_over_all_splits(long: bool) -> None:
    random = np.random.default_rng(1)
    planner = Planner("two_threshold")
    for round_ in range(1800 if long else 300):
        experts = int(random.integers(0, 9))
        problem = (wild_problem, loose_problem, modelled_problem)[round_ % 3](random, experts)
        best = min(planner.makespan(problem, np.array(split, bool)) for split in splits(problem))
        assert optimum(problem) == pytest.approx(best, rel=1e-12), problem


@needs_optimum
def test_optimum_of_as_many_experts_as_models_have() -> None:
    random = np.random.default_rng(3)
    for round_ in range(40):
        problem = modelled_problem(random, 64)
        grain_ms = problem.cpu_ms.max() / random.choice([3, 30, 90])
        scaled = {name: getattr(problem, name) / grain_ms for name in ("gpu_ms", "transfer_ms", "first_cpu_ms")}
        problem = replace(problem, cpu_ms=np.ceil(problem.cpu_ms / grain_ms), **scaled, max_transfers=3 * round_ if round_ % 2 else 64)
        assert optimum(problem) == pytest.approx(optimum_over_integers(problem), rel=1e-12), problem


def test_too_many_transfers_are_refused() -> None:
    problem = make_problem([1, 1], [1.0, 1.0], [1.0, 1.0], [INF, INF], 1.0, max_transfers=1)
    with pytest.raises(ValueError, match="needs 2 transfers where max_transfers is 1"):
        Planner("greedy").makespan(problem, np.zeros(2, bool))


def fields(**changed: Any) -> SimpleNamespace:
    problem = make_problem([1, 2], [1.0, 1.0], [1.0, 1.0], [0.0, INF], 1.0)
    return SimpleNamespace(**{name: getattr(problem, name) for name in type(problem).__slots__} | changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"loads": np.array([1, 2])}, TypeError, "loads must be a C-contiguous numpy array of int32"),
        ({"cpu_ms": np.ones(4)[::2]}, TypeError, "cpu_ms must be a C-contiguous numpy array of float64"),
        ({"gpu_ms": [1.0, 2.0]}, TypeError, "gpu_ms must be a C-contiguous numpy array of float64"),
        ({"arrival_ms": np.zeros(3)}, ValueError, "arrival_ms must have one dimension and as many values as loads, 2"),
        ({"arrival_ms": np.zeros((2, 1))}, ValueError, "arrival_ms must have one dimension"),
        ({"cpu_ms": np.array([1.0, math.nan])}, ValueError, r"cpu_ms\[1\] is nan; it must be at least 0"),
        ({"gpu_ms": np.array([-1.0, 1.0])}, ValueError, r"gpu_ms\[0\] is -1.0*; it must be at least 0"),
        ({"loads": np.array([1, -2], np.int32)}, ValueError, r"loads\[1\] is -2"),
        ({"link_free_ms": math.nan}, ValueError, "link_free_ms is nan"),
        ({"transfer_ms": -1.0}, ValueError, "transfer_ms is -1"),
        ({"max_transfers": -3}, ValueError, "max_transfers is -3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_problems_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    check_problem(fields())
    for call in (check_problem, Planner("greedy").plan, Planner("two_threshold").gains):
        with pytest.raises(error, match=message):
            call(fields(**changed))


@needs_optimum
def test_unknown_schedules_and_other_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'best'; expected one of all_cpu, fixed, on_demand, greedy, two_threshold"):
        Planner("best")
    with pytest.raises(ValueError, match="on_cpu must have one dimension and as many values as loads, 2"):
        Planner("greedy").makespan(fields(), np.zeros(3, bool))
    with pytest.raises(ValueError, match="more than 16 experts in flight"):
        optimum(make_problem([1] * 17, [1.0] * 17, [1.0] * 17, [1.0] * 17, 1.0))
