"""A captured step over an engine's layers: right with whatever the slots hold, which change between steps and not within one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from support.engine_rig import EXPERTS, LAYERS, TOP_K, EngineRig, Setting, engine_rig
from support.faulty_device import Faults
from support.kernel_cases import make_batch, make_layer, relative_error
from support.transfer_harness import DEVICES, EMULATED, advance

from moegraft.cpu_backend import PackedExperts, Runtime
from moegraft.operators.offload.deferral import DeferredSums, LayerDeferral
from moegraft.operators.offload.devices.base import DeviceError, Graph, Stream
from moegraft.operators.offload.executors import EngineLayers
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.step_graph import CallShape, CapturedLayer, StepGraph
from moegraft.operators.offload.transfers import Urgency
from moegraft.operators.timeline import Timeline


class Step:
    """All layers of a rig, called on inputs of their own within one captured step.

    Args:
        defer: experts of a token that each layer may leave to the next one.
    """

    def __init__(self, rig: EngineRig, tokens: int, dtype: torch.dtype = torch.float32, defer: int = 0) -> None:
        self.rig = rig
        self._tokens = tokens
        self._kept = TOP_K - defer
        sums = DeferredSums()
        deferrals: list[LayerDeferral | None] = [None]  # of what follows the last layer
        for _ in rig.layers:
            deferrals.insert(0, LayerDeferral(sums, EXPERTS, defer, deferrals[0]))
        on = rig.torch_device
        self._inputs = [tuple(each.to(on) for each in make_batch(tokens, TOP_K, layer, dtype, seed=0)) for layer in rig.layers]
        self._scores = [torch.rand(tokens, EXPERTS).to(on) for _ in rig.layers]
        self.graph = StepGraph(
            rig.engine, rig.engine_layers(), [CallShape(tokens, TOP_K, dtype)] * LAYERS, deferrals[:-1] if defer else None
        )
        self._results: list[torch.Tensor] = []
        self.runs = 0
        self.graph.capture(self._run)

    def _run(self) -> None:
        self.runs += 1
        for layer, inputs, scores in zip(self.graph.layers, self._inputs, self._scores, strict=True):
            self._results.append(layer.forward(*inputs, scores))

    def replay(self, seed: int) -> float:
        """The largest error of a layer on new inputs."""
        expected: list[torch.Tensor] = []
        arriving: torch.Tensor | float = 0.0
        for number, (kept, scores) in enumerate(zip(self._inputs, self._scores, strict=True)):
            given = make_batch(self._tokens, TOP_K, self.rig.layers[number], kept[0].dtype, seed=seed * LAYERS + number)
            if seed % 3 == 0:
                given[1][0, 0] = (-1, EXPERTS)[seed % 2]  # a padded slot
            for into, new in zip(kept, given, strict=True):
                into.copy_(new)
            scores.copy_(torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)))
            reference, (x, index, weights) = self.rig.layers[number].reference, given
            later = self._deferred(number, index, weights)
            expected.append(reference(x, index, weights * ~later) + arriving)
            arriving = reference(x, index, weights * later)
        self.graph.replay()
        return max(relative_error(found.cpu(), right) for found, right in zip(self._results, expected, strict=True))

    def _deferred(self, number: int, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Which choices (T, K) the next layer gets: experts without a slot that no token has among the largest weights it keeps."""
        first: set[int] = set()
        for row, values in zip(index.tolist(), weights.tolist(), strict=True):
            real = sorted(((value, expert) for expert, value in zip(row, values, strict=True) if 0 <= expert < EXPERTS), reverse=True)
            first |= {expert for _, expert in real[: self._kept]}
        resident = self.rig.engine.cache.slots.table[number] >= 0
        free = [[0 <= expert < EXPERTS and expert not in first and not resident[expert] for expert in row] for row in index.tolist()]
        return torch.tensor(free) & (number < LAYERS - 1)


@contextmanager
def captured(setting: Setting, tokens: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[Step]:
    with engine_rig(setting, dtype) as rig:
        yield Step(rig, tokens, dtype)


def fill(rig: EngineRig, missing: Sequence[tuple[int, int]] = ()) -> None:
    """Load as many experts as layers have slots for, as when a model is loaded; `missing`: (layer, expert) to leave out."""
    slots, queue = rig.engine.cache.slots, rig.engine.cache.queue
    for layer in range(LAYERS):
        for expert in range(min(slots.capacity_of(layer), EXPERTS)):
            if (layer, expert) not in missing:
                queue.request(layer, expert, Urgency.PROMOTION)
    land(rig)


def land(rig: EngineRig) -> None:
    """Let everything that was requested land."""
    device = rig.engine.device
    while not rig.engine.cache.queue.idle:
        device.stream("copy").record().wait()
        device.synchronize()


@contextmanager
def captured_host_nodes(rig: EngineRig) -> Iterator[list[int]]:
    """Collect the calls of the host in what is captured meanwhile."""
    nodes: list[int] = []
    device = rig.engine.device
    launch_host, capture = device.launch_host, device.capture

    def counted(stream: Stream, function: int, data: int) -> None:
        nodes.append(data)
        launch_host(stream, function, data)

    def begun(step: Callable[[], None]) -> Graph:
        nodes.clear()  # those of the warm-up
        return capture(step)

    with mock.patch.multiple(device, launch_host=counted, capture=begun):
        yield nodes


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
            if seed % 10 == 9:
                step.rig.engine.device.synchronize()  # however slow the link's thread is, something lands
        assert step.runs == 1, "Python code runs once alone"
        if 0 < slots.plan.total < LAYERS * EXPERTS:
            assert slots.evictions > 0, "the table changed between steps"


@pytest.mark.parametrize(("tokens", "defer"), [(1, 1), (1, 2), (4, 1), (4, TOP_K - 1)])
@pytest.mark.parametrize("capacity", [(0,) * LAYERS, (2,) * LAYERS, (3, 2, 0)])
@pytest.mark.parametrize("kind", EMULATED)
def test_deferred_experts_are_added_in_the_next_layer(kind: str, capacity: tuple[int, ...], tokens: int, defer: int) -> None:
    """Whatever the slots hold; some choices are padded."""
    with engine_rig(Setting("greedy", capacity, kind=kind)) as rig:
        step, rng = Step(rig, tokens, defer=defer), np.random.default_rng(0)
        queue = rig.engine.cache.queue
        for seed in range(20):
            queue.request(int(rng.integers(LAYERS)), int(rng.integers(EXPERTS)), Urgency.PROMOTION)
            land(rig)  # before the step, with what the last one requested
            assert step.replay(seed) < rig.limit, f"step {seed}"
        statistics = rig.engine.statistics
        assert 0 < statistics.deferred <= statistics.on_cpu


@pytest.mark.parametrize(
    ("capacity", "missing", "resident"),
    [
        ((EXPERTS,) * LAYERS, (), (True, True, True)),
        ((EXPERTS, EXPERTS + 2, EXPERTS), (), (True, True, True)),  # slots that no expert needs
        ((EXPERTS, EXPERTS - 1, EXPERTS), (), (True, False, True)),
        ((EXPERTS,) * LAYERS, ((0, 5),), (False, True, True)),  # it lands while steps run
        ((2, EXPERTS, 2), (), (False, True, False)),
        ((0, 0, EXPERTS), (), (False, False, True)),
    ],
)
@pytest.mark.parametrize(("tokens", "defer"), [(1, 0), (1, 2), (4, 1)])
@pytest.mark.parametrize("kind", DEVICES)
def test_layers_with_all_experts_in_slots_do_not_call_the_host(
    kind: str, capacity: tuple[int, ...], missing: tuple[tuple[int, int], ...], resident: tuple[bool, ...], tokens: int, defer: int
) -> None:
    """A layer that receives experts adds them, whether or not it calls the host itself."""
    with engine_rig(Setting("greedy", capacity, kind=kind)) as rig:
        fill(rig, missing)
        with captured_host_nodes(rig) as nodes:
            step = Step(rig, tokens, defer=defer)
        assert len(nodes) == resident.count(False) + (resident[:-1].count(False) if defer else 0)
        for seed in range(10):
            assert step.replay(seed) < rig.limit, f"step {seed}"
            land(rig)  # what was requested: the reference defers by what is resident
        statistics = rig.engine.statistics
        assert statistics.replayed == 9 and statistics.used_by_layer.min() >= 9  # experts
        in_slots = statistics.found_by_layer == statistics.used_by_layer
        assert in_slots[list(resident)].all() and (statistics.on_cpu == 0) == all(in_slots)
        assert all(in_slots) or not all(resident)
        assert all(rig.engine.policy.priority(layer).any() for layer in range(LAYERS)), "the cache learns from all layers"


def test_layers_of_each_form_are_launched_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first launch loads the kernel, which drivers may refuse while they capture."""
    launched: list[tuple[bool, ...]] = []
    forward = CapturedLayer.forward

    def counted(self: CapturedLayer, *inputs: torch.Tensor) -> torch.Tensor:
        launched.append(self.form)
        return forward(self, *inputs)

    monkeypatch.setattr(CapturedLayer, "forward", counted)
    with engine_rig(Setting("greedy", (2, EXPERTS, 2))) as rig:
        fill(rig)
        Step(rig, 1, defer=1)
    before, captured = launched[:-LAYERS], launched[-LAYERS:]
    assert len(set(captured)) == LAYERS and set(before) == set(captured)


def test_a_step_whose_resident_experts_are_lost_is_refused() -> None:
    with engine_rig(Setting("greedy", (EXPERTS,) * LAYERS)) as rig:
        fill(rig)
        step = Step(rig, 1)
        assert step.replay(1) < rig.limit and step.graph.valid
        slots = rig.engine.cache.slots
        with slots.lock:
            slots._evict(1, 3)  # which nothing does
        assert not step.graph.valid
        with pytest.raises(DeviceError, match="experts left the slots that a captured step relies on; capture it again"):
            step.replay(2)
        again = Step(rig, 1)
        assert max(again.replay(seed) for seed in range(10)) < rig.limit


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


def test_steps_that_are_compared_load_nothing() -> None:
    """Computed again layer by layer, such a step must find the same experts on each device, as the CPU alone quantises activations."""
    with captured(Setting("greedy", policy="lru", prefetch=PrefetchOptions(policy="none"))) as step:
        engine = step.rig.engine
        for seed in range(3):
            step.replay(seed)
        with engine.by_residency():
            before = engine.cache.queue.statistics.requested, engine.cache.slots.version
            for seed in range(3, 6):
                step.replay(seed)
            assert (engine.cache.queue.statistics.requested, engine.cache.slots.version) == before
        step.replay(6)
        assert engine.cache.queue.statistics.requested > before[0]


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


@pytest.mark.parametrize(("ms", "expected"), [(1.0, 4), (9.5, 10), (1000.0, 16)])
def test_as_many_experts_are_requested_as_the_link_transfers(ms: float, expected: int) -> None:
    """An expert takes it 1 ms."""
    with captured(Setting("greedy", (0,) * LAYERS, staging=1)) as step:
        for seed in range(3):
            start_ms = step.rig.engine.device.now_ms()
            step.replay(seed)
            step.rig.engine.device.advance(max(0.0, ms - (step.rig.engine.device.now_ms() - start_ms)))
        step.replay(3)
        assert step.graph._requests == expected
