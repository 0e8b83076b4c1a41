"""Block types of GGUF files: computed with as they are where a kernel can, and reported where none can."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.families import prompt, weight_of, written
from support.gguf_files import BlockType, tensors_of, write_gguf
from support.k_quants import dequantised, quantise
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

from moegraft.injection import optimize_and_load
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.linear import QuantizedLinear
from moegraft.operators.offload.gpu_layer import GpuLayer
from moegraft.operators.weights import WeightTypes

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 101, "hidden_size": 256}
MEDIUM = {"gate_inp": BlockType.F32, "_down_exps": BlockType.Q6_K, "": BlockType.Q4_K}  # as half of the layers are in Q4_K_M
PARTS = ("gate", "up", "down")


def qwen3(intermediate: int = 256) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, intermediate_size=48, moe_intermediate_size=intermediate, num_experts=3, num_experts_per_tok=2, initializer_range=0.1
    )
    return AutoModelForCausalLM.from_config(config).eval()


def saved(folder: Path, kinds: Mapping[str, BlockType], model: PreTrainedModel | None = None) -> Path:
    model = model or qwen3()
    model.config.save_pretrained(folder)
    write_gguf(folder / "model.gguf", model, kinds)
    return folder


def load(folder: Path, options: str = "weights: stored", linear: str = "") -> PreTrainedModel:
    rules = folder / "rules.yaml"
    text = f"version: 1\nrules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{{options}}}}}\n"
    if linear:
        text += (
            f"- match: {{kind: linear, name: '_proj$|lm_head'}}\n  replace: {{class: quantized_linear, kwargs: {{weights: {linear}}}}}\n"
        )
    rules.write_text(text)
    return optimize_and_load(folder, rules, gguf=folder, dtype="float32", progress=False)


def experts_of(model: PreTrainedModel) -> HybridExperts:
    found = model.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(found, HybridExperts)
    return found


def errors(found: PreTrainedModel, exact: PreTrainedModel) -> torch.Tensor:
    """Of each token's logits."""
    ids = prompt(48)
    with torch.no_grad():
        expected = exact(ids).logits[0]
        return (found(ids).logits[0] - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize(
    ("kinds", "options", "expected"),
    [
        ({"": BlockType.Q4_K}, "weights: stored", "q4_k"),
        ({"": BlockType.Q6_K}, "weights: stored", "q6_k"),
        ({"": BlockType.IQ1_M}, "weights: stored", "iq1_m"),
        (MEDIUM, "weights: stored", "q4_k+q6_k"),
        (MEDIUM, "weights: int8", "q4_k+q6_k"),  # of no fewer bits than either
        (MEDIUM, "weights: int4", "q4_k+int4"),  # as many bits as Q4_K, fewer than Q6_K
        ({"_down_exps": BlockType.Q8_0, "": BlockType.Q6_K}, "weights: stored", "q6_k+int8"),
        ({"_down_exps": BlockType.F16, "": BlockType.Q4_K}, "weights: stored", "q4_k+float16"),
        ({"_down_exps": BlockType.Q4_K, "": BlockType.Q8_0}, "weights: stored", "int8+q4_k"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_values_stay_to_the_last_bit(kinds: Mapping[str, BlockType], options: str, expected: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, kinds)
    kept, exact = load(folder, options), load(folder, "weights: float32")
    assert experts_of(kept).weight_type == expected
    types = WeightTypes.parse(expected)
    of_parts = {"gate": types.gate_up, "up": types.gate_up, "down": types.down}
    for part in PARTS:
        if of_parts[part] != "int4":
            for expert in range(3):
                values = (torch.from_numpy(experts_of(model).on_cpu.packed.unpack(expert, part)) for model in (kept, exact))  # type: ignore[union-attr]
                assert torch.equal(*values), part
    # The kernel rounds activations to 8 bits: logits are near, but for a token whose experts were all but tied.
    assert errors(kept, exact).median() < (0.5 if "int4" in expected else 0.02)


# Of layer 0's gate and up, and down; of layer 1's; of attention's linear layers.
MIXTURES = [
    ("MXFP4", "IQ4_NL", "Q5_K", "Q3_K", "IQ4_XS"),
    ("Q2_K", "Q4_K", "IQ4_XS", "Q5_1", "Q4_1"),
    ("Q5_0", "Q4_1", "Q6_K", "MXFP4", "Q3_K"),
]


@pytest.mark.parametrize("names", MIXTURES, ids="-".join)
def test_a_file_that_changes_type_per_tensor(names: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = ("blk.0.ffn_down_exps", "blk.0.ffn_", "blk.1.ffn_down_exps", "blk.1.ffn_", "attn_")
    order = (1, 0, 3, 2, 4)
    kinds = {"gate_inp": BlockType.F32} | {part: BlockType[names[place]] for part, place in zip(parts, order, strict=True)}
    folder = saved(tmp_path, kinds)
    with caplog.at_level(logging.WARNING):
        kept = load(folder, linear="int8")
    assert not [record.message for record in caplog.records if "converted" in record.message]
    exact = load(folder, "weights: float32")
    for layer, expected in enumerate((names[:2], names[2:4])):
        path = f"model.layers.{layer}.mlp.experts"
        found, stock = (model.get_submodule(path).on_cpu.packed for model in (kept, exact))  # type: ignore[union-attr]
        assert found.weight_type == "+".join(expected).lower()
        for part in PARTS:
            assert all((found.unpack(expert, part) == stock.unpack(expert, part)).all() for expert in range(3)), part
    operator = kept.get_submodule("model.layers.1.self_attn.k_proj")
    assert isinstance(operator, QuantizedLinear)
    assert operator.weight_type == names[4].lower()
    assert errors(kept, exact).median() < 0.06  # every linear layer rounds its activations, too


def test_slots_hold_the_bytes_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Layers of two types have slots of their own, and share the memory by their bytes."""
    grid = {"blk.1.ffn_gate_inp": BlockType.F32, "blk.1.ffn_down_exps": BlockType.Q3_K, "blk.1.ffn_": BlockType.IQ3_XXS}
    kinds = {"gate_inp": BlockType.F32, "blk.0.ffn_down_exps": BlockType.Q6_K, "ffn_": BlockType.Q4_K, "": BlockType.F32}
    kinds = grid | kinds
    folder = saved(tmp_path, kinds)
    on_cpu = load(folder)
    with caplog.at_level(logging.WARNING):
        found = load(folder, "weights: stored, gpu: emulated, cache: {gpu_memory: 1400KiB}")
    assert not [record.message for record in caplog.records if "converted" in record.message]
    for layer, expected in enumerate(("q4_k+q6_k", "iq3_xxs+q3_k")):
        experts = found.get_submodule(f"model.layers.{layer}.mlp.experts")
        assert isinstance(experts, HybridExperts) and isinstance(experts.backend, GpuLayer)
        assert experts.weight_type == expected
        assert experts.backend.engine.cache.slots.plan.total == 2  # and four for transfers; alone it would have all three
    assert errors(found, on_cpu).max() < 1e-3  # sums in another order: an activation may round to the next of its 8 bits


def test_what_is_kept_is_what_the_quantiser_wrote(tmp_path: Path) -> None:
    """Not only what another way of loading reads."""
    model = qwen3()
    packed = experts_of(load(saved(tmp_path, MEDIUM, model))).on_cpu.packed
    assert packed is not None
    for part, weight_type in (("gate", "q4_k"), ("down", "q6_k")):
        expected = dequantised(quantise(tensors_of(model)[f"blk.1.ffn_{part}_exps.weight"][2], weight_type), weight_type)
        assert (packed.unpack(2, part) == expected).all()


def test_unconverted_tensors_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(saved(tmp_path, MEDIUM), linear="int8")
    assert not [record.message for record in caplog.records if "_K" in record.message]


@pytest.mark.parametrize(
    ("kinds", "options", "expected"),
    [
        (MEDIUM, "weights: bfloat16", "bfloat16"),
        ({"_up_exps": BlockType.Q6_K, "_exps": BlockType.Q4_K}, "weights: stored", "int8+q4_k"),  # gate and up share blocks
    ],
    ids=["bfloat16", "gate unlike up"],
)
def test_conversions_are_logged_once(
    kinds: Mapping[str, BlockType], options: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, kinds)
    with caplog.at_level(logging.WARNING):
        found = load(folder, options, linear="int8")
    assert experts_of(found).weight_type == expected
    [notice] = [record.message for record in caplog.records if "_K" in record.message]
    assert "tensors in Q" in notice and "converted through float32" in notice and "_exps" in notice


def test_the_sparse_layout_requantises(tmp_path: Path) -> None:
    folder = saved(tmp_path, MEDIUM)
    path = folder / "sparse.yaml"
    path.write_text(
        "version: 1\nrules:\n- match: {kind: experts}\n"
        "  replace: {class: hybrid_experts, kwargs: {weights: stored, sparsity: {target: 0.5, scope: routed}}}\n"
    )
    planned = optimize_and_load(folder, path, gguf=folder, dry_run=True)
    assert planned.swaps[0].options.weights == "int8"  # type: ignore[attr-defined]


def test_a_file_that_falls_back_where_rows_are_no_whole_blocks(tmp_path: Path) -> None:
    """As llama.cpp does for an I that is no multiple of 256."""
    folder = saved(tmp_path, {"_down_exps": BlockType.Q8_0, "": BlockType.Q4_K}, qwen3(intermediate=96))
    kept = load(folder)
    assert experts_of(kept).weight_type == "q4_k+int8"
    assert errors(kept, load(folder, "weights: float32")).median() < 0.02


@pytest.mark.parametrize(("linear", "expected"), [("int8", {"q4_k", "q6_k"}), ("int4", {"q4_k", "int4"}), ("bfloat16", {"bfloat16"})])
def test_linear_layers_keep_them_in_their_own_order_of_rows(linear: str, expected: set[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, intermediate_size=256, num_local_experts=2, initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config).eval()
    folder = saved(tmp_path, {"attn_v": BlockType.Q6_K, "output.": BlockType.Q6_K, "": BlockType.Q4_K}, model)
    found, exact = load(folder, linear=linear), load(folder, "weights: float32")
    types = set()
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.0.self_attn.o_proj", "lm_head"):
        operator = found.get_submodule(name)
        assert isinstance(operator, QuantizedLinear)
        types.add(operator.weight_type)
        if operator.weight_type in ("q4_k", "q6_k"):
            torch.testing.assert_close(weight_of(operator), exact.get_parameter(f"{name}.weight"), rtol=1e-6, atol=1e-7)
    assert types == expected
    if linear != "int4":
        assert errors(found, exact).median() < 0.06  # every linear layer rounds its activations, too


def test_the_plan_counts_what_is_kept(tmp_path: Path) -> None:
    folder = saved(tmp_path, MEDIUM)
    model = load(folder, linear="int8")
    planned = optimize_and_load(folder, folder / "rules.yaml", gguf=folder, dry_run=True)
    by_path = {swap.module: swap for swap in planned.swaps}
    experts = by_path["model.layers.1.mlp.experts"]
    packed = experts_of(model).on_cpu.packed
    assert packed is not None and experts.footprint.by_device == {"cpu": packed.nbytes}
    assert packed.nbytes == 3 * (2 * 144 + 210) * 256
    assert by_path["model.layers.0.self_attn.q_proj"].footprint.by_device == {"cpu": 256 * 144}


def test_packed_experts_are_kept_for_the_next_start(tmp_path: Path) -> None:
    folder = saved(tmp_path, MEDIUM)
    options = f"weights: stored, cache_dir: '{tmp_path / 'packed'}'"
    first, packed = load(folder, options), written(tmp_path / "packed")
    second = load(folder, options)
    assert packed and written(tmp_path / "packed") == packed, "packed a second time"
    assert experts_of(second).weight_type == "q4_k+q6_k"
    assert not errors(second, first).any()
