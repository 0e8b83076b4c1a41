"""`sparse_experts` in rules: its options, refusals and footprint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.sources import ModuleSource
from moegraft.operators.context import InjectionContext
from moegraft.operators.draft import DraftSettings
from moegraft.operators.errors import RuleFileError, UnsupportedModelError
from moegraft.operators.experts.sparse_experts import SparseExperts, SparseExpertsOptions
from moegraft.operators.registry import load_registry
from moegraft.operators.sparsity import SparseLayers, SparsityOptions

SPARSITY = SparsityOptions(0.5, "routed")


def qwen() -> nn.Module:
    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=40, num_experts=4)
    config._experts_implementation = "eager"
    return Qwen3MoeExperts(config)


def gpt_oss() -> nn.Module:
    """Return experts that are transposed and interleaved, with biases and clamps."""
    config = GptOssConfig(hidden_size=64, intermediate_size=40, num_local_experts=4)
    config._experts_implementation = "eager"
    return GptOssExperts(config)


def initialised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return module


def built(module: nn.Module, options: SparseExpertsOptions | None = None, context: InjectionContext | None = None) -> SparseExperts:
    context = context or InjectionContext(dtype=torch.float32, threads=1)
    operator = SparseExperts.build(module, options or SparseExpertsOptions(SPARSITY), context)
    operator.load(ModuleSource("experts", module), lambda size: None)
    return operator


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Few tokens: a call takes the interpreter a third of a second for six."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 64, generator=generator)
    return x, torch.rand(2, 4, generator=generator).topk(2).indices, torch.rand(2, 2, generator=generator)


@pytest.mark.parametrize("make", [qwen, gpt_oss])
def test_without_a_threshold_it_equals_the_stock_module(make) -> None:  # type: ignore[no-untyped-def]
    module = initialised(make())
    operator = built(module)
    with torch.no_grad():
        torch.testing.assert_close(operator(*inputs()), module(*inputs()), rtol=1e-4, atol=1e-5)


def test_padded_slots_are_skipped_with_a_threshold() -> None:
    operator = built(initialised(qwen()))
    x, index, weights = inputs()
    operator.sparsity.set_threshold(0.05, 0.5)
    expected = operator(x, index, weights.where(torch.tensor([True, False]), 0.0))
    for padding in (-1, 4):
        torch.testing.assert_close(operator(x, index.where(torch.tensor([True, False]), padding), weights), expected)
    operator.sparsity.set_threshold(0.0, 0.0)
    assert not torch.allclose(operator(x, index, weights), expected)


def test_a_draft_leaves_out_more_neurons() -> None:
    context = InjectionContext(dtype=torch.float32, threads=1)
    operator, given = built(initialised(qwen()), context=context), inputs()
    operator.sparsity.set_threshold(0.3, 0.9)
    sparser = operator(*given)
    operator.sparsity.set_threshold(0.01, 0.1)
    operator.sparsity.set_draft_threshold(0.3)
    usual, switch = operator(*given), context.draft_switch
    assert switch.layers == 1 and not torch.allclose(usual, sparser)
    with pytest.raises(KeyboardInterrupt), switch.drafting(DraftSettings(2, sparsity=0.9)):
        assert torch.equal(operator(*given), sparser)
        raise KeyboardInterrupt
    assert torch.equal(operator(*given), usual)


def test_empty_batches_and_all_dtypes_are_accepted() -> None:
    operator = built(initialised(qwen()))
    x, index, weights = inputs()
    assert operator(x[:0], index[:0], weights[:0]).shape == (0, 64)
    for dtype in (torch.float64, torch.bfloat16):
        found = operator(x.to(dtype), index.int(), weights.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), operator(x, index, weights), rtol=0.05, atol=0.05)


def test_a_gradient_is_refused() -> None:
    operator = built(initialised(qwen()))
    x, index, weights = inputs()
    with pytest.raises(UnsupportedModelError, match=r"sparse_experts has no backward pass: .* no gradients"):
        operator(x.requires_grad_(), index, weights).sum().backward()


def test_other_modules_are_refused() -> None:
    assert "does not follow" in (SparseExperts.unsupported_reason(nn.Linear(2, 2), SparseExpertsOptions(SPARSITY)) or "")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpu": "cpu"}, "cuda:0"),
        ({"gpu": "cuda:x"}, "cuda:0"),
    ],
)
def test_options_that_contradict_each_other(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseExpertsOptions(**{"sparsity": SPARSITY, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [qwen, gpt_oss])
def test_the_footprint_equals_the_held_bytes(make) -> None:  # type: ignore[no-untyped-def]
    module = initialised(make())
    options = SparseExpertsOptions(SPARSITY, gpu="cuda:1")
    operator = built(module, options)
    assert operator._arena is not None
    assert SparseExperts.footprint(module, options, torch.float32).by_device == {"cuda:1": operator._arena.nbytes}


class Device:
    """The interface of a layer on a GPU that the state of its sparsity uses."""

    def __init__(self) -> None:
        self.thresholds: list[float] = []
        self.pending = (0, 0)

    def set_threshold(self, threshold: float) -> None:
        self.thresholds.append(threshold)

    def take_counts(self) -> tuple[int, int]:
        taken, self.pending = self.pending, (0, 0)
        return taken


def test_thresholds_reach_the_device_and_counts_come_back() -> None:
    layers, device = SparseLayers(), Device()
    layer = layers.join(SPARSITY)
    layer.attach(device)
    device.pending = (7, 8)  # before there was a threshold
    layer.set_threshold(0.25, 0.5)
    assert device.thresholds == [0.0, 0.25]
    assert layer.achieved is None
    device.pending = (3, 10)
    assert layer.achieved == 0.7
    device.pending = (2, 10)
    assert layers.statistics()[0]["routed_sparsity"] == 0.75
    assert np.array_equal(layer.counts, [5, 20])


def test_sparse_experts_is_registered() -> None:
    registry = load_registry()
    assert registry["sparse_experts"] is SparseExperts


def test_placement_and_statistics() -> None:
    operator = built(initialised(qwen()), SparseExpertsOptions(SPARSITY))
    assert operator.placement() == "experts: sparse_experts, float32 on cpu, without the 50 % of routed neurons that matter least"
    assert operator.statistics() == {"sparsity": operator.sparsity.statistics()}


def test_a_rule_with_sparse_experts_and_no_gpu_is_refused_with_its_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\n"
        "rules:\n"
        "- match: {kind: experts}\n"
        "  replace:\n"
        "    class: sparse_experts\n"
        "    kwargs: {sparsity: {target: 0.85, scope: total}}\n"
    )
    config = Qwen3MoeConfig(num_hidden_layers=2, hidden_size=32, moe_intermediate_size=16, num_experts=4, vocab_size=64)
    model = Qwen3MoeForCausalLM(config)
    with pytest.raises(RuleFileError, match=r"rules\.yaml:5:\d+: error: .*sparse_experts computes on a CUDA GPU.*hybrid_experts"):
        optimize_and_load(model, rules, dry_run=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = optimize_and_load(model, rules, dry_run=True)
    assert plan.bytes_by_device.keys() >= {"cuda:0"}
