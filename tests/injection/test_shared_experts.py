"""Models with shared experts and a GPU: they run beside the routed ones, once a pass, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.families import build_model, case_of, prompt
from support.gpus import limit, on, placed
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.operators.draft import DraftSettings
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.executors import CallExecutor
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
    def load(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
        """The stock model and the injected one, both on the device."""
        path = tmp_path / "rules.yaml"
        path.write_text(RULES.replace("GPU", f'"{gpu}"'))
        case = case_of(model_type)
        stock: PreTrainedModel = build_model(case).to(on(gpu))
        return stock, optimize_and_load(placed(build_model(case), gpu), path, progress=False, threads=1)

    return load


def device_class(model: PreTrainedModel) -> type:
    (engine,) = model.moegraft.context.gpu_engines
    return type(engine.device)


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
@pytest.mark.parametrize("model_type", ["deepseek_v2", "qwen2_moe"])
def test_the_cpu_is_at_work_when_they_run(model_type: str, load, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    _, model = load(model_type)
    model(input_ids=prompt(9).to(model.device))
    order: list[str] = []
    kind = device_class(model)
    submit, join = kind.submit_cpu, CallExecutor.join
    monkeypatch.setattr(kind, "submit_cpu", lambda *given: (order.append("submitted"), submit(*given))[1])
    monkeypatch.setattr(CallExecutor, "join", lambda *given: (order.append("waited"), join(*given))[1])
    with told(model, lambda number: order.append("shared")):
        model(input_ids=prompt(1).to(model.device))
    assert order == ["submitted", "shared", "waited"] * len(layers_of(model))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["deepseek_v2", "qwen2_moe"])
def test_drafts_and_failing_devices_change_nothing(  # type: ignore[no-untyped-def]
    model_type: str, load, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = load(model_type)
    ids = prompt(7).to(stock.device)
    expected = stock(input_ids=ids).logits
    model(input_ids=ids)
    switch = model.moegraft.context.draft_switch
    with switch.drafting(DraftSettings(top_k=1)):
        drafted = model(input_ids=ids).logits
        assert not torch.allclose(drafted, expected)
        assert torch.equal(model(input_ids=ids).logits.argmax(-1), drafted.argmax(-1))
    kind = device_class(model)
    launch = kind.launch

    def failing(*given: object) -> None:
        raise DeviceError("injected")

    monkeypatch.setattr(kind, "launch", failing)
    found = model(input_ids=ids).logits
    monkeypatch.setattr(kind, "launch", launch)
    for logits in (found, model(input_ids=ids).logits):
        assert (logits - expected).norm() / expected.norm() < limit(gpu)
