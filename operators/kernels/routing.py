"""Pairs of a token and an expert: grouped by expert, and each token's sum over them; on the device, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import LAUNCH

CHUNK = 1024  # pairs that a program looks at in one go
COLUMNS = 512  # of a program that sums rows


@triton.jit
def _group_pairs_kernel(
    ids_ptr,  # (P,) int32, -1: skipped
    pairs_ptr,  # (max blocks * BM,) int32
    block_ids_ptr,  # (max blocks,) int32
    count_ptr,  # (1,) int32
    pair_count,
    IDS: tl.constexpr,
    IDS_PADDED: tl.constexpr,
    BM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (IDS,). Each program counts all pairs, so it knows where its own blocks begin, then lists its own pairs in order."""
    own = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    ids = tl.arange(0, IDS_PADDED)
    totals = tl.zeros((IDS_PADDED,), tl.int32)
    first = 0
    while first < pair_count:
        chunk = tl.load(ids_ptr + first + lanes, mask=first + lanes < pair_count, other=-1)
        totals += tl.histogram(tl.where(chunk < 0, 0, chunk), IDS_PADDED, mask=chunk >= 0)
        first += CHUNK
    blocks = (totals + BM - 1) // BM
    start = tl.sum(tl.where(ids < own, blocks, 0))
    own_blocks = tl.sum(tl.where(ids == own, blocks, 0))
    if own == IDS - 1:
        tl.store(count_ptr, start + own_blocks)
    if own_blocks == 0:
        return
    block = 0
    while block < own_blocks:
        tl.store(block_ids_ptr + start + block, own)
        block += 1
    pairs_ptr += start * BM
    seen = 0
    first = 0
    while first < pair_count:
        chunk = tl.load(ids_ptr + first + lanes, mask=first + lanes < pair_count, other=-1)
        mine = (chunk == own).to(tl.int32)
        tl.store(pairs_ptr + seen + tl.cumsum(mine, 0) - mine, first + lanes, mask=mine != 0)
        seen += tl.sum(mine)
        first += CHUNK
    rest = seen + tl.arange(0, BM)
    tl.store(pairs_ptr + rest, tl.zeros((BM,), tl.int32) + pair_count, mask=rest < own_blocks * BM)


@dataclass(frozen=True, slots=True)
class PairGroups:
    """Blocks of up to `block_pairs` pairs of one expert or slot, on the device.

    Attributes:
        pairs: (max_blocks * block_pairs,) int32: numbers of pairs in ascending order, `pair_count` where a block is not full.
        block_ids: (max_blocks,) int32: each block's expert or slot.
        count: (1,) int32: blocks in use; what lies behind them was never written.
    """

    pairs: torch.Tensor
    block_ids: torch.Tensor
    count: torch.Tensor
    block_pairs: int
    max_blocks: int
    pair_count: int

    @classmethod
    def allocate(cls, pair_count: int, num_ids: int, block_pairs: int, device: torch.device) -> PairGroups:
        # each id that occurs leaves at most one block unfilled
        max_blocks = min(pair_count, num_ids) + pair_count // block_pairs
        pairs = torch.empty(max_blocks * block_pairs, dtype=torch.int32, device=device)
        block_ids = torch.empty(max_blocks, dtype=torch.int32, device=device)
        return cls(pairs, block_ids, torch.empty(1, dtype=torch.int32, device=device), block_pairs, max_blocks, pair_count)


def group_pairs(ids: torch.Tensor, num_ids: int, groups: PairGroups) -> None:
    """Fill `groups` from `ids` (P,) int32, of which -1 is skipped; one launch, no synchronisation."""
    padded = max(16, triton.next_power_of_2(num_ids))
    _group_pairs_kernel[num_ids,](
        ids, groups.pairs, groups.block_ids, groups.count, groups.pair_count,
        IDS=num_ids, IDS_PADDED=padded, BM=groups.block_pairs, CHUNK=CHUNK, num_warps=4, **LAUNCH,
    )  # fmt: skip


def pairs_a_block(pair_count: int, num_ids: int, dtype: torch.dtype) -> int:
    """Return 16, 32 or 64: the least that holds an id's mean share of the pairs, so that few weights are read twice and few rows are empty.

    Always 16 for float32, whose products take three times the registers.
    """
    mean = pair_count / max(1, num_ids)
    return 16 if mean <= 16 or dtype == torch.float32 else 32 if mean <= 32 else 64


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
    """`out (T, H) = sum over k of weights[t, k] * rows[t * K + k]` over the pairs whose id is not -1, in their order."""
    tokens, hidden = out.shape
    _combine_kernel[tokens, triton.cdiv(hidden, COLUMNS)](
        rows, ids, weights, out, H=hidden, TOP_K=ids.shape[1], COLUMNS=COLUMNS, num_warps=4, **LAUNCH
    )
