"""The union path, for some hundred tokens: the pairs of one expert share the rows that any of them needs, on tensor cores.

A block of pairs reads the union of its pairs' active rows once; where a pair is not active its activation is an exact zero. Gate and sum
are those of the dense path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.activations import limited_up
from moegraft.operators.kernels.availability import interpreted
from moegraft.operators.kernels.finish import Threshold, reaches
from moegraft.operators.kernels.launch import LAUNCH
from moegraft.operators.kernels.routing import PairGroups
from moegraft.operators.kernels.units import dot
from moegraft.operators.sparse.call import Call, Lists
from moegraft.operators.sparse.kernels.packed_rows import PackedRows
from moegraft.operators.sparse.kernels.rows import NeuronRows, neuron_rows


@triton.jit
def _compact_union_kernel(
    act_ptr,  # (P, I) float32: activations, of which those that are left out become zeros
    pairs_ptr,  # of PairGroups
    count_ptr,
    threshold_ptr,  # (1,) float32
    counts_ptr,  # (2,) int64
    list_ptr,  # (max blocks, I) int32
    length_ptr,  # (max blocks,) int32
    pair_count,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
):
    """Grid (max blocks,). Lists the neurons that a pair of the block keeps."""
    block = tl.program_id(0)
    if block >= tl.load(count_ptr):
        return
    threshold = tl.load(threshold_ptr)
    LANES: tl.constexpr = R.lanes
    PADDED: tl.constexpr = R.padded_neurons
    list_ptr += block.to(tl.int64) * R.neurons
    active = 0
    length = 0
    for first in tl.static_range(0, PADDED, LANES):
        lanes = first + tl.arange(0, LANES)
        inside = lanes < R.neurons
        union = tl.zeros((LANES,), tl.int32)
        reached = tl.zeros((LANES,), tl.int32)
        for place in range(BM):  # one pair at a time: the activations of one fill a program's registers
            pair = tl.load(pairs_ptr + block * BM + place)
            if pair < pair_count:
                row_ptr = act_ptr + pair.to(tl.int64) * R.neurons
                activations = tl.load(row_ptr + lanes, mask=inside, other=0.0)
                kept = (reaches(activations, threshold) & inside).to(tl.int32)
                reached += kept
                if GROUP > 1:
                    one = tl.max(tl.reshape(kept, (LANES // GROUP, GROUP)), 1)
                    kept = tl.reshape(tl.broadcast_to(one[:, None], (LANES // GROUP, GROUP)), (LANES,))
                    kept = tl.where(inside, kept, 0)
                union = union | kept
                tl.store(row_ptr + lanes, tl.where(kept != 0, activations, 0.0), mask=inside)
        tl.store(list_ptr + length + tl.cumsum(union, 0) - union, lanes, mask=union != 0)
        active += tl.sum(reached)
        length += tl.sum(union)
    tl.store(length_ptr + block, length)
    present = tl.load(pairs_ptr + block * BM + tl.arange(0, BM)) < pair_count
    tl.atomic_add(counts_ptr, tl.cast(active, tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, (tl.sum(present.to(tl.int32)) * R.neurons).to(tl.int64), sem="relaxed")


@triton.jit
def _up_union_kernel(
    x_ptr,  # (T, H) floating
    gate_up_ptr,  # (E, rows, H) of the same dtype
    biases_ptr,  # (E, rows) float32, or anything
    pairs_ptr,
    block_ids_ptr,
    count_ptr,
    act_ptr,  # (P, I) float32, zeros where a neuron is left out
    list_ptr,  # (max blocks, I) int32
    length_ptr,  # (max blocks,) int32
    neurons_ptr,  # (P, I) of the dtype of x: gated neurons by place in the block's list
    pair_count,
    R: tl.constexpr,
    GATE: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STEP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (max blocks, I / BN). BN listed rows of up times the block's tokens."""
    block = tl.program_id(0)
    if block >= tl.load(count_ptr):
        return
    length = tl.load(length_ptr + block)
    first = tl.program_id(1) * BN
    if first >= length:
        return
    pair = tl.load(pairs_ptr + block * BM + tl.arange(0, BM))
    present = pair < pair_count
    pair = tl.where(present, pair, 0)
    places = first + tl.arange(0, BN)
    listed = tl.load(list_ptr + block.to(tl.int64) * R.neurons + places, mask=places < length, other=0)
    value = tl.load(act_ptr + pair.to(tl.int64)[None, :] * R.neurons + listed[:, None], mask=present[None, :], other=0.0)
    if R.gated:
        rows = tl.load(block_ids_ptr + block).to(tl.int64) * R.rows + listed * R.step + R.up_offset
        up = _gathered_product(gate_up_ptr, x_ptr, rows, pair // TOP_K, present, R.hidden, BN, BM, STEP, UPCAST)
        if R.bias:
            up += tl.load(biases_ptr + rows)[:, None]
        value *= limited_up(up, GATE)
    out_ptrs = neurons_ptr + pair.to(tl.int64)[None, :] * R.neurons + places[:, None]
    tl.store(out_ptrs, value.to(neurons_ptr.dtype.element_ty), mask=present[None, :] & (places < length)[:, None])


@triton.jit
def _gathered_product(
    w_ptr, x_ptr, rows, tokens, present, H: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STEP: tl.constexpr, UPCAST: tl.constexpr
):
    """`w[rows] @ x[tokens].T`: (BN, BM) float32."""
    columns = tl.arange(0, STEP)
    w_ptrs = w_ptr + rows[:, None] * H + columns[None, :]
    x_ptrs = x_ptr + tokens.to(tl.int64)[None, :] * H + columns[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, H, STEP):
        if H % STEP == 0:
            w = tl.load(w_ptrs + first)
            x = tl.load(x_ptrs + first, mask=present[None, :], other=0.0)
        else:
            inside = first + columns < H
            w = tl.load(w_ptrs + first, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs + first, mask=present[None, :] & inside[:, None], other=0.0)
        total = dot(w, x, total, UPCAST)
    return total


@triton.jit
def _down_union_kernel(
    down_ptr,  # (E, I, H) floating
    biases_ptr,  # (E, H) float32, or anything
    pairs_ptr,
    block_ids_ptr,
    count_ptr,
    list_ptr,  # (max blocks, I) int32
    length_ptr,  # (max blocks,) int32
    neurons_ptr,  # (P, I) of the dtype of down, by place
    out_ptr,  # (P, H) float32
    pair_count,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (max blocks, H / BH). The block's listed rows of down, transposed, times its neurons."""
    block = tl.program_id(0)
    if block >= tl.load(count_ptr):
        return
    pair = tl.load(pairs_ptr + block * BM + tl.arange(0, BM))
    present = pair < pair_count
    pair = tl.where(present, pair, 0).to(tl.int64)
    expert = tl.load(block_ids_ptr + block).to(tl.int64)
    columns = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = columns < R.hidden
    length = tl.load(length_ptr + block)
    list_ptr += block.to(tl.int64) * R.neurons
    down_ptr += expert * R.neurons * R.hidden
    total = tl.zeros((BH, BM), tl.float32)
    # The interpreter of Triton 3.6 cannot count to a number that it has loaded.
    for first in range(0, R.neurons if UPCAST else length, BN):
        places = first + tl.arange(0, BN)
        alive = places < length
        listed = tl.load(list_ptr + places, mask=alive, other=0)
        w = tl.load(down_ptr + listed[None, :] * R.hidden + columns[:, None], mask=alive[None, :] & inside[:, None], other=0.0)
        value = tl.load(neurons_ptr + pair[None, :] * R.neurons + places[:, None], mask=alive[:, None] & present[None, :], other=0.0)
        total = dot(w, value, total, UPCAST)
    if R.bias:
        total += tl.load(biases_ptr + expert * R.hidden + columns, mask=inside, other=0.0)[:, None]
    tl.store(out_ptr + pair[None, :] * R.hidden + columns[:, None], total, mask=present[None, :] & inside[:, None])


def _tile(block_pairs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Listed rows, columns a step and warps of a program, by the registers they leave. Not timed yet."""
    if dtype == torch.float32:  # three passes over split operands
        return 64, 32, 4
    return 64, 64, 4


def compact_union(threshold: Threshold, lists: Lists, act: torch.Tensor, groups: PairGroups, rows: NeuronRows | PackedRows) -> None:
    """Fills `lists`, one for each block of pairs; of `act (P, I)` float32 what is left out becomes zeros."""
    _compact_union_kernel[groups.max_blocks,](
        act, groups.pairs, groups.count, threshold.value, threshold.counts, lists.neurons, lists.lengths, groups.pair_count,
        R=rows, GROUP=threshold.group, BM=groups.block_pairs, num_warps=max(4, rows.lanes // 128), **LAUNCH,
    )  # fmt: skip


def up_union(call: Call, lists: Lists, act: torch.Tensor, out: torch.Tensor, groups: PairGroups) -> None:
    """`out (P, I)` of the dtype of the weights: the gated neurons by place in the lists of the blocks."""
    weights, x = call.weights, call.hidden_states
    rows = neuron_rows(weights)
    listed, step, warps = _tile(groups.block_pairs, x.dtype)
    _up_union_kernel[groups.max_blocks, triton.cdiv(rows.neurons, listed)](
        x, weights.gate_up, weights.gate_up_bias, groups.pairs, groups.block_ids, groups.count, act, lists.neurons, lists.lengths, out,
        groups.pair_count,
        R=rows, GATE=weights.gate, TOP_K=call.top_k, BM=groups.block_pairs, BN=listed, STEP=step, UPCAST=interpreted(),
        num_warps=warps, num_stages=4, **LAUNCH,
    )  # fmt: skip


def down_union(call: Call, lists: Lists, neurons: torch.Tensor, out: torch.Tensor, groups: PairGroups) -> None:
    """`out (P, H) float32`: each pair's sum over its block's listed rows of down, and the bias."""
    weights = call.weights
    rows = neuron_rows(weights)
    columns, listed, warps = _tile(groups.block_pairs, neurons.dtype)
    _down_union_kernel[groups.max_blocks, triton.cdiv(rows.hidden, columns)](
        weights.down_t, weights.down_bias, groups.pairs, groups.block_ids, groups.count, lists.neurons, lists.lengths, neurons, out,
        groups.pair_count,
        R=rows, BM=groups.block_pairs, BN=listed, BH=columns, UPCAST=interpreted(), num_warps=warps, num_stages=3, **LAUNCH,
    )  # fmt: skip
