"""Small operations in one launch: root-mean-square norms (Zhang and Sennrich 2019, arXiv:1910.07467), and a router's choice of experts.

Shapes: R rows, N columns; T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import LAUNCH, on

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


MAX_EXPERTS = 4096  # a program holds the scores of whole tokens
PROGRAM_SCORES = 1024  # at least: an estimate, no GPU has measured it
SMALLEST_SUM = tl.constexpr(1e-20)  # added to the sum of weights before the division, as in the models' own code
LEFT_OUT = tl.constexpr(-(1 << 63))  # less than the key of any score


@triton.jit(do_not_specialize=["tokens"])  # else a captured step of another number of tokens might compile
def _choice_kernel(
    logits_ptr,  # (T, E) floating
    bias_ptr,  # (E,) floating, added to the scores for the choice alone; or None
    weights_ptr,  # (T, K) floating
    index_ptr,  # (T, K) int64
    tokens,
    scale,
    SCORE: tl.constexpr,
    NORMALISE: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (T / ROWS, rounded up)."""
    experts = tl.arange(0, EXPERTS)[None, :]
    slots = tl.arange(0, SLOTS)[None, :]
    own = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    logits = tl.load(logits_ptr + own * E + experts, mask=(own < tokens) & (experts < E), other=0.0).to(tl.float32)
    logits = tl.where(experts < E, logits, float("-inf"))
    if SCORE == "softmax":
        exponentials = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = exponentials / tl.sum(exponentials, 1)[:, None]
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)
    # Keys have the order of the scores, with NaN as the largest, and among equals that of the experts from the last to the first.
    bits = tl.where(choice == choice, choice.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where(experts < E, (ordered << 32) + (EXPERTS - 1 - experts), LEFT_OUT)
    index = tl.zeros((ROWS, SLOTS), tl.int64)
    for slot in range(K):
        best = tl.max(keys, 1)[:, None]
        keys = tl.where(keys == best, LEFT_OUT, keys)
        index = tl.where(slots == slot, EXPERTS - 1 - (best & (EXPERTS - 1)), index)
    weights = tl.gather(scores, index.to(tl.int32), 1)
    if SCORE == "chosen_softmax":
        weights = tl.where(slots < K, weights, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, 1)[:, None])
        weights /= tl.sum(weights, 1)[:, None]
    elif NORMALISE:
        weights /= tl.sum(tl.where(slots < K, weights, 0.0), 1)[:, None] + SMALLEST_SUM
    chosen = own * K + slots
    inside = (own < tokens) & (slots < K)
    tl.store(weights_ptr + chosen, (weights * scale).to(weights_ptr.dtype.element_ty), mask=inside)
    tl.store(index_ptr + chosen, index, mask=inside)


def choose_experts(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid", "chosen_softmax"] = "softmax",
    normalise: bool = False,
    scale: float = 1.0,
    choice_bias: torch.Tensor | None = None,
    weights_type: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (T, K) and ids (T, K) int64 of the experts with the largest scores, in their order, on the current stream.

    The arguments have the meaning of RouterSpec's; of equal scores the first expert is chosen.

    Args:
        logits: (T, E) floating, contiguous.
        choice_bias: (E,) floating, contiguous.
    """
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=weights_type, device=logits.device)
    index = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    padded = triton.next_power_of_2(experts)
    rows = max(1, PROGRAM_SCORES // padded)
    if tokens:
        with on(logits.device):
            _choice_kernel[triton.cdiv(tokens, rows),](
                logits, choice_bias, weights, index, tokens, scale, SCORE=score, NORMALISE=normalise, E=experts, EXPERTS=padded, K=top_k,
                SLOTS=triton.next_power_of_2(top_k), ROWS=rows, num_warps=4, **LAUNCH,
            )  # fmt: skip
    return weights, index
