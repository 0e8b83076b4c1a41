"""What a token passes in a layer with experts: how many of them, and how many neurons of shared experts beside them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from moegraft.operators.errors import UnsupportedModelError

TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k", "num_selected_experts")
SHARED_DOWN = ("down_proj", "output_linear")  # what shared experts call the projection that reads their neurons


def experts_per_token(config: PretrainedConfig) -> int:
    """
    Raises:
        UnsupportedModelError: the config does not say.
    """
    text: Any = config.get_text_config()
    found = next((value for name in TOP_K_NAMES if isinstance(value := getattr(text, name, None), int)), None)
    if found is None:
        raise UnsupportedModelError(f"the config of {config.model_type} does not say how many experts a token has")
    return found


def shared_intermediate(path: str, model: nn.Module) -> int:
    """Neurons of the shared experts beside the experts module at `path`: in its block or, as Granite has them, in its layer."""
    block, _, _ = path.rpartition(".")
    layer, _, _ = block.rpartition(".")
    for owner in (block, layer):
        shared = [child for name, child in model.get_submodule(owner).named_children() if "shared" in name]
        found = sum(_down_width(child) for child in shared)
        if found:
            return found
    return 0


def _down_width(shared: nn.Module) -> int:
    named = [module for name, module in shared.named_modules() if name.rpartition(".")[2] in SHARED_DOWN]
    return sum(int(module.in_features) for module in named if hasattr(module, "in_features"))
