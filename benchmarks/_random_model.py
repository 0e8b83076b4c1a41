"""Models with random weights of any size: in host memory, or all but the experts on a GPU."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

DISTINCT_EXPERTS = 4  # the others repeat them byte by byte


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """In host memory, in the config's dtype; always the same weights."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        distinct = min(DISTINCT_EXPERTS, parameter.shape[0]) if parameter.dim() == 3 else parameter.shape[0]
        drawn = torch.empty(distinct, *parameter.shape[1:])
        drawn.normal_(std=0.02) if parameter.dim() > 1 else drawn.fill_(1.0)
        parameter.data.copy_(drawn.repeat(parameter.shape[0] // distinct, *[1] * (parameter.dim() - 1)))
    model.model.rotary_emb.__init__(config=model.config)  # its buffers were emptied with the rest
    return model.eval()


def move_all_but_experts(model: PreTrainedModel, device: torch.device | str) -> None:
    """Experts stay: operators take them from host memory."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dim() < 3:
            tensor.data = tensor.data.to(device)
