"""Models in GGUF files, of every family and block type: what is loaded equals the stock model, its weights rounded as the file has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import build_model, case_of, prompt, weight_of, written
from support.gguf_files import (
    ARCHITECTURES,
    BlockType,
    Tensors,
    experts_apart,
    gate_and_up_together,
    gguf,
    quantised,
    queries_to_gates_together,
    split_key_value,
    tensors_of,
    write_gguf,
)
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3_5MoeTextConfig, Qwen3MoeConfig, Qwen3NextConfig

from moegraft.cpu_backend import PackedLinear
from moegraft.injection import optimize_and_load
from moegraft.operators.errors import CheckpointError
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.linear import QuantizedLinear

SPARSE_EVERYWHERE = {"qwen2_moe", "qwen3_moe", "qwen3_next"}  # llama.cpp has no dense layers in these
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101}


def build(model_type: str) -> PreTrainedModel:
    case = case_of(model_type)
    if model_type not in SPARSE_EVERYWHERE:
        return build_model(case)
    return build_model(dataclasses.replace(case, text={**case.text, "mlp_only_layers": []}))


def mixtral(hidden: int = 64, intermediate: int = 32) -> PreTrainedModel:
    """Every row of every matrix is whole groups of 32."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, hidden_size=hidden, intermediate_size=intermediate, num_local_experts=4, initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config).eval()


def qwen3(hidden: int = 256, intermediate: int = 256) -> PreTrainedModel:
    """Rows of whole blocks of 256."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 48, "moe_intermediate_size": intermediate, "num_experts": 3}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES | sizes, num_experts_per_tok=2, initializer_range=0.1)).eval()


def saved(model: PreTrainedModel, folder: Path, kinds: Mapping[str, BlockType] | None = None, **options: object) -> Path:
    """A folder with the config alone, and the file beside it."""
    model.config.save_pretrained(folder)
    write_gguf(folder / "model.gguf", model, kinds, **options)  # type: ignore[arg-type]
    return folder


def load(folder: Path, rules: str | Path = "cpu-exact", path: str = "model.gguf", **options: object) -> PreTrainedModel:
    return optimize_and_load(folder, rules, gguf=folder / path, dtype="float32", progress=False, **options)


def rules_in(folder: Path, match: str, replace: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(f"version: 1\nrules:\n- match: {{{match}}}\n  replace: {{{replace}}}\n")
    return path


def experts_rules(folder: Path, options: str) -> Path:
    return rules_in(folder, "kind: experts", f"class: hybrid_experts, kwargs: {{{options}}}")


def relative_error(found: PreTrainedModel, stock: PreTrainedModel) -> float:
    ids = prompt(12)
    with torch.no_grad():
        expected = stock(ids).logits
        return float((found(ids).logits - expected).abs().max() / expected.abs().max())


def experts_of(model: PreTrainedModel, layer: int = 1) -> HybridExperts:
    found = model.get_submodule(f"model.layers.{layer}.mlp.experts")
    assert isinstance(found, HybridExperts)
    return found


def unpacked(model: PreTrainedModel, expert: int, part: str) -> torch.Tensor:
    packed = experts_of(model).on_cpu.packed
    assert packed is not None
    return torch.from_numpy(packed.unpack(expert, part))


@torch.no_grad()
def rounded(model: PreTrainedModel, kind: BlockType) -> PreTrainedModel:
    """The model with each matrix as `kind` holds it; blocks run along rows, so no order of rows matters."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.from_numpy(gguf.dequantize(quantised(parameter.numpy(), kind), kind)))
    return model


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_every_family_equals_stock(model_type: str, tmp_path: Path) -> None:
    stock = build(model_type)
    assert relative_error(load(saved(stock, tmp_path)), stock) < 2e-6


def test_granite_hybrid_with_rotated_biases_and_two_groups(tmp_path: Path) -> None:
    """llama.cpp's converter changes the order of biases with that of their rows, and the norm of Mamba-2 has a row for each group."""
    case = case_of("granitemoehybrid")
    changes = {"attention_bias": True, "position_embedding_type": "rope", "mamba_n_groups": 2}
    stock = build_model(dataclasses.replace(case, text={**case.text, **changes}))
    assert relative_error(load(saved(stock, tmp_path)), stock) < 5e-6


@pytest.mark.parametrize(
    ("model_type", "form"),
    [
        ("mixtral", lambda tensors, _: experts_apart(tensors)),
        ("qwen3_moe", lambda tensors, _: gate_and_up_together(tensors)),
        ("deepseek_v3", split_key_value),
        ("glm4_moe_lite", split_key_value),
        ("qwen3_next", queries_to_gates_together),
    ],
    ids=["experts apart", "gate and up together", "kv_b in halves", "kv_b in halves, glm", "linear attention together"],
)
def test_other_forms_of_the_same_weights(model_type: str, form: Callable[[Tensors, PreTrainedModel], Tensors], tmp_path: Path) -> None:
    stock = build(model_type)
    tensors = form(tensors_of(stock), stock)
    assert set(tensors) != set(tensors_of(stock))
    assert relative_error(load(saved(stock, tmp_path, tensors=tensors)), stock) < 2e-6


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_experts_that_no_rule_takes(model_type: str, tmp_path: Path) -> None:
    """transformers loads them itself, in its own order of gate and up."""
    stock = build(model_type)
    rules = rules_in(tmp_path, "name: '^lm_head$'", "class: quantized_linear")
    loaded = load(saved(stock, tmp_path), rules)
    for name, parameter in stock.named_parameters():
        if name != "lm_head.weight":
            assert torch.equal(loaded.get_parameter(name), parameter), name


@pytest.mark.parametrize("kind", [BlockType.F16, BlockType.BF16], ids=lambda kind: kind.name)
def test_floats_are_kept(kind: BlockType, tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path, {"": kind})
    found = load(folder)
    assert experts_of(found).weight_type == {"F16": "float16", "BF16": "bfloat16"}[kind.name]
    assert relative_error(found, rounded(mixtral(), kind)) < 2e-6


CODES = pytest.mark.parametrize(("kind", "weights"), [(BlockType.Q8_0, "int8"), (BlockType.Q4_0, "int4")], ids=["Q8_0", "Q4_0"])


@CODES
@pytest.mark.parametrize("rule", ["stored", "named"])
def test_codes_are_kept(kind: BlockType, weights: str, rule: str, tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path, {"": kind})
    stock = rounded(mixtral(), kind)
    found = load(folder, "cpu-exact" if rule == "stored" else experts_rules(tmp_path, f"weights: {weights}"))
    assert experts_of(found).weight_type == weights
    layer = stock.get_submodule("model.layers.1.mlp.experts")
    gate_up, down = layer.get_parameter("gate_up_proj"), layer.get_parameter("down_proj")
    for expert in range(4):
        assert torch.equal(unpacked(found, expert, "gate"), gate_up[expert, :32])
        assert torch.equal(unpacked(found, expert, "up"), gate_up[expert, 32:])
        assert torch.equal(unpacked(found, expert, "down"), down[expert])
    ids = prompt(48)
    with torch.no_grad():
        expected = stock(ids).logits[0]
        errors = (found(ids).logits[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    # The kernel rounds activations to 8 bits: logits are near, but for a token whose experts were all but tied.
    assert errors.median() < 0.02


@CODES
def test_codes_in_a_float_type(kind: BlockType, weights: str, tmp_path: Path) -> None:
    """Without the rounding of activations, the logits are those of the stock model with dequantised weights."""
    folder = saved(mixtral(), tmp_path, {"": kind})
    assert relative_error(load(folder, experts_rules(tmp_path, "weights: float32")), rounded(mixtral(), kind)) < 2e-6


def test_a_layer_of_both_codes_is_int8(tmp_path: Path) -> None:
    """Codes of 4 bits are codes of 8 bits, too: nothing is rounded."""
    model = mixtral()
    found = load(saved(model, tmp_path, {"_down_exps": BlockType.Q8_0, "_exps": BlockType.Q4_0}))
    assert experts_of(found).weight_type == "int8"
    layer = model.get_submodule("model.layers.1.mlp.experts")
    for part, stored, kind in (
        ("gate", layer.get_parameter("gate_up_proj")[2, :32], BlockType.Q4_0),
        ("down", layer.get_parameter("down_proj")[2], BlockType.Q8_0),
    ):
        expected = gguf.dequantize(quantised(stored.detach().numpy(), kind), kind)
        assert np.array_equal(unpacked(found, 2, part).numpy(), expected)


def test_a_quantised_linear_keeps_codes_in_its_own_order_of_rows(tmp_path: Path) -> None:
    found = load(saved(mixtral(), tmp_path, {"": BlockType.Q8_0}), "cpu")
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "lm_head"):
        operator = found.get_submodule(name)
        assert isinstance(operator, QuantizedLinear)
        expected = rounded(mixtral(), BlockType.Q8_0).get_parameter(f"{name}.weight")
        torch.testing.assert_close(weight_of(operator), expected, rtol=1e-6, atol=1e-7)


def qwen3_next() -> PreTrainedModel:
    """Linear attention with rows of whole blocks of 256."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 3,
    }
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 64}
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(**SIZES | sizes | linear, num_experts_per_tok=2, layer_types=kinds, initializer_range=0.1)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("qkv", "gate", "weights"),
    [
        (BlockType.Q8_0, BlockType.Q8_0, "int8"),
        (BlockType.Q4_0, BlockType.Q8_0, "int8"),
        (BlockType.Q4_K, BlockType.Q4_K, "q4_k"),
        (BlockType.Q5_0, BlockType.Q5_0, "q5_0"),
        (BlockType.Q6_K, BlockType.Q4_K, "q6_k:320+q4_k:256"),
        (BlockType.Q4_K, BlockType.Q8_0, "q4_k:320+int8:256"),
        (BlockType.F32, BlockType.Q4_K, "int8"),  # through float32
    ],
    ids=lambda kind: kind.name if isinstance(kind, BlockType) else "",
)
def test_a_projection_in_two_tensors_is_kept(
    qkv: BlockType, gate: BlockType, weights: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = qwen3_next()
    rules = rules_in(tmp_path, "kind: linear, name: '_proj(_qkvz)?$'", "class: quantized_linear")
    folder = saved(model, tmp_path, {"attn_qkv": qkv, "attn_gate": gate, "ssm_out": BlockType.Q4_K})
    found = load(folder, rules)
    operators = [found.get_submodule(f"model.layers.0.linear_attn.{name}") for name in ("in_proj_qkvz", "out_proj")]
    projection, out = operators
    assert isinstance(projection, QuantizedLinear) and isinstance(out, QuantizedLinear)
    assert (projection.weight_type, out.weight_type) == (weights, "q4_k")
    assert ("1 tensors in Q4_K, the first of them blk.0.attn_gate.weight, are converted" in caplog.text) is (qkv is BlockType.F32)
    expected = model.get_parameter("model.layers.0.linear_attn.in_proj_qkvz.weight").detach().reshape(2, -1, 256)
    of_gates = [
        part.reshape(-1, 256).numpy() if kind is BlockType.F32 else gguf.dequantize(quantised(part.reshape(-1, 256).numpy(), kind), kind)
        for part, kind in zip(expected.split([160, 128], 1), (qkv, gate), strict=True)
    ]
    held = torch.from_numpy(np.concatenate([part.reshape(2, -1, 256) for part in of_gates], axis=1).reshape(-1, 256))
    limit = 0.01 if qkv is BlockType.F32 else 1e-6
    assert float((weight_of(projection) - held).abs().max()) <= limit * float(held.abs().max())
    given = torch.randn(5, len(held))
    assert float((projection.gradient(given) - given @ held).norm() / (given @ held).norm()) < 0.02
    (swap,) = (swap for swap in optimize_and_load(folder, rules, gguf=folder, dry_run=True).swaps if swap.module.endswith("qkvz"))
    parts = [PackedLinear(int(rows or 576), 256, kind) for kind, _, rows in (part.partition(":") for part in weights.split("+"))]
    assert swap.weight_type == weights and swap.footprint.by_device == {"cpu": sum(part.nbytes for part in parts)}


def test_a_projection_in_two_types_is_part_of_native_programs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(qwen3_next(), tmp_path, {"attn_qkv": BlockType.Q5_K, "attn_gate": BlockType.Q4_K})
    model = load(folder, "cpu")
    assert model.get_submodule("model.layers.0.linear_attn.in_proj_qkvz").weight_type == "q5_k:320+q4_k:256"
    with caplog.at_level("DEBUG", logger="moegraft.operators.decode"):
        model.generate(prompt(8), max_new_tokens=12, do_sample=False)
    (message,) = (message for message in caplog.messages if message.startswith("decode steps are native programs: "))
    assert "calls of PyTorch" not in message


@pytest.mark.parametrize("kind", [BlockType.Q8_0, BlockType.Q4_K], ids=lambda kind: kind.name)
def test_columns_in_another_order_are_kept_and_the_inputs_reordered(
    kind: BlockType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen3.5's value heads of 64 columns are stored in another order, and blocks of 256 columns hold several heads."""
    torch.manual_seed(0)
    old = qwen3_next().config.to_dict()
    names = set(Qwen3_5MoeTextConfig().to_dict()) - {"model_type", "architectures", "rope_parameters"}
    model = AutoModelForCausalLM.from_config(Qwen3_5MoeTextConfig(**{name: old[name] for name in names & set(old)})).eval()
    rules = rules_in(tmp_path, "kind: linear, name: 'linear_attn.out_proj$'", "class: quantized_linear")
    folder = saved(model, tmp_path, {"ssm_out": kind})
    out = load(folder, rules).get_submodule("model.layers.0.linear_attn.out_proj")
    assert isinstance(out, QuantizedLinear) and out.weight_type == {"Q8_0": "int8", "Q4_K": "q4_k"}[kind.name]
    assert "are converted" not in caplog.text
    weight = load(folder, rules_in(tmp_path, "kind: linear, name: lm_head", "class: quantized_linear")).get_parameter(
        "model.layers.0.linear_attn.out_proj.weight"
    )
    x = torch.randn(2, 3, 256)
    with torch.no_grad():
        expected = x @ weight.T
        assert float((out(x) - expected).norm() / expected.norm()) < 0.02  # activations of 8 bits
    given = torch.randn(2, 3, weight.shape[0])
    returned = given @ weight.detach()
    assert float((out.gradient(given) - returned).norm() / returned.norm()) < 0.02
    with caplog.at_level("DEBUG", logger="moegraft.operators.decode"):
        load(folder, "cpu").generate(prompt(8), max_new_tokens=12, do_sample=False)
    (message,) = (message for message in caplog.messages if message.startswith("decode steps are native programs: "))
    assert "calls of PyTorch" not in message


@pytest.mark.parametrize(
    ("model_type", "kept"),
    [
        ("qwen3_next", {"linear_attn.in_proj_qkvz", "linear_attn.out_proj"}),
        ("lfm2_moe", {"conv.in_proj", "conv.out_proj", "feed_forward.w1"}),
        ("granitemoehybrid", {"mamba.in_proj", "mamba.out_proj", "shared_mlp.input_linear"}),
    ],
)
def test_the_projections_of_recurrent_layers_are_kept_by_the_shipped_rules(model_type: str, kept: set[str], tmp_path: Path) -> None:
    found = load(saved(build(model_type), tmp_path, {"": BlockType.Q8_0}), "cpu")
    for name in kept:
        operator = found.get_submodule(f"model.layers.0.{name}")
        assert isinstance(operator, QuantizedLinear), name


def test_a_decay_rate_that_cannot_be_is_refused(tmp_path: Path) -> None:
    model = qwen3_next()
    tensors = tensors_of(model)
    tensors["blk.0.ssm_a"][1] *= -1
    with pytest.raises(CheckpointError, match=r"model\.gguf: blk\.0\.ssm_a: a value is out of the range of this tensor"):
        load(saved(model, tmp_path, tensors=tensors))


@pytest.mark.parametrize("lacking", ["attn_gate.weight", "ssm_a", "ssm_dt.bias"])
def test_a_tensor_of_linear_attention_that_is_missing_is_named(lacking: str, tmp_path: Path) -> None:
    model = qwen3_next()
    tensors = tensors_of(model)
    del tensors[f"blk.0.{lacking}"]
    with pytest.raises(CheckpointError, match=f"'blk.0.{lacking}', the tensor of model.layers.0.linear_attn.*, is missing"):
        load(saved(model, tmp_path, tensors=tensors))


@pytest.mark.parametrize("name", ["part", "folder"])
def test_split_files(name: str, tmp_path: Path) -> None:
    stock = mixtral()
    saved(stock, tmp_path, tensors_a_file=10)
    parts = sorted(path.name for path in tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    assert relative_error(load(tmp_path, path=parts[1] if name == "part" else "."), stock) < 2e-6


def test_a_folder_with_a_tower_beside_the_model(tmp_path: Path) -> None:
    stock = mixtral()
    saved(stock, tmp_path)
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert relative_error(load(tmp_path, path="."), stock) < 2e-6


def test_the_plan_counts_what_the_file_holds(tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path, {"_exps": BlockType.Q4_0})
    planned = optimize_and_load(folder, "cpu-exact", gguf=folder, dry_run=True)
    first = next(swap for swap in planned.swaps if swap.operator == "hybrid_experts")
    assert first.options.weights == "int4"  # type: ignore[attr-defined]
    packed = experts_of(load(folder)).on_cpu.packed
    assert packed is not None and first.footprint.by_device == {"cpu": packed.nbytes}


def test_packed_experts_are_kept_for_the_next_start(tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path, {"": BlockType.Q8_0})
    rules = experts_rules(tmp_path, f"weights: stored, cache_dir: '{tmp_path / 'packed'}'")
    first, packed = load(folder, rules), written(tmp_path / "packed")
    assert torch.equal(unpacked(load(folder, rules), 3, "down"), unpacked(first, 3, "down"))
    assert packed and written(tmp_path / "packed") == packed, "packed a second time"
    torch.manual_seed(1)
    saved(AutoModelForCausalLM.from_config(mixtral().config), folder, {"": BlockType.Q8_0})
    assert not torch.equal(unpacked(load(folder, rules), 3, "down"), unpacked(first, 3, "down"))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    stock = build("glm4_moe")
    tensors = tensors_of(stock)
    further = {name.replace("blk.2.", "blk.3."): values for name, values in tensors.items() if name.startswith("blk.2.")}
    further["blk.3.nextn.enorm.weight"] = np.ones(4, np.float32)
    assert relative_error(load(saved(stock, tmp_path, tensors=tensors | further)), stock) < 2e-6


def test_a_folder_whose_own_weights_are_quantised(tmp_path: Path) -> None:
    """The config of GPT-OSS says MXFP4 of the weights beside it, and nothing about the file's."""
    stock = build("gpt_oss")
    folder = saved(stock, tmp_path)
    stock.config.quantization_config = {"quant_method": "mxfp4"}
    stock.config.save_pretrained(folder)
    assert relative_error(load(folder), build("gpt_oss")) < 2e-6
