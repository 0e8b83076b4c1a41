"""The eager reference of the experts' forward pass: plain loops in PyTorch, for tests and benchmarks of every kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moegraft.cpu_backend import GateSpec


def reference_activation(name: str, x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the activation of `x` that the kernels know by `name`; `alpha` scales silu's sigmoid argument."""
    match name:
        case "silu":
            return x * torch.sigmoid(alpha * x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "identity":
            return x
        case "sigmoid":
            return torch.sigmoid(x)
        case "tanh":
            return torch.tanh(x)
    raise ValueError(f"unknown activation {name!r}")


def reference_gate(spec: GateSpec, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """Return `min(act(min(gate, gate_limit)), act_limit) * (clamp(up, +-up_limit) + up_offset)`; `act(up)` without a gate."""
    acted = _acted(spec, gate, up)
    return acted if gate is None else acted * (up.clamp(-spec.up_limit, spec.up_limit) + spec.up_offset)


def reference_experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    gate_spec: GateSpec,
    *,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    threshold: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, computed in `dtype`.

    Args:
        hidden_states: (T, H).
        top_k_index: (T, K) integer ids; -1 and E are padded slots.
        top_k_weights: (T, K).
        gate, up: (E, I, H); `gate` is None for ungated experts.
        down: (E, H, I).
        gate_bias, up_bias: (E, I), down_bias: (E, H), all or none.
        threshold: neurons with `|act(gate)|` (ungated: `|act(up)|`) below it count as zero.

    Returns:
        (T, H) of `dtype`.
    """
    num_experts = up.shape[0]
    tokens = hidden_states.to(dtype)
    out = torch.zeros_like(tokens)
    for expert in range(num_experts):
        token, slot = torch.where(top_k_index == expert)
        if token.numel() == 0:
            continue
        x = tokens[token]
        gate_rows = None if gate is None else F.linear(x, gate[expert].to(dtype), _of(gate_bias, expert, dtype))
        up_rows = F.linear(x, up[expert].to(dtype), _of(up_bias, expert, dtype))
        neurons = reference_gate(gate_spec, gate_rows, up_rows)
        if threshold > 0.0:
            below = _acted(gate_spec, gate_rows, up_rows).abs() < threshold  # a NaN is not, so that it reaches the output
            neurons = neurons.where(~below, 0.0)
        share = top_k_weights[token, slot].to(dtype)[:, None]
        out.index_add_(0, token, share * F.linear(neurons, down[expert].to(dtype), _of(down_bias, expert, dtype)))
    return out


def _of(bias: torch.Tensor | None, expert: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias[expert].to(dtype)


def _acted(spec: GateSpec, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    if gate is None:
        return reference_activation(spec.activation, up, spec.alpha)
    return reference_activation(spec.activation, gate.clamp(max=spec.gate_limit), spec.alpha).clamp(max=spec.act_limit)
