"""The families of models in GGUF files, one row each: llama.cpp's name, and what it stores or computes otherwise than transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig

from moegraft.operators.errors import UnsupportedModelError

Shape = tuple[int, ...]
Values = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Change:
    """What llama.cpp's converter does to a parameter; the functions' first argument is the config.

    Attributes:
        parts: the tensors of a layer that hold the parameter's rows, by name, and how many each holds; None if one tensor holds all.
            Files of older converters may hold all in one tensor, in the parameter's order.
        kinds: the heads, and how many rows each kind has, where rows are head by head and stored kind by kind.
        rows: the stored row of each row of the parameter, counted through all parts; None if the order is the same.
        columns: two sizes (m, n), where columns of (m, n, rest) are stored as (n, m, rest); None if the order is the same.
        shape: the tensor's shape, from the parameter's.
        store, load: the stored values from the parameter's, and these from the stored; None if they are the same.
    """

    parts: Callable[[Any, int], Mapping[str, int]] | None = None
    kinds: Callable[[Any], tuple[int, tuple[int, ...]]] | None = None
    rows: Callable[[Any, int], NDArray[np.int64]] | None = None
    columns: Callable[[Any], tuple[int, int]] | None = None
    shape: Callable[[Any, Shape], Shape] | None = None
    store: Values | None = None
    load: Values | None = None


UNCHANGED = Change()
# Convolutions have one input channel, and a gate for all of a token's features has one row.
SQUEEZED = Change(shape=lambda config, shape: tuple(size for size in shape if size != 1))
ONE_ADDED = Change(store=lambda values: values + 1, load=lambda values: values - 1)
COLUMN = Change(shape=lambda config, shape: (*shape, 1))
DECAY_RATES = Change(store=lambda values: -values.exp(), load=lambda values: values.neg().log())


DECAY_RATES_COLUMN = replace(DECAY_RATES, shape=COLUMN.shape)
# The norm of Mamba-2's output is one of each group.
GROUPED = Change(shape=lambda config, shape: (_mamba_groups(config), shape[0] // _mamba_groups(config)))
CONVOLUTIONS = Change(parts=lambda config, count: {f"ssm_conv1d_{letter}": count // 3 for letter in "qkv"})
GATE_AND_UP = Change(parts=lambda config, count: {"ffn_gate_shexp": count // 2, "ffn_up_shexp": count // 2})


def _mamba_groups(config: Any) -> int:
    return int(config.mamba_n_groups if hasattr(config, "mamba_n_groups") else config.n_groups)


def _neighbours(heads: str) -> Change:
    """Return the order in which neighbouring rows (0, 1), (2, 3), ... of a head are rotated; transformers rotates r and r + d/2."""

    def rows(config: Any, count: int) -> NDArray[np.int64]:
        of_head = count // getattr(config, heads)
        return np.arange(count).reshape(-1, of_head // 2, 2).swapaxes(1, 2).reshape(-1)

    return Change(rows=rows)


NEIGHBOURS = {
    f".{matrix}_proj.{part}": _neighbours(heads)
    for matrix, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for part in ("weight", "bias")
}


def _delta_rule_sizes(config: Any) -> tuple[int, int]:
    """Return how many rows the keys and the values of gated delta networks have."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, config.linear_num_value_heads * config.linear_value_head_dim


def _query_key_value_and_gate(config: Any, count: int) -> Mapping[str, int]:
    keys, values = _delta_rule_sizes(config)
    return {"attn_qkv": 2 * keys + values, "attn_gate": values}


def _kinds(config: Any) -> tuple[int, tuple[int, ...]]:
    keys, values = _delta_rule_sizes(config)
    return config.linear_num_key_heads, (keys, keys, values, values)


def _kinds_apart(config: Any, count: int) -> NDArray[np.int64]:
    heads, sizes = _kinds(config)
    kinds = np.split(np.arange(count), np.cumsum(sizes)[:-1])
    return np.concatenate([kind.reshape(heads, -1) for kind in kinds], axis=1).reshape(-1)


# One head's queries, keys, values and gates follow each other in transformers; all heads' queries do here, then all keys, ...
APART = Change(parts=_query_key_value_and_gate, kinds=_kinds, rows=_kinds_apart)


def _value_heads(config: Any) -> tuple[int, int]:
    """Return the number of key heads, and the value heads of each, which follow each other in transformers."""
    return config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads


def _first_of_every_key(kept: Callable[[Any], int] = lambda config: 0) -> Change:
    """Return the order in which the first value head of every key head comes first, then all second ones, ...; `kept` rows before stay."""

    def rows(config: Any, count: int) -> NDArray[np.int64]:
        before, (keys, of_key) = kept(config), _value_heads(config)
        values = np.arange(before, count).reshape(of_key, keys, -1).swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(before), values])

    return Change(rows=rows)


VALUES = _first_of_every_key()
QUERIES_KEYS_VALUES = _first_of_every_key(lambda config: 2 * _delta_rule_sizes(config)[0])


@dataclass(frozen=True, slots=True)
class Family:
    """How llama.cpp stores and computes the models of one of transformers' types.

    Attributes:
        architecture: its name there.
        normalises: whether it divides the weights of a token's experts by their sum; None where the file states it.
        is_latent: whether attention is to latents, with one key and value for all heads.
        gating: the function of the router's scores, where files describe the routing as DeepSeek's: after layers without experts.
        alternates: whether every other layer has a sliding window, from the first one on.
        ignores_windows: whether it computes full attention whatever the config sets.
        needs_equal_heads: whether it needs as many key-value heads as attention heads.
        layers: the beginning of the names of layers' parameters in its tables.
        apart: whether experts have layers of their own, beside those with attention or a state.
        expert_size: the config's name of the intermediate size of experts; files have none where the config has none.
        splits: its names of ways to split text, where they differ from those of other families.
        recurrent: the type of the layers without attention that it supports beside those with full attention.
        has_interval: whether every n-th layer has full attention; it supports any order otherwise.
        mtp: whether its converter writes MTP layers, after the body's.
        unwritten: why no files are written; None where they are.
        rotates_sections: whether files state the sections of rotary embeddings that a position's time, height and width rotate.
        requires: fields of the config that it computes all models with one value of, beside `hidden_act`, which is silu.
        changes: what its converter does to parameters, by the end of their name; the first that fits counts.
    """

    architecture: str
    normalises: bool | None = None
    is_latent: bool = False
    gating: Literal["softmax", "sigmoid"] | None = None
    alternates: bool = False
    ignores_windows: bool = False
    needs_equal_heads: bool = False
    layers: str = "model.layers."
    apart: bool = False
    expert_size: str = "moe_intermediate_size"
    splits: Mapping[str, str] = field(default_factory=dict)
    recurrent: str | None = None
    has_interval: bool = False
    mtp: bool = False
    rotates_sections: bool = False
    unwritten: str | None = None
    requires: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)


_NO_OUTPUT_BIAS = {"attention_bias": False}  # llama.cpp loads those of queries, keys and values alone
_NO_WINDOWS = "its keys for sliding windows in some layers are not known here"
_UNTIED = {"tie_word_embeddings": False}  # it loads no files without a tensor of the head
_GLM = {"llama-bpe": "glm4"}  # the same, without a token at the beginning of a text
_QWEN3_NEXT = {
    "linear_attn.norm.weight": UNCHANGED,
    "norm.weight": ONE_ADDED,
    ".A_log": DECAY_RATES,
    ".conv1d.weight": SQUEEZED,
    ".in_proj_qkvz.weight": APART,
    ".shared_expert_gate.weight": SQUEEZED,
}
_QWEN3_5 = {
    **_QWEN3_NEXT,
    ".A_log": replace(VALUES, store=DECAY_RATES.store, load=DECAY_RATES.load),
    ".dt_bias": VALUES,
    ".conv1d.weight": replace(QUERIES_KEYS_VALUES, shape=SQUEEZED.shape),
    ".in_proj_qkv.weight": QUERIES_KEYS_VALUES,
    **{f".in_proj_{name}.weight": VALUES for name in "zba"},
    ".linear_attn.out_proj.weight": Change(columns=_value_heads),
}
_MAMBA = {
    ".A_log": DECAY_RATES_COLUMN,
    ".D": COLUMN,
    ".conv1d.weight": SQUEEZED,
}
_GRANITE_HYBRID = {
    **NEIGHBOURS,
    **_MAMBA,
    ".mamba.norm.weight": GROUPED,
    ".shared_mlp.input_linear.weight": GATE_AND_UP,
}
# By transformers' model type. Families whose parameters llama.cpp's converter changes in another way must not be listed.
FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": Family("qwen3moe", normalises=True, ignores_windows=True, requires={"attention_bias": False}),
    "qwen2_moe": Family("qwen2moe", normalises=False, requires=_UNTIED, changes={".shared_expert_gate.weight": SQUEEZED}),
    "olmoe": Family("olmoe", normalises=False, needs_equal_heads=True, requires={**_UNTIED, "attention_bias": False}),
    "mixtral": Family("llama", ignores_windows=True, changes=NEIGHBOURS),
    "gpt_oss": Family(
        "gpt-oss",
        alternates=True,
        expert_size="intermediate_size",
        requires={**_UNTIED, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
    "deepseek_v2": Family("deepseek2", is_latent=True, gating="softmax", requires={"mlp_bias": False}),
    "deepseek_v3": Family("deepseek2", is_latent=True, gating="sigmoid"),
    "glm4_moe_lite": Family("deepseek2", is_latent=True, gating="sigmoid", splits=_GLM),
    "glm4_moe": Family("glm4moe", gating="sigmoid", splits=_GLM, mtp=True),
    "solar_open": Family("glm4moe", gating="sigmoid"),
    "dots1": Family("dots1", gating="sigmoid", needs_equal_heads=True, requires={**_UNTIED, **_NO_OUTPUT_BIAS}),
    "ernie4_5_moe": Family("ernie4_5-moe", gating="softmax", requires={"use_bias": False, "moe_layer_interval": 1, "moe_norm_min": 1e-12}),
    "minimax_m2": Family("minimax-m2", gating="sigmoid", expert_size="intermediate_size", requires=_UNTIED),
    "hunyuan_v1_moe": Family("hunyuan-moe", expert_size="intermediate_size", requires=_NO_OUTPUT_BIAS),
    "granitemoeshared": Family("granitemoe", changes={**NEIGHBOURS, ".shared_mlp.input_linear.weight": GATE_AND_UP}),
    "granitemoe": Family("granitemoe", changes=NEIGHBOURS),
    "qwen3_next": Family(
        "qwen3next",
        normalises=True,
        recurrent="linear_attention",
        has_interval=True,
        requires={"attention_bias": False},
        changes=_QWEN3_NEXT,
    ),
    "qwen3_5_moe_text": Family(
        "qwen35moe",
        recurrent="linear_attention",
        has_interval=True,
        mtp=True,
        rotates_sections=True,
        requires={"attention_bias": False},
        changes=_QWEN3_5,
    ),
    "lfm2_moe": Family(
        "lfm2moe",
        normalises=True,
        gating="sigmoid",
        recurrent="conv",
        requires={"conv_bias": False, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        changes={".conv.conv.weight": SQUEEZED},
    ),
    "granitemoehybrid": Family(
        "granitehybrid",
        recurrent="linear_attention",
        requires={"mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_expand": 2, "time_step_limit": (0.0, math.inf)},
        changes=_GRANITE_HYBRID,
    ),
    "gemma4_text": Family("gemma4", unwritten=_NO_WINDOWS),
    "exaone_moe": Family("exaone-moe", unwritten=_NO_WINDOWS),
    "afmoe": Family("afmoe", unwritten=_NO_WINDOWS),
    "mimo_v2_flash": Family("mimo2", unwritten=_NO_WINDOWS),
    "mistral4": Family("mistral4", unwritten="its keys for queries that grow with their position are not known here"),
    "glm_moe_dsa": Family("glm-dsa", unwritten="its keys for the indexer of sparse attention are not known here"),
    "kimi_linear": Family(
        "kimi-linear",
        unwritten="its keys for Kimi delta attention are not known here",
        changes={".A_log": DECAY_RATES, ".conv1d.weight": CONVOLUTIONS},
    ),
    "jamba": Family("jamba", changes=_MAMBA, unwritten="its keys for Mamba-1 are not known here"),
    "phimoe": Family("phimoe", unwritten="its experts' weights are those of SparseMixer, and llama.cpp computes a softmax"),
    # Neighbouring columns are rotated in transformers as well.
    "llama4_text": Family("llama4", unwritten="its keys for chunks of attention and for layers without positions are not known here"),
    # Without rotary embeddings, rows of queries and keys that a converter reorders alike change no product.
    "nemotron_h": Family(
        "nemotron_h_moe",
        gating="sigmoid",
        layers="backbone.layers.",
        apart=True,
        recurrent="linear_attention",
        requires={
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), False),
            "use_conv_bias": True,
            "time_step_limit": (0.0, math.inf),
            "time_step_min": 0.001,
        },
        changes={**_MAMBA, ".mixer.norm.weight": GROUPED},
    ),
}


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a config.

    Raises:
        UnsupportedModelError: GGUF files of this family cannot be loaded.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type '{config.model_type}' cannot be loaded from GGUF files; supported are {', '.join(sorted(FAMILIES))}; "
            "load its safetensors checkpoint instead"
        )
    return FAMILIES[config.model_type]


def change_of(config: PretrainedConfig, parameter: str) -> Change:
    """Return what llama.cpp's converter does to a parameter."""
    return next((change for end, change in family_of(config).changes.items() if parameter.endswith(end)), UNCHANGED)
