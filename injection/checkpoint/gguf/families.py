"""The families of models in GGUF files, one row each: llama.cpp's name, and what it stores or computes otherwise than transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from moegraft.operators.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """How llama.cpp stores and computes the models of one of transformers' types.

    Attributes:
        architecture: its name there.
        normalises: whether it divides the weights of a token's experts by their sum; None where the file states it.
        pairs_rows: whether it rotates neighbouring rows of each head of queries and keys, and files have the rows in that order.
        is_latent: whether attention is to latents, with one key and value for all heads.
        gating: the function of the router's scores, where files describe the routing as DeepSeek's: after layers without experts.
        alternates: whether every other layer has a sliding window, from the first one on.
        ignores_windows: whether it computes full attention whatever the config sets.
        needs_equal_heads: whether it needs as many key-value heads as attention heads.
        expert_size: the config's name of the intermediate size of experts; files have none where the config has none.
        splits: its names of ways to split text, where they differ from those of other families.
    """

    architecture: str
    normalises: bool | None = None
    pairs_rows: bool = False
    is_latent: bool = False
    gating: Literal["softmax", "sigmoid"] | None = None
    alternates: bool = False
    ignores_windows: bool = False
    needs_equal_heads: bool = False
    expert_size: str = "moe_intermediate_size"
    splits: Mapping[str, str] = field(default_factory=dict)


_GLM = {"llama-bpe": "glm4"}  # the same, without a token at the beginning of a text
# By transformers' model type. Families whose parameters llama.cpp's converter changes in another way must not be listed.
FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": Family("qwen3moe", normalises=True),
    "qwen2_moe": Family("qwen2moe", normalises=False),
    "olmoe": Family("olmoe", normalises=False, needs_equal_heads=True),
    "mixtral": Family("llama", pairs_rows=True, ignores_windows=True),
    "gpt_oss": Family("gpt-oss", alternates=True, expert_size="intermediate_size"),
    "deepseek_v2": Family("deepseek2", is_latent=True, gating="softmax"),
    "deepseek_v3": Family("deepseek2", is_latent=True, gating="sigmoid"),
    "glm4_moe_lite": Family("deepseek2", is_latent=True, gating="sigmoid", splits=_GLM),
    "glm4_moe": Family("glm4moe", gating="sigmoid", splits=_GLM),
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


def stored_rows(config: Any, parameter: str, rows: int) -> NDArray[np.int64] | None:
    """Return the stored row of each row of a parameter; None where the order is the same.

    Where llama.cpp's rotary embedding rotates the neighbouring rows (0, 1), (2, 3), ... of a head, transformers' rotates r and r + d/2.
    """
    heads = {".q_proj.weight": "num_attention_heads", ".k_proj.weight": "num_key_value_heads"}
    count = next((name for suffix, name in heads.items() if parameter.endswith(suffix)), None)
    if count is None or not family_of(config).pairs_rows:
        return None
    of_head = rows // getattr(config, count)
    return np.arange(rows).reshape(-1, of_head // 2, 2).swapaxes(1, 2).reshape(-1)
