"""What a model's parameters are called in GGUF files: llama.cpp's architectures and the tables of the package `gguf`."""

from __future__ import annotations

import re

from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import PretrainedConfig

from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.weights import Part

# transformers' model types and llama.cpp's architectures. A family is here once its parameters are known to be stored as they are,
# but for what `GgufWeights` undoes.
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
}
BLOCK = re.compile(r"blk\.(\d+)\.")
LAYER = re.compile(r"\blayers\.(\d+)\.")
# Rotary frequencies, which transformers computes from the config.
COMPUTED = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")


def architecture_of(model_type: str) -> str:
    """llama.cpp's name for a family.

    Raises:
        UnsupportedModelError: GGUF files of this family cannot be loaded.
    """
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"model type '{model_type}' cannot be loaded from GGUF files; supported are {', '.join(sorted(ARCHITECTURES))}; "
            "load its safetensors checkpoint instead"
        )
    return ARCHITECTURES[model_type]


class Names:
    """The stored names of one model's parameters."""

    def __init__(self, config: PretrainedConfig) -> None:
        """
        Raises:
            UnsupportedModelError: GGUF files of this family cannot be loaded.
        """
        self.layers = int(config.num_hidden_layers)
        architecture = architecture_of(config.model_type)
        number = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
        self._table = get_tensor_name_map(number, self.layers)

    def stored(self, parameter: str) -> str | None:
        """The tensor that holds `parameter`, None where none can."""
        # Two names that llama.cpp's converter changes before it looks them up.
        if parameter.endswith(".e_score_correction_bias"):
            parameter = parameter.removesuffix("_bias") + ".bias"
        elif parameter.endswith(".sinks"):
            parameter += ".weight"
        name: str | None = self._table.get_name(parameter, try_suffixes=(".weight", ".bias"))
        return name

    def ignored(self, tensor: str) -> bool:
        """Whether nothing in the model needs `tensor`: what is computed, and the layers after the last, which predict further tokens."""
        block = BLOCK.match(tensor)
        return tensor.startswith(COMPUTED) or (block is not None and int(block[1]) >= self.layers)


def layer_of(module: str) -> int:
    found = LAYER.search(f"{module}.")
    assert found is not None, f"{module} is in no layer"
    return int(found[1])


def experts_name(layer: int, part: Part, *, fused: bool = False, expert: int | None = None) -> str:
    """The tensor of a part: of all experts, `fused` with its neighbour, or, in files of before 2024-04, of one expert."""
    matrix, _, bias = part.partition("_")
    suffix = "bias" if bias else "weight"
    if expert is not None:
        return f"blk.{layer}.ffn_{matrix}.{expert}.{suffix}"
    return f"blk.{layer}.ffn_{'gate_up' if fused else matrix}_exps.{suffix}"
