"""The modelled costs match figures worked out by hand, and the clock of the virtual device follows them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.model_shapes import MODELS
from support.virtual_device import PROFILES

from moegraft.operators.experts.forecast import Neurons


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


def test_skipped_neurons_cost_nothing() -> None:
    machine, size = PROFILES["a6000_10core"], MODELS["deepseek-v2-lite"].expert_bytes()
    tenth = Neurons(active=0.1, gate_share=1 / 3)
    # One token reads the gates and a tenth of the other rows: 1/3 + 2/30 = 0.4 of the 4.866 MB.
    np.testing.assert_allclose(machine.cpu_ms([1], size, neurons=tenth), [0.4 * 0.0811008 + 0.010])
    np.testing.assert_allclose(machine.gpu_ms([1], size, neurons=tenth), [0.4 * 0.0090112 + 0.040])
    assert machine.first_cpu_ms(size, tenth) == pytest.approx(0.4 * 0.0405504 + 0.020)
    assert machine.transfer_ms(size) == pytest.approx(0.202752), "whole experts are transferred"
    # Two read the rows of either: 1 - 0.9^2 = 0.19; two thirds of that and 1/3 are 0.46.
    np.testing.assert_allclose(machine.gpu_ms([2], size, neurons=tenth), [0.46 * 0.0090112 + 0.040])
    # A hundred read nearly all of them. The CPU computes 0.4 of the products of each, the GPU those of all rows that it has read.
    np.testing.assert_allclose(machine.cpu_ms([100], size, neurons=tenth), [0.4 * 4.943286857 + 0.010], rtol=1e-8)
    np.testing.assert_allclose(machine.gpu_ms([100], size, neurons=tenth), [0.0288358 + 0.040], rtol=1e-4)
    for cost in (machine.cpu_ms, machine.gpu_ms):
        every = cost(np.arange(600), size)
        assert (np.diff(cost(np.arange(600), size, neurons=tenth)) >= 0).all()
        assert (cost(np.arange(600), size, neurons=tenth) <= every).all()
        np.testing.assert_allclose(cost(np.arange(600), size, neurons=Neurons(1.0, 0.5)), every)


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


def test_a_rate_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="link_gb_s is 0; it must be above 0"):
        replace(PROFILES["a6000_10core"], link_gb_s=0)
    with pytest.raises(ValueError, match="gpu_launch_ms is -1; it must be at least 0"):
        replace(PROFILES["a6000_10core"], gpu_launch_ms=-1)
