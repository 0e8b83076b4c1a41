"""Pairs of a token and an expert: grouped by expert, and each token's sum over them; on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.launch import LAUNCH

CHUNK = 1024  # pairs that a program looks at in one go
COLUMNS = 512  # of a program that sums rows
ROUTED = 1024  # values of a token that a program copies


@triton.jit
def _ids_at(ids_ptr, slots_ptr, at, pair_count, BY_ID: tl.constexpr, IDS: tl.constexpr):
    """The ids of some pairs, -1 where a pair is skipped."""
    ids = tl.load(ids_ptr + at, mask=at < pair_count, other=-1).to(tl.int32)
    present = (ids >= 0) & (ids < IDS)
    if slots_ptr is not None:
        places = ids if BY_ID else at
        present = present & (tl.load(slots_ptr + places, mask=present, other=-1) >= 0)
    return tl.where(present, ids, -1)


@triton.jit
def _group_pairs_kernel(
    ids_ptr,  # (P,) integers; those that are not from 0 to IDS - 1 are skipped
    slots_ptr,  # int32, -1: skipped; BY_ID (IDS,), of each id, otherwise (P,), of each pair; None: ids are slots
    listed_ptr,  # (P,) int32: gets the slots of the pairs that are listed; or None
    pairs_ptr,  # (max blocks * BM,) int32
    block_ids_ptr,  # (max blocks,) int32
    count_ptr,  # (1,) int32
    pair_count,
    BY_ID: tl.constexpr,
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
        chunk = _ids_at(ids_ptr, slots_ptr, first + lanes, pair_count, BY_ID, IDS)
        totals += tl.histogram(tl.where(chunk < 0, 0, chunk), IDS_PADDED, mask=chunk >= 0)
        first += CHUNK
    blocks = (totals + BM - 1) // BM
    start = tl.sum(tl.where(ids < own, blocks, 0))
    own_blocks = tl.sum(tl.where(ids == own, blocks, 0))
    if own == IDS - 1:
        tl.store(count_ptr, start + own_blocks)
    if own_blocks == 0:
        return
    slot = own
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + own) if BY_ID else -1
    pairs_ptr += start * BM
    seen = 0
    first = 0
    while first < pair_count:
        at = first + lanes
        mine = _ids_at(ids_ptr, slots_ptr, at, pair_count, BY_ID, IDS) == own
        if slots_ptr is not None and not BY_ID:
            slot = tl.maximum(slot, tl.max(tl.load(slots_ptr + at, mask=mine, other=-1), 0))
        one = mine.to(tl.int32)
        tl.store(pairs_ptr + seen + tl.cumsum(one, 0) - one, at, mask=mine)
        if listed_ptr is not None:
            tl.store(listed_ptr + at, tl.zeros((CHUNK,), tl.int32) + slot, mask=mine)
        seen += tl.sum(one)
        first += CHUNK
    rest = seen + tl.arange(0, BM)
    tl.store(pairs_ptr + rest, tl.zeros((BM,), tl.int32) + pair_count, mask=rest < own_blocks * BM)
    block = 0
    while block < own_blocks:
        tl.store(block_ids_ptr + start + block, slot)
        block += 1


@dataclass(frozen=True, slots=True)
class PairGroups:
    """Blocks of up to `block_pairs` pairs of one expert, on the device.

    Attributes:
        pairs: (max_blocks * block_pairs,) int32: numbers of pairs in ascending order, `pair_count` where a block is not full.
        block_ids: (max_blocks,) int32: the slot of each block's expert.
        count: (1,) int32: blocks in use; what lies behind them was never written.
    """

    pairs: torch.Tensor
    block_ids: torch.Tensor
    count: torch.Tensor
    block_pairs: int
    max_blocks: int
    pair_count: int

    @classmethod
    def allocate(cls, pair_count: int, num_ids: int, block_pairs: int, device: torch.device, most_listed: int | None = None) -> PairGroups:
        """Allocate for `pair_count` pairs, of which at most `most_listed` are listed, with at most `num_ids` different ids."""
        listed = pair_count if most_listed is None else most_listed
        # each id that occurs leaves at most one block unfilled
        max_blocks = min(listed, num_ids) + listed // block_pairs
        pairs = torch.empty(max_blocks * block_pairs, dtype=torch.int32, device=device)
        block_ids = torch.empty(max_blocks, dtype=torch.int32, device=device)
        return cls(pairs, block_ids, torch.empty(1, dtype=torch.int32, device=device), block_pairs, max_blocks, pair_count)


def group_pairs(
    ids: torch.Tensor,
    num_ids: int,
    groups: PairGroups,
    slots: torch.Tensor | None = None,
    *,
    slot_of: torch.Tensor | None = None,
    listed: torch.Tensor | None = None,
) -> None:
    """Fill `groups` from `ids` (P,) integers; one launch, no synchronisation. Ids that are not from 0 to `num_ids - 1` are skipped.

    A block's id is its slot. The number of ids is a constant of the kernel, and one program runs for each: give experts of one layer and
    their slots, not the slots of all layers.

    Args:
        slots: (P,) int32, the slot of each pair, equal where ids are equal; -1: skipped.
        slot_of: in its place (num_ids,) int32, the slot of each id.
        listed: (P,) int32, gets the slots of the pairs that are listed; others are left as they are.
    """
    padded = max(16, triton.next_power_of_2(num_ids))
    by_id = slot_of is not None
    _group_pairs_kernel[num_ids,](
        ids, slot_of if by_id else slots, listed, groups.pairs, groups.block_ids, groups.count, groups.pair_count,
        BY_ID=by_id, IDS=num_ids, IDS_PADDED=padded, BM=groups.block_pairs, CHUNK=CHUNK, num_warps=4, **LAUNCH,
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


@triton.jit
def _route_kernel(
    x_ptr,  # (T, H) floating
    scores_ptr,  # (T, E) floating, or None
    index_ptr,  # (T, K) integers
    weights_ptr,  # (T, K) floating
    slot_of_ptr,  # (E,) int32
    tokens_ptr,  # (T, H) of the dtype of x
    kept_scores_ptr,  # (T, E) float32
    kept_weights_ptr,  # (T, K) float32
    chosen_ptr,  # (T, K) int64
    ids_ptr,  # (T, K) int64
    slots_ptr,  # (T, K) int32
    H: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T, max(H, E) / BLOCK)."""
    token = tl.program_id(0)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(tokens_ptr + token * H + lanes, tl.load(x_ptr + token * H + lanes, mask=lanes < H, other=0.0), mask=lanes < H)
    if scores_ptr is not None:
        scores = tl.load(scores_ptr + token * E + lanes, mask=lanes < E, other=0.0)
        tl.store(kept_scores_ptr + token * E + lanes, scores.to(tl.float32), mask=lanes < E)
    if tl.program_id(1) == 0:
        k = tl.arange(0, TOP_K_PADDED)
        pairs = token * TOP_K + k
        index = tl.load(index_ptr + pairs, mask=k < TOP_K, other=-1).to(tl.int64)
        real = (index >= 0) & (index < E)
        slots = tl.load(slot_of_ptr + index, mask=real, other=-1)
        weights = tl.load(weights_ptr + pairs, mask=k < TOP_K, other=0.0)
        tl.store(kept_weights_ptr + pairs, weights.to(tl.float32), mask=k < TOP_K)
        tl.store(chosen_ptr + pairs, tl.where(real, index, -1), mask=k < TOP_K)
        tl.store(ids_ptr + pairs, tl.where(real & (slots < 0), index, -1), mask=k < TOP_K)
        tl.store(slots_ptr + pairs, slots, mask=k < TOP_K)


def route(
    hidden_states: torch.Tensor,
    scores: torch.Tensor | None,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    slot_of: torch.Tensor,
    into: Mapping[str, torch.Tensor],
) -> None:
    """Write a layer's tokens and routing into one place, in one launch.

    Args:
        slot_of: (E,) int32, -1: no slot.
        into: `tokens`, `scores` and `weights`, and as (T, K) with -1 for padded slots `chosen`, the experts, `ids`, those without a slot,
            and `slots`. Without `scores` those are left as they are.
    """
    (tokens, hidden), num_experts, top_k = hidden_states.shape, slot_of.shape[0], top_k_index.shape[1]
    _route_kernel[tokens, triton.cdiv(max(hidden, num_experts), ROUTED)](
        hidden_states, scores, top_k_index, top_k_weights, slot_of,
        into["tokens"], into["scores"], into["weights"], into["chosen"], into["ids"], into["slots"],
        H=hidden, E=num_experts, TOP_K=top_k, TOP_K_PADDED=triton.next_power_of_2(top_k), BLOCK=ROUTED, num_warps=4, **LAUNCH,
    )  # fmt: skip
