"""Checkpoints of every quantisation config: what is loaded equals the stock model with the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import prompt, weight_of
from support.quantised_files import FORMATS, FP4, FP8_BLOCKS, Format, Tensors, awq, compressed, float8, gptq
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig, PreTrainedModel, Qwen3MoeConfig

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.experts.hybrid import HybridExperts

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.experts.1.up_proj"


@cache
def qwen3(intermediate: int = 256) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "moe_intermediate_size": intermediate, "intermediate_size": 64, "vocab_size": 101}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3MoeConfig(
        **sizes, **heads, num_hidden_layers=2, num_experts=3, num_experts_per_tok=2, initializer_range=0.1, dtype="float32"
    )
    return AutoModelForCausalLM.from_config(config).eval()


def save(form: Format, folder: Path, intermediate: int = 256) -> None:
    """Write the quantised checkpoint."""
    stored: Tensors = {}
    for key, weight in plain(intermediate).items():
        stored |= form.write(key.removesuffix(".weight"), weight)[0] if key.endswith("_proj.weight") else {key: weight}
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(qwen3(intermediate).config.to_json_string(use_diff=False))
    reconfigure(folder, lambda config: config.update(quantization_config=dict(form.settings), architectures=["Qwen3MoeForCausalLM"]))


@cache
def plain(intermediate: int) -> Tensors:
    """The tensors of the stock model's checkpoint."""
    with TemporaryDirectory() as folder:
        qwen3(intermediate).save_pretrained(folder)
        return load_file(f"{folder}/{WEIGHTS}")


def stock_of(form: Format, intermediate: int = 256) -> PreTrainedModel:
    """The stock model with the weights that a quantised checkpoint stands for."""
    meant = {key: form.write("m", weight)[1] if key.endswith("_proj.weight") else weight for key, weight in plain(intermediate).items()}
    model = deepcopy(qwen3(intermediate))
    for name, parameter in model.named_parameters():
        if name in meant:
            parameter.data = meant[name]
            continue
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        prefix = name.rpartition(".")[0]
        each = [torch.cat([meant[f"{prefix}.{expert}.{part}.weight"] for part in parts]) for expert in range(len(parameter))]
        parameter.data = torch.stack(each)
    return model


def reconfigure(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def rules(folder: Path, text: str) -> Path:
    (folder / "rules.yaml").write_text(f"version: 1\nrules:\n{text}")
    return folder / "rules.yaml"


def load(folder: Path, text: str) -> PreTrainedModel:
    return optimize_and_load(folder, rules(folder, text), dtype="float32", progress=False)


HEAD = "- match: {name: '^lm_head$'}\n  replace: {class: quantized_linear}\n"
EXPERTS = "- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {weights: stored}}\n"
LINEARS = "- match: {kind: linear, name: '_proj$'}\n  replace: {class: quantized_linear, kwargs: {weights: stored}}\n"


COMPUTED = (
    "compressed fp8 rows",
    "compressed fp8 tensor",
    "compressed int4 zeros",
    "compressed int8",
    "compressed mxfp4",
    "awq",
    "gptq",
    "modelopt nvfp4",
)


@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_stock_model_with_the_same_weights(name: str, tmp_path: Path, *, long: bool) -> None:
    save(FORMATS[name], tmp_path)
    stock, found = stock_of(FORMATS[name]), load(tmp_path, HEAD)
    for parameter, expected in stock.named_parameters():
        if parameter != "lm_head.weight":
            assert torch.equal(found.get_parameter(parameter), expected), parameter
    if name not in COMPUTED and not long:
        return
    replaced, ids = load(tmp_path, EXPERTS + LINEARS), prompt(24)
    with torch.no_grad():
        logits = stock(ids).logits[0]
        error = (replaced(ids).logits[0] - logits).norm(dim=-1) / logits.norm(dim=-1)
    # Steps with FP8 are in float32, prompts in bfloat16 where the CPU multiplies in it. With integers, each of 14 products in a row rounds
    # activations to 8 bits; where that changes a token's experts, its error is larger.
    assert error.median() < (1e-2 if name.startswith("compressed fp8 ") and "blocks" not in name else 0.06), error


def of_each_expert(tensors: Tensors) -> Tensors:
    """The tensors of a Llama 4 checkpoint with matrices of single experts, as quantisers divide them."""
    divided: Tensors = {}
    for key, tensor in tensors.items():
        parts = ("gate_proj", "up_proj") if key.endswith("gate_up_proj") else ("down_proj",)
        for expert, matrices in enumerate(tensor) if ".experts." in key else ():
            for part, matrix in zip(parts, matrices.T.chunk(len(parts)), strict=True):
                divided[f"{key.rpartition('.')[0]}.{expert}.{part}.weight"] = matrix
        if ".experts." not in key:
            divided[key] = tensor
    return divided


@pytest.mark.parametrize("name", ["plain", "compressed fp8 rows", "compressed int4"])
def test_experts_that_the_model_stores_together(name: str, tmp_path: Path) -> None:
    """Llama 4 Maverick in FP8 has them one by one, and transformers has no conversion for them."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "intermediate_size_mlp": 64, "vocab_size": 101, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    config = Llama4TextConfig(**sizes, **heads, num_hidden_layers=2, num_local_experts=3, interleave_moe_layer_step=2)
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config).eval()
    stock.save_pretrained(tmp_path)
    stored, meant = Tensors(), Tensors()
    for key, weight in of_each_expert(load_file(tmp_path / WEIGHTS)).items():
        quantises = name != "plain" and key.endswith("_proj.weight") and ".self_attn." not in key
        written = FORMATS[name].write(key.removesuffix(".weight"), weight) if quantises else ({key: weight}, weight)
        stored |= written[0]
        meant[key] = written[1]
    for parameter_name, parameter in stock.named_parameters():
        if ".experts." not in parameter_name:
            parameter.data = meant[parameter_name]
            continue
        parts = ("gate_proj", "up_proj") if parameter_name.endswith("gate_up_proj") else ("down_proj",)
        prefix = parameter_name.rpartition(".")[0]
        each = [torch.cat([meant[f"{prefix}.{expert}.{part}.weight"] for part in parts]).T for expert in range(3)]
        parameter.data = torch.stack(each)
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, tmp_path / WEIGHTS, {"format": "pt"})
    if name != "plain":
        reconfigure(tmp_path, lambda config: config.update(quantization_config=dict(FORMATS[name].settings)))
    with pytest.raises(CheckpointError, match=r"nothing in this checkpoint feeds model\.layers\.1\.feed_forward\.experts"):
        load(tmp_path, HEAD)
    replaced, ids = load(tmp_path, EXPERTS), prompt(24)
    assert [experts.weight_type for experts in replaced.modules() if isinstance(experts, HybridExperts)] == [TYPES_TOGETHER[name]]
    with torch.no_grad():
        logits = stock(ids).logits[0]
        error = (replaced(ids).logits[0] - logits).norm(dim=-1) / logits.norm(dim=-1)
    assert error.median() < {"plain": 1e-5, "compressed fp8 rows": 1e-2, "compressed int4": 0.04}[name], error


TYPES_TOGETHER = {"plain": "float32", "compressed fp8 rows": "fp8_rows", "compressed int4": "int4"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("compressed int4", "int4"),
        ("gptq", "int4"),
        ("awq", "int4_g32"),
        ("compressed int4 zeros", "int4_g64"),
        ("compressed int4 rows", "int4_g256"),
        ("compressed int8", "int8_g128"),
        ("compressed fp8 rows", "fp8_rows"),
        ("compressed fp8 tensor", "fp8"),
        ("compressed mxfp4", "mxfp4"),
        ("fp8", "bfloat16"),  # blocks of 32 by 32
        ("modelopt nvfp4", "nvfp4"),
    ],
)
def test_stored_is_a_type_that_holds_the_codes(name: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(FORMATS[name], tmp_path)
    stock = stock_of(FORMATS[name])
    packed = load(tmp_path, EXPERTS + LINEARS).get_submodule("model.layers.1.mlp.experts").on_cpu.packed  # type: ignore[union-attr]
    assert packed.weight_type == expected
    exact = stock.get_submodule("model.layers.1.mlp.experts")
    for part, values in zip(("gate", "up"), exact.get_parameter("gate_up_proj")[1].chunk(2), strict=True):
        found = torch.from_numpy(packed.unpack(1, part))
        assert torch.equal(found, values if expected != "bfloat16" else values.bfloat16().float()), part
    down = torch.from_numpy(packed.unpack(1, "down"))
    assert torch.equal(down, exact.get_parameter("down_proj")[1]) or expected == "bfloat16"
    notices = [record.getMessage() for record in caplog.records if "converted through float32" in record.getMessage()]
    assert bool(notices) == (expected == "bfloat16")


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (compressed(4, 128), "int4_g128"),
        (compressed(4, 128, symmetric=False), "int4_g128"),
        (awq(64), "int4_g64"),
        (awq(32), "int4_g32"),
        (compressed(4, 0), "int4_g256"),
        (compressed(4, 256), "int4_g256"),
        (gptq(4, 0), "int4_g256"),
        (gptq(4, 128, version="gptq_v2"), "int4_g128"),
        (compressed(4, 32), "int4"),
        (awq(128), "int4_g128"),
        (compressed(8, 0, form="int-quantized"), "int8_g128"),
        (compressed(8, 128), "int8_g128"),
        (compressed(8, 32), "int8"),
        (gptq(8, 0), "int8_g128"),
        (FORMATS["compressed fp8 tensor"], "fp8"),
        (FORMATS["modelopt fp8"], "fp8"),
        (float8("_scale_inv", (128, 128), {**FP8_BLOCKS, "weight_block_size": [128, 128]}), "fp8"),
        (FORMATS["compressed fp8 rows"], "fp8_rows"),
        (FORMATS["compressed mxfp4"], "mxfp4"),
        (FORMATS["compressed nvfp4"], "nvfp4"),
        (FORMATS["modelopt nvfp4"], "nvfp4"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_as_many_bytes_as_the_file(form: Format, expected: str, tmp_path: Path) -> None:
    save(form, tmp_path)
    experts = "model.layers.1.mlp.experts"
    tensors = load_file(tmp_path / WEIGHTS).items()
    other = ("_shape", "g_idx", "input_scale")
    stored = sum(tensor.nbytes for key, tensor in tensors if key.startswith(experts) and not key.endswith(other))
    planned = optimize_and_load(tmp_path, rules(tmp_path, EXPERTS + LINEARS), dry_run=True)
    types = {swap.weight_type for swap in planned.swaps if swap.module != experts}  # type: ignore[attr-defined]
    assert types == {expected}
    [swap] = [swap for swap in planned.swaps if swap.module == experts]  # type: ignore[attr-defined]
    assert swap.weight_type == expected
    assert abs(swap.footprint.total_bytes / stored - 1) <= 0.02
    packed = load(tmp_path, EXPERTS).get_submodule(experts).on_cpu.packed
    assert packed.buffer.nbytes == swap.footprint.total_bytes  # type: ignore[union-attr]


def within_two_units(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether float32 numbers differ by at most two units in the last place."""
    units = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
    return bool(((found - expected).abs() <= 2 * units).all())


def test_a_number_that_divides_scales_becomes_its_reciprocal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """compressed-tensors' NVFP4: weights change by at most two units in the last place of a float32."""
    form = FORMATS["compressed nvfp4"]
    save(form, tmp_path)
    stock, found = stock_of(form), load(tmp_path, EXPERTS + LINEARS)
    experts = "model.layers.1.mlp.experts"
    packed = found.get_submodule(experts).on_cpu.packed
    assert packed.weight_type == "nvfp4"
    held = {part: torch.from_numpy(packed.unpack(1, part)) for part in ("gate", "up", "down")}
    gate, up = stock.get_parameter(f"{experts}.gate_up_proj")[1].chunk(2)
    for part, values in {"gate": gate, "up": up, "down": stock.get_parameter(f"{experts}.down_proj")[1]}.items():
        assert within_two_units(held[part], values), part
    assert not [record for record in caplog.records if "converted through float32" in record.getMessage()]


def test_only_down_has_columns_that_fill_no_block_of_nvfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    form = FORMATS["modelopt nvfp4"]
    save(form, tmp_path, intermediate=192)
    stock, found = stock_of(form, 192), load(tmp_path, EXPERTS + LINEARS)
    experts = found.get_submodule("model.layers.1.mlp.experts")
    assert experts.weight_type == "nvfp4+bfloat16"
    assert found.get_submodule("model.layers.1.self_attn.q_proj").weight_type == "nvfp4"
    assert "weights in NVFP4, the first of them model.layers.0.mlp.experts.0.down_proj.weight, are converted through" in caplog.text
    with torch.no_grad():
        expected = stock(prompt(12)).logits[0]
        error = (found(prompt(12)).logits[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.04


def test_nvfp4_of_all_experts_in_one_tensor(tmp_path: Path) -> None:
    """(E, 2I, H), with a scale of each expert."""
    form = FORMATS["modelopt nvfp4"]
    save(form, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    meant: dict[str, torch.Tensor] = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for key in [key for key in tensors if key.startswith(prefix)]:
            del tensors[key]
        for name in ("gate_up_proj", "down_proj"):
            each = [form.write("m", weight) for weight in qwen3().get_parameter(f"{prefix}.{name}").detach()]
            for suffix in ("", "_scale", "_scale_2"):
                tensors[f"{prefix}.{name}{suffix}"] = torch.stack([stored[f"m.weight{suffix}"] for stored, _ in each])
            meant[name] = torch.stack([values for _, values in each])
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    packed = load(tmp_path, EXPERTS).get_submodule("model.layers.1.mlp.experts").on_cpu.packed
    assert packed.weight_type == "nvfp4"
    for expert in range(3):
        held = {part: torch.from_numpy(packed.unpack(expert, part)) for part in ("gate", "up", "down")}
        assert torch.equal(torch.cat([held["gate"], held["up"]]), meant["gate_up_proj"][expert])
        assert torch.equal(held["down"], meant["down_proj"][expert])


TENSORS_FP8 = float8("_scale", (0, 0), {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]})


@pytest.mark.parametrize(
    ("form", "number", "expected"),
    [
        (FORMATS["modelopt nvfp4"], "_scale_2", "nvfp4"),
        (FORMATS["compressed nvfp4"], "_global_scale", "nvfp4"),
        (TENSORS_FP8, "_scale", "fp8"),
    ],
    ids=["modelopt nvfp4", "compressed-tensors nvfp4", "modelopt fp8"],
)
def test_fused_gate_and_up_may_have_a_scale_each(form: Format, number: str, expected: str, tmp_path: Path) -> None:
    """A scale of shape (E, 2) beside gate_up_proj (E, 2I, H); of (E,) beside down_proj. All values against NumPy's."""
    save(form, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    prefix = "model.layers.1.mlp.experts"
    for key in [key for key in tensors if key.startswith(prefix)]:
        del tensors[key]
    codes = "_packed" if number == "_global_scale" else ""
    rounding = 3e-7 if number == "_global_scale" else 0  # of the reciprocal of a scale that divides
    meant: dict[str, np.ndarray[Any, Any]] = {}
    for name in ("gate_up_proj", "down_proj"):
        whole = qwen3().get_parameter(f"{prefix}.{name}").detach()
        written = [form.write("m", weight)[0] for weight in whole]
        stored = {suffix: torch.stack([each[f"m.weight{suffix}"] for each in written]) for suffix in {codes, "_scale", number}}
        parts = 2 if name == "gate_up_proj" else 1
        numbers = 0.001 * torch.arange(1, 3 * parts + 1).reshape(3, parts).float() ** 2
        stored[number] = numbers if parts == 2 else numbers[:, 0]
        tensors |= {f"{prefix}.{name}{suffix}": tensor for suffix, tensor in stored.items()}
        factors = (1 / numbers if number == "_global_scale" else numbers).numpy().repeat(whole.shape[1] // parts, axis=1)[..., None]
        if expected == "fp8":
            meant[name] = stored[codes].float().numpy() * factors
        else:
            pairs = stored[codes].numpy()
            values = FP4.numpy()[np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)]
            meant[name] = values * (stored["_scale"].float().numpy() * factors).repeat(16, axis=-1)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    found, kept = load(tmp_path, EXPERTS), load(tmp_path, HEAD)
    packed = found.get_submodule(prefix).on_cpu.packed
    assert packed.weight_type == expected
    for expert in range(3):
        held = {part: packed.unpack(expert, part) for part in ("gate", "up", "down")}
        np.testing.assert_allclose(np.concatenate([held["gate"], held["up"]]), meant["gate_up_proj"][expert], rtol=rounding)
        np.testing.assert_allclose(held["down"], meant["down_proj"][expert], rtol=rounding)
    for name, values in meant.items():  # the stock module, through the other path
        np.testing.assert_allclose(kept.get_parameter(f"{prefix}.{name}").detach().numpy(), values, rtol=rounding)
    tensors[f"{prefix}.gate_up_proj{number}"] = torch.ones(3, 3)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{prefix}.gate_up_proj{number}: shape \(3, 3\), expected "):
        load(tmp_path, EXPERTS)


def test_a_scale_each_is_refused_where_gate_and_up_are_alternating_rows(tmp_path: Path) -> None:
    """gpt-oss interleaves the rows of gate and up."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes, **heads, dtype="float32"))
    model.save_pretrained(tmp_path)
    tensors, key = load_file(tmp_path / WEIGHTS), "model.layers.0.mlp.experts.gate_up_proj"
    tensors[key] = torch.zeros(2, 64, 32, dtype=torch.uint8)
    tensors[f"{key}_scale"] = torch.zeros(2, 64, 4).to(torch.float8_e4m3fn)
    tensors[f"{key}_scale_2"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    reconfigure(tmp_path, lambda config: config.update(quantization_config=dict(FORMATS["modelopt nvfp4"].settings)))
    with pytest.raises(CheckpointError, match=r"gate_up_proj: gate and up have a scale each, and are no halves of its rows in this model"):
        load(tmp_path, EXPERTS)


@pytest.mark.parametrize("divides", [False, True], ids=["modelopt", "compressed-tensors"])
def test_every_scale_of_nvfp4(divides: bool, tmp_path: Path) -> None:
    """All codes of E4M3 that are numbers, also negative and subnormal ones, and all of E2M1."""
    name = "compressed nvfp4" if divides else "modelopt nvfp4"
    save(FORMATS[name], tmp_path)
    query = "model.layers.1.self_attn.q_proj"
    tensors = load_file(tmp_path / WEIGHTS)
    codes, number = (f"{query}.weight_packed", "global_scale") if divides else (f"{query}.weight", "scale_2")
    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(256).repeat(16).reshape(tensors[f"{query}.weight_scale"].shape).to(torch.uint8)
    scales[scales & 127 == 127] = 1  # subnormal
    stored = scales.view(torch.float8_e4m3fn)
    whole = torch.tensor([0.0123])
    places = torch.randint(0, 256, tensors[codes].shape, dtype=torch.uint8, generator=generator)
    tensors |= {codes: places, f"{query}.weight_scale": stored, f"{query}.weight_{number}": 1 / whole if divides else whole}
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    values = FP4[torch.stack([places & 15, places >> 4], dim=-1).flatten(1).int()]
    wide = (stored.float() / (1 / whole) if divides else stored.float() * whole).repeat_interleave(16, 1)
    torch.testing.assert_close(weight_of(load(tmp_path, LINEARS).get_submodule(query)), values * wide, rtol=1e-6, atol=0.0)
    assert torch.equal(load(tmp_path, HEAD).get_parameter(f"{query}.weight"), values * wide)


def test_linear_layers_keep_the_codes_that_are_no_larger(tmp_path: Path) -> None:
    save(awq(64), tmp_path)
    query = "model.layers.1.self_attn.q_proj"
    found = load(tmp_path, LINEARS.replace("stored", "int8")).get_submodule(query)
    assert found.weight_type == "int4_g64"
    expected = stock_of(awq(64)).get_submodule(query)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (found(x) - expected(x)).norm() < 0.01 * expected(x).norm()


def test_slots_on_a_gpu_hold_the_bytes_of_the_file(tmp_path: Path) -> None:
    fp8 = float8("_scale_inv", (128, 128), {**FP8_BLOCKS, "weight_block_size": [128, 128]})
    nvfp4 = FORMATS["modelopt nvfp4"]
    for form, expected in ((compressed(4, 128), "int4_g128"), (fp8, "fp8"), (FORMATS["compressed mxfp4"], "mxfp4"), (nvfp4, "nvfp4")):
        save(form, tmp_path)
        slots = EXPERTS.replace("weights: stored", "weights: stored, gpu: emulated, cache: {slots: 1}")
        planned = optimize_and_load(tmp_path, rules(tmp_path, slots), dry_run=True)
        for swap in planned.swaps:  # type: ignore[attr-defined]
            assert swap.weight_type == expected
            assert swap.footprint.by_device["cpu"] == 3 * swap.footprint.by_device["gpu"]
    on_cpu, found, ids = load(tmp_path, EXPERTS), load(tmp_path, slots), prompt(24)
    with torch.no_grad():
        expected_logits = on_cpu(ids).logits
        assert (found(ids).logits - expected_logits).norm() < 1e-4 * expected_logits.norm()


def test_codes_of_all_experts_in_one_tensor(tmp_path: Path) -> None:
    """(E, 2I, H), as transformers saves its FP8 experts."""
    save(FORMATS["fp8"], tmp_path)
    stock = stock_of(FORMATS["fp8"])
    tensors = load_file(tmp_path / WEIGHTS)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for suffix in ("", "_scale_inv"):
            own = {
                name: [tensors.pop(f"{prefix}.{expert}.{name}_proj.weight{suffix}") for expert in range(3)]
                for name in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(own["gate"], own["up"], strict=True)]
            tensors[f"{prefix}.gate_up_proj{suffix}"], tensors[f"{prefix}.down_proj{suffix}"] = torch.stack(both), torch.stack(own["down"])
        for expert, name in ((expert, name) for expert in range(3) for name in ("gate", "up", "down")):
            tensors.pop(f"{prefix}.{expert}.{name}_proj.input_scale")
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    found = load(tmp_path, HEAD)
    for name in ("gate_up_proj", "down_proj"):
        parameter = f"model.layers.1.mlp.experts.{name}"
        assert torch.equal(found.get_parameter(parameter), stock.get_parameter(parameter))


def refusal(folder: Path, change: Callable[[Tensors], object] | None = None) -> str:
    if change is not None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        load(folder, EXPERTS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("fp8", f"{UP}.weight_scale_inv"),
        ("compressed int4", f"{UP}.weight_scale"),
        ("compressed int8", f"{UP}.weight_scale"),
        ("awq", f"{UP}.qzeros"),
        ("gptq", f"{UP}.scales"),
        ("modelopt nvfp4", f"{UP}.weight_scale_2"),
        ("compressed mxfp4", f"{UP}.weight_scale"),
    ],
)
def test_a_lost_tensor_is_named(name: str, lost: str, tmp_path: Path) -> None:
    save(FORMATS[name], tmp_path)
    message = refusal(tmp_path, lambda tensors: tensors.pop(lost))
    assert f"{WEIGHTS}: {UP}." in message and f"of this weight, {lost}, are missing" in message


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("compressed int4", f"{UP}.weight_scale", "expected (256, 8) for blocks of (1, 32)"),
        ("compressed int4 zeros", f"{UP}.weight_zero_point", "expected (32, 4)"),
        ("compressed int8", f"{UP}.weight_scale", "expected (256, 1) for a weight of shape (256, 256)"),
        ("awq", f"{UP}.scales", "expected (8, 256)"),
        ("gptq", f"{UP}.qzeros", "expected (8, 32)"),
        ("gptq", f"{UP}.g_idx", "expected (256,)"),
        ("modelopt nvfp4", f"{UP}.weight_scale", "expected (256, 16) for blocks of (1, 16)"),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: str, key: str, expected: str, tmp_path: Path) -> None:
    save(FORMATS[name], tmp_path)
    message = refusal(
        tmp_path, lambda tensors: tensors.update({key: torch.cat([tensors[key].view(torch.uint8)] * 3).view(tensors[key].dtype)})
    )
    assert f"{WEIGHTS}: {key}: shape (" in message and expected in message


@pytest.mark.parametrize(
    ("name", "key", "dtype", "expected"),
    [
        ("gptq", f"{UP}.qzeros", torch.int16, "zero points of dtype I16, expected I32"),
        ("gptq", f"{UP}.scales", torch.int32, "scales of dtype I32, which is no floating-point one"),
        ("compressed nvfp4", f"{UP}.weight_scale", torch.float16, "scales of dtype F16, expected F8_E4M3"),
        ("compressed int4", f"{UP}.weight_packed", torch.int64, "dtype I64, expected I32 or U8"),
    ],
)
def test_a_tensor_of_another_dtype_is_named(name: str, key: str, dtype: torch.dtype, expected: str, tmp_path: Path) -> None:
    save(FORMATS[name], tmp_path)
    message = refusal(tmp_path, lambda tensors: tensors.update({key: tensors[key].float().to(dtype)}))
    assert f"{WEIGHTS}: {key}: {expected}" in message


@pytest.mark.parametrize("declared", [True, False], ids=["desc_act", "undeclared"])
def test_activation_order_is_refused(declared: bool, tmp_path: Path) -> None:
    save(FORMATS["gptq"], tmp_path)
    reconfigure(tmp_path, lambda config: config["quantization_config"].update(desc_act=declared))
    load(tmp_path, EXPERTS)  # the groups are in order, whatever the settings declare
    order = torch.arange(256).roll(7) // 32
    message = refusal(tmp_path, lambda tensors: tensors.update({f"{UP}.g_idx": order.int()}))
    assert f"{UP}.g_idx: the columns are grouped by activation order" in message and "desc_act: false" in message


@pytest.mark.parametrize(("name", "of_all"), [("modelopt nvfp4", torch.inf), ("compressed nvfp4", 0.0)])
def test_scales_that_are_no_numbers(name: str, of_all: float, tmp_path: Path) -> None:
    save(FORMATS[name], tmp_path)
    key = f"{UP}.weight_scale_2" if name.startswith("modelopt") else f"{UP}.weight_global_scale"
    whole = load_file(tmp_path / WEIGHTS)[key]
    message = refusal(tmp_path, lambda tensors: tensors.update({key: torch.full_like(whole, of_all)}))
    assert f"{WEIGHTS}: {UP}.weight" in message and "a weight or scale is NaN or too large for nvfp4" in message

    def damage(tensors: Tensors) -> None:
        tensors[key] = whole
        tensors[f"{UP}.weight_scale"].view(torch.uint8)[3, 5] = 0x7F

    assert "a weight or scale is NaN or too large for nvfp4; download it again" in refusal(tmp_path, damage)


def test_biases_of_zeros_for_layers_without_a_bias(tmp_path: Path) -> None:
    """As AutoGPTQ writes them."""
    save(FORMATS["gptq"], tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({**tensors, f"{UP}.bias": torch.zeros(256)}, tmp_path / WEIGHTS, {"format": "pt"})
    load(tmp_path, EXPERTS)
    assert f"nothing in the model reads {UP}.bias" in refusal(tmp_path, lambda tensors: tensors.update({f"{UP}.bias": torch.ones(256)}))


def test_zero_points_that_the_settings_deny(tmp_path: Path) -> None:
    save(gptq(symmetric=False), tmp_path)
    reconfigure(tmp_path, lambda config: config["quantization_config"].update(sym=True))
    assert "sym: true" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes; supported are float32"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ of version gemv with 4 bits; supported is version gemm"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ in the format gptq with 3 bits; supported are gptq and gptq_v2 with 4 or 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ in the format marlin with 4 bits"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors in the format marlin-24; supported are pack-q"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's W4A8_AWQ; supported are FP8, NVFP4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "config.json: group_size must be a positive integer, or -1"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "config.json: group_size must be a positive integer, or -1"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config.json: config_groups must be a mapping"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_settings_that_cannot_be_read(settings: dict[str, object], expected: str, tmp_path: Path) -> None:
    save(FORMATS["gptq"], tmp_path)
    reconfigure(tmp_path, lambda config: config.update(quantization_config=settings))
    assert expected in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"group_size": 0}, "group_size must be a positive integer, or -1 for whole rows, not 0"),
        ({"strategy": "block"}, "block_structure must be two positive integers, such as [128, 128], not None"),
        ({"strategy": "token"}, "strategy must be tensor, channel, group, tensor_group, block, not 'token'"),
        ({"type": "complex"}, "type must be int or float and num_bits an integer"),
        ({"num_bits": 3}, "_proj.weight_packed: integers of 3 bits cannot be read"),
    ],
    ids=str,
)
def test_schemes_that_cannot_be_read(change: dict[str, object], expected: str, tmp_path: Path) -> None:
    save(FORMATS["compressed int4"], tmp_path)
    reconfigure(tmp_path, lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(change))
    assert expected in refusal(tmp_path)


def test_settings_under_their_older_key(tmp_path: Path) -> None:
    """The first versions of compressed-tensors called them `compression_config`, without a method."""
    form = FORMATS["compressed int4"]
    save(form, tmp_path)

    def rename(config: dict[str, Any]) -> None:
        config["compression_config"] = config.pop("quantization_config")
        config["compression_config"].pop("quant_method")

    reconfigure(tmp_path, rename)
    stock, found = stock_of(form), load(tmp_path, HEAD)
    assert all(torch.equal(found.get_parameter(name), each) for name, each in stock.named_parameters() if name != "lm_head.weight")
    planned = optimize_and_load(tmp_path, rules(tmp_path, EXPERTS), dry_run=True)
    assert {swap.weight_type for swap in planned.swaps} == {"int4"}
    reconfigure(tmp_path, lambda config: config.update(compression_config=[1]))
    assert "'compression_config' must be a mapping" in refusal(tmp_path)


def test_two_schemes_in_one_checkpoint(tmp_path: Path) -> None:
    """As Kimi's: each weight is of the scheme that fits its tensors."""
    save(FORMATS["compressed int4"], tmp_path)
    stock = stock_of(FORMATS["compressed int4"])
    tensors = load_file(tmp_path / WEIGHTS)
    rows = FORMATS["compressed fp8 rows"]
    for key in [key for key in tensors if ".self_attn." in key and ".weight_" in key]:
        del tensors[key]
    for name, weight in stock.named_parameters():
        if ".self_attn." in name and name.endswith("_proj.weight"):
            stored, values = rows.write(name.removesuffix(".weight"), weight.data)
            weight.data = values
            tensors |= stored
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    groups = rows.settings["config_groups"]
    reconfigure(tmp_path, lambda config: config["quantization_config"].update(format="mixed-precision"))
    reconfigure(tmp_path, lambda config: config["quantization_config"]["config_groups"].update(group_1=groups["group_0"]))
    found = load(tmp_path, HEAD)
    for parameter, expected in stock.named_parameters():
        if parameter != "lm_head.weight":
            assert torch.equal(found.get_parameter(parameter), expected), parameter


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("compressed")])
def test_values_are_those_of_compressed_tensors(name: str) -> None:
    """The writers of these tests mean what the library does."""
    compressors = pytest.importorskip("compressed_tensors.compressors", exc_type=ImportError)
    quantization = pytest.importorskip("compressed_tensors.quantization")
    form = FORMATS[name]
    stored, values = form.write("m", torch.randn(96, 128, generator=torch.Generator().manual_seed(0)))
    state = {key.removeprefix("m."): tensor for key, tensor in stored.items()}
    if name.split()[1] in ("int4", "int8", "fp8"):  # in float32, as here: it multiplies in the dtype of the scales
        state["weight_scale"] = state["weight_scale"].float()
    scheme = quantization.QuantizationScheme.model_validate(form.settings["config_groups"]["group_0"])
    found = compressors.BaseCompressor.get_value_from_registry(form.settings["format"]).decompress(state, scheme)["weight"]
    assert torch.equal(found.float(), values.to(found.dtype).float())


def test_values_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    form = float8("_scale_inv", (32, 64), {})
    stored, values = form.write("m", torch.randn(96, 128, generator=torch.Generator().manual_seed(0)))
    found = Fp8Dequantize(None)._dequantize_one(stored["m.weight"], stored["m.weight_scale_inv"], torch.float32)
    assert torch.equal(found, values)
