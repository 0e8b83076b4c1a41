"""Tiny models for the tests of sparsity, and the stock model with neurons left out by plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen2MoeConfig

from moegraft.operators.layout import read_layout
from moegraft.operators.reference import reference_experts
from moegraft.operators.structure import calls_all_rows
from support.byte_tokenizer import byte_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "eos_token_id": 0,
    "max_position_embeddings": 512,
    "dtype": torch.float32,
}
# Layer 0 is dense; shared experts are half as wide as a token's two routed ones of 24.
SHARED = Qwen2MoeConfig(
    **SIZES, moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=5, intermediate_size=48, mlp_only_layers=[0]
)
# Biases, a clamped gate, weights that are stored transposed and interleaved.
OSS = GptOssConfig(**SIZES, num_local_experts=4, intermediate_size=40, sliding_window=32)


def save_model(folder: Path, config: Any = SHARED, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    byte_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def stock(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if path.endswith(".experts")}


@contextmanager
def left_out(model: nn.Module, thresholds: Mapping[str, float], seen: dict[str, list[torch.Tensor]] | None = None) -> Iterator[None]:
    """Replace the stock model's experts by the eager reference with a threshold per layer in the body.

    `seen` receives every `|act(gate)|` by path, from which inactive shares are computed.
    """
    before = {path: module.forward for path, module in experts_of(model).items()}
    for path, module in experts_of(model).items():
        module.forward = _sparse(module, path, thresholds[path], seen)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for path, forward in before.items():
            model.get_submodule(path).forward = forward  # type: ignore[method-assign]


def _sparse(module: nn.Module, path: str, threshold: float, seen: dict[str, list[torch.Tensor]] | None) -> Callable[..., torch.Tensor]:
    layout = read_layout(module)
    parts: dict[str, torch.Tensor] = {}
    for part in layout.parts():
        stored = module.get_parameter(layout.parameter(part)).detach()
        parts[part] = torch.stack([layout.cut(part, stored[expert]) for expert in range(layout.num_experts)])

    def of_all_rows(rows: torch.Tensor) -> torch.Tensor:
        """Rows of all tokens for the first expert, then for the second one, ...; zero where it is not chosen."""
        number = torch.arange(layout.num_experts).repeat_interleave(len(rows) // layout.num_experts)
        return forward(rows, number.where(rows.any(-1), -1)[:, None], torch.ones(len(rows), 1))

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if seen is not None:
            bias = parts.get("gate_bias")
            for token, slot in (top_k_index >= 0).nonzero().tolist():
                expert = int(top_k_index[token, slot])
                rows = parts["gate"][expert] @ hidden_states[token] + (0 if bias is None else bias[expert])
                spec = layout.gate
                rows = rows.clamp(max=spec.gate_limit)
                seen.setdefault(path, []).append((rows * torch.sigmoid(spec.alpha * rows)).abs())
        biases = {name: parts.get(name) for name in ("gate_bias", "up_bias", "down_bias")}
        weights = (parts.get("gate"), parts["up"], parts["down"])
        found = reference_experts(hidden_states, top_k_index, top_k_weights, *weights, layout.gate, **biases, threshold=threshold)
        return found.to(hidden_states.dtype)

    return of_all_rows if calls_all_rows(module) else forward
