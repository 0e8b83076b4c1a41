"""The three public steps: `plan` decides, `graft` builds and checks, `load` fills."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from support.families import tiny_model
from transformers import PreTrainedModel

from moegraft.injection import build_meta_model, graft, grafting, load, optimize_and_load, plan
from moegraft.injection.checkpoint.files import LazyTensor
from moegraft.injection.planning import Plan
from moegraft.operators import machine
from moegraft.operators.base import ModelOperator, Traits
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.machine import Gpu, Machine
from moegraft.operators.registry import load_registry

IDS = torch.tensor([[5, 17, 33, 90, 3, 8, 61]])


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def folder(stock: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps")
    stock.save_pretrained(path)
    return path


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits


def steps(model: Any) -> PreTrainedModel:
    the_plan = plan(model, "cpu-exact")
    grafted = graft(model, the_plan, threads=1)
    loaded = load(grafted, progress=False)
    assert loaded.moegraft.plan is the_plan
    assert type(loaded) is grafted.model_class
    return loaded


def test_the_steps_give_what_optimize_and_load_gives(stock: PreTrainedModel, folder: Path) -> None:
    expected = logits(optimize_and_load(folder, "cpu-exact", progress=False, threads=1))
    assert torch.equal(logits(steps(build_meta_model(folder, weights=True))), expected)
    assert torch.equal(logits(steps(copy.deepcopy(stock))), expected)


def test_no_weight_is_read_before_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_meta_model(folder, weights=True)
    reads = []
    monkeypatch.setattr(LazyTensor, "__getitem__", lambda self, index: reads.append(self.key))
    grafted = graft(model, plan(model, "cpu"))
    assert grafted.injection.operators and not reads


@pytest.mark.parametrize(("cores", "beside"), [(16, 14), (8, 6), (4, 3), (2, 2), (1, 1)])
def test_a_gpu_leaves_the_cpu_fewer_threads(cores: int, beside: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that launch, transfer and call back need cores; not where the GPU is unused, or threads are given."""
    monkeypatch.setattr(machine, "default_threads", lambda: cores)
    model = build_meta_model(folder, weights=True)
    on_gpu, on_cpu = plan(model, "hybrid"), plan(model, "cpu")

    def threads(the_plan: Plan, gpus: int = 1, **options: Any) -> int:
        here = Machine(cores, 1 << 33, (Gpu("a GPU", 24 << 30, 20 << 30),) * gpus)
        monkeypatch.setattr(grafting, "probe_machine", lambda: here)
        return graft(model, the_plan, **options).injection.context.threads

    assert threads(on_gpu) == threads(on_gpu, gpus=2) == beside
    assert threads(on_gpu, threads=5) == 5
    assert threads(on_cpu) == threads(on_gpu, gpus=0) == threads(on_gpu, device_map="cpu") == 0, "the default"


@dataclass(frozen=True, slots=True)
class WatchedOptions:
    replays: bool


class Watched(ModelOperator):
    """An operator of another package, which may have to see each module compute."""

    name, options_type, summary = "watched", WatchedOptions, "generates as the stock model does"

    @classmethod
    def traits(cls, options: WatchedOptions) -> Traits:
        return Traits("", replays_steps=options.replays)

    @classmethod
    def build(cls, module: torch.nn.Module, options: WatchedOptions, context: InjectionContext) -> Self:
        return cls(options)

    def placement(self) -> str:
        return "steps: watched"

    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)


@pytest.mark.parametrize("replays", [True, False])
def test_an_operator_of_the_model_decides_whether_steps_are_replayed(replays: bool, stock: PreTrainedModel, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    options = f"{{class: watched, kwargs: {{replays: {str(replays).lower()}}}}}"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n- {{match: {{kind: model}}, replace: {options}}}\n")
    registry = load_registry().with_operators(Watched)
    model = optimize_and_load(copy.deepcopy(stock), rules, registry=registry, threads=1, progress=False)
    model.generate(IDS, max_new_tokens=12, do_sample=False)
    assert (model.moegraft.statistics()["decode_steps"] != {}) == replays


def test_a_model_in_memory_is_unchanged_before_load(stock: PreTrainedModel) -> None:
    model = copy.deepcopy(stock)
    grafted = graft(model, plan(model, "cpu-exact"))
    assert type(model) is type(stock) and not hasattr(model, "moegraft")
    assert torch.equal(logits(model), logits(stock))
    assert hasattr(load(grafted, progress=False), "moegraft")


def test_a_model_without_weights_can_be_planned_alone(stock: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = build_meta_model(tmp_path)
    with pytest.raises(UnsupportedModelError, match="weights=True"):
        graft(model, plan(model, "cpu"))
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        graft(build_meta_model(tmp_path, weights=True), plan(model, "cpu"))


def test_an_injected_model_is_planned_no_second_time(stock: PreTrainedModel) -> None:
    model = steps(copy.deepcopy(stock))
    with pytest.raises(UnsupportedModelError, match="injected already"):
        plan(model, "cpu")


def test_a_grafted_model_is_loaded_once(folder: Path) -> None:
    model = build_meta_model(folder, weights=True)
    grafted = graft(model, plan(model, "cpu"))
    load(grafted, progress=False)
    with pytest.raises(ValueError, match="loaded already"):
        load(grafted, progress=False)
