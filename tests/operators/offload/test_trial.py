"""The faster of two ways to decode, by a clock of the test's own."""

from __future__ import annotations

import pytest

from moegraft.operators.offload.decode_steps import STEPS, Trial


def run(trial: Trial, steps: int, cost_ms: dict[str, float], start_ms: float = 0.0) -> tuple[list[str], float]:
    ways, now_ms = [], start_ms
    for _ in range(steps):
        ways.append(trial.next(now_ms))
        now_ms += cost_ms[ways[-1]]
    return ways, now_ms


@pytest.mark.parametrize(("cost_ms", "winner"), [({"eager": 9.0, "graph": 7.0}, "graph"), ({"eager": 7.0, "graph": 7.0}, "eager")])
def test_each_way_is_timed_and_the_faster_stays(cost_ms: dict[str, float], winner: str) -> None:
    trial = Trial()
    ways, _ = run(trial, 4 * STEPS, cost_ms)
    tried = STEPS + 1
    assert ways[: 2 * tried] == ["eager"] * tried + ["graph"] * tried
    assert trial.winner == winner and set(ways[2 * tried :]) == {winner}


def test_a_slow_first_step_is_no_argument() -> None:
    trial, costs = Trial(), {"eager": 9.0, "graph": 7.0}
    _, now_ms = run(trial, STEPS + 1, costs)
    assert trial.next(now_ms) == "graph"
    run(trial, 2 * STEPS, costs, now_ms + 500.0)  # a capture
    assert trial.winner == "graph"


def test_what_comes_between_is_not_counted() -> None:
    trial, costs = Trial(), {"eager": 7.0, "graph": 9.0}
    now_ms = 0.0
    for _ in range(6 * STEPS):
        ways, now_ms = run(trial, 2, costs, now_ms)
        trial.pause()
        now_ms += 1000.0 if ways[-1] == "eager" else 0.0  # a prompt
    assert trial.winner == "eager"
