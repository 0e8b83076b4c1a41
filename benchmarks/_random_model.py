"""Models with random weights of any size: in host memory, or all but the experts on a GPU."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

DISTINCT_EXPERTS = 4  # the other experts are copies


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model in host memory in the config's dtype, with random weights from a fixed seed."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        distinct = min(DISTINCT_EXPERTS, parameter.shape[0]) if parameter.dim() == 3 else parameter.shape[0]
        drawn = torch.empty(distinct, *parameter.shape[1:])
        drawn.normal_(std=0.02) if parameter.dim() > 1 else drawn.fill_(1.0)
        parameter.data.copy_(drawn.repeat(parameter.shape[0] // distinct, *[1] * (parameter.dim() - 1)))
    model.model.rotary_emb.__init__(config=model.config)  # recreates its buffers, which `to_empty` cleared
    return model.eval()


def move_all_but_experts(model: PreTrainedModel, device: torch.device | str) -> None:
    """Move everything except experts, which operators take from host memory."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dim() < 3:
            tensor.data = tensor.data.to(device)
