"""The modelled costs, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegraft.operators.experts.devices.profiles import MODELS, PROFILES


def test_an_expert_of_deepseek_on_the_first_machine() -> None:
    machine, model = PROFILES["a6000_10core"], MODELS["deepseek-v2-lite"]
    size = model.expert_bytes()
    assert size == 3 * 2048 * 1408 * 9 // 16
    # One token: 4.866 MB at 60 GB/s and 10 us, at 540 GB/s and 40 us, at 24 GB/s.
    np.testing.assert_allclose(machine.cpu_ms([1], size), [0.0811008 + 0.010])
    np.testing.assert_allclose(machine.gpu_ms([1], size), [0.0090112 + 0.040])
    assert machine.transfer_ms(size) == pytest.approx(0.202752)
    assert machine.first_cpu_ms(size) == pytest.approx(0.0405504 + 0.020)
    # 100 tokens: 1.7302 GFLOP at 350 GFLOP/s and at 60 TFLOP/s, both slower than reading the weights.
    np.testing.assert_allclose(machine.cpu_ms([100], size), [4.943286857 + 0.010], rtol=1e-8)
    np.testing.assert_allclose(machine.gpu_ms([100], size), [0.0288358 + 0.040], rtol=1e-5)


def test_costs_follow_the_weight_type() -> None:
    machine, model = PROFILES["a6000_10core"], MODELS["mixtral-8x7b"]
    wide, narrow = model.expert_bytes(16), model.expert_bytes(4.5)
    assert machine.cpu_ms([1], wide, 16)[0] - 0.010 == pytest.approx((machine.cpu_ms([1], narrow, 4.5)[0] - 0.010) * 16 / 4.5)
    # Arithmetic is that of the weights, however many bits they have.
    np.testing.assert_allclose(machine.cpu_ms([512], wide, 16), machine.cpu_ms([512], narrow, 4.5))


def test_no_token_costs_nothing_and_more_cost_no_less() -> None:
    for machine in PROFILES.values():
        for model in MODELS.values():
            for cost in (machine.cpu_ms, machine.gpu_ms):
                times = cost(np.arange(600), model.expert_bytes())
                assert times[0] == 0.0 and (np.diff(times) >= 0).all()


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="link_gb_s is 0; it must be above 0"):
        replace(PROFILES["a6000_10core"], link_gb_s=0)
    with pytest.raises(ValueError, match="gpu_launch_ms is -1; it must be at least 0"):
        replace(PROFILES["a6000_10core"], gpu_launch_ms=-1)
