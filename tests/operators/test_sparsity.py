"""Counts of neurons, their sums and the warning about drift while a model runs."""

from __future__ import annotations

import logging

import pytest

from moegraft.operators.sparsity import WINDOW_TOKENS, LayerSparsity, SparseLayers, SparsityOptions

OPTIONS = SparsityOptions(0.7, "routed")
NEURONS = 100  # neurons per token in these tests


def joined(count: int) -> tuple[SparseLayers, list[LayerSparsity]]:
    layers = SparseLayers()
    found = [layers.join(OPTIONS) for _ in range(count)]
    for layer in found:
        layer.set_threshold(0.1, 0.7)
    return layers, found


def run(layers: list[LayerSparsity], tokens: int, shares: list[float]) -> None:
    """Run one forward pass in which each layer leaves a share out."""
    for layer, share in zip(layers, shares, strict=True):
        layer.begin(tokens)
        layer.counts[:] += (round(tokens * NEURONS * (1 - share)), tokens * NEURONS)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_drift_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    _, layers = joined(2)
    for _ in range(4):
        run(layers, WINDOW_TOKENS, [0.60, 0.74])  # 67 % together
    (message,) = warnings(caplog)
    assert message.startswith("sparsity: 67.0 % of the routed neurons are left out, where the target is 70.0 %")
    assert "moegraft calibrate --text FILE" in message


@pytest.mark.parametrize("shares", [[0.62, 0.78], [0.685, 0.685], [0.715, 0.715]])
def test_drift_is_that_of_all_layers_together_and_up_to_two_points_are_allowed(
    caplog: pytest.LogCaptureFixture, shares: list[float]
) -> None:
    _, layers = joined(2)
    for _ in range(3):
        run(layers, WINDOW_TOKENS, shares)
    assert warnings(caplog) == []


def test_drift_is_noticed_after_many_tokens_on_target(caplog: pytest.LogCaptureFixture) -> None:
    _, layers = joined(1)
    for _ in range(100):
        run(layers, WINDOW_TOKENS, [0.7])
    for _ in range(2):
        run(layers, WINDOW_TOKENS, [0.75])  # the total since the start would still be 70 %
    assert len(warnings(caplog)) == 1


def test_few_tokens_are_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    _, layers = joined(1)
    run(layers, WINDOW_TOKENS - 1, [0.1])
    run(layers, 1, [0.7])
    assert warnings(caplog) == []
    run(layers, 1, [0.7])  # now the window is full
    assert len(warnings(caplog)) == 1


def test_a_target_of_zero_never_drifts(caplog: pytest.LogCaptureFixture) -> None:
    layer = SparseLayers().join(SparsityOptions(0.0, "routed"))
    for _ in range(3):
        run([layer], WINDOW_TOKENS, [0.0])
    assert warnings(caplog) == []


def test_statistics_are_by_target() -> None:
    layers, found = joined(2)
    other = layers.join(SparsityOptions(0.5, "total"))
    assert layers.statistics()[0]["routed_sparsity"] is None
    run(found, 10, [0.6, 0.8])
    run([other], 10, [0.55])
    first, second = layers.statistics()
    assert first == {"target": 0.7, "scope": "routed", "layers": 2, "routed_target": 0.7, "routed_sparsity": pytest.approx(0.7)}
    assert (second["scope"], second["layers"], second["routed_sparsity"]) == ("total", 1, pytest.approx(0.55))
    assert found[0].statistics() == {"threshold": 0.1, "routed_sparsity": pytest.approx(0.6), "neurons": 1000}


def test_two_models_count_separately() -> None:
    (_, [one]), (_, [other]) = joined(1), joined(1)
    run([one], 5, [0.9])
    assert one.achieved == pytest.approx(0.9) and other.achieved is None
