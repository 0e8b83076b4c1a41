"""A captured step over an engine's layers: right with whatever the slots hold, which change between steps and not within one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.engine_rig import EXPERTS, LAYERS, TOP_K, EngineRig, Setting, engine_rig
from support.faulty_device import Faults
from support.kernel_cases import make_batch, make_layer, relative_error
from support.transfer_harness import DEVICES, EMULATED, advance

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.executors import EngineLayers
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.step_graph import CallShape, StepGraph
from moegraft.operators.offload.transfers import Urgency
from moegraft.operators.timeline import Timeline


class Step:
    """All layers of a rig, called on inputs of their own within one captured step."""

    def __init__(self, rig: EngineRig, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        self.rig = rig
        self._tokens = tokens
        on = rig.torch_device
        self._inputs = [tuple(each.to(on) for each in make_batch(tokens, TOP_K, layer, dtype, seed=0)) for layer in rig.layers]
        self._scores = [torch.rand(tokens, EXPERTS).to(on) for _ in rig.layers]
        self.graph = StepGraph(rig.engine, rig.engine_layers(), [CallShape(tokens, TOP_K, dtype)] * LAYERS)
        self._results: list[torch.Tensor] = []
        self.runs = 0
        self.graph.capture(self._run)

    def _run(self) -> None:
        self.runs += 1
        for layer, inputs, scores in zip(self.graph.layers, self._inputs, self._scores, strict=True):
            self._results.append(layer.forward(*inputs, scores))

    def replay(self, seed: int) -> float:
        """The largest error of a layer on new inputs."""
        expected = []
        for number, (kept, scores) in enumerate(zip(self._inputs, self._scores, strict=True)):
            given = make_batch(self._tokens, TOP_K, self.rig.layers[number], kept[0].dtype, seed=seed * LAYERS + number)
            if seed % 3 == 0:
                given[1][0, 0] = (-1, EXPERTS)[seed % 2]  # a padded slot
            for into, new in zip(kept, given, strict=True):
                into.copy_(new)
            scores.copy_(torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)))
            expected.append(self.rig.layers[number].reference(*given))
        self.graph.replay()
        return max(relative_error(found.cpu(), right) for found, right in zip(self._results, expected, strict=True))


@contextmanager
def captured(setting: Setting, tokens: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[Step]:
    with engine_rig(setting, dtype) as rig:
        yield Step(rig, tokens, dtype)


@pytest.mark.parametrize("capacity", [(0,) * LAYERS, (2,) * LAYERS, (EXPERTS,) * LAYERS, (3, 2, 0)])
@pytest.mark.parametrize("kind", DEVICES)
def test_a_captured_step_is_right_with_whatever_is_in_the_slots(kind: str, capacity: tuple[int, ...]) -> None:
    """Experts land while steps run and others leave between them."""
    with captured(Setting("greedy", capacity, kind=kind)) as step:
        queue, slots, rng = step.rig.engine.cache.queue, step.rig.engine.cache.slots, np.random.default_rng(0)
        for seed in range(30):
            for expert in rng.permutation(EXPERTS)[:3].tolist():
                queue.request(int(rng.integers(LAYERS)), expert, Urgency.PROMOTION)
            assert step.replay(seed) < step.rig.limit, f"step {seed}"
            advance(step.rig.engine.device, 1.0)  # of sampling
        assert step.runs == 1, "Python code runs once alone"
        if 0 < slots.plan.total < LAYERS * EXPERTS:
            assert slots.evictions > 0, "the table changed between steps"


@pytest.mark.parametrize("kind", DEVICES)
def test_several_sequences_and_half_precision(kind: str) -> None:
    for dtype, bound in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        with captured(Setting("greedy", kind=kind), tokens=4, dtype=dtype) as step:
            assert max(step.replay(seed) for seed in range(4)) < bound


def test_both_devices_take_part_and_the_cache_learns() -> None:
    with captured(Setting("greedy", (3,) * LAYERS)) as step:
        engine = step.rig.engine
        before = engine.policy.priority(0).copy()
        for _ in range(12):
            step.replay(7)  # the same experts each time
            engine.device.advance(4.0)
        statistics = engine.statistics
        assert statistics.replayed == 11 and 0 < statistics.on_cpu < statistics.used  # of the last step nothing is learnt yet
        assert not np.array_equal(engine.policy.priority(0), before)
        on_cpu = statistics.on_cpu
        step.replay(7)
        step.replay(7)
        assert statistics.on_cpu == on_cpu, "what the CPU had to serve was brought up"


def test_a_timeline_shows_every_step() -> None:
    with captured(Setting("greedy")) as step:
        step.rig.engine.timings.timeline = timeline = Timeline("emulated:0")
        for seed in range(3):
            step.replay(seed)
        spans = [span for span in timeline.spans if span.name == "captured step"]
        assert len(spans) == 3 and all(span.lane == "GPU" and span.end_ms >= span.start_ms for span in spans)


@pytest.mark.parametrize("kind", DEVICES)
def test_a_fixed_map_stays(kind: str) -> None:
    with captured(Setting("fixed", prefetch=PrefetchOptions(policy="none", promote=False), kind=kind)) as step:
        assert max(step.replay(seed) for seed in range(4)) < step.rig.limit
        assert step.rig.engine.cache.queue.statistics.requested == 0


@pytest.mark.parametrize("kind", DEVICES)
def test_what_fails_on_the_cpu_is_raised_after_the_step(kind: str) -> None:
    with engine_rig(Setting("greedy", (0,) * LAYERS, kind=kind)) as rig:
        whole, first = rig.layers[1].packed, rig.layers[0].packed
        rig.layers[1].packed = PackedExperts(whole.shape, whole.gate_spec, whole.weight_type)  # nothing is packed into it
        step = Step(rig, 1)
        with pytest.raises(ValueError, match="expert"):
            step.replay(1)
        with pytest.raises(ValueError, match="expert"):
            step.replay(2)
        rig.layers[1].packed = whole
        assert Step(rig, 1).replay(3) < rig.limit, "the engine is as good as new"
        found, expected = rig.call(0, 2, seed=4)
        assert relative_error(found, expected) < rig.limit and first is rig.layers[0].packed


@pytest.mark.parametrize("kind", EMULATED)
def test_a_device_that_fails_is_told_and_steps_go_on(kind: str) -> None:
    with captured(Setting("greedy", kind=kind, device={"faults": Faults(launches=(20,))})) as step:
        with pytest.raises(DeviceError, match="injected: a launch failed"):
            for seed in range(10):
                step.replay(seed)
        assert max(step.replay(seed) for seed in range(3)) < 2e-6


@pytest.mark.parametrize("kind", DEVICES)
def test_the_step_and_eager_calls_take_turns(kind: str) -> None:
    with captured(Setting("greedy", kind=kind)) as step:
        for seed in range(6):
            assert step.replay(seed) < step.rig.limit
            found, expected = step.rig.call(seed % LAYERS, 3, seed)
            assert relative_error(found, expected) < step.rig.limit


@pytest.mark.parametrize("kind", EMULATED)
def test_a_step_captured_in_inference_mode_runs_outside_of_it(kind: str) -> None:
    """What `torch.inference_mode` makes cannot be written under `torch.no_grad`."""
    with engine_rig(Setting("greedy", kind=kind)) as rig:
        with torch.inference_mode():
            step = Step(rig, 1)
        step._inputs = [tuple(torch.empty_like(each) for each in inputs) for inputs in step._inputs]  # type: ignore[misc]
        rig.engine.cache.queue.request(0, 5, Urgency.PROMOTION)
        rig.engine.device.synchronize()
        with torch.no_grad():
            step.graph.replay()
        assert not any(each.is_inference() for each in vars(step.graph._buffers).values() if isinstance(each, torch.Tensor))


def test_host_memory_made_in_inference_mode_is_written_outside_of_it() -> None:
    layer = make_layer(num_experts=2, hidden=32, intermediate=32)
    slots = SimpleNamespace(tensor=torch.zeros(2 * layer.packed.expert_bytes, dtype=torch.uint8))  # as of a GPU
    layers = EngineLayers(torch.device("cpu"), Runtime(1), [layer.packed], [], [None], slots)  # type: ignore[arg-type]
    shape = torch.Size((2, 32))
    with torch.inference_mode():
        layers.host_buffer("tokens", shape, torch.float32).fill_(1.0)
    with torch.no_grad():
        assert layers.host_buffer("tokens", shape, torch.float32).fill_(2.0).sum() == 128


@pytest.mark.parametrize(("ms", "expected"), [(1.0, 4), (9.5, 10), (1000.0, 32)])
def test_as_many_experts_are_requested_as_the_link_transfers(ms: float, expected: int) -> None:
    """An expert takes it 1 ms."""
    with captured(Setting("greedy", (0,) * LAYERS, staging=1)) as step:
        for seed in range(3):
            start_ms = step.rig.engine.device.now_ms()
            step.replay(seed)
            step.rig.engine.device.advance(max(0.0, ms - (step.rig.engine.device.now_ms() - start_ms)))
        step.replay(3)
        assert step.graph._requests == expected
