"""Each schedule against its definition, what holds of every plan, and how near the optimum the default comes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from support.optimum import needs_optimum, optimum
from support.schedule_cases import (
    INF,
    fixed_by_definition,
    gains_by_definition,
    greedy_by_definition,
    loose_problem,
    make_problem,
    modelled_problem,
    on_demand_by_definition,
    threshold_splits,
    wild_problem,
)

from moegraft.cpu_backend import Planner
from moegraft.operators.offload.scheduler import (
    SCHEDULES,
    LayerPlan,
    LayerProblem,
    ScheduleName,
    Scheduler,
    layers_that_fit,
)

MAP = (True, False)


def every_scheduler() -> Iterator[tuple[Scheduler, int]]:
    """Each with a layer to plan; the map for both of its devices."""
    for name in SCHEDULES:
        if name == "layer_map":
            yield from ((Scheduler(name, gpu_layers=MAP), layer) for layer in (0, 1))
        else:
            yield Scheduler(name), 0


def check_plan(plan: LayerPlan, problem: LayerProblem) -> None:
    """Exactly the missing experts of the GPU are transferred, each once and no more than there are slots."""
    assert plan.on_cpu.shape == problem.loads.shape and plan.on_cpu.dtype == np.bool_
    needed = np.flatnonzero(~plan.on_cpu & np.isinf(problem.arrival_ms))
    assert sorted(plan.transfers.tolist()) == needed.tolist()
    assert len(needed) <= problem.max_transfers


def problems(seed: int, count: int, most: int = 8) -> Iterator[LayerProblem]:
    """Half of them with costs that follow nothing, half as machines have them."""
    random = np.random.default_rng(seed)
    for round_ in range(count):
        experts = int(random.integers(0, most + 1))
        yield wild_problem(random, experts) if round_ % 2 else modelled_problem(random, experts, in_flight=round_ // 2 % 3)


def test_plans_are_valid_and_predict_their_makespan() -> None:
    schedulers, planner = list(every_scheduler()), Planner("greedy")
    for problem in problems(0, 1500, most=12):
        for scheduler, layer in schedulers:
            plan = scheduler.plan(layer, problem)
            check_plan(plan, problem)
            assert plan.makespan_ms == planner.makespan(problem, plan.on_cpu)
            times = problem.gpu_ms[plan.transfers]
            assert (np.diff(times[np.isfinite(times)]) <= 0).all()


def test_definitions() -> None:
    for problem in problems(1, 3000):
        experts = len(problem.loads)
        for name, split in (
            ("all_cpu", (True,) * experts),
            ("fixed", fixed_by_definition(problem)),
            ("on_demand", on_demand_by_definition(problem)),
            ("greedy", greedy_by_definition(problem)),
        ):
            assert tuple(Scheduler(name).plan(0, problem).on_cpu.tolist()) == split, (name, problem)


def test_greedy_by_definition_on_whole_layers() -> None:
    random = np.random.default_rng(2)
    greedy = Scheduler("greedy")
    for round_ in range(150):
        problem = modelled_problem(random, 64, in_flight=round_ % 4)
        if round_ % 5 == 0:
            problem = replace(problem, max_transfers=round_ % 7)
        assert tuple(greedy.plan(0, problem).on_cpu.tolist()) == greedy_by_definition(problem)


def test_the_papers_example() -> None:
    """Figure 5's idea: the CPU, done with what is missing, computes a cached expert while the GPU computes a transferred one."""
    problem = make_problem([2, 1, 1, 4], [2.0, 1.0, 1.0, 4.0], [1.0] * 4, [0.0, 0.0, INF, INF], 3.0)
    assert Scheduler("greedy").plan(0, problem).makespan_ms == 4.0
    assert Scheduler("fixed").plan(0, problem).makespan_ms == 5.0
    plan = Scheduler("two_threshold").plan(0, problem)
    assert (plan.transfers.tolist(), plan.makespan_ms) == ([3], 4.0)


def test_two_threshold_is_at_least_as_good_as_every_pair_of_thresholds() -> None:
    """Where both devices' times grow with the load; else the order of transfers within the sweep is not the best one."""
    random = np.random.default_rng(3)
    two_threshold, planner = Scheduler("two_threshold"), Planner("two_threshold")
    for round_ in range(2000):
        problem = modelled_problem(random, int(random.integers(0, 10)), in_flight=round_ % 5)
        if round_ % 4 == 0:
            problem = replace(problem, max_transfers=round_ // 4 % 4, cpu_free_ms=random.random(), gpu_free_ms=random.random())
        best = min(planner.makespan(problem, np.array(split, bool)) for split in threshold_splits(problem))
        assert two_threshold.plan(0, problem).makespan_ms <= best * (1 + 1e-12), problem


def test_two_threshold_is_never_slower_than_all_cpu_or_fixed() -> None:
    two_threshold, all_cpu, fixed = (Scheduler(name) for name in ("two_threshold", "all_cpu", "fixed"))
    for problem in problems(4, 4000, most=40):
        bound = min(all_cpu.plan(0, problem).makespan_ms, fixed.plan(0, problem).makespan_ms)
        assert two_threshold.plan(0, problem).makespan_ms <= bound * (1 + 1e-12), problem


@pytest.mark.parametrize("experts", [6, 26, 64], ids=["decode", "verify", "prefill"])
@needs_optimum
def test_two_threshold_is_near_the_optimum(experts: int) -> None:
    random = np.random.default_rng(experts)
    two_threshold = Scheduler("two_threshold")
    ratios = []
    for round_ in range(600):
        problem = modelled_problem(random, experts, in_flight=round_ % 3)
        ratios.append(two_threshold.plan(0, problem).makespan_ms / optimum(problem))
    assert min(ratios) >= 1 - 1e-12
    assert np.percentile(ratios, 99) <= 1.002 and max(ratios) <= 1.005


@needs_optimum
def test_two_threshold_stays_near_where_costs_follow_nothing() -> None:
    """Thresholds mean little then; moving and swapping brings the mean from 3.6% above the optimum to 1.4%."""
    random = np.random.default_rng(12)
    two_threshold = Scheduler("two_threshold")
    ratios = []
    for _ in range(1000):
        problem = loose_problem(random, 12)
        ratios.append(two_threshold.plan(0, problem).makespan_ms / optimum(problem))
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) <= 1.02 and np.percentile(ratios, 99) <= 1.13


def test_of_those_in_flight_the_latest_or_the_cheapest_go_to_the_cpu() -> None:
    two_threshold = Scheduler("two_threshold")
    latest = make_problem([1, 1, 1, 3], [1.0, 1.0, 1.0, 3.0], [0.1] * 4, [1.0, 2.0, 3.0, 20.0], 1.0)
    plan = two_threshold.plan(0, latest)
    assert plan.on_cpu.tolist() == [False, False, False, True] and plan.makespan_ms == pytest.approx(3.1)
    cheapest = make_problem([1, 9, 9, 9], [1.0, 9.0, 9.0, 9.0], [1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 1.1, 1.2], 1.0)
    plan = two_threshold.plan(0, cheapest)
    assert plan.on_cpu.tolist() == [True, False, False, False] and plan.makespan_ms == pytest.approx(4.0)


@needs_optimum
def test_one_gpu_time_for_all_makes_two_thresholds_optimal() -> None:
    random = np.random.default_rng(5)
    two_threshold = Scheduler("two_threshold")
    for round_ in range(400):
        problem = modelled_problem(random, int(random.integers(1, 30)), in_flight=round_ % 2)
        problem = replace(problem, gpu_ms=np.full_like(problem.gpu_ms, random.random()))
        if not ((problem.arrival_ms > 0) & np.isfinite(problem.arrival_ms)).any():
            assert two_threshold.plan(0, problem).makespan_ms == pytest.approx(optimum(problem), rel=1e-12)


def test_all_resident_and_none_resident() -> None:
    costs = ([1, 2], [5.0, 9.0], [1.0, 2.0])
    resident = make_problem(*costs, [0.0, 0.0], 1.0)
    missing = make_problem(*costs, [INF, INF], 1.0)
    no_slot = make_problem(*costs, [INF, INF], 1.0, max_transfers=0)
    expected = {"all_cpu": (14.0, 14.0, 14.0), "fixed": (3.0, 14.0, 14.0), "on_demand": (3.0, 4.0, 14.0)}
    expected |= {"greedy": (3.0, 4.0, 14.0), "two_threshold": (3.0, 4.0, 14.0)}
    for name, makespans in expected.items():
        scheduler = Scheduler(name)  # type: ignore[arg-type]
        assert tuple(scheduler.plan(0, problem).makespan_ms for problem in (resident, missing, no_slot)) == makespans, name


def test_a_gpu_or_link_that_is_lost_leaves_the_cpu() -> None:
    """Infinite costs express it; the plan then uses neither."""
    for name in ("greedy", "two_threshold"):
        scheduler = Scheduler(name)  # type: ignore[arg-type]
        no_gpu = make_problem([1, 2, 3], [1.0, 2.0, 3.0], [INF] * 3, [0.0, INF, 0.5], 1.0)
        assert scheduler.plan(0, no_gpu).makespan_ms == 6.0
        no_link = make_problem([1, 2, 3], [1.0, 2.0, 3.0], [0.1] * 3, [0.0, INF, INF], INF)
        assert scheduler.plan(0, no_link).makespan_ms == 5.0
        no_cpu = make_problem([1, 2, 3], [INF] * 3, [0.5] * 3, [0.0, INF, 2.5], 1.0)
        assert scheduler.plan(0, no_cpu).makespan_ms == 3.0


def test_gains_by_definition() -> None:
    for name in ("all_cpu", "fixed", "on_demand", "greedy", "two_threshold"):
        scheduler = Scheduler(name)  # type: ignore[arg-type]
        for problem in problems(6, 400):
            found = scheduler.gains(0, problem)
            expected = gains_by_definition(problem, lambda changed: scheduler.plan(0, changed).makespan_ms)  # noqa: B023
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_layer_map() -> None:
    problem = make_problem([1, 2], [5.0, 9.0], [1.0, 2.0], [0.0, INF], 1.0)
    scheduler = Scheduler("layer_map", gpu_layers=MAP)
    assert scheduler.plan(0, problem).makespan_ms == 3.0
    assert scheduler.plan(1, problem).makespan_ms == 14.0
    assert scheduler.gains(1, problem).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="layer_map: layer 2 is outside the map of 2 layers"):
        scheduler.plan(2, problem)


def test_layers_that_fit() -> None:
    assert layers_that_fit(4, 8, 0) == (False,) * 4
    assert layers_that_fit(4, 8, 23) == (False, False, True, True)
    assert layers_that_fit(4, 8, 99) == (True,) * 4


@pytest.mark.parametrize(
    ("name", "gpu_layers", "message"),
    [
        ("best", None, "unknown schedule 'best'; available schedules: all_cpu, fixed, layer_map"),
        ("layer_map", None, "schedule 'layer_map' needs gpu_layers"),
        ("greedy", (True,), "schedule 'greedy' takes no gpu_layers"),
    ],
)
def test_mistakes(name: ScheduleName, gpu_layers: tuple[bool, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(name, gpu_layers=gpu_layers)


def test_problems_are_checked_when_made_and_do_not_change() -> None:
    with pytest.raises(ValueError, match="first_cpu_ms is -1"):
        make_problem([1], [1.0], [1.0], [0.0], 1.0, first_cpu_ms=-1.0)
    with pytest.raises(TypeError, match="loads must be a C-contiguous numpy array of int32"):
        LayerProblem([1], np.ones(1), np.ones(1), np.ones(1), 1.0)  # type: ignore[arg-type]
    problem = make_problem([1], [1.0], [1.0], [0.0], 1.0)
    with pytest.raises(FrozenInstanceError):
        problem.transfer_ms = 2.0  # type: ignore[misc]
    assert copy.copy(problem).transfer_ms == pickle.loads(pickle.dumps(problem)).transfer_ms == 1.0


def test_plans_do_not_share_memory() -> None:
    """A planner reuses its own; what it hands out stays."""
    scheduler = Scheduler("on_demand")
    first = scheduler.plan(0, make_problem([1, 1], [1.0, 1.0], [1.0, 2.0], [INF, INF], 1.0))
    scheduler.plan(0, make_problem([1, 1], [1.0, 1.0], [2.0, 1.0], [INF, INF], 1.0, max_transfers=1))
    assert first.transfers.tolist() == [1, 0] and not first.on_cpu.any()
    assert math.isfinite(first.makespan_ms)
