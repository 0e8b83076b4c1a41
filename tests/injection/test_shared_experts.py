"""Models with shared experts and a GPU: they run beside the routed ones, once a pass, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emulated import device_kind
from support.families import build_model, case_of, prompt
from support.faulty_device import Countdown, Faults, FaultyDevice
from support.gpus import emulated_only, limit, on, placed
from support.virtual_device import VirtualDevice, VirtualTicket
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.draft import DraftSettings
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.offload.shared_overlap import SharedOverlap
from moegraft.operators.structure import SHARED_NAMES

RULES = """
version: 1
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {gpu: GPU, cache: {ratio: 0.5}}}
"""
FAMILIES = {"deepseek_v2": "after", "glm4_moe": "after", "nemotron_h": "after", "qwen2_moe": "before", "hunyuan_v1_moe": "before"}


@pytest.fixture
def load(tmp_path: Path, gpu: str):  # type: ignore[no-untyped-def]
    def load(model_type: str, gpu: str = gpu) -> tuple[PreTrainedModel, PreTrainedModel]:
        """The stock model and the injected one, both on the device."""
        path = tmp_path / "rules.yaml"
        path.write_text(RULES.replace("GPU", f'"{gpu}"'))
        case = case_of(model_type)
        stock: PreTrainedModel = build_model(case).to(on(gpu))
        return stock, optimize_and_load(placed(build_model(case), gpu), path, progress=False, threads=1)

    return load


def layers_of(model: PreTrainedModel) -> list[SharedOverlap]:
    operators = [module for module in model.modules() if isinstance(module, HybridExperts)]
    found = [operator.overlap for operator in operators]
    assert found and None not in found
    return found  # type: ignore[return-value] # just asserted


@contextmanager
def told(model: PreTrainedModel, tell: Callable[[int], object]) -> Iterator[None]:
    """`tell` gets a layer's number whenever its shared experts are computed, hooks of their own or not."""
    paths = [path for path, module in model.named_modules() if isinstance(module, HybridExperts)]
    hooks = []
    for number, path in enumerate(paths):
        block = model.get_submodule(path.rpartition(".")[0])
        shared = next(getattr(block, name) for name in SHARED_NAMES if hasattr(block, name))
        first = next(module for module in shared.modules() if isinstance(module, nn.Linear))
        hooks.append(first.register_forward_hook(lambda *given, number=number: tell(number) and None))
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("model_type", FAMILIES)
def test_shared_experts_run_beside_the_routed_ones(model_type: str, load, gpu: str) -> None:  # type: ignore[no-untyped-def]
    stock, model = load(model_type)
    for tokens in (9, 5, 1):
        ids = prompt(tokens, batch=2).to(stock.device)
        expected = stock(input_ids=ids).logits
        passes: list[int] = []
        with told(model, passes.append):
            found = model(input_ids=ids).logits
        assert (found - expected).norm() / expected.norm() < limit(gpu)
    layers = layers_of(model)
    assert {layer.order for layer in layers} == {FAMILIES[model_type]}
    assert passes == [*range(len(layers))], "once a pass"


@torch.no_grad()
@emulated_only
@pytest.mark.parametrize("model_type", ["deepseek_v2", "qwen2_moe"])
def test_the_cpu_is_at_work_when_they_run(model_type: str, load) -> None:  # type: ignore[no-untyped-def]
    order: list[str] = []

    class Ticket:
        def __init__(self, ticket: VirtualTicket) -> None:
            self._ticket = ticket

        @property
        def elapsed_ms(self) -> float | None:
            return self._ticket.elapsed_ms

        def wait(self) -> None:
            order.append("waited")
            self._ticket.wait()

    class Noting(VirtualDevice):
        def submit_cpu(self, *given: Any) -> Any:
            order.append("submitted")
            return Ticket(super().submit_cpu(*given))

    with device_kind(Noting) as noting:
        _, model = load(model_type, noting)
    model(input_ids=prompt(9))
    order.clear()
    with told(model, lambda number: order.append("shared")):
        model(input_ids=prompt(1))
    assert order == ["submitted", "shared", "waited"] * len(layers_of(model))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["deepseek_v2", "qwen2_moe"])
@emulated_only
def test_drafts_and_failing_devices_change_nothing(model_type: str, load, gpu: str) -> None:  # type: ignore[no-untyped-def]
    launches = Countdown()
    with device_kind(FaultyDevice, faults=Faults(launches=launches)) as faulty:
        stock, model = load(model_type, faulty)
    ids = prompt(7).to(stock.device)
    expected = stock(input_ids=ids).logits
    model(input_ids=ids)
    switch = model.moegraft.context.draft_switch
    with switch.drafting(DraftSettings(top_k=1)):
        drafted = model(input_ids=ids).logits
        assert not torch.allclose(drafted, expected)
        assert torch.equal(model(input_ids=ids).logits.argmax(-1), drafted.argmax(-1))
    for left in (1, 0):  # the next launch fails; then none
        launches.left = left
        logits = model(input_ids=ids).logits
        assert launches.left < 0
        assert (logits - expected).norm() / expected.norm() < limit(gpu)
