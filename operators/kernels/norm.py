"""Root-mean-square norms (Zhang and Sennrich 2019, arXiv:1910.07467) of rows in one launch.

Shapes: R rows, N columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import on

MAX_COLUMNS = 16384  # a program holds a whole row
# Estimates, no GPU has measured them.
PROGRAM_ELEMENTS = 1024  # at least: several rows where they are short, as those of queries and keys are
THREAD_ELEMENTS = 8  # 16 bytes of 16-bit rows
MAX_WARPS = 16


@triton.jit(do_not_specialize=["rows"])  # else a captured step of another number of rows might compile
def _norm_kernel(
    x_ptr,  # (R, N) floating
    weight_ptr,  # (N,) floating
    out_ptr,  # (R, N) floating
    rows,
    epsilon,
    offset,
    ROUNDS_FIRST: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (R / ROWS, rounded up)."""
    columns = tl.arange(0, COLUMNS)
    own = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = own[:, None] * N + columns[None, :]
    inside = (own < rows)[:, None] & (columns < N)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32) + offset
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) * (1.0 / N) + epsilon)[:, None]
    if ROUNDS_FIRST:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + places, (y * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds_first: bool) -> torch.Tensor:
    """Return `x / sqrt(mean(x * x) + epsilon) * (offset + weight)` of every row, on the current stream; accumulates in float32.

    Args:
        x: (..., N) floating, contiguous; the result has its shape and dtype.
        weight: (N,) floating, contiguous.
        rounds_first: round to that dtype before the product with the weight as well, not after it alone.
    """
    columns = weight.numel()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // columns
    padded = triton.next_power_of_2(columns)
    block = max(1, PROGRAM_ELEMENTS // padded)
    if rows:
        with on(x.device):
            # Not fused, so that each step rounds as PyTorch's own operations do.
            _norm_kernel[triton.cdiv(rows, block),](
                x, weight, out, rows, epsilon, offset, ROUNDS_FIRST=rounds_first, N=columns, ROWS=block, COLUMNS=padded,
                num_warps=min(MAX_WARPS, block * padded // (32 * THREAD_ELEMENTS)), enable_fp_fusion=False,
            )  # fmt: skip
    return out
