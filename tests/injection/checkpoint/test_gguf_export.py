"""Models written to GGUF files: every type, family and role, loaded here and in llama.cpp, and the files that are not written."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT
from support.byte_tokenizer import byte_tokenizer
from support.families import SMALL_TEXT, build_config, build_model, case_of, prompt
from support.gguf_files import BlockType, gguf
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from moegraft.cpu_backend import PackedLinear
from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.gguf import export
from moegraft.injection.checkpoint.gguf.export import ExportPlan, plan_export, read_types, write_export
from moegraft.injection.checkpoint.gguf.families import FAMILIES as ROWS
from moegraft.injection.checkpoint.gguf.families import change_of
from moegraft.injection.checkpoint.gguf.vocabulary import add_vocabulary
from moegraft.injection.importance import measure_importance
from moegraft.injection.meta_model import MetaModel, build_meta_model
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.layout import read_layout, why_unsupported
from moegraft.operators.weight_formats import ENCODED, GGUF_TYPES, fitting_type

SQNR = {name: form.encoding.least_db for name, form in GGUF_TYPES.items() if form.encoding is not None}
FLOATS = [name for name, form in GGUF_TYPES.items() if not form.scaled]
FLOAT_RULES = "rules:\n- match: {kind: experts}\n  replace: {class: hybrid_experts, kwargs: {weights: stored}}\n"


def matrix(rows: int = 24, columns: int = 512) -> torch.Tensor:
    """Normal weights in rows of different sizes, with rows of zeros, of one sign and of one large weight."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 2, rows)[:, None]
    found[0] = 0
    found[1, 256:] = 0
    found[2], found[3] = found[2].abs(), -found[3].abs()
    found[4, 17] = 100 * found[4].abs().max()
    return found


def decoded(blocks: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(blocks, BlockType[name]))


def decibels(values: torch.Tensor, stored: torch.Tensor, weight: torch.Tensor | float = 1.0) -> float:
    noise = (weight * (values - stored).square()).sum()
    return float(10 * torch.log10((weight * values.square()).sum() / noise))


@pytest.mark.parametrize("name", SQNR)
def test_blocks_are_close_by_the_reference_decoder(name: str) -> None:
    values = matrix()
    blocks = GGUF_TYPES[name].encode(values)
    found = decoded(blocks, name)
    form = GGUF_TYPES[name]
    if form.stored:
        packed = PackedLinear(*values.shape, form.name)
        packed.pack_blocks(blocks)
        assert torch.equal(torch.from_numpy(packed.unpack()), found)
    assert bool(found.isfinite().all())
    assert not found[0].any() and not found[1, 256:].any()
    assert decibels(values[8:], found[8:]) >= SQNR[name]  # the first rows are subnormal in float16, or of other distributions
    try:
        theirs = decoded(gguf.quantize(values.numpy(), BlockType[name]), name)
    except NotImplementedError:
        return
    assert decibels(values[8:], found[8:]) >= decibels(values[8:], theirs[8:])


@pytest.mark.parametrize("name", SQNR)
def test_importance_moves_the_error_to_where_it_matters_less(name: str) -> None:
    values = matrix()[8:]
    weight = torch.logspace(-3, 0, values.shape[1])[torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(1))]
    plain, weighted = (decoded(GGUF_TYPES[name].encode(values, given), name) for given in (None, weight))
    assert decibels(values, weighted, weight) > decibels(values, plain, weight)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_once(name: str) -> None:
    values = matrix()
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    assert torch.equal(decoded(GGUF_TYPES[name].encode(values), name), values.to(dtype).float())


def test_mxfp4_weights_stay_as_they_are() -> None:
    values = decoded(GGUF_TYPES["MXFP4"].encode(matrix()), "MXFP4")
    assert torch.equal(decoded(GGUF_TYPES["MXFP4"].encode(values), "MXFP4"), values)


def test_rows_that_blocks_do_not_divide_have_another_type() -> None:
    assert [fitting_type("Q4_K", columns) for columns in (512, 96, 40)] == ["Q4_K", "Q5_0", "F16"]
    assert [fitting_type("IQ3_XXS", columns) for columns in (512, 96, 40)] == ["IQ3_XXS", "IQ4_NL", "F16"]
    assert fitting_type("Q8_0", 40) == "F16"


def test_types_by_role_and_layer() -> None:
    choices = export.Choices(read_types("q4_k,down=int8,down@1-2=Q6_K"))
    assert [choices.type_of(*place) for place in (("up", 1), ("down", 0), ("down", 2), ("output", None))] == [
        "Q4_K",
        "Q8_0",
        "Q6_K",
        "Q4_K",
    ]
    assert export.Choices(read_types("gate=Q4_K")).type_of("attention", 0) == "Q8_0"


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ("Q4_K,down@2-3=Q6_K", "'down@2-3=Q6_K' fits no matrix of this model"),  # which has two layers
        ("gate@0=Q4_K,dense=Q6_K", "'dense=Q6_K' fits no matrix of this model"),
        ("down=Q4_K,Q8_0", "'down=Q4_K' counts for no matrix, as later types replace it"),
    ],
)
def test_types_that_no_matrix_has_are_refused(types: str, message: str, tmp_path: Path) -> None:
    meta = saved(qwen3(), tmp_path)
    assert meta.weights is not None
    with pytest.raises(UnsupportedModelError, match=message):
        plan_export(meta.weights, meta.skeleton, read_types(types))


def test_types_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "types.yaml"
    file.write_text("all: Q4_K\ndown@0,3-4: Q6_K\n")
    of_layers = export.TypeChoice("down", export.parse_layers("0,3-4"), "Q6_K")
    assert read_types(str(file)) == (export.TypeChoice(None, None, "Q4_K"), of_layers)
    assert read_types("{all: Q4_K, 'down@0,3-4': Q6_K}") == read_types(str(file))
    assert read_types("{gate: int4, up: int4, down: int8}") == read_types("gate=Q4_0,up=Q4_0,down=Q8_0")
    file.write_text("[Q4_K]")
    with pytest.raises(ValueError, match=r"types\.yaml: expected a mapping"):
        read_types(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Q4_L", "type 'Q4_L' cannot be written; the types are F32, F16"),
        ("IQ1_M", "type 'IQ1_M' cannot be written"),
        ("Q4_K_M", "types of matrices can be mixed, as in Q4_K,down=Q6_K"),
        ("{gate: Q4_K", "not YAML"),
        ("middle=Q4_K", "unknown role 'middle' in 'middle=Q4_K'; the roles are gate, up, down"),
        ("down@x=Q4_K", "give TYPE, ROLE=TYPE or ROLE@LAYERS=TYPE"),
        ("down@3-1=Q4_K", "range 3-1 runs backwards"),
        ("", "give TYPE"),
    ],
)
def test_wrong_types_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_types(text)


FAMILIES = (
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_5_moe_text",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "solar_open",
    "dots1",
    "ernie4_5_moe",
    "minimax_m2",
    "hunyuan_v1_moe",
    "granitemoe",
    "granitemoeshared",
)
ONLY_READ = [model_type for model_type, row in ROWS.items() if row.unwritten is not None]


def family(model_type: str) -> PreTrainedModel:
    case = case_of(model_type)
    more: dict[str, Any] = {"mlp_only_layers": []} if model_type.startswith("qwen") else {}
    if model_type == "qwen3_moe":
        more["norm_topk_prob"] = True
    if model_type == "mixtral":
        more["sliding_window"] = None
    if model_type == "deepseek_v3":
        scaling = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.7}
        more["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, **scaling}
    if model_type == "qwen3_5_moe_text":
        sections = {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}  # llama.cpp requires that heads have room for them
        more["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **sections}
    if model_type == "nemotron_h":
        more["moe_latent_size"] = 32  # as in Nemotron-3-Super
    if model_type == "deepseek_v2":
        more["q_lora_rank"] = None  # as in DeepSeek-V2-Lite
    if model_type == "glm4_moe":
        more |= {"use_qk_norm": True, "attention_bias": True}
    if model_type == "hunyuan_v1_moe":
        more["moe_topk"] = [2, 2, 2]
    if model_type in ("olmoe", "dots1"):
        more["num_key_value_heads"] = case.text.get("num_attention_heads", SMALL_TEXT["num_attention_heads"])
    return build_model(dataclasses.replace(case, text={**case.text, **more}))


def test_every_family_is_tried_and_documented() -> None:
    assert {*FAMILIES, *ONLY_READ} == set(ROWS)
    guide = " ".join((ROOT / "rules" / "guide" / "families.md").read_text().split())
    written, loaded = guide.partition("GGUF files (`--gguf`)")[2].partition("Of models")[0].split("They are loaded, and not")
    assert sorted(FAMILIES) == re.findall(r"`(\w+)`", written.partition("model types:")[2])
    assert sorted(ONLY_READ) == re.findall(r"`(\w+)`", loaded)
    assert f"GGUF files of {len(ROWS)} model types" in (ROOT / "README.md").read_text()
    assert f"It supports {len(FAMILIES)} [model types](families.md)" in (ROOT / "rules" / "guide" / "formats.md").read_text()


def qwen3(**changes: Any) -> PreTrainedModel:
    """Rows of whole super-blocks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 160}
    config = Qwen3MoeConfig(**sizes, **more, initializer_range=0.1, norm_topk_prob=True, **changes)
    return AutoModelForCausalLM.from_config(config).eval()


def saved(model: PreTrainedModel, folder: Path) -> MetaModel:
    model.save_pretrained(folder)
    return build_meta_model(folder, weights=True)


def exported(meta: MetaModel, types: str, path: Path, importance: Mapping[str, torch.Tensor] | None = None) -> ExportPlan:
    assert meta.weights is not None
    plan = plan_export(meta.weights, meta.skeleton, read_types(types))
    written: list[int] = []
    write_export(plan, path, meta.source.folder, "tiny", importance or {}, written.append, replace=True)
    assert sum(written) == plan.nbytes
    return plan


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids).logits.float()


def stored_values(path: Path) -> dict[str, torch.Tensor]:
    read = gguf.GGUFReader(path)
    return {tensor.name: torch.from_numpy(gguf.dequantize(np.array(tensor.data), tensor.tensor_type)) for tensor in read.tensors}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_loads_as_it_was(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the config and tokenizer of its folder, and with those that the file has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    byte_tokenizer().save_pretrained(tmp_path)
    model = family(model_type)
    meta = saved(model, tmp_path)
    exported(meta, "F32", tmp_path / "model.gguf")
    rules = tmp_path / "rules.yaml"
    rules.write_text(FLOAT_RULES)
    loaded = optimize_and_load(tmp_path, rules, gguf=tmp_path / "model.gguf", dtype="float32", progress=False)
    assert "in the config, which counts" not in caplog.text
    ids = prompt(24)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-4, atol=1e-4)
    alone = optimize_and_load(tmp_path / "model.gguf", rules, dtype="float32", progress=False)
    torch.testing.assert_close(logits(alone, ids), logits(model, ids), rtol=1e-4, atol=1e-4)


def test_numbers_that_the_config_of_another_model_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of models whose tensors have the same shapes."""
    exported(saved(qwen3(), tmp_path), "F32", tmp_path / "model.gguf")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 1e7
    path.write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    optimize_and_load(tmp_path, "cpu-exact", gguf=tmp_path / "model.gguf", progress=False)
    notices = [record.getMessage() for record in caplog.records if "which counts; give the folder or hub id" in record.getMessage()]
    assert [notice.partition(": ")[2].partition(" in the config")[0] for notice in notices] == [
        "rope.freq_base is 10000, and rope_theta is 1e+07",
        "expert_used_count is 2, and num_experts_per_tok is 1",
    ]


@pytest.mark.parametrize("model_type", ONLY_READ)
def test_a_family_that_is_not_written_loads(model_type: str, tmp_path: Path) -> None:
    """Tensors with the names of the package gguf and, as in newer files of llama.cpp's converter, gate and up in one."""
    model = family(model_type)
    weights = saved(model, tmp_path).weights
    assert weights is not None
    names, values = export.Names(model.config), dict(model.state_dict())
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", ROWS[model_type].architecture)
    writer.add_block_count(model.config.num_hidden_layers)
    for path, module in model.named_modules():
        if why_unsupported(module) is not None:
            continue
        source, layout = weights.source(path, "experts"), read_layout(module)
        experts = {part: torch.stack([source.read(part, expert) for expert in range(layout.num_experts)]) for part in layout.parts()}
        both = torch.cat([experts["gate"], experts["up"]], dim=1)
        writer.add_tensor(export.experts_name(names.layer(path), "gate", fused=True), both.numpy())
        writer.add_tensor(export.experts_name(names.layer(path), "down"), experts["down"].numpy())
        values = {name: value for name, value in values.items() if not name.startswith(f"{path}.")}
    for name, value in values.items():
        change = change_of(model.config, name)
        shape = tuple(value.shape) if change.shape is None else change.shape(model.config, tuple(value.shape))
        stored = names.stored(name)
        if stored is not None and stored.endswith("attn_kv_b.weight"):
            halves = value.reshape(model.config.num_attention_heads, -1, value.shape[-1]).split(
                [model.config.qk_nope_head_dim, model.config.v_head_dim], dim=1
            )
            writer.add_tensor(stored.replace("kv_b", "k_b"), halves[0].transpose(1, 2).contiguous().numpy())
            writer.add_tensor(stored.replace("kv_b", "v_b"), halves[1].contiguous().numpy())
        elif parts := names.parts(name, len(value)):
            for part, rows in zip(parts, value.split(list(parts.values())), strict=True):
                writer.add_tensor(part, rows.numpy())
        elif name not in model.all_tied_weights_keys:
            assert stored is not None, f"there is no tensor for {name}"
            writer.add_tensor(stored, (value if change.store is None else change.store(value)).reshape(shape).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rules = tmp_path / "rules.yaml"
    rules.write_text(FLOAT_RULES)
    loaded = optimize_and_load(tmp_path, rules, gguf=tmp_path / "model.gguf", dtype="float32", progress=False)
    ids = prompt(24)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "parameter", "tensor"),
    [
        ("gemma4_text", "model.layers.1.layer_scalar", "blk.1.layer_output_scale.weight"),
        ("gemma4_text", "model.layers.1.router.scale", "blk.1.ffn_gate_inp.scale"),
        ("gemma4_text", "model.layers.1.router.per_expert_scale", "blk.1.ffn_down_exps.scale"),
        ("mimo_v2_flash", "model.layers.1.self_attn.sinks", "blk.1.attn_sinks.weight"),
        ("afmoe", "model.layers.1.mlp.expert_bias", "blk.1.exp_probs_b.bias"),
        ("ernie4_5_moe", "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias", "blk.1.exp_probs_b.bias"),
        ("jamba", "model.layers.0.mamba.A_log", "blk.0.ssm_a"),
        ("kimi_linear", "model.layers.0.self_attn.forget_gate.dt_bias", "blk.0.ssm_dt.bias"),
        ("kimi_linear", "model.layers.0.self_attn.forget_gate.A_log", "blk.0.ssm_a"),
    ],
)
def test_names_are_those_of_llama_cpps_converter(model_type: str, parameter: str, tensor: str) -> None:
    config = build_config(case_of(model_type))
    assert export.Names(config).stored(parameter) == tensor


@pytest.mark.parametrize("types", ["gate=Q4_K,up=Q4_K,down=Q6_K,down@1=Q3_K,attention=F32,output=F32,embedding=F32", "Q5_K,down=IQ4_XS"])
def test_a_quantised_file_computes_what_its_values_do(types: str, tmp_path: Path) -> None:
    model = qwen3()
    meta = saved(model, tmp_path)
    path = tmp_path / "model.gguf"
    plan = exported(meta, types, path)
    assert path.stat().st_size - plan.nbytes < 20_000
    rules = tmp_path / "rules.yaml"
    rules.write_text(FLOAT_RULES)
    stored = optimize_and_load(tmp_path, rules, gguf=path, dtype="float32", progress=False)
    rules.write_text(FLOAT_RULES.replace("stored", "float32"))
    loaded = optimize_and_load(tmp_path, rules, gguf=path, dtype="float32", progress=False)
    values = stored_values(path)
    rounded = model.state_dict()
    names = export.Names(model.config)
    for key, value in rounded.items():
        if ".experts." not in key:
            value.copy_(values[names.stored(key) or key].reshape(value.shape))
            continue
        block = f"blk.{key.split('.')[2]}.ffn_"
        parts = ("gate", "up") if key.endswith("gate_up_proj") else ("down",)
        value.copy_(torch.cat([values[f"{block}{part}_exps.weight"] for part in parts], dim=1))
    ids = torch.arange(40)[None] * 3
    expected = logits(model, ids)
    torch.testing.assert_close(logits(loaded, ids), expected, rtol=1e-4, atol=1e-4)
    errors = (logits(stored, ids) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.median()) < 4e-2  # kernels of stored formats round activations to 8 bits


def test_importance_of_every_matrix_is_measured_and_used(tmp_path: Path) -> None:
    model = qwen3()
    meta = saved(model, tmp_path)
    assert meta.weights is not None
    loaded = optimize_and_load(tmp_path, "cpu", dtype="float32", progress=False)
    ids = torch.arange(64) % 160
    found = measure_importance(loaded, meta.weights, meta.skeleton, ids, 32, lambda tokens: None)
    plan = exported(meta, "Q4_0", tmp_path / "weighted.gguf", found)
    needed = {tensor.importance for tensor in plan.tensors if tensor.importance is not None}
    assert needed <= set(found) | {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}  # routers stay float32
    # What the layer's input is, its projections see.
    inputs: list[torch.Tensor] = []
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for part in ids.split(32):
        logits(model, part[None])
    expected = torch.cat(inputs).square().sum((0, 1))
    # int8 projections before it
    torch.testing.assert_close(found["model.layers.1.self_attn.o_proj"], expected, rtol=0.2, atol=float(expected.mean()) * 0.05)
    exported(meta, "Q4_0", tmp_path / "plain.gguf")
    assert (tmp_path / "weighted.gguf").read_bytes() != (tmp_path / "plain.gguf").read_bytes()


def test_of_a_model_with_an_image_tower_the_language_model_is_written_and_loaded(tmp_path: Path) -> None:
    model = build_model(case_of("qwen3_5_moe"))
    meta = saved(model, tmp_path)
    assert meta.weights is not None
    plan = plan_export(meta.weights, meta.skeleton, read_types("F32"))
    notices = write_export(plan, tmp_path / "model.gguf", tmp_path, "tiny", {}, lambda written: None)
    assert sum("such as model.visual." in notice for notice in notices) == 1
    loaded = optimize_and_load(tmp_path, "cpu-exact", gguf=tmp_path / "model.gguf", dtype="float32", progress=False)
    assert not any("visual" in name for name, _ in loaded.named_parameters())
    ids = prompt(24)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-4, atol=1e-4)


def test_importance_is_in_the_order_of_the_stored_columns(tmp_path: Path) -> None:
    """llama.cpp has the value heads of Qwen3.5's linear attention, 64 in 4 heads here, in another order."""
    path = "model.layers.0.linear_attn.out_proj"
    model = family("qwen3_5_moe_text")
    importance = torch.logspace(-4, 0, 64)
    plan = exported(saved(model, tmp_path), "Q4_0", tmp_path / "model.gguf", {path: importance})
    tensor = next(tensor for tensor in plan.tensors if tensor.name == "blk.0.ssm_out.weight")
    order = torch.cat([torch.arange(16) + 16 * head for head in (0, 2, 1, 3)])
    expected = GGUF_TYPES["Q4_0"].encode(model.get_parameter(f"{path}.weight").detach()[:, order], importance[order])
    stored = next(each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors if each.name == tensor.name)
    assert np.array_equal(stored.data, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"mlp_only_layers": [0]}, "some layers have no experts"),
        ({"use_sliding_window": True, "sliding_window": 16}, "sliding_window is 16 in the config, which llama.cpp ignores in qwen3_moe"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "does not support these layer_types in qwen3_moe models: linear_attention",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "the type dynamic cannot be described"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 0.7}},
            "attention_factor of the rotary embeddings is 0.7, and llama.cpp computes 1.139",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.7}},
            "attention_factor of the rotary embeddings is 1.0, and llama.cpp computes 1.139",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes: dict[str, Any], message: str) -> None:
    config = qwen3().config
    for name, value in changes.items():
        setattr(config, name, value)
    assert message in str(export.why_not_exportable(config))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}, "llama.cpp chooses groups of experts by"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}},
            "mscale and mscale_all_dim of the rotary",
        ),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is false"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "the type linear cannot be described in deepseek_v3"),
        ("glm4_moe_lite", {"attention_bias": True}, "llama.cpp has no such biases in glm4_moe_lite models"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "layers without experts after layers with experts"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "layers without experts after layers with experts (moe_layer_end_index)"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 1, 2]}, "layers choose 1 to 2 experts, and the same number in all layers in llama.cpp"),
        ("granitemoe", {"hidden_act": "gelu"}, "hidden_act is gelu in the config, and GGUF files of granitemoe models mean silu"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act is gelu in the config, and GGUF files of glm4_moe models mean silu"),
    ],
)
def test_what_llama_cpp_computes_otherwise_in_one_family_is_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    config = build_config(case_of(model_type))
    assert export.why_not_exportable(config) is None
    for name, value in changes.items():
        setattr(config, name, value)
    assert message in str(export.why_not_exportable(config))


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("qwen3_moe", "hidden_act", "gelu"),
        ("qwen3_moe", "attention_bias", True),
        ("qwen2_moe", "tie_word_embeddings", True),
        ("olmoe", "tie_word_embeddings", True),
        ("olmoe", "attention_bias", True),
        ("gpt_oss", "tie_word_embeddings", True),
        ("gpt_oss", "attention_bias", False),
        ("gpt_oss", "swiglu_alpha", 1.5),
        ("gpt_oss", "swiglu_limit", 2.0),
        ("deepseek_v2", "mlp_bias", True),
        ("granitemoehybrid", "mamba_conv_bias", False),
        ("qwen3_next", "attention_bias", True),
        ("qwen3_5_moe_text", "hidden_act", "gelu"),
        ("lfm2_moe", "routed_scaling_factor", 2.5),
        ("lfm2_moe", "use_expert_bias", False),
        ("lfm2_moe", "conv_bias", True),
        ("granitemoehybrid", "mamba_proj_bias", True),
        ("granitemoehybrid", "time_step_limit", (0.0, 0.1)),
        ("nemotron_h", "time_step_limit", [0.0, 0.1]),
        ("nemotron_h", "time_step_min", 0.05),
        ("dots1", "attention_bias", True),
        ("ernie4_5_moe", "moe_norm_min", 0.9),
        ("hunyuan_v1_moe", "attention_bias", True),
        ("ernie4_5_moe", "use_bias", True),
        ("ernie4_5_moe", "moe_layer_interval", 2),
        ("nemotron_h", "mlp_hidden_act", "silu"),
    ],
)
def test_fields_that_llama_cpp_has_one_value_of_are_refused(model_type: str, field: str, value: object) -> None:
    config = family(model_type).config
    assert export.why_not_exportable(config) is None
    setattr(config, field, value)
    assert f"{field} is {value} in the config, and GGUF files of" in str(export.why_not_exportable(config))


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    case = case_of("granitemoehybrid")
    meta = saved(build_model(dataclasses.replace(case, text={**case.text, "num_local_experts": 0})), tmp_path)
    with pytest.raises(UnsupportedModelError, match="GraniteMoeHybridForCausalLM has no experts"):
        exported(meta, "F32", tmp_path / "model.gguf")


def test_other_names_of_silu_are_written() -> None:
    config = family("granitemoe").config
    config.hidden_act = "swish"
    assert export.why_not_exportable(config) is None


def test_a_parameter_without_elements_is_refused(tmp_path: Path) -> None:
    case = case_of("solar_open")
    meta = saved(build_model(dataclasses.replace(case, text={**case.text, "n_shared_experts": 0})), tmp_path)
    assert meta.weights is not None
    with pytest.raises(UnsupportedModelError, match=r"shared_experts.* has no elements, as where a model has no shared experts"):
        plan_export(meta.weights, meta.skeleton, read_types("F32"))


def test_bounds_that_llama_cpp_rounds_are_reported(tmp_path: Path) -> None:
    meta = saved(family("gpt_oss"), tmp_path)
    assert meta.weights is not None
    plan = plan_export(meta.weights, meta.skeleton, read_types("F32"))
    notices = write_export(plan, tmp_path / "model.gguf", tmp_path, "tiny", {}, lambda written: None)
    assert any("rounds the bounds of YaRN's ramp" in notice for notice in notices)


def test_heads_of_keys_and_values_of_different_sizes_are_refused() -> None:
    config = family("qwen3_next").config
    config.linear_value_head_dim = 32
    assert "heads of keys and values have 16 and 32 dimensions" in str(export.why_not_exportable(config))


def test_an_order_of_layers_that_llama_cpp_has_not_is_refused() -> None:
    config = family("qwen3_next").config
    assert export.why_not_exportable(config) is None
    config.layer_types = ["full_attention", "linear_attention", "linear_attention"]
    assert "in qwen3_next models every n-th layer has full attention in llama.cpp" in str(export.why_not_exportable(config))


def test_other_families_are_refused() -> None:
    case = case_of("flex_olmo")
    assert "'flex_olmo' cannot be written to GGUF files; supported are qwen3_moe" in str(
        export.why_not_exportable(build_model(case).config)
    )
    reason = export.why_not_exportable(build_config(case_of("llama4_text")))
    assert reason is not None and "is loaded from GGUF files, and not written to them: its keys" in reason


NUMBERS = r"\p{N}{1,3}"
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHINESE = "[一-龥぀-ゟ゠-ヿ]+"  # noqa: RUF001
WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
    "\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


@pytest.mark.parametrize(
    ("model_type", "patterns", "name"),
    [
        ("deepseek_v3", (NUMBERS, CHINESE, WORDS), "deepseek-v3"),
        ("glm4_moe", (LETTERS,), "glm4"),
        ("qwen3_moe", (LETTERS,), "llama-bpe"),
        ("qwen3_5_moe_text", (MARKS,), "qwen35"),
        ("deepseek_v3", (CHINESE, NUMBERS, WORDS), "gpt-2"),  # another order
    ],
)
def test_how_text_is_split_has_llama_cpps_name(model_type: str, patterns: tuple[str, ...], name: str, tmp_path: Path) -> None:
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in patterns]
    body = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}
    body["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, {"type": "ByteLevel", "use_regex": False}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    writer = gguf.GGUFWriter(None, "deepseek2")
    notices = add_vocabulary(writer, tmp_path, 3, ROWS[model_type].splits)
    assert writer.kv_data[0]["tokenizer.ggml.pre"].value == name
    assert writer.kv_data[0]["tokenizer.ggml.add_bos_token"].value is False, "llama.cpp adds one to llama-bpe by default"
    assert ["has no name in llama.cpp" in notice for notice in notices] == [True] * (name == "gpt-2")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no tokenizer can be read \\(Expecting property name"):
        add_vocabulary(gguf.GGUFWriter(None, "deepseek2"), tmp_path, 1, {})


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@pytest.mark.parametrize(
    ("steps", "before", "prepends"),
    [
        ([{"type": "Prepend", "prepend": "▁"}, REPLACE], None, True),
        ([REPLACE], None, False),
        ([], {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}, True),
        ([], {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}, False),
    ],
)
def test_tokens_with_bytes_as_fallback_are_merged_in_the_order_of_the_tokenizer(
    steps: list[dict[str, Any]], before: dict[str, Any] | None, prepends: bool, tmp_path: Path
) -> None:
    merges = ["b c", "a bc", "a b", "▁ a", "▁ abc"]
    special = ["<unk>", "<s>", "</s>"]
    names = [*special, *(f"<0x{number:02X}>" for number in range(256)), *"▁abc", *(merge.replace(" ", "") for merge in merges)]
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    body = {
        "model": {"type": "BPE", "byte_fallback": True, "vocab": {name: number for number, name in enumerate(names)}, "merges": merges},
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": before,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "added_tokens": [{"id": number, "content": name, "special": True, **flags} for number, name in enumerate(special)],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    assert add_vocabulary(writer, tmp_path, len(names) + 1, {}) == []
    assert writer.kv_data[0]["tokenizer.ggml.add_space_prefix"].value is prepends
    kinds = writer.kv_data[0]["tokenizer.ggml.token_type"].value
    assert [gguf.TokenType(kinds[number]).name for number in (0, 3, 259, len(names))] == ["CONTROL", "BYTE", "NORMAL", "UNUSED"]
    scores = dict(zip(names, writer.kv_data[0]["tokenizer.ggml.scores"].value, strict=False))
    assert [scores[merge.replace(" ", "")] for merge in merges] == [0, -1, -2, -3, -4]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    theirs, ours = llama_cpp().Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False), Tokenizer.from_str(json.dumps(body))
    for text in ("ab", "abc", "a ab", "é cab"):
        assert theirs.tokenize(text.encode(), add_bos=False) == ours.encode(text).ids


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = saved(qwen3(), tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(OSError, match=r"No space left on device: .*model\.gguf"):
        exported(meta, "Q4_K", out / "model.gguf")
    assert not list(out.iterdir())


def test_a_weight_that_is_not_finite_leaves_no_file(tmp_path: Path) -> None:
    model = qwen3()
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 4] = torch.nan
    meta = saved(model, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down_exps\.weight\[2\]: a weight is NaN"):
        exported(meta, "Q4_K", out / "model.gguf")
    assert not list(out.iterdir())


def llama_cpp() -> Any:
    return pytest.importorskip("llama_cpp", reason="llama.cpp is used through the package llama-cpp-python, which is not installed")


def their_logits(path: Path, ids: list[int]) -> torch.Tensor:
    model = llama_cpp().Llama(str(path), n_ctx=256, logits_all=True, verbose=False, n_threads=1)
    model.eval(ids)
    return torch.from_numpy(np.array(model.scores[: len(ids)]))


GRIDS = ("gate=IQ3_XXS,up=IQ3_XXS,down=IQ3_S,attention=IQ2_S", "gate=IQ2_XXS,up=IQ2_XXS,down=IQ1_S,attention=IQ2_XS", "TQ2_0,down=TQ1_0")


@pytest.mark.parametrize(
    ("model_type", "types"),
    [*itertools.product(FAMILIES, ("F32", "Q4_K,down=Q6_K,output=Q5_K,attention=IQ4_NL")), *(("qwen3_moe", types) for types in GRIDS)],
)
def test_llama_cpp_computes_the_same(model_type: str, types: str, tmp_path: Path) -> None:
    llama_cpp()
    model = family(model_type) if types == "F32" or model_type != "qwen3_moe" else qwen3()
    exported(saved(model, tmp_path), types, tmp_path / "model.gguf")
    rules = tmp_path / "rules.yaml"
    rules.write_text(FLOAT_RULES)
    loaded = optimize_and_load(tmp_path, rules, gguf=tmp_path / "model.gguf", dtype="float32", progress=False)
    ids = torch.arange(1, 33)[None] * 2 % model.config.vocab_size
    ours, theirs = logits(loaded, ids)[0], their_logits(tmp_path / "model.gguf", ids[0].tolist())
    errors = (ours - theirs).norm(dim=-1) / ours.norm(dim=-1)
    # Activations are rounded to 16 or 8 bits, and where two experts score alike, another one may be chosen: not for most tokens.
    # llama.cpp rounds the bounds of YaRN's ramp, which gpt-oss does not (truncate: false).
    assert float(errors.median()) < (1e-1 if types != "F32" else 1e-2 if model_type == "gpt_oss" else 1e-3)
    if types == "F32":
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_a_file_of_llama_cpps_quantiser_loads_here(tmp_path: Path) -> None:
    api = llama_cpp()
    model = qwen3()
    exported(saved(model, tmp_path), "F32", tmp_path / "whole.gguf")
    params = api.llama_model_quantize_default_params()
    params.ftype, params.nthread = api.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    path = tmp_path / "model.gguf"
    assert api.llama_model_quantize(str(tmp_path / "whole.gguf").encode(), str(path).encode(), params) == 0
    rules = tmp_path / "rules.yaml"
    rules.write_text(FLOAT_RULES)
    loaded = optimize_and_load(tmp_path, rules, gguf=path, dtype="float32", progress=False)
    ids = torch.arange(1, 33)[None]
    ours, theirs = logits(loaded, ids)[0], their_logits(path, ids[0].tolist())
    assert float(((ours - theirs).norm(dim=-1) / ours.norm(dim=-1)).median()) < 1e-1  # linear layers here become int8


def test_types_are_those_of_the_reader() -> None:
    """What is written can be read."""
    from moegraft.injection.checkpoint.gguf.files import FORMAT_OF

    assert {BlockType[name] for name in ENCODED} <= set(FORMAT_OF)


def test_a_model_without_a_gguf_name_is_refused_before_it_is_read(tmp_path: Path) -> None:
    meta = saved(qwen3(), tmp_path)
    meta.skeleton.config.model_type = "another"
    assert meta.weights is not None
    with pytest.raises(UnsupportedModelError, match="model type 'another' cannot be written to GGUF files"):
        plan_export(meta.weights, meta.skeleton, read_types("Q4_K"))
