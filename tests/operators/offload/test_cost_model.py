"""Tables between and beyond their rows, and a model that follows a machine that changes."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from support.model_shapes import MODELS
from support.virtual_device import PROFILES

from moegraft.operators.offload.costs import CostModel, CostTables, fit_first_expert

TABLES = CostTables(
    cpu_ms=((1, 0.1), (4, 0.1), (8, 0.5), (16, 1.5)),
    gpu_ms=((2, 0.04), (512, 0.06)),
    transfer_ms=((1000, 0.5), (3000, 0.7)),
    first_cpu_ms=0.06,
)


def loads(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_between_and_beyond_the_rows() -> None:
    model = CostModel(TABLES)
    np.testing.assert_allclose(model.cpu_ms(loads(1, 3, 4, 6, 8, 12, 16)), [0.1, 0.1, 0.1, 0.3, 0.5, 1.0, 1.5])
    np.testing.assert_allclose(model.cpu_ms(loads(24, 116)), [2.5, 14.0])  # on along the last two rows
    np.testing.assert_allclose(model.gpu_ms(loads(1, 2, 257)), [0.04, 0.04, 0.05])  # level before the first
    assert [model.transfer_ms(nbytes) for nbytes in (10, 1000, 2000, 5000)] == pytest.approx([0.5, 0.5, 0.6, 0.9])
    assert model.first_cpu_ms == 0.06
    assert model.cpu_ms(loads(0, 1)).tolist() == [0.0, 0.1]
    assert model.cpu_ms(loads()).shape == (0,)


def test_loads_beyond_any_expected() -> None:
    """A prompt may be longer than what was prepared for."""
    model = CostModel(TABLES)
    model.observe_cpu(loads(16), 1.5 + 0.06)
    assert model.cpu_ms(loads(1, 1023))[1] == pytest.approx(0.5 + 0.125 * 1015)
    assert model.cpu_ms(loads(1, 100_000))[1] == pytest.approx(0.5 + 0.125 * 99_992)
    model.observe_gpu(loads(300_000), 12.0)
    assert model.gpu_ms(loads(300_000))[0] == pytest.approx(12.0, rel=0.1)


def test_a_single_row_is_extended_in_proportion() -> None:
    model = CostModel(CostTables(cpu_ms=((2, 0.1),), transfer_ms=((1000, 0.5),)))
    np.testing.assert_allclose(model.cpu_ms(loads(1, 2, 6)), [0.1, 0.1, 0.3])
    assert model.transfer_ms(4000) == pytest.approx(2.0)


def test_no_gpu_costs_infinity() -> None:
    model = CostModel(CostTables(cpu_ms=((1, 0.1),)))
    assert model.gpu_ms(loads(1, 5)).tolist() == [math.inf, math.inf]
    assert model.transfer_ms(1000) == math.inf
    model.observe_gpu(loads(1), 3.0)  # moves nothing
    assert model.gpu_ms(loads(1)).tolist() == [math.inf]


@pytest.mark.parametrize("machine", PROFILES)
@pytest.mark.parametrize("shape", MODELS)
def test_tables_of_a_modelled_machine_predict_it(machine: str, shape: str) -> None:
    """From 18 measured loads; the line across the bend from reading to arithmetic is the worst."""
    profile, nbytes = PROFILES[machine], MODELS[shape].expert_bytes()
    measured = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    every = loads(*range(1, 1025))
    tables = CostTables(
        cpu_ms=tuple(zip(measured, profile.cpu_ms(measured, nbytes).tolist(), strict=True)),
        gpu_ms=tuple(zip(measured, profile.gpu_ms(measured, nbytes).tolist(), strict=True)),
    )
    model = CostModel(tables)
    for found, expected in ((model.cpu_ms(every), profile.cpu_ms(every, nbytes)), (model.gpu_ms(every), profile.gpu_ms(every, nbytes))):
        error = np.abs(found / expected - 1)
        assert error.max() < 0.12 and error.mean() < 0.01


def test_follows_a_machine_that_slows_down() -> None:
    """Loads of 4 to 7 take 1.6 times as long as at start-up: their bucket learns it, the others keep what was measured."""
    model = CostModel(TABLES)
    before = model.cpu_ms(loads(1, 5, 16))
    for _ in range(80):
        model.observe_cpu(loads(5, 5, 6), 1.6 * (0.2 + 0.2 + 0.3) + 0.06)
    after = model.cpu_ms(loads(1, 5, 16))
    np.testing.assert_allclose(after / before, [1.0, 1.6, 1.0], rtol=0.02)


def test_finds_the_penalty_of_the_first_expert_and_each_ones_time_apart() -> None:
    model = CostModel(TABLES)
    random = np.random.default_rng(0)
    for _ in range(3000):
        count = int(random.integers(1, 7))
        model.observe_cpu(np.ones(count, np.int32), 0.03 + 0.13 * count)
    assert model.first_cpu_ms == pytest.approx(0.03, rel=0.15)  # from 0.06; the last of it goes slowly, as it is a small part
    assert model.cpu_ms(loads(1))[0] == pytest.approx(0.13, rel=0.01)


def test_one_disturbed_measurement_moves_little() -> None:
    model = CostModel(TABLES)
    for disturbed_ms in (1e6, 0.0):
        before = model.gpu_ms(loads(64))[0]
        model.observe_gpu(loads(64), disturbed_ms)
        assert 0.94 < model.gpu_ms(loads(64))[0] / before < 1.11


def test_what_is_learnt_stays_near_the_warm_up() -> None:
    """Long layers that are seen only where they are slow, and short ones that are faster than expected, contradict each other."""
    model = CostModel(TABLES)
    for _ in range(500):
        model.observe_cpu(np.full(30, 4, np.int32), 40.0)
        model.observe_cpu(loads(4, 5), 0.02)
    assert TABLES.first_cpu_ms / 4 <= model.first_cpu_ms <= 4 * TABLES.first_cpu_ms
    assert np.all(model.cpu_ms(loads(4, 16)) >= 0.25 * np.array([0.1, 1.5]))
    assert np.all(model.cpu_ms(loads(4, 16)) <= 4 * np.array([0.1, 1.5]))


def test_transfers_follow_the_link() -> None:
    model = CostModel(TABLES)
    for _ in range(60):
        model.observe_transfer(3000, 1.4)
    assert model.transfer_ms(3000) == pytest.approx(1.4, rel=0.01)
    assert model.transfer_ms(1000) == pytest.approx(1.0, rel=0.01)


def test_nothing_is_learnt_where_nothing_was_computed() -> None:
    model = CostModel(TABLES)
    model.observe_cpu(loads(), 0.3)
    model.observe_cpu(loads(0, 0), 0.3)
    assert model.first_cpu_ms == 0.06 and model.cpu_ms(loads(1))[0] == 0.1


def test_models_share_nothing() -> None:
    first, second = CostModel(TABLES), CostModel(TABLES)
    first.observe_cpu(loads(1), 9.0)
    assert second.cpu_ms(loads(1))[0] == 0.1
    with pytest.raises(FrozenInstanceError):
        TABLES.first_cpu_ms = 1.0  # type: ignore[misc]


def test_fit_first_expert() -> None:
    assert fit_first_expert([1, 2, 4], [0.16, 0.26, 0.46]) == pytest.approx((0.06, 0.1))
    assert fit_first_expert([1, 2, 3], [0.1, 0.3, 0.5])[0] == 0.0  # a negative penalty is noise
    assert fit_first_expert([1], [0.1]) == (0.0, 0.1)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"cpu_ms must ascend from 1, and has \[2, 2\]"):
        CostTables(cpu_ms=((2, 0.1), (2, 0.2)))
    with pytest.raises(ValueError, match="gpu_ms holds a time that is negative"):
        replace(TABLES, gpu_ms=((1, -0.1),))
    with pytest.raises(ValueError, match="first_cpu_ms must be finite and at least 0"):
        replace(TABLES, first_cpu_ms=math.nan)
    with pytest.raises(ValueError, match="a measured time of nan ms"):
        CostModel(TABLES).observe_cpu(loads(1), math.nan)
    with pytest.raises(ValueError, match="a measured time of -1"):
        CostModel(TABLES).observe_transfer(1, -1.0)
