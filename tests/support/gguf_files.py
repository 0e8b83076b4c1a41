"""Tiny models as GGUF files in the format of llama.cpp's converter, with independent copies of its names and orders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from support.k_quants import KINDS, gguf, quantise

BlockType = gguf.GGMLQuantizationType
Tensors = dict[str, NDArray[np.float32]]
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "llama4_text": "llama4",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.embedding_norm": "token_embd_norm"}
WHOLE |= {"model.embeddings": "token_embd", "model.norm_f": "output_norm"}
BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.in_proj": "ssm_in",
    "mamba.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
}
BLOCK |= {name.replace("self_attn.", "mixer."): stored for name, stored in BLOCK.items() if re.fullmatch(r"self_attn\.[qkvo]_proj", name)}
BLOCK |= {name.replace("mamba.", "mixer."): stored for name, stored in BLOCK.items() if name.startswith("mamba.")}
BLOCK |= {
    "norm": "attn_norm",
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
SHARED = re.compile(r"(?:mlp|mixer|feed_forward)\.shared_experts?\.(gate|up|down)_proj")


def _block_name(name: str, model_type: str) -> str:
    shared = SHARED.fullmatch(name)
    if shared:
        return f"ffn_{shared[1]}_shexp"
    if name == "post_attention_layernorm" and model_type in ("gpt_oss", "glm4_moe", "qwen3_next", "qwen3_5_moe_text"):
        return "post_attention_norm"
    return BLOCK[name]


def _as_llama_turns(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Interleave rows r and r + d/2 of each head."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _experts(block: str, name: str, values: NDArray[np.float32], model_type: str) -> Tensors:
    """Split the fused parameter `mlp.experts.<name>` into the tensors of the files."""
    bias = name.endswith("_bias")
    suffix = "bias" if bias else "weight"
    rows = values if bias or model_type not in ("gpt_oss", "llama4_text") else values.swapaxes(1, 2)
    if name.startswith("down"):
        return {f"{block}ffn_down_exps.{suffix}": rows}
    if model_type == "nemotron_h":
        return {f"{block}ffn_up_exps.{suffix}": rows}
    if model_type == "gpt_oss":
        gate, up = rows[:, 0::2], rows[:, 1::2]
    else:
        gate, up = np.split(rows, 2, axis=1)
    return {f"{block}ffn_gate_exps.{suffix}": gate, f"{block}ffn_up_exps.{suffix}": up}


def _queries_to_gates(block: str, values: NDArray[np.float32], config: PretrainedConfig) -> Tensors:
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    by_head = values.reshape(heads, -1, values.shape[-1])
    kinds = np.split(by_head, np.cumsum([key, key, value]), axis=1)
    query, key_rows, value_rows, gate = (kind.reshape(-1, values.shape[-1]) for kind in kinds)
    return {f"{block}attn_qkv.weight": np.concatenate([query, key_rows, value_rows]), f"{block}attn_gate.weight": gate}


def _tiled(values: NDArray[np.float32], config: PretrainedConfig, axis: int = 0, first: int = 0) -> NDArray[np.float32]:
    """Put the value heads of each key head apart, from `first` on: all first ones, then all second ones, ..."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    kept, moved = np.split(values, [first], axis=axis)
    by_head = np.split(moved, heads, axis=axis)
    order = [key * (heads // keys) + place for place in range(heads // keys) for key in range(keys)]
    return np.concatenate([kept, *(by_head[head] for head in order)], axis=axis)


def _in_tiles(name: str, values: NDArray[np.float32], config: PretrainedConfig) -> NDArray[np.float32]:
    """Return a parameter of Qwen3.5's linear attention with its value heads in tiles."""
    part = name.removeprefix("linear_attn.")
    if part in ("A_log", "dt_bias", "in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
        return _tiled(values, config)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return _tiled(values, config, first=2 * config.linear_num_key_heads * config.linear_key_head_dim)
    return _tiled(values, config, axis=1) if part == "out_proj.weight" else values


def _recurrent(block: str, name: str, values: NDArray[np.float32], config: PretrainedConfig) -> Tensors | None:
    """Return what is changed in layers with states; None for all else."""
    mamba = name.startswith(("mamba.", "mixer."))
    match name.partition(".")[2]:
        case "A_log":
            return {f"{block}ssm_a": -np.exp(values[:, None] if mamba else values)}
        case "D":
            return {f"{block}ssm_d": values[:, None]}
        case "dt_bias":
            return {f"{block}ssm_dt.bias": values}
        case "norm.weight" if mamba:
            return {f"{block}ssm_norm.weight": values.reshape(config.n_groups if name.startswith("mixer.") else config.mamba_n_groups, -1)}
        case "in_proj_qkvz.weight":
            return _queries_to_gates(block, values, config)
        case "input_linear.weight":
            gate, up = np.split(values, 2)
            return {f"{block}ffn_gate_shexp.weight": gate, f"{block}ffn_up_shexp.weight": up}
        case "expert_bias":
            return {f"{block}exp_probs_b.bias": values}
    return None


def _converted(key: str, values: NDArray[np.float32], model: PreTrainedModel) -> Tensors:
    config = model.config
    if (
        config.model_type in ("qwen3_next", "qwen3_5_moe_text")
        and key.endswith("norm.weight")
        and not key.endswith("linear_attn.norm.weight")
    ):
        values = values + 1
    further = re.fullmatch(r"mtp\.layers\.(\d+)\.(\w+)\.(.+)", key)
    if further is not None:
        number = config.num_hidden_layers + int(further[1])
        if further[2] != "mtp_block":
            return {f"blk.{number}.nextn.{'shared_head_norm' if further[2] == 'post_norm' else further[2]}.{further[3]}": values}
        key = f"model.layers.{number}.{further[3]}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key)
    if layer is None:
        module, _, suffix = key.rpartition(".")
        return {f"{WHOLE[module]}.{suffix}": values}
    block, name = f"blk.{layer[1]}.", layer[2]
    if config.model_type == "qwen3_5_moe_text" and name.startswith("linear_attn."):
        values = _in_tiles(name, values, config)
    experts = re.fullmatch(r"(?:mlp|mixer|feed_forward|block_sparse_moe)\.experts\.(.+)", name)
    if experts is not None:
        return _experts(block, experts[1], values, config.model_type)
    if name.endswith(".gate.e_score_correction_bias"):
        return {f"{block}exp_probs_b.bias": values}
    if name == "self_attn.sinks":
        return {f"{block}attn_sinks.weight": values}
    changed = _recurrent(block, name, values, config)
    if changed is not None:
        return changed
    module, _, suffix = name.rpartition(".")
    if config.model_type in ("mixtral", "granitemoehybrid") and module in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
        values = _as_llama_turns(values, heads)
    if module == "mlp.shared_expert_gate":
        values = values[0]
    if values.ndim == 3:
        values = values[:, 0]
    return {f"{block}{_block_name(module, config.model_type)}.{suffix}": values}


def tensors_of(model: PreTrainedModel) -> Tensors:
    """Return every tensor of the model's GGUF file, in float32 and in PyTorch's order of dimensions."""
    state = model.state_dict()
    tied = model.all_tied_weights_keys
    found: Tensors = {}
    for key, tensor in state.items():
        if key not in tied and (not key.startswith("mtp.") or key.startswith("mtp.layers.")):
            found |= _converted(key, np.ascontiguousarray(tensor.float().numpy()), model)
    return found


def split_key_value(tensors: Tensors, model: PreTrainedModel) -> Tensors:
    """Split `attn_kv_b` into two tensors, as in files since 2025-04."""
    config = model.config
    found: Tensors = {}
    for name, values in tensors.items():
        if not name.endswith("attn_kv_b.weight"):
            found[name] = values
            continue
        heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
        key, value = np.split(heads, [config.qk_nope_head_dim], axis=1)
        found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(key.swapaxes(1, 2))
        found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(value)
    return found


def experts_apart(tensors: Tensors) -> Tensors:
    """Split experts into one tensor each, as in files before 2024-04."""
    found: Tensors = {}
    for name, values in tensors.items():
        if "_exps." not in name:
            found[name] = values
        else:
            found |= {name.replace("_exps.", f".{number}."): expert for number, expert in enumerate(values)}
    return found


def gate_and_up_together(tensors: Tensors) -> Tensors:
    """Join gate and up rows in one tensor."""
    found = {name: values for name, values in tensors.items() if "ffn_gate_exps" not in name and "ffn_up_exps" not in name}
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        both = [tensors[name], tensors[name.replace("gate", "up")]]
        found[name.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
    return found


def queries_to_gates_together(tensors: Tensors, model: PreTrainedModel) -> Tensors:
    """Join the projections of linear attention in one tensor in transformers' order, as in the first files of Qwen3-Next."""
    found = {name: values for name, values in tensors.items() if "attn_qkv" not in name and "attn_gate" not in name}
    for name, tensor in model.state_dict().items():
        if name.endswith("in_proj_qkvz.weight"):
            found[f"blk.{name.split('.')[2]}.ssm_in.weight"] = tensor.numpy()
    return found


def quantised(values: NDArray[np.float32], kind: BlockType) -> NDArray[np.generic]:
    if kind.name.lower() in KINDS:
        return quantise(np.ascontiguousarray(values), kind.name.lower())
    return gguf.quantize(np.ascontiguousarray(values), kind)


def type_of(name: str, values: NDArray[np.float32], kinds: Mapping[str, BlockType]) -> BlockType:
    """Return the type of the first of `kinds` whose name is in the tensor's; float32 if rows are not whole blocks."""
    kind = next((kind for part, kind in kinds.items() if part in name and values.ndim > 1), BlockType.F32)
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return kind if values.shape[-1] % block == 0 else BlockType.F32


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kinds: Mapping[str, BlockType] | None = None,
    *,
    tensors: Tensors | None = None,
    architecture: str | None = None,
    tensors_a_file: int = 0,
) -> None:
    """Write `tensors`, by default all of `model`, to `path`, or to several files of `tensors_a_file` tensors each."""
    name = architecture or ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(str(path), name, split_max_tensors=tensors_a_file)
    further = len(model.get_submodule("mtp.layers")) if hasattr(model, "mtp") else 0
    writer.add_block_count(model.config.num_hidden_layers + further)
    if further:
        writer.add_nextn_predict_layers(further)
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(model.config.vocab_size)])
    for tensor, values in (tensors_of(model) if tensors is None else tensors).items():
        kind = type_of(tensor, values, kinds or {})
        packed = quantised(values, kind)
        writer.add_tensor(tensor, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
