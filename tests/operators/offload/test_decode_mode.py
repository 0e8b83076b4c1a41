"""The faster of two ways to decode, by a clock of the test's own."""

from __future__ import annotations

import pytest

from moegraft.operators.decode.cuda_graph import TIMED_STEPS, DecodeModeTuner


def run(tuner: DecodeModeTuner, steps: int, cost_ms: dict[str, float], start_ms: float = 0.0) -> tuple[list[str], float]:
    modes, now_ms = [], start_ms
    for _ in range(steps):
        modes.append(tuner.next(now_ms))
        now_ms += cost_ms[modes[-1]]
    return modes, now_ms


@pytest.mark.parametrize(("cost_ms", "winner"), [({"eager": 9.0, "graph": 7.0}, "graph"), ({"eager": 7.0, "graph": 7.0}, "eager")])
def test_each_mode_is_timed_and_the_faster_stays(cost_ms: dict[str, float], winner: str) -> None:
    tuner = DecodeModeTuner()
    modes, _ = run(tuner, 4 * TIMED_STEPS, cost_ms)
    timed = TIMED_STEPS + 1
    assert modes[: 2 * timed] == ["eager"] * timed + ["graph"] * timed
    assert tuner.winner == winner and set(modes[2 * timed :]) == {winner}


def test_a_slow_first_step_is_no_argument() -> None:
    tuner, costs = DecodeModeTuner(), {"eager": 9.0, "graph": 7.0}
    _, now_ms = run(tuner, TIMED_STEPS + 1, costs)
    assert tuner.next(now_ms) == "graph"
    run(tuner, 2 * TIMED_STEPS, costs, now_ms + 500.0)  # a capture
    assert tuner.winner == "graph"


def test_what_comes_between_is_not_counted() -> None:
    tuner, costs = DecodeModeTuner(), {"eager": 7.0, "graph": 9.0}
    now_ms = 0.0
    for _ in range(6 * TIMED_STEPS):
        modes, now_ms = run(tuner, 2, costs, now_ms)
        tuner.pause()
        now_ms += 1000.0 if modes[-1] == "eager" else 0.0  # a prompt
    assert tuner.winner == "eager"
