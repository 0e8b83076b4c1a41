"""`hybrid_experts` with `sparsity`: a threshold of zero computes the whole layer, and any other threshold the reference's result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.families import written
from support.sparse_models import save_model, stock
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.sources import ModuleSource
from moegraft.operators.context import InjectionContext
from moegraft.operators.experts.hybrid import HybridExperts, HybridExpertsOptions
from moegraft.operators.layout import read_layout
from moegraft.operators.reference import reference_experts
from moegraft.operators.sparsity import SparsityOptions

EXPERTS, HIDDEN, WIDTH, TOKENS, TOP_K = 5, 64, 40, 9, 2
SPARSE = SparsityOptions(0.5, "routed")
TOLERANCE = {"stored": 1e-5, "bfloat16": 1e-2, "int8": 3e-2}


@pytest.fixture(scope="module")
def module() -> Qwen3MoeExperts:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    made = Qwen3MoeExperts(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.requires_grad_(False)


def built(module: nn.Module, options: HybridExpertsOptions) -> HybridExperts:
    context = InjectionContext(dtype=torch.float32, threads=1)
    made = HybridExperts.build(module, options, context)
    made.load(ModuleSource("experts", module), lambda size: None)
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K, dim=-1).indices
    index[3, 1] = -1
    return torch.randn(TOKENS, HIDDEN, generator=generator), index, torch.rand(TOKENS, TOP_K, generator=generator)


def acted(module: nn.Module, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return activations (T, K, I); padded slots count as expert 0."""
    gate = torch.einsum("eih,th->tei", module.gate_up_proj[:, :WIDTH], hidden)
    return torch.nn.functional.silu(gate).gather(1, index.clamp_min(0)[..., None].expand(-1, -1, WIDTH))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("weights", list(TOLERANCE))
def test_a_threshold_of_zero_computes_the_whole_layer(module: Qwen3MoeExperts, weights: str) -> None:
    inputs = batch()
    expected = module(inputs[0], inputs[1].clamp_min(0), inputs[2].where(inputs[1] >= 0, 0.0)).double()
    operator = built(module, HybridExpertsOptions(weights=weights, sparsity=SPARSE))  # type: ignore[arg-type]
    whole = operator(*inputs)
    assert relative_error(whole, expected) <= TOLERANCE[weights]
    assert operator.sparsity is not None and operator.sparsity.achieved == 0.0
    operator.sparsity.threshold = 1e-30  # below every activation: the same work, so the same bits
    assert torch.equal(operator(*inputs), whole)


def test_a_threshold_leaves_out_the_references_neurons(module: Qwen3MoeExperts) -> None:
    hidden, index, weights = batch()
    operator = built(module, HybridExpertsOptions(sparsity=SPARSE))
    assert operator.sparsity is not None
    magnitudes = acted(module, hidden, index)[index >= 0].abs().flatten().sort().values
    middle = len(magnitudes) // 2
    threshold = float((magnitudes[middle] + magnitudes[middle + 1]) / 2)
    operator.sparsity.set_threshold(threshold, 0.5)
    gate, up, down = module.gate_up_proj[:, :WIDTH], module.gate_up_proj[:, WIDTH:], module.down_proj
    expected = reference_experts(hidden, index, weights, gate, up, down, read_layout(module).gate, threshold=threshold)
    assert relative_error(operator(hidden, index, weights), expected) <= 1e-5
    assert operator.sparsity.counts.tolist() == [len(magnitudes) - middle - 1, len(magnitudes)]
    assert operator.statistics() == {"sparsity": operator.sparsity.statistics()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_observer_sees_every_activation(module: Qwen3MoeExperts, dtype: torch.dtype) -> None:
    hidden, index, weights = batch()
    operator = built(module, HybridExpertsOptions(sparsity=SPARSE))
    assert operator.sparsity is not None
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    operator.sparsity.observer = lambda *given: seen.append(given)
    operator(hidden.to(dtype), index, weights)
    [(ids, found)] = seen
    real = index >= 0
    assert torch.equal(ids, index)
    expected = acted(module, hidden.to(dtype).float(), index)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
def test_the_footprint_equals_the_held_bytes(module: Qwen3MoeExperts, weights: str) -> None:
    for sparsity in (None, SPARSE):
        options = HybridExpertsOptions(weights=weights, sparsity=sparsity)  # type: ignore[arg-type]
        operator = built(module, options)
        packed = operator.on_cpu.packed
        assert HybridExperts.footprint(module, options, torch.float32).by_device == {"cpu": packed.nbytes}
        assert packed.sparse == (sparsity is not None)


def test_placement_names_the_sparsity(module: Qwen3MoeExperts) -> None:
    assert built(module, HybridExpertsOptions(sparsity=SPARSE)).placement().endswith("without the 50 % of routed neurons that matter least")
    none = HybridExpertsOptions(sparsity=replace(SPARSE, target=0.0))
    assert built(module, none).placement().endswith("every neuron in a layout that can leave some out")
    plain = built(module, HybridExpertsOptions())
    assert "neuron" not in plain.placement() and plain.statistics() == {}


def test_dense_and_sparse_layouts_have_separate_cache_files(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    cache = tmp_path / "cache"
    cache.mkdir()
    ids = torch.tensor([[5, 17, 33, 60]])
    expected = stock(folder)(ids).logits
    for option, new in (("", True), (", sparsity: {target: 0, scope: routed}", True), (", sparsity: {target: 0, scope: total}", False)):
        rules = tmp_path / "rules.yaml"
        rules.write_text(f"- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{cache_dir: '{cache}'{option}}}}}\n")
        before = written(cache)
        model = optimize_and_load(folder, rules, progress=False)
        assert (written(cache) != before) == new
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3)
