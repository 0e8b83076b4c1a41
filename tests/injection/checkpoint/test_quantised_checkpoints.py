"""FP8 and MXFP4 safetensors checkpoints: what is loaded equals the stock model with the weights that they stand for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialised
from support.families import prompt
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import CheckpointError

BLOCK = 32  # as DeepSeek's 128, with rows that are no whole blocks
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101, "num_experts_per_tok": 2, "hidden_size": 64}
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def deepseek() -> PreTrainedModel:
    torch.manual_seed(0)
    small = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1}
    sizes = {"n_routed_experts": 4, "moe_intermediate_size": 40, "intermediate_size": 72, "first_k_dense_replace": 1, "topk_group": 1}
    config = DeepseekV3Config(**SIZES, **small, **sizes, num_key_value_heads=4, initializer_range=0.2, dtype="float32")
    return AutoModelForCausalLM.from_config(config).eval()


def gpt_oss() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"num_local_experts": 4, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
    return AutoModelForCausalLM.from_config(GptOssConfig(**SIZES, **sizes, initializer_range=0.2, dtype="float32")).eval()


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each weight."""
    rows, columns = (torch.arange(size) // BLOCK for size in shape)
    return scales[rows][:, columns]


def to_fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """What an FP8 checkpoint holds, and what it stands for in float32."""
    stored, meant = dict(tensors), dict(tensors)
    for key, weight in tensors.items():
        if not key.endswith("_proj.weight"):
            continue
        generator = torch.Generator().manual_seed(len(key))
        scales = 0.001 + 0.01 * torch.rand(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK), generator=generator)
        wide = spread(scales, weight.shape)
        stored[key] = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{key}_scale_inv"] = scales
        meant[key] = stored[key].float() * wide
    return stored, meant


def to_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    stored, meant = dict(tensors), dict(tensors)
    for number, (key, weight) in enumerate(tensors.items()):
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        generator = torch.Generator().manual_seed(number)
        experts, inputs, rows = weight.shape
        del stored[key]
        blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, (experts, rows, inputs // 32), dtype=torch.uint8, generator=generator)
        stored[f"{key}_blocks"], stored[f"{key}_scales"] = blocks, scales
        meant[key] = convert_moe_packed_tensors(blocks, scales).float()  # transformers' own
        assert meant[key].shape == weight.shape
    return stored, meant


Form = tuple[Callable[[], PreTrainedModel], Callable[[Tensors], tuple[Tensors, Tensors]], dict[str, object]]
FP8: Form = deepseek, to_fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
MXFP4: Form = gpt_oss, to_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
FORMS = pytest.mark.parametrize("form", [FP8, MXFP4], ids=["fp8", "mxfp4"])


def save(form: Form, folder: Path) -> PreTrainedModel:
    """Writes the quantised checkpoint; returns the stock model with the weights that it stands for."""
    build, quantise, settings = form
    build().save_pretrained(folder)
    stored, meant = quantise(load_file(folder / WEIGHTS))
    save_file(meant, folder / WEIGHTS, {"format": "pt"})
    stock: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return stock


def relative_error(found: PreTrainedModel, stock: PreTrainedModel) -> float:
    with torch.no_grad():
        expected = stock(prompt(12)).logits
        return float((found(prompt(12)).logits - expected).abs().max() / expected.abs().max())


@FORMS
def test_equals_the_stock_model_with_dequantised_weights(form: Form, tmp_path: Path) -> None:
    stock = save(form, tmp_path)
    found = optimize_and_load(tmp_path, "cpu-exact", dtype="float32", progress=False)
    experts = found.get_submodule("model.layers.1.mlp.experts")
    # Kernels have FP8 with blocks of 128 by 128 alone.
    assert experts.weight_type == ("mxfp4" if form is MXFP4 else "bfloat16")
    assert relative_error(found, stock) < 5e-2
    if form is MXFP4:
        for part, whole in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj")):
            values = stock.get_parameter(f"model.layers.1.mlp.experts.{whole}")[2].T
            expected = values if part == "down" else values[int(part == "up") :: 2]
            assert torch.equal(torch.from_numpy(experts.on_cpu.packed.unpack(2, part)), expected), part
    assert getattr(found.config, "quantization_config", None) is None, "what was loaded is not quantised"


@FORMS
def test_experts_that_no_rule_takes(form: Form, tmp_path: Path) -> None:
    stock = save(form, tmp_path)
    rules = tmp_path / "rules.yaml"
    rules.write_text("version: 1\nrules:\n- match: {name: '^lm_head$'}\n  replace: {class: quantized_linear}\n")
    found = optimize_and_load(tmp_path, rules, dtype="float32", progress=False)
    for name, parameter in stock.named_parameters():
        if name != "lm_head.weight":
            assert torch.equal(found.get_parameter(name), parameter), name


def edit(folder: Path, change: Callable[[Tensors], object]) -> str:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        optimize_and_load(folder, "cpu-exact", dtype="float32", progress=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "key", "scales"),
    [
        (FP8, "model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"),
        (MXFP4, "model.layers.1.mlp.experts.down_proj_blocks", "model.layers.1.mlp.experts.down_proj_scales"),
    ],
    ids=["fp8", "mxfp4"],
)
def test_codes_without_scales(form: Form, key: str, scales: str, tmp_path: Path) -> None:
    save(form, tmp_path)
    message = edit(tmp_path, lambda tensors: tensors.pop(scales))
    assert f"{WEIGHTS}: {key}: " in message and "without" in message and scales in message


@pytest.mark.parametrize(
    ("form", "scales"),
    [(FP8, "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"), (MXFP4, "model.layers.1.mlp.experts.down_proj_scales")],
    ids=["fp8", "mxfp4"],
)
def test_scales_of_another_shape(form: Form, scales: str, tmp_path: Path) -> None:
    save(form, tmp_path)
    message = edit(tmp_path, lambda tensors: tensors.update({scales: tensors[scales][:1].clone()}))
    assert f"{WEIGHTS}: {scales}: shape (1, " in message


UP = "model.layers.1.mlp.experts.2.up_proj.weight"
SQUARE = "model.layers.0.self_attn.o_proj.weight"  # (64, 64)
SCALE = "_scale_inv"


def reconfigure(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**config["quantization_config"], **settings}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("block", [[0, 0], [128], ["a", 1], 128], ids=str)
def test_block_sizes_that_are_none(block: object, tmp_path: Path) -> None:
    save(FP8, tmp_path)
    reconfigure(tmp_path, weight_block_size=block)
    with pytest.raises(CheckpointError, match=r"config\.json: weight_block_size must be two positive integers, such as"):
        optimize_and_load(tmp_path, "cpu-exact", dtype="float32", progress=False)


@pytest.mark.parametrize(
    ("key", "block", "scales", "expected"),
    [
        (SQUARE, [BLOCK, BLOCK], torch.ones(64), "(2, 2) for blocks of (32, 32)"),  # of each row or of each column?
        (SQUARE, [BLOCK, BLOCK], torch.ones(7), "(2, 2) for blocks of (32, 32)"),
        (SQUARE, None, torch.ones(64), "(1, 1) or (64, 1)"),
        (SQUARE, None, torch.ones(1, 64), "(1, 1) or (64, 1)"),
        (UP, [BLOCK, BLOCK], torch.ones(2, 2, dtype=torch.int32), "no floating-point one"),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else str(value)[-16:],
)
def test_scales_that_could_mean_something_else(key: str, block: object, scales: torch.Tensor, expected: str, tmp_path: Path) -> None:
    save(FP8, tmp_path)
    reconfigure(tmp_path, weight_block_size=block)

    def change(tensors: Tensors) -> None:
        if block is None:  # all others have one scale
            tensors.update({name: torch.tensor(0.5) for name in tensors if name.endswith(SCALE)})
        tensors[f"{key}{SCALE}"] = scales

    message = edit(tmp_path, change)
    assert f"{WEIGHTS}: {key}{SCALE}: " in message and expected in message


@pytest.mark.parametrize("form", ["one number", "one for each row"])
def test_one_scale_for_a_matrix_or_for_each_row(form: str, tmp_path: Path) -> None:
    stock = save(FP8, tmp_path)
    reconfigure(tmp_path, weight_block_size=None)
    tensors, meant = load_file(tmp_path / WEIGHTS), stock.state_dict()
    for name in [name for name in tensors if name.endswith(SCALE)]:
        weight = tensors[name.removesuffix(SCALE)]
        rows = torch.rand(len(weight), 1, generator=torch.Generator().manual_seed(len(name))) / 100
        scale = {"one number": rows[0, 0].clone(), "one for each row": rows}[form]
        tensors[name] = scale
        tensors[name.removesuffix(SCALE)] = weight
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    rules = tmp_path / "rules.yaml"
    rules.write_text("version: 1\nrules:\n- match: {name: '^lm_head$'}\n  replace: {class: quantized_linear}\n")
    found = optimize_and_load(tmp_path, rules, dtype="float32", progress=False).get_parameter(SQUARE)
    expected = tensors[SQUARE].float() * tensors[f"{SQUARE}{SCALE}"]
    assert torch.equal(found, expected) and not torch.equal(found, meant[SQUARE])


def shard(folder: Path, apart: str) -> None:
    """Move the tensors whose names end with `apart` to a file of their own."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {"model-00001-of-00002.safetensors": False, "model-00002-of-00002.safetensors": True}
    where = {}
    for file, moved in files.items():
        own = {key: tensor for key, tensor in tensors.items() if key.endswith(apart) == moved}
        save_file(own, folder / file, {"format": "pt"})
        where |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize(
    ("form", "apart", "change"),
    [(FP8, SCALE, "scales"), (MXFP4, "_scales", "scales"), (FP8, SCALE, "block size")],
    ids=["fp8 scales", "mxfp4 scales", "fp8 block size"],
)
def test_a_cache_of_experts_depends_on_all_that_is_read(form: Form, apart: str, change: str, tmp_path: Path) -> None:
    """Scales in another shard than the codes, edited in place with the old time restored, and the settings."""
    model, rules = tmp_path / "model", tmp_path / "rules.yaml"
    save(form, model)
    shard(model, apart)

    def logits(cache: str) -> torch.Tensor:
        rules.write_text(f"- match: {{kind: experts}}\n  replace: {{class: hybrid_experts{cache}}}\n")
        with torch.no_grad():
            found: torch.Tensor = optimize_and_load(model, rules, dtype="float32", progress=False)(prompt(12)).logits
        return found

    cached = f", kwargs: {{cache_dir: '{tmp_path / 'cache'}'}}"
    before = logits(cached)
    if change == "scales":
        path = model / "model-00002-of-00002.safetensors"
        status, tensors = path.stat(), load_file(path)
        for key, tensor in tensors.items():
            tensors[key] = tensor + 1 if form is MXFP4 else tensor * 2
        with path.open("r+b") as file:
            file.write(serialised(tensors, {"format": "pt"}))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    else:
        reconfigure(model, weight_block_size=[BLOCK + 1, BLOCK + 1])  # as many blocks
    after = logits(cached)
    assert torch.equal(after, logits("")) and not torch.equal(after, before)
