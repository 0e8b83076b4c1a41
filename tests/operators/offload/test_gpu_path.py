"""The engine over the code for a real GPU: Triton's kernels, in slots that are no host memory, give the right sums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support import combinations
from support import engine_rig as rigs
from support.emulated import HostSlotLayers
from support.engine_rig import EXPERTS, LAYERS, TABLES, TOP_K, EngineRig, Setting, engine_rig
from support.kernel_cases import make_batch, relative_error
from support.triton_cases import INTERPRETED
from support.virtual_device import Timed, VirtualDevice, work_of
from triton.runtime.interpreter import InterpretedFunction

from moegraft.operators.draft import DraftSwitch
from moegraft.operators.offload.costs import CostModel
from moegraft.operators.offload.devices.base import Stream
from moegraft.operators.offload.executors import EngineLayers, LookAhead
from moegraft.operators.offload.gpu_layer import GpuLayer
from moegraft.operators.offload.step_graph import CallShape, StepBuffers, StepGraph
from moegraft.operators.routing import Router

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tensors of this device are on the CPU")
BATCHES = (1, 4, 1, 9, 0)  # decode, a verified draft, a prompt, nothing


class InterpretedGpu(VirtualDevice):
    """Calls launches at once, as CUDA does; each waits for what it would wait for on its stream."""

    def launch(self, stream: Stream, function: Callable[[], None]) -> None:
        stream.record().wait()
        function()
        super().launch(stream, Timed(work_of(function)))


@pytest.fixture
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineRig]:
    monkeypatch.setattr(rigs, "make_device", lambda kind, profile, **options: InterpretedGpu(profile, **options))
    schedule, capacity, *stored = request.param
    with engine_rig(Setting(schedule, capacity, staging=3, stored="".join(stored))) as rig:
        rig.layers_type = EngineLayers
        yield rig


@pytest.mark.parametrize(
    ("rig", "first_gpu_ms"),
    [
        (("on_demand", (0,) * LAYERS), 0.0),  # experts arrive, few at a time, one by one
        (("on_demand", (0,) * LAYERS), 5.0),  # together
        (("on_demand", (4,) * LAYERS), 0.0),  # and others are resident
        (("on_demand", (4,) * LAYERS), 5.0),
        (("two_threshold", (2,) * LAYERS), 0.0),  # the CPU takes part
        (("fixed", (EXPERTS,) * LAYERS), 0.0),  # one launch
        (("all_cpu", (2,) * LAYERS), 0.0),  # none
    ],
    indirect=["rig"],
    ids=str,
)
def test_the_sum_is_right(rig: EngineRig, first_gpu_ms: float) -> None:
    rig.engine.costs = CostModel(replace(TABLES, first_gpu_ms=first_gpu_ms))
    for step, tokens in enumerate(BATCHES):
        for number in range(LAYERS):
            found, expected = rig.call(number, tokens, seed=100 * step + number)
            assert relative_error(found, expected) < 1e-5, f"step {step}, layer {number}"
    assert rig.engine.statistics.recoveries == 0


@pytest.mark.parametrize("rig", [("on_demand", (2,) * LAYERS, "iq3_xxs+nvfp4")], indirect=True, ids=str)
def test_slots_have_the_bytes_of_a_file(rig: EngineRig) -> None:
    """Experts in fewer bits than a GPU computes with arrive, are kept and make room like all others."""
    for number, tokens in enumerate((9, 5)):
        found, expected = rig.call(number, tokens, seed=number + 1)
        assert relative_error(found, expected) < 1e-5, f"{tokens} tokens"


GATHERED = [
    # tokens, experts, hidden, top_k
    (1, 6, 64, 2),
    (4, 7, 72, 3),  # no power of two
    (2, 4, 1100, 4),  # more than a program copies, and every expert chosen
    (1, 1030, 32, 1),  # more experts than a program copies
]


@pytest.mark.parametrize(
    ("scored", "dtype", "shape"), combinations([True, False], [torch.float32, torch.float16, torch.bfloat16], GATHERED), ids=str
)
def test_a_layer_is_gathered_in_one_launch(scored: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As PyTorch does it in many."""
    tokens, num_experts, hidden, top_k = shape
    generator = torch.Generator().manual_seed(0)
    found = []
    for write in (EngineLayers.write_routing, HostSlotLayers.write_routing):
        buffers = StepBuffers(VirtualDevice(), 3, num_experts, hidden, CallShape(tokens, top_k, dtype))
        table = torch.arange(3 * num_experts, dtype=torch.int32).view(3, -1) % 5 - 1
        buffers.set_table(table.numpy(), 1)
        generator.manual_seed(0)
        x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        scores = torch.rand(tokens, num_experts, generator=generator)
        index = torch.argsort(scores, descending=True)[:, :top_k].contiguous()
        weights = torch.rand(tokens, top_k, generator=generator).to(dtype)
        index[0, 0] = (-1, num_experts)[tokens % 2]  # padded
        write(None, x, scores if scored else None, index, weights, buffers.table[1], buffers.row(1))  # type: ignore[arg-type]
        buffers.to_host(1)
        found.append({name: rows[1].clone() for name, rows in buffers.rows.items()})
        assert all(not rows[[0, 2]].clamp(min=0).any() for rows in buffers.rows.values()), "of this layer alone"
    assert found[0].keys() == found[1].keys()
    for name, rows in found[0].items():
        assert torch.equal(rows, found[1][name]), name


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("rig", [("all_cpu", (2,) * LAYERS)], indirect=True, ids=str)  # whose steps launch nothing before the capture
def test_what_a_captured_step_launches_was_launched_before(rig: EngineRig, scored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first launch compiles the kernel and loads it, which drivers may refuse while they capture."""
    launched: list[tuple[object, ...]] = []
    run = InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.append((self.fn.__name__, *(each.dtype if isinstance(each, torch.Tensor) else type(each) for each in args)))
        run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    layers = rig.engine_layers()
    layers.routers = [Router(f"layers.{number}.experts", Scores(), torch.nn.Module(), EXPERTS) for number in range(LAYERS)]
    layers.look_ahead = LookAhead(layers.routers)
    gpu_layers = [GpuLayer(rig.engine, layers, number, DraftSwitch(), pytest.fail) for number in range(LAYERS)]
    x, index, weights = make_batch(1, TOP_K, rig.layers[0], torch.bfloat16)
    routed = index.int(), weights.bfloat16()  # as some families have them

    def step() -> None:
        for number, (layer, router) in enumerate(zip(gpu_layers, layers.routers, strict=True)):
            if scored or number == 1:
                router.module(x)
            layer.forward(x, *routed)

    step()
    graph = StepGraph(rig.engine, layers, [layer.last_call for layer in gpu_layers])
    for layer, captured in zip(gpu_layers, graph.layers, strict=True):
        layer.captured = threading.get_ident(), captured
    before: set[tuple[object, ...]] = set()

    def capture(step: Callable[[], None]) -> Any:
        before.update(launched)
        launched.clear()
        step()

    monkeypatch.setattr(rig.engine.device, "capture", capture)
    graph.capture(step)
    assert "_route_kernel" in {kernel for kernel, *_ in launched}
    assert set(launched) <= before


class Scores(torch.nn.Module):
    top_k = TOP_K

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(x), EXPERTS)
