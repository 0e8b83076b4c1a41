"""Recurrent layers in float64, token by token: the reference of the kernels.

Shapes: B sequences, T tokens, H heads of values, G heads of keys (or groups), K key columns, V value columns, C channels.
"""

from __future__ import annotations

import torch
from torch.nn import functional

Pair = tuple[torch.Tensor, torch.Tensor]


def delta_rule(
    query: torch.Tensor,  # (B, T, G, K)
    key: torch.Tensor,  # (B, T, G, K)
    value: torch.Tensor,  # (B, T, H, V)
    decay: torch.Tensor,  # (B, T, H) or (B, T, H, K), logarithms
    beta: torch.Tensor,  # (B, T, H)
    before: torch.Tensor | None,  # (B, H, K, V)
    *,
    scale: float,
    epsilon: float,
) -> Pair:
    """Return the outputs (B, T, H, V) and the state after the last token."""
    query, key, value, decay, beta = (tensor.double() for tensor in (query, key, value, decay, beta))
    if epsilon >= 0:
        query, key = (tensor / (tensor.square().sum(-1, keepdim=True) + epsilon).sqrt() for tensor in (query, key))
    query, key = (tensor.repeat_interleave(value.shape[2] // key.shape[2], 2) for tensor in (query * scale, key))
    decay = decay if decay.dim() == 4 else decay[..., None]
    batch, tokens, heads, columns = value.shape
    state = torch.zeros(batch, heads, key.shape[3], columns, dtype=torch.float64) if before is None else before.double()
    outs = []
    for t in range(tokens):
        state = state * decay[:, t].exp()[..., None]
        delta = (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], delta)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outs, 1), state


def short_conv(
    x: torch.Tensor,  # (B, C, T)
    weight: torch.Tensor,  # (C, taps)
    bias: torch.Tensor | None,  # (C,)
    before: torch.Tensor | None,  # (B, C, columns)
    *,
    silu: bool,
) -> Pair:
    """Return the outputs (B, C, T) and the columns that the next call needs."""
    x, weight = x.double(), weight.double()
    past = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if before is None else before.double()
    joined = torch.cat([x.new_zeros(*x.shape[:2], weight.shape[1]), past, x], -1)
    out = functional.conv1d(joined, weight[:, None], None if bias is None else bias.double(), groups=x.shape[1])[..., -x.shape[2] :]
    return functional.silu(out) if silu else out, joined[..., joined.shape[2] - past.shape[2] :]


def selective_scan(
    x: torch.Tensor,  # (B, T, H, C)
    dt: torch.Tensor,  # (B, T, H)
    a: torch.Tensor,  # (H,) or (H, N)
    b: torch.Tensor,  # (B, T, G, N)
    c: torch.Tensor,  # (B, T, G, N)
    d: torch.Tensor | None,  # (H,)
    dt_bias: torch.Tensor | None,  # (H,)
    z: torch.Tensor | None,  # (B, T, H, C)
    before: torch.Tensor | None,  # (B, H, C, N)
    *,
    softplus: bool,
    limits: tuple[float, float] = (float("-inf"), float("inf")),
) -> Pair:
    """Return the outputs (B, T, H, C) and the state after the last token."""
    x, dt, a, b, c = (tensor.double() for tensor in (x, dt, a, b, c))
    batch, tokens, heads, channels = x.shape
    dt = dt if dt_bias is None else dt + dt_bias.double()
    dt = (functional.softplus(dt) if softplus else dt).clamp(*limits)
    b, c = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (b, c))
    a = a if a.dim() == 2 else a[:, None]
    state = x.new_zeros(batch, heads, channels, b.shape[3]) if before is None else before.double()
    outs = []
    for t in range(tokens):
        factor = (dt[:, t, :, None] * a).exp()[:, :, None]
        state = state * factor + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outs.append(torch.einsum("bhcn,bhn->bhc", state, c[:, t]))
    out = torch.stack(outs, 1)
    out = out if d is None else out + d.double()[:, None] * x
    return out if z is None else out * functional.silu(z.double()), state
