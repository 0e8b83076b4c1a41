"""The warm-up measures what a modelled machine takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.emulated import HostSlotLayers
from support.emulated_graph import EmulatedGraph
from support.kernel_cases import make_layer
from support.model_shapes import MODELS
from support.virtual_device import PROFILES, Timed, VirtualDevice, Work

from moegraft.cpu_backend import Runtime
from moegraft.operators.experts.forecast import Neurons
from moegraft.operators.offload.costs import LOADS, CostModel, CostTables, warm_up
from moegraft.operators.offload.devices.base import CpuTicket, DeviceError, Event, Stream
from moegraft.operators.offload.executors import EngineLayers
from moegraft.operators.offload.model_experts import SyntheticCalls
from moegraft.operators.offload.queue import ExpertCache, open_expert_cache
from moegraft.operators.offload.scheduler import Ids
from moegraft.operators.offload.store import ExpertStore, even_plan
from moegraft.operators.sparsity import SparseLayers, SparsityOptions


class NoArithmetic:
    """An executor that computes nothing and takes the time of experts with `load` tokens each."""

    def __init__(self, load: int, expert_bytes: int, neurons: Neurons | None = None) -> None:
        self._work = partial(Work, expert_bytes=expert_bytes, neurons=neurons)
        self._load = load

    def on_cpu(self, experts: Ids) -> Timed:
        return Timed(self._work((self._load,) * len(experts)))

    def on_gpu(self, experts: Ids, slots: NDArray[np.int32]) -> Timed:
        return self.on_cpu(experts)

    def join(self, cpu: CpuTicket | None, gpu: Sequence[Event]) -> None:
        raise AssertionError("the warm-up waits for its jobs alone")

    def restart(self) -> None:
        raise AssertionError("nothing fails here")


def measured(device: VirtualDevice, cache: ExpertCache, neurons: Neurons | None = None) -> CostTables:
    expert_bytes = cache.queue.store.expert_bytes
    return warm_up(device, cache, lambda experts, load: NoArithmetic(load, expert_bytes, neurons))


def opened(device: VirtualDevice, model: str, slots: int) -> ExpertCache:
    shape = MODELS[model]
    store = ExpertStore.phantom(2, shape.num_experts, shape.expert_bytes())
    cache = open_expert_cache(device, store, even_plan(2, slots, 2), lambda layer: np.zeros(shape.num_experts))
    assert cache is not None
    return cache


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("machine", PROFILES)
def test_what_is_measured_is_what_the_machine_takes(machine: str, model: str) -> None:
    profile, expert_bytes = PROFILES[machine], MODELS[model].expert_bytes()
    device = VirtualDevice(profile)
    costs = CostModel(measured(device, opened(device, model, 8)))
    loads = np.array([1, 3, 17, 64])
    np.testing.assert_allclose(costs.cpu_ms(loads[:1]), profile.cpu_ms(loads[:1], expert_bytes), rtol=1e-6)
    np.testing.assert_allclose(costs.gpu_ms(loads), profile.gpu_ms(loads, expert_bytes), rtol=0.1)
    np.testing.assert_allclose(costs.cpu_ms(loads), profile.cpu_ms(loads, expert_bytes), rtol=0.1)
    assert costs.first_cpu_ms == pytest.approx(profile.first_cpu_ms(expert_bytes), rel=1e-6)
    for nbytes in (expert_bytes, expert_bytes // 6):
        assert costs.transfer_ms(nbytes) == pytest.approx(profile.transfer_ms(nbytes), rel=0.01)


def test_sparse_experts_are_cheaper_on_both_devices_and_cost_the_same_to_bring() -> None:
    profile, expert_bytes = PROFILES["a6000_10core"], MODELS["mixtral-8x7b"].expert_bytes()
    neurons = Neurons(active=0.1, gate_share=1 / 3)
    device = VirtualDevice(profile)
    costs = CostModel(measured(device, opened(device, "mixtral-8x7b", 8), neurons))
    loads = np.array([1, 3, 17])
    np.testing.assert_allclose(costs.cpu_ms(loads[:1]), profile.cpu_ms(loads[:1], expert_bytes, neurons=neurons), rtol=1e-6)
    np.testing.assert_allclose(costs.gpu_ms(loads), profile.gpu_ms(loads, expert_bytes, neurons=neurons), rtol=0.1)
    assert (costs.cpu_ms(loads) < 0.6 * profile.cpu_ms(loads, expert_bytes)).all()
    assert costs.transfer_ms(expert_bytes) == pytest.approx(profile.transfer_ms(expert_bytes), rel=0.01)


def test_preparing_a_call_is_not_measured() -> None:
    """Synthetic tokens take the host longer than a GPU takes for an expert."""
    device = VirtualDevice(PROFILES["a6000_10core"])
    cache = opened(device, "deepseek-v2-lite", 4)

    def slowly(experts: Sequence[int], load: int) -> NoArithmetic:
        device.advance(5.0)
        return NoArithmetic(load, cache.queue.store.expert_bytes)

    found = warm_up(device, cache, slowly)
    device = VirtualDevice(PROFILES["a6000_10core"])
    expected = measured(device, opened(device, "deepseek-v2-lite", 4))
    assert found.first_cpu_ms == pytest.approx(expected.first_cpu_ms)
    np.testing.assert_allclose(found.cpu_ms, expected.cpu_ms)
    np.testing.assert_allclose(found.gpu_ms, expected.gpu_ms)


class HostBound(VirtualDevice):
    """A device whose launches take the host time, while its events are recorded at once, as on an idle GPU. Replays are one call."""

    launch_ms = 0.5
    replaying = False

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        if not self.replaying:
            self.advance(self.launch_ms)
        super().launch(stream, function)

    def capture(self, step: Callable[[], None]) -> EmulatedGraph:
        graph = super().capture(step)
        replay = graph.replay

        def replayed() -> None:
            self.replaying = True
            replay()
            self.replaying = False

        graph.replay = replayed  # type: ignore[method-assign]
        return graph


def test_what_the_host_takes_to_launch_is_no_time_of_an_expert() -> None:
    profile, expert_bytes = PROFILES["a6000_10core"], MODELS["deepseek-v2-lite"].expert_bytes()
    device = HostBound(profile)
    costs = CostModel(measured(device, opened(device, "deepseek-v2-lite", 8)))
    loads = np.array([1, 3, 17, 64])
    np.testing.assert_allclose(costs.gpu_ms(loads), profile.gpu_ms(loads, expert_bytes), rtol=0.1)
    assert costs.first_gpu_ms == pytest.approx(HostBound.launch_ms)


def test_a_device_that_cannot_capture_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: VirtualDevice, step: Callable[[], None]) -> EmulatedGraph:
        raise DeviceError("no graphs here")

    monkeypatch.setattr(VirtualDevice, "capture", refused)
    device = VirtualDevice(PROFILES["a6000_10core"])
    tables = measured(device, opened(device, "deepseek-v2-lite", 8))
    assert len(tables.gpu_ms) > 1 and tables.gpu_ms[0][1] > 0


def test_long_jobs_end_the_warm_up() -> None:
    """A hundred tokens of Mixtral's experts take this CPU a second: larger batches are not waited for."""
    device = VirtualDevice(PROFILES["a6000_10core"])
    tables = measured(device, opened(device, "mixtral-8x7b", 4))
    assert tables.cpu_ms[-1][0] < LOADS[-1] and tables.gpu_ms[-1][0] > tables.cpu_ms[-1][0]


def test_with_no_slot_there_is_no_gpu() -> None:
    device = VirtualDevice(PROFILES["a6000_10core"])
    cache = opened(device, "deepseek-v2-lite", 0)
    cache.slots.freeze()
    tables = measured(device, cache)
    assert (tables.gpu_ms == ()) == (tables.transfer_ms == ())
    assert tables.cpu_ms


def test_neurons_are_left_out_of_the_work_that_is_measured() -> None:
    layer = make_layer(num_experts=4, hidden=64, intermediate=96, sparse=True)
    of_model = SparseLayers().join(SparsityOptions(0.7, "routed"))
    of_model.set_threshold(1e9, 0.7)  # fits the model's tokens, not the synthetic ones
    slots = SimpleNamespace(tensor=torch.from_numpy(layer.packed.buffer))
    calls = SyntheticCalls(HostSlotLayers(torch.device("cpu"), Runtime(1), [layer.packed], [], [of_model], slots))  # type: ignore[arg-type]
    calls.executor([0, 1, 2, 3], 16).on_cpu(np.arange(4))()()
    on_cpu = calls.sparsity.counts.copy()
    calls.executor([0, 1], 8).on_gpu(np.arange(2), np.arange(2, dtype=np.int32))()
    assert on_cpu[1] == 4 * 16 * 96 and calls.sparsity.counts[1] == on_cpu[1] + 2 * 8 * 96
    assert calls.sparsity.achieved == pytest.approx(0.7, abs=0.05)
    assert not of_model.counts.any(), "the model has left nothing out yet"


def test_kernels_are_warmed_up_for_the_experts_per_token_of_the_model() -> None:
    """Each number of them is a kernel of its own, and the first token would wait for it to be compiled."""
    layer = make_layer(num_experts=4, hidden=64, intermediate=96)
    arena = SimpleNamespace(tensor=torch.from_numpy(layer.packed.buffer.copy()))
    layers = EngineLayers(torch.device("cpu"), Runtime(1), [layer.packed], [], [None], arena)  # type: ignore[arg-type]
    calls, shapes = SyntheticCalls(layers, 3), set()

    class Kernel:
        def forward(self, x: torch.Tensor, arena: object, slots: torch.Tensor, *given: object, **more: object) -> None:
            shapes.add((slots.shape[1], int((slots >= 0).sum(1).max())))

    calls._kernel = Kernel()
    for count in (1, 2, 4):
        experts = np.arange(count)
        calls.executor(experts.tolist(), 1).on_gpu(experts, experts.astype(np.int32))()
    assert shapes == {(3, 1), (3, 2), (4, 4)}
    found = calls.executor([0, 2], 2)
    found.join(SimpleNamespace(wait=found.on_cpu(np.array([0, 2]))()), ())  # type: ignore[arg-type]
    assert found.result.shape == (2, 64)
