"""The last step of every path that computes pairs apart: each token's sum over its experts, in their order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import LAUNCH

COLUMNS = 512


@triton.jit
def _combine_kernel(
    rows_ptr,  # (T * K, H) float32; rows of absent pairs are never read
    ids_ptr,  # (T, K) int32, -1: absent
    weights_ptr,  # (T, K) floating
    out_ptr,  # (T, H) floating
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (T, H / COLUMNS)."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        present = tl.load(ids_ptr + pair) >= 0
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        width = tl.where(present, H, 0)
        row = tl.load(rows_ptr + pair.to(tl.int64) * H + columns, mask=columns < width, other=0.0)
        total += tl.where(present, weight, 0.0) * row
    tl.store(out_ptr + token.to(tl.int64) * H + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)


def combine(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """`out (T, H) = sum over k of weights[t, k] * rows[t * K + k]` over the pairs whose id is not -1; deterministic."""
    tokens, hidden = out.shape
    _combine_kernel[tokens, triton.cdiv(hidden, COLUMNS)](
        rows, ids, weights, out, H=hidden, TOP_K=ids.shape[1], COLUMNS=COLUMNS, num_warps=4, **LAUNCH
    )
