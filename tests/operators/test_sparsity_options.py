"""The scope of a target, and targets that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moegraft.operators.sparsity import ExpertsLayer, SparsityOptions

QWEN35 = ExpertsLayer("", 256, 2048, 512, 512, 8)  # Qwen3.5-35B-A3B: a shared expert as wide as each of 8


def test_total_targets_match_the_published_accounting() -> None:
    # The published total sparsities of this model are eight ninths of the routed ones.
    assert QWEN35.routed_target(SparsityOptions(0.85, "total")) == pytest.approx(0.85 * 9 / 8)
    assert QWEN35.routed_target(SparsityOptions(0.85, "routed")) == 0.85
    for target in (0.0, 0.3, 0.88):
        routed = QWEN35.routed_target(SparsityOptions(target, "total"))
        assert routed * 8 / 9 == pytest.approx(target)


def test_without_shared_experts_both_scopes_are_equal() -> None:
    assert replace(QWEN35, shared_intermediate=0).routed_target(SparsityOptions(0.7, "total")) == 0.7


@pytest.mark.parametrize("target", [8 / 9, 0.95])
def test_a_target_that_shared_neurons_make_unreachable_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match=r"cannot be reached: shared neurons are always computed, so the target must be below 0.889"):
        QWEN35.routed_target(SparsityOptions(target, "total"))


@pytest.mark.parametrize(
    ("target", "message"), [(85.0, "not 85; write 0.85"), (1.0, "not 1$"), (-0.1, "not -0.1"), (float("nan"), "not nan")]
)
def test_a_target_outside_zero_to_one_is_refused(target: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparsityOptions(target, "routed", Path("t.json"))
