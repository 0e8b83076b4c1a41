"""The warm-up finds what a modelled machine takes, and so do plans, whose promises come true."""

from __future__ import annotations

import numpy as np
import pytest
from support.kernel_cases import make_layer
from support.model_shapes import MODELS

from moegraft.cpu_backend import Runtime
from moegraft.operators.offload.costs import LOADS, CostModel, warm_up
from moegraft.operators.offload.devices.base import Neurons
from moegraft.operators.offload.devices.profiles import PROFILES
from moegraft.operators.offload.devices.virtual import VirtualDevice
from moegraft.operators.offload.executors import SlotArena
from moegraft.operators.offload.model_experts import EngineParts, WarmUpJobs
from moegraft.operators.offload.queue import Loading, open_loading
from moegraft.operators.offload.store import ExpertStore, even_plan
from moegraft.operators.sparse.layer import SparseLayers
from moegraft.operators.sparse.thresholds import SparsityOptions


class NoJobs:
    neurons: Neurons | None = None

    def on_cpu(self, experts: list[int], load: int) -> None:
        return None

    def on_gpu(self, slots: list[int], load: int) -> None:
        return None


def opened(device: VirtualDevice, model: str, slots: int) -> Loading:
    shape = MODELS[model]
    store = ExpertStore.phantom(2, shape.num_experts, shape.expert_bytes())
    loading = open_loading(device, store, even_plan(2, slots, 2), lambda layer: np.zeros(shape.num_experts))
    assert loading is not None
    return loading


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("machine", PROFILES)
def test_what_is_measured_is_what_the_machine_takes(machine: str, model: str) -> None:
    profile, expert_bytes = PROFILES[machine], MODELS[model].expert_bytes()
    device = VirtualDevice(profile)
    costs = CostModel(warm_up(device, opened(device, model, 8), NoJobs()))
    loads = np.array([1, 3, 17, 64])
    np.testing.assert_allclose(costs.cpu_ms(loads[:1]), profile.cpu_ms(loads[:1], expert_bytes), rtol=1e-6)
    np.testing.assert_allclose(costs.gpu_ms(loads), profile.gpu_ms(loads, expert_bytes), rtol=0.1)
    np.testing.assert_allclose(costs.cpu_ms(loads), profile.cpu_ms(loads, expert_bytes), rtol=0.1)
    assert costs.first_cpu_ms == pytest.approx(profile.first_cpu_ms(expert_bytes), rel=1e-6)
    for nbytes in (expert_bytes, expert_bytes // 6):
        assert costs.transfer_ms(nbytes) == pytest.approx(profile.transfer_ms(nbytes), rel=0.01)


def test_sparse_experts_are_cheaper_on_both_devices_and_cost_the_same_to_bring() -> None:
    profile, expert_bytes = PROFILES["a6000_10core"], MODELS["mixtral-8x7b"].expert_bytes()
    jobs = NoJobs()
    jobs.neurons = Neurons(active=0.1, gate_share=1 / 3)
    device = VirtualDevice(profile)
    costs = CostModel(warm_up(device, opened(device, "mixtral-8x7b", 8), jobs))
    loads = np.array([1, 3, 17])
    np.testing.assert_allclose(costs.cpu_ms(loads[:1]), profile.cpu_ms(loads[:1], expert_bytes, neurons=jobs.neurons), rtol=1e-6)
    np.testing.assert_allclose(costs.gpu_ms(loads), profile.gpu_ms(loads, expert_bytes, neurons=jobs.neurons), rtol=0.1)
    assert (costs.cpu_ms(loads) < 0.6 * profile.cpu_ms(loads, expert_bytes)).all()
    assert costs.transfer_ms(expert_bytes) == pytest.approx(profile.transfer_ms(expert_bytes), rel=0.01)


def test_long_jobs_end_the_warm_up() -> None:
    """A hundred tokens of Mixtral's experts take this CPU a second: larger batches are not waited for."""
    device = VirtualDevice(PROFILES["a6000_10core"])
    tables = warm_up(device, opened(device, "mixtral-8x7b", 4), NoJobs())
    assert tables.cpu_ms[-1][0] < LOADS[-1] and tables.gpu_ms[-1][0] > tables.cpu_ms[-1][0]


def test_with_no_slot_there_is_no_gpu() -> None:
    device = VirtualDevice(PROFILES["a6000_10core"])
    loading = opened(device, "deepseek-v2-lite", 0)
    loading.slots.freeze()
    tables = warm_up(device, loading, NoJobs())
    assert (tables.gpu_ms == ()) == (tables.transfer_ms == ())
    assert tables.cpu_ms


def test_neurons_are_left_out_of_the_work_that_is_measured() -> None:
    layer = make_layer(num_experts=4, hidden=64, intermediate=96, sparse=True)
    of_model = SparseLayers().join(SparsityOptions(0.7, "routed"))
    of_model.set_threshold(1e9, 0.7)  # fits the model's tokens, not those that are made up here
    parts = EngineParts("emulated:0", [layer.packed], [], Runtime(1), [of_model])
    parts.arena = SlotArena(parts.runtime, layer.packed, layer.packed.buffer)
    jobs = WarmUpJobs(parts)
    jobs.on_cpu([0, 1, 2, 3], 16)()()
    on_cpu = jobs.sparsity.counts.copy()
    jobs.on_gpu([0, 1], 8)()
    assert jobs.neurons == Neurons.without(0.7, gated=True), "so an emulated device charges for what is left"
    assert on_cpu[1] == 4 * 16 * 96 and jobs.sparsity.counts[1] == on_cpu[1] + 2 * 8 * 96
    assert jobs.sparsity.achieved == pytest.approx(0.7, abs=0.05)
    assert not of_model.counts.any(), "the model has left nothing out yet"
