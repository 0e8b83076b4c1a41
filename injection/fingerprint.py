"""What tells one loaded model from another: keys and values of a conversation are of use to the model that made them alone."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

from moegraft.injection.graft import Injection

SAMPLED = 64  # elements of each parameter: enough to tell fine-tunes apart, and read in milliseconds
NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures")


def fingerprint(model: PreTrainedModel) -> str:
    """A SHA-256 over the config, a sample of every parameter, and what stands in for the rest with which weights."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLED)].to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    injection = getattr(model, "moegraft", None)
    if isinstance(injection, Injection):
        for swap in injection.plan.swaps:
            digest.update(f"{swap.module} {swap.operator} {swap.operator_type.identity(swap.options)}".encode())
    return digest.hexdigest()
