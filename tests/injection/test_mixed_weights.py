"""Experts whose projections have different types, and rules that differ by layer: meaning, bytes, cache, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import tiny_model
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.calibration import sparse_rules
from moegraft.injection.meta_model import find_model
from moegraft.injection.rules import RuleErrors, read_rules
from moegraft.injection.verify import verify
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.experts.hybrid import ExpertWeights, HybridExperts, HybridExpertsOptions
from moegraft.operators.registry import load_registry
from moegraft.operators.weights import StoredTypes, WeightTypes, resolve_weight_types

MIXED = "{gate: int4, up: int4, down: int8}"


def rules(weights: str = MIXED, more: str = "") -> str:
    return f"rules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}{more}}}}}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    tiny_model(num_hidden_layers=3, moe_intermediate_size=32, num_experts=4, initializer_range=0.1).save_pretrained(path)
    return path


def load(folder: Path, text: str, name: str = "rules.yaml") -> PreTrainedModel:
    file = folder / name
    file.write_text(text)
    return optimize_and_load(folder, file, dtype="float32", progress=False)


def experts(model: PreTrainedModel) -> list[HybridExperts]:
    return [module for module in model.modules() if isinstance(module, HybridExperts)]


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(3, 30)[None]).logits


def test_each_projection_has_its_type(folder: Path) -> None:
    model, whole, small = (load(folder, rules(weights)) for weights in (MIXED, "int8", "int4"))
    assert [operator.weight_type for operator in experts(model)] == ["int4+int8"] * 3
    assert "int4+int8" in str(model.moegraft.placement())
    expected = load(folder, rules("float32"))
    errors = [float((logits(each) - logits(expected)).norm()) for each in (whole, model, small)]
    assert errors[0] < errors[1] < errors[2]
    sizes = [sum(model.moegraft.plan.bytes_by_device.values()) for model in (whole, model, small)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_plan_counts_the_bytes_that_are_held(folder: Path) -> None:
    model = load(folder, rules())
    held = sum(operator.on_cpu.packed.nbytes for operator in experts(model))
    planned = sum(sum(swap.footprint.by_device.values()) for swap in model.moegraft.plan.swaps)
    assert planned == held
    assert all(swap.weight_type == "int4+int8" for swap in model.moegraft.plan.swaps)


def test_layers_may_differ(folder: Path) -> None:
    first = "rules:\n- match: {kind: experts, layers: 0-1}\n  replace: {class: hybrid_experts, kwargs: {weights: int8}}\n"
    model = load(folder, first + rules().removeprefix("rules:\n"))
    assert [operator.weight_type for operator in experts(model)] == ["int8", "int8", "int4+int8"]


def test_verify_prices_it(folder: Path) -> None:
    model = load(folder, rules())
    found = verify(model, find_model(folder), torch.arange(3, 30))
    assert all(layer.ok and layer.weight_type == "int4+int8" and layer.relative_error > 1e-2 for layer in found.layers)


def test_the_packed_cache_tells_mixtures_apart(folder: Path, tmp_path: Path) -> None:
    more = f", cache_dir: {tmp_path}"
    first = logits(load(folder, rules(MIXED, more)))
    files = sorted(tmp_path.glob("*.experts"))
    assert len(files) == 3
    changed = [file.stat().st_mtime_ns for file in files]
    torch.testing.assert_close(logits(load(folder, rules(MIXED, more))), first, rtol=0, atol=0)
    assert [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("*.experts"))] == changed
    load(folder, rules("{gate: int8, up: int8, down: int4}", more))
    assert len(list(tmp_path.glob("*.experts"))) == 6


def test_types_of_gguf_files_are_packed_when_loaded(folder: Path) -> None:
    model = load(folder, rules("{gate: q5_0, up: q5_0, down: iq4_nl}"))
    assert [operator.weight_type for operator in experts(model)] == ["q5_0+iq4_nl"] * 3
    found = verify(model, find_model(folder), torch.arange(3, 30))
    whole = [verify(load(folder, rules(name)), find_model(folder), torch.arange(3, 30)) for name in ("q5_0", "iq4_nl")]
    assert found.ok and all(each.ok for each in whole)
    errors = [each.layers[0].relative_error for each in (whole[0], found, whole[1])]
    assert errors == sorted(errors) and errors[0] > 2e-2


@pytest.mark.parametrize(
    ("weights", "more", "message"),
    [
        ("iq3_xxs", "", "iq3_xxs has blocks of 256 weights, of which rows of 64 are no whole number; use iq4_nl"),
        ("{gate: q5_0, up: q5_0, down: q3_k}", "", "q3_k has blocks of 256 weights, of which rows of 32 are no whole number; use int4"),
        ("q4_1", ", sparsity: {target: 0.5, scope: routed}", "weights: q4_1 cannot be combined with sparsity"),
    ],
)
def test_types_that_do_not_fit_are_refused_with_the_reason(folder: Path, weights: str, more: str, message: str) -> None:
    with pytest.raises(RuleErrors, match=message):
        load(folder, rules(weights, more))


def test_one_type_for_all_is_that_type(folder: Path) -> None:
    model = load(folder, rules("{gate: int8, up: int8, down: int8}"))
    assert [operator.weight_type for operator in experts(model)] == ["int8"] * 3
    assert str(ExpertWeights(down="int8")) == "stored+int8"


@pytest.mark.parametrize(
    ("weights", "more", "message"),
    [
        ("{gate: int4, up: int8}", "", r"rules\.yaml:3:\d+: error: option 'weights' of hybrid_experts: gate and up share blocks in memory"),
        ("{gate: int5, up: int8}", "", r"option 'weights\.gate' of hybrid_experts must be one of stored, .*did you mean"),
        ("{gates: int4}", "", "unknown option 'gates' of option 'weights' of hybrid_experts; did you mean 'gate'"),
        (MIXED, ", gpu: auto", "weights of several types need gpu: none, as all slots"),
        (MIXED, ", sparsity: {target: 0.5, scope: routed}", "weights of several types cannot be combined with sparsity"),
    ],
)
def test_mistakes_have_a_place_and_a_reason(tmp_path: Path, weights: str, more: str, message: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rules(weights, more))
    with pytest.raises(RuleErrors, match=message):
        read_rules(file, registry=load_registry())


def test_calibration_refuses_it_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rules())
    registry = load_registry()
    with pytest.raises(UnsupportedModelError, match="cannot be combined with sparsity"):
        sparse_rules(read_rules(file, registry=registry), registry)


@pytest.mark.parametrize(
    ("requested", "found"),
    [
        ("stored", "q4_k+q6_k"),
        ("stored+int8", "q4_k+q6_k"),  # q6_k takes no more bytes than int8
        ("float16+int4", "float16+int4"),  # and more than int4
        ("int4+int8", "q4_k+q6_k"),
        ("bfloat16+stored", "bfloat16+q6_k"),
        ("int8+int4", "q4_k+int4"),
    ],
)
def test_files_with_blocks_keep_what_a_mixture_allows(requested: str, found: str) -> None:
    options = HybridExpertsOptions()
    stored = StoredTypes("int8", "q4_k", "q6_k")
    packing = HybridExperts.packing
    types = WeightTypes.parse(requested)
    assert str(resolve_weight_types(types, stored, packing.types, lambda name: packing.supports(options, name))) == found
    without = resolve_weight_types(types, stored, packing.types, lambda name: False)
    assert without == types.map(lambda each: "int8" if each == "stored" else each)


@pytest.mark.parametrize("text", ["int8", "q4_k+q6_k"])
def test_types_are_printed_as_they_are_read(text: str) -> None:
    assert str(WeightTypes.parse(text)) == text
