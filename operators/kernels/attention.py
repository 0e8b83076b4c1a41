"""Attention of a decode step over a cache of fixed size, in three launches: queries, keys and values are placed, read in parts, and merged.

Keys are read in parts by programs of their own, once for all query heads that share them, and the parts' results are merged by their
softmax sums (Flash-Decoding: Dao et al. 2023; the softmax: Milakov and Gimelshein 2018, arXiv:1805.02867).

Shapes: B sequences of one new token, Q query heads, KV heads of keys and values, D columns of queries and keys, DV of values, S places of
the cache, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import LAUNCH, interpreted, on
from moegraft.operators.kernels.units import dot

MAX_COLUMNS = 256  # of a head: a program holds all of them for a block of keys
# Estimates, no GPU has measured them.
BLOCK = 64  # keys of a step of a program, fewer for heads of more than 128 columns, as small GPUs have 100 KiB of shared memory
PROGRAMS = 256  # about two for each multiprocessor of a large GPU, where the cache has keys for so many
THREAD_SUMS = 32  # parts of sums that a thread merges
SMALLEST_SIDE = 16  # of a matrix product


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A root-mean-square norm of each head's queries or keys, in the terms of `small.norm`."""

    weight: torch.Tensor  # (D,) floating, contiguous
    epsilon: float
    offset: float
    rounds_first: bool


@triton.jit
def _normalised(row_ptr, weight_ptr, columns, inside, factor, offset, ROUNDS_FIRST: tl.constexpr):
    """Return these columns of a head in float32, with the values that the model's type has."""
    x = tl.load(row_ptr + columns, mask=inside, other=0.0)
    y = x.to(tl.float32)
    if weight_ptr is not None:
        y *= factor
        if ROUNDS_FIRST:
            y = y.to(x.dtype).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
        y = (y * weight).to(x.dtype).to(tl.float32)
    return y


@triton.jit
def _rotated(
    row_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    epsilon,
    offset,
    ROUNDS_FIRST: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr,
    ANGLES: tl.constexpr,
):
    """Return the columns of a head, normalised and rotated, in float32; each operation rounds as PyTorch's own do."""
    columns = tl.arange(0, COLUMNS)
    factor = 1.0
    if weight_ptr is not None:
        x = tl.load(row_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 0) * (1.0 / D) + epsilon)
    y = _normalised(row_ptr, weight_ptr, columns, columns < D, factor, offset, ROUNDS_FIRST)
    if ROTARY:
        half: tl.constexpr = ROTARY // 2
        turned = columns < ROTARY
        partner = tl.where(columns < half, columns + half, columns - half)
        other = _normalised(row_ptr, weight_ptr, partner, turned, factor, offset, ROUNDS_FIRST)
        kind: tl.constexpr = row_ptr.dtype.element_ty
        cos = tl.load(cos_ptr + columns % ANGLES, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + columns % ANGLES, mask=turned, other=0.0).to(tl.float32)
        other = tl.where(columns < half, -other, other)
        y = (y * cos).to(kind).to(tl.float32) + (other * sin).to(kind).to(tl.float32)
    return y


@triton.jit(
    do_not_specialize=["places", "query_stride", "key_stride", "value_stride"]
)  # else a captured step over another cache might compile
def _place_kernel(
    query_ptr,  # (B, Q, WIDTH) floating, contiguous but for sequences, of which the first D are the query
    key_ptr,  # (B, KV, D), as the query
    value_ptr,  # (B, KV, DV), as the query
    cos_ptr,  # (B, ANGLES) with its stride of sequences, 0 for one that all share; None where ROTARY is 0
    sin_ptr,
    query_weight_ptr,  # (D,); None without a norm
    key_weight_ptr,
    length_ptr,  # int64, the number of tokens in the cache
    keys_ptr,  # (B, KV, S, D), contiguous
    values_ptr,  # (B, KV, S, DV)
    out_ptr,  # (B, Q, D)
    places,
    query_stride,  # of sequences
    key_stride,
    value_stride,
    angles_stride,
    epsilon,
    offset,
    ROUNDS_FIRST: tl.constexpr,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr,
    ANGLES: tl.constexpr,
):
    """Grid (B, Q + 2 * KV)."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(length_ptr)
    columns = tl.arange(0, COLUMNS)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if ROTARY:
        cos_ptr += sequence * angles_stride
        sin_ptr += sequence * angles_stride
    if head < Q:
        query = _rotated(
            query_ptr + sequence * query_stride + head * WIDTH, query_weight_ptr,
            cos_ptr, sin_ptr, epsilon, offset, ROUNDS_FIRST, D, COLUMNS, ROTARY, ANGLES,
        )  # fmt: skip
        # Without room for the token nothing is written, and the answer is no number.
        query = tl.where(length < places, query, float("nan"))
        tl.store(out_ptr + (sequence * Q + head) * D + columns, query.to(kind), mask=columns < D)
    elif head < Q + KV:
        row = sequence * KV + head - Q
        key = _rotated(
            key_ptr + sequence * key_stride + (head - Q) * D, key_weight_ptr,
            cos_ptr, sin_ptr, epsilon, offset, ROUNDS_FIRST, D, COLUMNS, ROTARY, ANGLES,
        )  # fmt: skip
        tl.store(keys_ptr + (row * places + length) * D + columns, key.to(kind), mask=columns < tl.where(length < places, D, 0))
    else:
        row = sequence * KV + head - Q - KV
        held = tl.arange(0, VALUE_COLUMNS)
        value = tl.load(value_ptr + sequence * value_stride + (head - Q - KV) * DV + held, mask=held < DV, other=0.0)
        tl.store(values_ptr + (row * places + length) * DV + held, value, mask=held < tl.where(length < places, DV, 0))


@triton.jit(do_not_specialize=["places", "mask_stride"])
def _part_kernel(
    query_ptr,  # (B, Q, D) floating, contiguous
    keys_ptr,  # (B, KV, S, D), contiguous
    values_ptr,  # (B, KV, S, DV)
    mask_ptr,  # of S places or more with its stride of sequences: bool, or floating and added to the scores
    length_ptr,  # int64, the number of tokens before the new one
    sums_ptr,  # (B, Q, P, DV) float32: sums of values by exp(score - largest)
    shares_ptr,  # (B, Q, P, 2) float32: the largest score, -inf in a part without visible keys, and the sum of these exponentials
    places,
    mask_stride,
    scale,
    Q: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SELECTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (B * KV, P). The parts divide the tokens there are, not the places."""
    pair = tl.program_id(0).to(tl.int64)
    sequence = pair // KV
    tokens = tl.minimum(tl.load(length_ptr) + 1, places).to(tl.int32)
    share = tl.cdiv(tl.cdiv(tokens, BLOCK), PARTS) * BLOCK
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, tokens)
    columns = tl.arange(0, COLUMNS)
    held = tl.arange(0, VALUE_COLUMNS)
    group = tl.arange(0, GROUP)
    heads = sequence * Q + (pair % KV) * (Q // KV) + group
    own = group < Q // KV
    query = tl.load(query_ptr + heads[:, None] * D + columns[None, :], mask=own[:, None] & (columns < D)[None, :], other=0.0)
    largest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    sums = tl.zeros((GROUP, VALUE_COLUMNS), tl.float32)
    for first in range(start, end, BLOCK):
        tokens_here = first + tl.arange(0, BLOCK)
        inside = tokens_here < end
        rows = pair * places + tokens_here
        keys = tl.load(keys_ptr + rows[None, :] * D + columns[:, None], mask=inside[None, :] & (columns < D)[:, None], other=0.0)
        scores = dot(query, keys, tl.zeros((GROUP, BLOCK), tl.float32), UPCAST) * scale
        seen = tl.load(mask_ptr + sequence * mask_stride + tokens_here, mask=inside, other=0)
        if SELECTS:
            scores = tl.where((seen != 0)[None, :], scores, float("-inf"))
        else:
            scores += seen.to(tl.float32)[None, :]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(scores - base[:, None])
        factor = tl.exp(largest - base)
        values = tl.load(values_ptr + rows[:, None] * DV + held[None, :], mask=inside[:, None] & (held < DV)[None, :], other=0.0)
        total = total * factor + tl.sum(weights, 1)
        sums = dot(weights.to(values.dtype), values, sums * factor[:, None], UPCAST)
        largest = top
    parts = heads * PARTS + tl.program_id(1)
    tl.store(sums_ptr + parts[:, None] * DV + held[None, :], sums, mask=own[:, None] & (held < DV)[None, :])
    tl.store(shares_ptr + 2 * parts, largest, mask=own)
    tl.store(shares_ptr + 2 * parts + 1, total, mask=own)


@triton.jit(do_not_specialize=["gate_stride"])
def _merge_kernel(
    sums_ptr,  # (B, Q, P, DV) float32
    shares_ptr,  # (B, Q, P, 2) float32
    sinks_ptr,  # (Q,) floating, scores of keys without values; None without them
    gate_ptr,  # (B, Q, WIDTH), as the query of `_place_kernel`: those behind the first D are the gate; None without it
    length_ptr,  # int64; it becomes that with the new token
    out_ptr,  # (B, Q, DV) floating
    gate_stride,
    Q: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid (B * Q). No other program of this launch reads the length."""
    head = tl.program_id(0).to(tl.int64)
    parts = head * PARTS + tl.arange(0, PARTS)
    held = tl.arange(0, VALUE_COLUMNS)
    largest = tl.load(shares_ptr + 2 * parts)
    top = tl.max(largest, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head % Q).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)  # of a sequence that sees no token, whose result is 0
    factors = tl.exp(largest - top)
    total = tl.sum(tl.load(shares_ptr + 2 * parts + 1) * factors, 0)
    if sinks_ptr is not None:
        total += tl.exp(sink - top)
    sums = tl.load(sums_ptr + parts[:, None] * DV + held[None, :], mask=(held < DV)[None, :], other=0.0)
    out = tl.sum(sums * factors[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + head // Q * gate_stride + head % Q * WIDTH + D + held, mask=held < DV, other=0.0).to(tl.float32)
        out = out.to(out_ptr.dtype.element_ty).to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + head * DV + held, out.to(out_ptr.dtype.element_ty), mask=held < DV)
    if head == 0:
        tl.store(length_ptr, tl.load(length_ptr) + 1)


def decode_attention(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    rotary: int,
    norms: tuple[HeadNorm, HeadNorm] | None,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Add a token of each sequence to the cache, and return its attention (B, 1, Q * DV), on the current stream.

    Where the cache has no room for the token, it stays as it is, but for its number of tokens, and the result is NaN.

    Args:
        states: query (B, 1, Q * D), key (B, 1, KV * D) and value (B, 1, KV * DV) as projected, of one dtype.
        angles: cosines and sines (B or 1, 1, N), of the same dtype, of rotary embeddings (Su et al. 2021, arXiv:2104.09864), by which the
            first `rotary` columns of a head are rotated, those of the first half with those of the second; N is `rotary`, or a half of it.
        norms: of queries and keys before they are rotated, alike but for their weights.
        cache: keys (B, KV, S, D), values (B, KV, S, DV), contiguous, and the number () int64 of tokens in them, which is incremented.
        mask: (B or 1, 1, 1, S or more), contiguous in the last dimension: bool, or floating, added to the scores.
        sinks: (Q,), scores that take a share of the softmax (StreamingLLM: Xiao et al. 2023, arXiv:2309.17453; as in gpt-oss).
        gated: the query is (B, 1, Q * 2 * D): behind each head's is its gate, with whose sigmoid the result is multiplied; DV is D.
    """
    query, key, value = (each if each.stride(2) == 1 else each.contiguous() for each in states)
    keys, values, length = cache
    batch, heads, places, columns = keys.shape
    value_columns = values.shape[3]
    width = columns * (1 + gated)
    queries = query.shape[2] // width
    rotated = torch.empty(batch, queries, columns, dtype=query.dtype, device=query.device)
    parts = triton.next_power_of_2(max(1, min(triton.cdiv(places, BLOCK), PROGRAMS // (batch * heads))))
    sums = torch.empty(batch, queries, parts, value_columns, dtype=torch.float32, device=query.device)
    shares = torch.empty(batch, queries, parts, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, 1, queries * value_columns, dtype=query.dtype, device=query.device)
    sizes = {
        "Q": queries,
        "D": columns,
        "DV": value_columns,
        "VALUE_COLUMNS": max(SMALLEST_SIDE, triton.next_power_of_2(value_columns)),
    }
    shape = {**sizes, "KV": heads, "COLUMNS": max(SMALLEST_SIDE, triton.next_power_of_2(columns))}
    cos, sin = (None, None) if angles is None else angles
    weights = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
    epsilon, offset, rounds_first = (0.0, 0.0, False) if norms is None else (norms[0].epsilon, norms[0].offset, norms[0].rounds_first)
    selects = mask.dtype == torch.bool
    block = min(BLOCK, 128 * BLOCK // sizes["VALUE_COLUMNS"], 128 * BLOCK // shape["COLUMNS"])
    with on(query.device):
        # Not fused, so that each step rounds as PyTorch's own operations do.
        _place_kernel[batch, queries + 2 * heads](
            query, key, value, cos, sin, *weights, length, keys, values, rotated, places,
            *(each.stride(0) for each in (query, key, value)), stride_of(cos), epsilon, offset,
            ROUNDS_FIRST=rounds_first, ROTARY=rotary, ANGLES=1 if cos is None else cos.shape[-1],
            WIDTH=width, num_warps=1, enable_fp_fusion=False, **shape,
        )  # fmt: skip
        _part_kernel[batch * heads, parts](
            rotated, keys, values, mask.view(torch.uint8) if selects else mask, length, sums, shares, places, stride_of(mask), scale,
            GROUP=max(SMALLEST_SIDE, triton.next_power_of_2(queries // heads)), BLOCK=block, PARTS=parts, SELECTS=selects,
            UPCAST=interpreted(), num_warps=4, **shape, **LAUNCH,
        )  # fmt: skip
        _merge_kernel[batch * queries,](
            sums, shares, sinks, query if gated else None, length, out, query.stride(0), WIDTH=width, PARTS=parts,
            num_warps=min(16, max(1, parts * sizes["VALUE_COLUMNS"] // THREAD_SUMS // 32)), **sizes, **LAUNCH,
        )  # fmt: skip
    return out


def stride_of(tensor: torch.Tensor | None) -> int:
    """Return the stride of sequences, 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
