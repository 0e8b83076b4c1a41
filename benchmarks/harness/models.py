"""Models and experts with random weights of any size, in host memory, on a GPU, or experts in the packed form alone; and rules for them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts
from moegraft.injection import optimize_and_load
from moegraft.operators.decode.mtp_layers import add_mtp_layers, mtp_layers
from moegraft.operators.weight_formats import FORMATS

DISTINCT_EXPERTS = 4  # the other experts are copies at other addresses
VOCABULARY = 8192
ROPE = {"rope_type": "default", "rope_theta": 150000.0}
# Of the models' own configs, without the numbers of layers and of tokens.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True},
    },
    "gpt-oss-20b": {
        **{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "rope_parameters": ROPE},
        **{"max_position_embeddings": 4096},
    },
    "deepseek-v2-lite": {
        **{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408},
        **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 4096},
    },
    "mixtral-8x7b": {
        **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8},
        **{"num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8},
    },
    # Of these two, four layers, three of them recurrent, and 64 experts.
    "qwen3-next": {
        **{"model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
        **{"num_experts": 64, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True},
        **{"linear_num_value_heads": 32, "shared_expert_intermediate_size": 512},
    },
    "granite-4-h": {
        **{"model_type": "granitemoehybrid", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4},
        **{"num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512, "shared_intermediate_size": 1024},
        **{"layer_types": ["mamba", "mamba", "mamba", "attention"], "mamba_d_state": 128, "mamba_n_groups": 1},
        **{"mamba_n_heads": 48, "mamba_d_head": 64},
    },
}
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")


def config_of(shape: str, layers: int, scale: int = 1, **more: Any) -> PreTrainedConfig:
    """Return the config of a model of `SHAPES` with few layers, a small vocabulary and bfloat16; `scale` divides its widths."""
    sizes = dict(SHAPES[shape])
    if scale > 1:
        sizes |= {name: max(sizes[name] // scale // 128, 1) * 128 for name in WIDTHS if name in sizes}
    common = {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "dtype": torch.bfloat16}
    config: PreTrainedConfig = AutoConfig.for_model(sizes.pop("model_type"), **common | sizes | more)
    return config


def cpu_rules(weights: str) -> str:
    """Return the rules `cpu` with experts and linear layers in a weight type."""
    return f"extends: cpu\nvars: {{weights: {weights}, linear: {weights}}}\n"


@contextmanager
def rule_file(rules: str) -> Iterator[str]:
    """Yield the path of a file with the rules of a text."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(rules)
        file.flush()
        yield file.name


def injected(model: str | Path | PreTrainedModel, rules: str, **options: Any) -> PreTrainedModel:
    """Load a model with the rules of a text."""
    with rule_file(rules) as path:
        loaded: PreTrainedModel = optimize_and_load(model, path, progress=False, **options)
    return loaded


def random_model(
    config: PreTrainedConfig, device: torch.device | str = "cpu", *, experts: bool = True, mtp: bool = False
) -> PreTrainedModel:
    """Return a model in the config's dtype, with random weights from a fixed seed.

    Args:
        experts: without, they have shapes and no memory, for operators that are given `RandomExperts`.
        mtp: whether the model gets the MTP layers that the config states.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        if mtp:
            add_mtp_layers(model)
            mtp_layers(model).to(model.dtype)
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not experts and any(parameter.dim() == 3 for parameter in own.values()):
            for name, parameter in own.items():
                empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
            continue
        module.to_empty(device=device, recurse=False)
        for parameter in module.parameters(recurse=False):
            distinct = min(DISTINCT_EXPERTS, parameter.shape[0]) if parameter.dim() == 3 else parameter.shape[0]
            drawn = torch.empty(distinct, *parameter.shape[1:], device=device)
            drawn.normal_(std=0.02) if parameter.dim() > 1 else drawn.fill_(1.0)
            parameter.data.unflatten(0, (-1, distinct)).copy_(drawn)
    rotary = getattr(model.model, "rotary_emb", None)  # hybrid models may have none
    if rotary is not None:
        rotary.__init__(config=model.config)  # recreates its buffers, which `to_empty` cleared
        rotary.to(device)
    return model.eval()


def move_all_but_experts(model: PreTrainedModel, device: torch.device | str) -> None:
    """Move everything except experts, which operators take from host memory."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dim() < 3:
            tensor.data = tensor.data.to(device)


@lru_cache(maxsize=1)
def distinct_experts(shape: ExpertsShape, gate: GateSpec, weight_type: str, *, sparse: bool = False) -> PackedExperts:
    """Return the few experts that are drawn and packed, with the sizes of `shape`."""
    packed = PackedExperts(ExpertsShape(DISTINCT_EXPERTS, shape.hidden, shape.intermediate), gate, weight_type, sparse=sparse)
    random, generator, wide = np.random.default_rng(0), torch.Generator().manual_seed(0), (shape.intermediate, shape.hidden)
    for expert in range(DISTINCT_EXPERTS):
        for part, size in {"gate": wide, "up": wide, "down": wide[::-1]}.items():
            if FORMATS[weight_type].stored:
                packed.pack_blocks(expert, part, FORMATS[weight_type].random_blocks(size, random))
            else:
                packed.pack(expert, part, (torch.randn(size, generator=generator) * size[1] ** -0.5).numpy())
    return packed


class RandomExperts(PackedExperts):
    """All experts of a layer in memory of their own, with the bytes of `distinct_experts`: gigabytes in the time that a copy takes."""

    def __init__(self, shape: ExpertsShape, gate: GateSpec, weight_type: str) -> None:
        self._held = PackedExperts(shape, gate, weight_type)
        few, complete = distinct_experts(shape, gate, weight_type), self._held.buffer
        whole = torch.from_numpy(self._held.buffer).view(-1, DISTINCT_EXPERTS, few.expert_bytes)
        whole.copy_(torch.from_numpy(few.buffer).view(DISTINCT_EXPERTS, -1))
        complete.flags.writeable = False  # counts as completely packed
        super().__init__(shape, gate, weight_type, complete)

    @property
    def buffer(self) -> NDArray[np.uint8]:
        return self._held.buffer  # writable: page-locked as the experts of a checkpoint are
