"""`sparse_experts` with its kernels: as a module of a model, with its threshold on the device and a calibration's observer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.families import tiny_model
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.injection import optimize_and_load
from moegraft.injection.calibration import ActivationHistogram
from moegraft.injection.checkpoint.sources import ModuleSource
from moegraft.operators.context import InjectionContext
from moegraft.operators.draft import DraftSettings
from moegraft.operators.experts.sparse_experts import SparseExperts, SparseExpertsOptions
from moegraft.operators.layout import read_layout
from moegraft.operators.reference import reference_experts
from moegraft.operators.sparsity import SparsityOptions

SPARSITY = SparsityOptions(0.5, "routed")


def stock() -> nn.Module:
    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=40, num_experts=4)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return module


def built(module: nn.Module, options: SparseExpertsOptions | None = None) -> SparseExperts:
    context = InjectionContext(dtype=torch.float32, threads=1)
    operator = SparseExperts.build(module, options or SparseExpertsOptions(SPARSITY), context)
    operator.load(ModuleSource("experts", module), lambda size: None)
    return operator


def inputs(tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 64, generator=generator)
    return x, torch.rand(tokens, 4, generator=generator).topk(2).indices, torch.rand(tokens, 2, generator=generator)


def reference(module: nn.Module, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], threshold: float) -> torch.Tensor:
    gate, up = module.gate_up_proj.detach().chunk(2, dim=1)
    found = reference_experts(*given, gate, up, module.down_proj.detach(), read_layout(module).gate, threshold=threshold)
    return found.float()


def test_it_equals_the_stock_module_and_applies_its_threshold() -> None:
    module = stock()
    operator = built(module)
    with torch.no_grad():
        torch.testing.assert_close(operator(*inputs()), module(*inputs()), rtol=1e-4, atol=1e-5)
    assert operator.sparsity.achieved == 0.0
    operator.sparsity.set_threshold(0.25, 0.5)
    torch.testing.assert_close(operator(*inputs()), reference(module, inputs(), 0.25), rtol=1e-4, atol=1e-5)
    assert 0.05 < (operator.sparsity.achieved or 0.0) < 0.95


def test_a_draft_has_a_threshold_of_its_own() -> None:
    operator = built(stock())
    operator.sparsity.set_threshold(0.25, 0.5)
    sparser = operator(*inputs())
    operator.sparsity.set_threshold(0.01, 0.1)
    usual = operator(*inputs())
    operator.sparsity.set_draft_threshold(0.25)
    counted = int(operator.sparsity.counts[1])
    with operator._draft.drafting(DraftSettings(2, sparsity=0.5)):
        assert torch.equal(operator(*inputs()), sparser)
    assert int(operator.sparsity.counts[1]) == counted, "a draft is not counted as what is always left out"
    assert torch.equal(operator(*inputs()), usual)


def test_an_observer_receives_every_activation() -> None:
    operator = built(stock(), SparseExpertsOptions(SPARSITY))
    histogram = ActivationHistogram(4)
    x, index, weights = inputs(6)
    index[2, 1] = -1
    operator.sparsity.observer = histogram.add
    operator(x, index, weights)
    assert histogram.bins.sum() == 11 * 40


def test_a_rule_injects_sparse_experts_into_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\nrules:\n- match: {kind: experts}\n  replace: {class: sparse_experts, kwargs: {sparsity: {target: 0, scope: routed}}}\n"
    )
    loaded = tiny_model(hidden_size=32, moe_intermediate_size=16, initializer_range=0.02)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        expected = loaded(ids).logits
        injected = optimize_and_load(loaded, rules)
        torch.testing.assert_close(injected(ids).logits, expected, rtol=1e-3, atol=1e-4)
    assert "sparse_experts" in injected.moegraft.plan.describe()
