"""Shared experts run while routed ones are waited for: whatever a block's order, what it gets is what it would have computed itself."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.engine_rig import Setting, engine_rig
from support.kernel_cases import make_batch
from support.virtual_device import Timed, VirtualDevice, Work
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.offload.scheduler import LayerStep
from moegraft.operators.offload.shared_overlap import PrecomputedModule, SharedOverlap, shared_experts_of
from moegraft.operators.offload.statistics import TimingRecorder

HIDDEN = 8


class Shared(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.log = log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append("shared")
        return self.linear(x)


class Router(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, HIDDEN))
        self.log = log

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.log.append("router")
        logits = hidden_states @ self.weight.T
        weights, index = logits.softmax(-1).topk(2)
        return logits, weights, index


class Block(nn.Module):
    """`order` is that of its calls; the routed experts are one more linear layer, weighed."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.log: list[str] = []
        self.order = order
        self.gate, self.shared_experts = Router(self.log), Shared(self.log)
        self.routed = nn.Linear(HIDDEN, HIDDEN)
        module = self.shared_experts
        assert shared_experts_of(self) is module
        self.overlap: SharedOverlap | None = SharedOverlap(module, self.gate, self.experts, self.record)

    def record(self, hidden_states: torch.Tensor, output: Any) -> None:
        self.log.append("recorded")

    def experts(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        self.log.append("handed over")
        if meanwhile is not None:
            meanwhile()
        self.log.append("waited")
        return self.routed(hidden_states) * top_k_weights.sum(-1, keepdim=True)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.view(-1, HIDDEN)
        shared = self.shared_experts(tokens) if self.order == "before" else None
        _, weights, index = self.gate(tokens)
        if self.order == "rounded":
            weights = weights.double().float()
            shared = self.shared_experts(tokens)
        routed = (self.overlap.forward if self.overlap else self.experts)(tokens, index, weights).view(hidden_states.shape)
        if self.order == "changed":
            tokens.mul_(2)
        if shared is None:
            shared = self.shared_experts(hidden_states)
        return routed + shared.view(hidden_states.shape)


def plain(block: Block) -> Callable[[torch.Tensor], torch.Tensor]:
    """The block's own answer, computed by modules of another block with its weights."""
    other = Block(block.order)
    other.overlap = None
    for module in (other.gate, other.shared_experts):
        del module.forward  # type: ignore[attr-defined] # of the instance
    other.load_state_dict(block.state_dict())
    return other


@torch.no_grad()
@pytest.mark.parametrize(
    ("order", "found", "log"),
    [
        ("after", "after", ["router", "handed over", "shared", "waited"]),
        ("before", "before", ["router", "recorded", "handed over", "shared", "waited"]),
        ("rounded", "other", ["router", "shared", "handed over", "waited"]),  # its weights are not the router's own tensor
        ("changed", "other", ["router", "handed over", "waited", "shared"]),  # its shared experts read other values
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_order_answers_as_it_does_alone(order: str, found: str, log: list[str], mode: Any) -> None:
    block = Block(order)
    alone = plain(block)
    with mode():
        for tokens in (5, 1, 3):
            x = torch.randn(2, tokens, HIDDEN)
            expected = alone(x.clone())
            block.log.clear()
            assert torch.equal(block(x), expected)
        assert block.overlap is not None and block.overlap.order == found
        assert block.log == log


@torch.no_grad()
@pytest.mark.parametrize("order", ["after", "before", "rounded"])
def test_a_pass_of_no_token_decides_nothing(order: str) -> None:
    """Empty tensors are all at one address and all equal."""
    block = Block(order)
    assert block(torch.randn(1, 0, HIDDEN)).shape == (1, 0, HIDDEN)
    assert block.overlap is not None and block.overlap.order == "unknown"
    for _ in range(2):
        block(torch.randn(1, 2, HIDDEN))
    assert block.overlap.order == ("other" if order == "rounded" else order)


def test_where_gradients_are_wanted_a_block_runs_as_it_is() -> None:
    block = Block("before")
    with torch.no_grad():
        block(torch.randn(1, 2, HIDDEN))
    block.log.clear()
    block(torch.randn(1, 2, HIDDEN)).sum().backward()
    assert block.log == ["shared", "router", "handed over", "waited"]
    assert block.shared_experts.linear.weight.grad is not None


@torch.no_grad()
@pytest.mark.parametrize("order", ["after", "before"])
def test_passes_of_two_threads_do_not_meet(order: str) -> None:
    """One thread waits for its routed experts while the other runs through the same block."""
    block = Block(order)
    alone, waiting, passed = plain(block), threading.Event(), threading.Event()
    inputs = [torch.randn(1, 3, HIDDEN) for _ in range(2)]
    block(inputs[0])
    routed, first = block.routed.forward, threading.get_ident()

    def slow(x: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != first:
            waiting.set()
            assert passed.wait(20)
        return routed(x)

    block.routed.forward = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(torch.no_grad()(block), inputs[1])
        assert waiting.wait(20)
        found = block(inputs[0])
        passed.set()
        assert torch.equal(found, alone(inputs[0])) and torch.equal(other.result(20), alone(inputs[1]))


@torch.no_grad()
def test_a_watched_pass_runs_as_it_is() -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    log: list[str] = []
    shared, router = Shared(log), Router(log)
    overlap = SharedOverlap(shared, router, lambda x, *_: (log.append("ahead"), x)[1], unwatched=True)
    overlap.order = "before"
    x = torch.randn(3, HIDDEN)
    with Watching():
        shared(x)
    assert log == ["shared"]
    shared(x)
    assert log == ["shared", "router", "ahead", "shared"]


@torch.no_grad()
def test_a_result_is_for_the_same_tensor_unchanged() -> None:
    log: list[str] = []
    module = Shared(log)
    ahead = PrecomputedModule(module)
    x = torch.randn(3, HIDDEN)
    ahead.keep(x, ahead.run(x))
    assert torch.equal(module(x), module.linear(x)) and log == ["shared"]
    module(x)
    assert log == ["shared"] * 2, "handed out once"
    ahead.keep(x, ahead.run(x))
    x.add_(1)
    assert torch.equal(module(x), module.linear(x)) and log == ["shared"] * 4
    ahead.keep(x, ahead.run(x))
    assert torch.equal(module(x[:2]), module.linear(x[:2])) and log == ["shared"] * 6


def test_a_block_goes_with_its_last_reference() -> None:
    """No collection is waited for: what is on a GPU goes at once."""
    gc.disable()
    try:
        module = Shared([])
        watched, ahead = weakref.ref(module), PrecomputedModule(module)
        del module
        assert watched() is None
        other = Shared([])
        ahead = PrecomputedModule(other)
        del ahead
        assert other(torch.ones(1, HIDDEN)).shape == (1, HIDDEN)
    finally:
        gc.enable()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_gpu_works_while_the_cpu_does(overlap: bool) -> None:
    """By the clock: the shorter of the two costs nothing where it runs in between, and all it takes where it comes after."""
    with engine_rig(Setting("all_cpu", prefetch=PrefetchOptions(policy="none", promote=False))) as rig:
        device, compute = rig.engine.device, rig.engine.device.stream("compute")
        layer = rig.layers[0]
        x, index, weights = make_batch(1, 3, layer, torch.float32, 1)
        executor = rig.executor(0, x, index, weights)

        def shared() -> None:
            device.launch(compute, Timed(Work(cost_ms=1.5)))

        began_ms = device.now_ms()
        rig.engine.run(LayerStep.of(0, index.numpy()), executor, shared if overlap else None)
        cpu_ms = device.now_ms() - began_ms
        if not overlap:
            shared()
        compute.record().wait()
        took_ms = device.now_ms() - began_ms
        assert cpu_ms > 1.5
        assert took_ms == pytest.approx(cpu_ms if overlap else cpu_ms + 1.5)


def test_the_gpu_s_work_in_between_is_measured_and_planned_with() -> None:
    device = VirtualDevice(MachineProfile("tiny", 50, 500, 500, 20, link_gb_s=20))
    timings, compute = TimingRecorder(device), device.stream("compute")
    assert timings.overlap_ms(1) == 0.0, "until it was measured"
    for cost_ms in [1.0] * 2 + [3.0] * 400:
        timings.launch_overlap(compute, 1, lambda cost_ms=cost_ms: device.launch(compute, Timed(Work(cost_ms=cost_ms))))  # type: ignore[misc]
        device.synchronize()
        timings.collect()
        if cost_ms == 1.0:
            assert timings.overlap_ms(1) == pytest.approx(1.0)
    assert 2.5 < timings.overlap_ms(1) < 3.0, "it follows, from one measurement in sixteen"
    assert timings.overlap_ms(8) == 0.0, "of so many tokens nothing is known"


def test_plans_leave_the_gpu_less_where_it_is_busy_in_between() -> None:
    with engine_rig(Setting("two_threshold", prefetch=PrefetchOptions(policy="none", promote=False))) as rig:
        layer, engine, compute = rig.layers[0], rig.engine, rig.engine.device.stream("compute")
        x, index, weights = make_batch(8, 3, layer, torch.float32, 1)
        planned: list[float] = []
        plan = engine.scheduler.plan

        def watched(number: int, problem: Any) -> Any:
            planned.append(problem.gpu_free_ms)
            return plan(number, problem)

        engine.scheduler.plan = watched  # type: ignore[method-assign]
        for overlap in (lambda: engine.device.launch(compute, Timed(Work(cost_ms=1.5))), None):
            for _ in range(2):
                executor = rig.executor(0, x, index, weights)
                engine.run(LayerStep.of(0, index.numpy()), executor, overlap)
                engine.device.synchronize()
                engine.timings.collect()
    assert planned == [0.0, pytest.approx(1.5), 0.0, 0.0]
