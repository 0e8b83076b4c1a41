"""The union path, for some hundred tokens: the pairs of one expert share the rows that any of them needs, on tensor cores.

A block of pairs reads the union of its pairs' active rows once; where a pair is not active its activation is an exact zero. Gate and sum
are those of the dense path.

Many tokens over rows in the CPU kernel's sparse layout: the pairs of one expert share its rows, on tensor cores.

Either the rows that any pair of a block needs (the union path) or all of them (the dense path). A row is read as its bytes lie, so what it
is multiplied with is stored in *element order*: an element is a number, of int8 its byte, of int4 a byte with two numbers, of which the
upper ones form a second row behind the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from moegraft.operators.kernels.availability import interpreted
from moegraft.operators.kernels.epilogue import Threshold, limited_up, reaches
from moegraft.operators.kernels.launch import LAUNCH, Bytes
from moegraft.operators.kernels.packed_layout import Gate
from moegraft.operators.kernels.routing import PairGroups
from moegraft.operators.kernels.sparse_call import Call, Lists
from moegraft.operators.kernels.sparse_rows import CHUNK_COLUMNS, LANES, NeuronRows, PackedRows, neuron_rows
from moegraft.operators.kernels.units import dot


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


ELEMENT_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.uint8,
    "int4": torch.uint8,
}


class ElementRows(NamedTuple):
    """`PackedRows` by elements, a compile-time constant; offsets and strides in elements unless named otherwise."""

    weights: str
    neurons: int
    hidden: int
    gated: bool
    scaled: bool
    held: int  # numbers in an element
    elements: int  # of a row
    together: int  # elements of one lane that lie side by side, and share a scale
    chunk: int  # elements of 512 columns
    header: int
    row_stride: int
    expert_stride: int
    up_first: int
    down_first: int
    expert_words: int
    up_bias_word: int  # -1: no biases
    down_bias_word: int

    @property
    def width(self) -> int:
        """Values of a vector in element order."""
        return self.elements * self.held


def element_rows(rows: PackedRows) -> ElementRows:
    held = 2 if rows.weights == "int4" else 1
    together = rows.columns_a_unit // held
    assert rows.expert_stride * together < 1 << 31, "offsets within an expert have 32 bits"
    return ElementRows(
        weights=rows.weights,
        neurons=rows.neurons,
        hidden=rows.hidden,
        gated=rows.gated,
        scaled=rows.header > 0,
        held=held,
        elements=rows.units * together,
        together=together,
        chunk=CHUNK_COLUMNS // held,
        header=rows.header * together,
        row_stride=rows.row_stride * together,
        expert_stride=rows.expert_stride * together,
        up_first=rows.up_first * together,
        down_first=rows.down_first * together,
        expert_words=rows.expert_words,
        up_bias_word=rows.up_bias_word,
        down_bias_word=rows.down_bias_word,
    )


def in_element_order(x: torch.Tensor, rows: ElementRows) -> torch.Tensor:
    """(T, columns) -> (T, width) of the same dtype."""
    padded = F.pad(x, (0, rows.width - x.shape[1]))
    by_lane = padded.view(len(x), -1, LANES, 32 // (rows.held * rows.together), rows.held, rows.together)
    return by_lane.permute(0, 4, 1, 3, 2, 5).reshape(len(x), -1)


def from_element_order(y: torch.Tensor, rows: ElementRows) -> torch.Tensor:
    """(T, width) -> (T, H), a copy."""
    by_line = y.view(len(y), rows.held, -1, 32 // (rows.held * rows.together), LANES, rows.together)
    return by_line.permute(0, 2, 4, 3, 1, 5).reshape(len(y), -1)[:, : rows.hidden]


@triton.jit
def _scale_at(lanes, R: tl.constexpr):
    """Of what a lane holds side by side, by its number in the row, among the scales of that row."""
    return lanes // (R.chunk // R.together) * 16 + lanes % 16


@triton.jit
def _column_of(elements, V: tl.constexpr, R: tl.constexpr):
    """The number of the column of the `V`-th value of elements."""
    in_chunk = elements % R.chunk
    lane = in_chunk // R.together % 16
    line = in_chunk // (R.together * 16)
    return elements // R.chunk * 512 + lane * 32 + (line * R.held + V) * R.together + in_chunk % R.together


@triton.jit
def _numbers(elements, scales, V: tl.constexpr, dtype: tl.constexpr, R: tl.constexpr):
    """The `V`-th number of each element."""
    if R.weights == "int8":
        return ((elements.to(tl.int32) - 128).to(tl.float32) * scales).to(dtype)
    elif R.weights == "int4":
        return ((((elements.to(tl.int32) >> 4 * V) & 15) - 8).to(tl.float32) * scales).to(dtype)
    else:
        return elements.to(dtype)


@triton.jit
def _row_product(
    elements_ptr,
    scales_ptr,
    x_ptr,
    rows,
    tokens,
    present,
    R: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STEP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows, by where they begin, times `x[tokens].T`: (BN, BM) float32."""
    HELD: tl.constexpr = R.held
    at = tl.arange(0, STEP)
    w_ptrs = elements_ptr + (rows[:, None] + R.header + at[None, :])
    x_ptrs = x_ptr + tokens.to(tl.int64)[None, :] * (R.elements * R.held) + at[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, R.elements, STEP):
        w = tl.load(w_ptrs + first)
        scales = 1.0
        if R.scaled:
            lanes = first // R.together + tl.arange(0, STEP // R.together)
            scales = tl.load(scales_ptr + ((rows // 2)[:, None] + _scale_at(lanes, R)[None, :]))
            scales = tl.broadcast_to(scales[:, :, None], (BN, STEP // R.together, R.together))
            scales = tl.reshape(scales, (BN, STEP)).to(tl.float32)
        for v in tl.static_range(HELD):
            x = tl.load(x_ptrs + v * R.elements + first, mask=present[None, :], other=0.0)
            total = dot(_numbers(w, scales, v, x.dtype, R), x, total, UPCAST)
    return total


@triton.jit
def _up_packed_union_kernel(
    x_ptr,  # (T, width) floating, in element order
    elements_ptr,  # (S, expert_bytes), as elements
    scales_ptr,  # the same bytes as float16
    biases_ptr,  # the same bytes as float32
    pairs_ptr,  # of PairGroups
    block_ids_ptr,
    count_ptr,
    threshold_ptr,  # (1,) float32; None with a list, which has judged already
    counts_ptr,  # (2,) int64
    act_ptr,  # (P, I) float32, with a list zeros where a neuron is left out
    list_ptr,  # (max blocks, I) int32; None: every neuron
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
    """Grid (max blocks, I / BN). BN rows of up times the block's tokens."""
    block = tl.program_id(0)
    if block >= tl.load(count_ptr):
        return
    first = tl.program_id(1) * BN
    length = R.neurons if list_ptr is None else tl.load(length_ptr + block)
    if first >= length:
        return
    pair = tl.load(pairs_ptr + block * BM + tl.arange(0, BM))
    present = pair < pair_count
    pair = tl.where(present, pair, 0)
    places = first + tl.arange(0, BN)
    alive = places < length
    if list_ptr is None:
        listed = tl.where(alive, places, 0)
    else:
        listed = tl.load(list_ptr + block.to(tl.int64) * R.neurons + places, mask=alive, other=0)
    value = tl.load(act_ptr + pair.to(tl.int64)[None, :] * R.neurons + listed[:, None], mask=present[None, :], other=0.0)
    if threshold_ptr is not None:
        counted = present[None, :] & alive[:, None]
        kept = reaches(value, tl.load(threshold_ptr)) & counted
        tl.atomic_add(counts_ptr, tl.sum(kept.to(tl.int32)).to(tl.int64), sem="relaxed")
        tl.atomic_add(counts_ptr + 1, tl.sum(counted.to(tl.int32)).to(tl.int64), sem="relaxed")
        value = tl.where(kept, value, 0.0)
    if R.gated:
        slot = tl.load(block_ids_ptr + block).to(tl.int64)
        start = slot * R.expert_stride + R.up_first
        rows = listed * R.row_stride  # offsets within an expert have 32 bits, which takes half of the registers
        up = _row_product(elements_ptr + start, scales_ptr + start // 2, x_ptr, rows, pair // TOP_K, present, R, BN, BM, STEP, UPCAST)
        if R.up_bias_word >= 0:
            up += tl.load(biases_ptr + slot * R.expert_words + R.up_bias_word + listed)[:, None]
        value *= limited_up(up, GATE)
    out_ptrs = neurons_ptr + pair.to(tl.int64)[None, :] * R.neurons + places[:, None]
    tl.store(out_ptrs, value.to(neurons_ptr.dtype.element_ty), mask=present[None, :] & alive[:, None])


@triton.jit
def _down_packed_union_kernel(
    elements_ptr,
    scales_ptr,
    biases_ptr,
    pairs_ptr,
    block_ids_ptr,
    count_ptr,
    list_ptr,  # (max blocks, I) int32; None: every neuron
    length_ptr,  # (max blocks,) int32
    neurons_ptr,  # (P, I) floating, by place
    out_ptr,  # (P, width) float32, in element order
    pair_count,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (max blocks, elements / BC). The block's rows of down, transposed, times its neurons."""
    HELD: tl.constexpr = R.held
    block = tl.program_id(0)
    if block >= tl.load(count_ptr):
        return
    pair = tl.load(pairs_ptr + block * BM + tl.arange(0, BM))
    present = pair < pair_count
    pair = tl.where(present, pair, 0).to(tl.int64)
    slot = tl.load(block_ids_ptr + block).to(tl.int64)
    at = tl.program_id(1) * BC + tl.arange(0, BC)
    lanes = tl.program_id(1) * (BC // R.together) + tl.arange(0, BC // R.together)
    start = slot * R.expert_stride + R.down_first
    elements_ptr += start + R.header
    scales_ptr += start // 2
    length = R.neurons if list_ptr is None else tl.load(length_ptr + block)
    total = tl.zeros((BC, BM), tl.float32)
    upper = tl.zeros((BC, BM), tl.float32)
    # The interpreter of Triton 3.6 cannot count to a number that it has loaded.
    for first in range(0, R.neurons if UPCAST or list_ptr is None else length, BN):
        places = first + tl.arange(0, BN)
        alive = places < length
        if list_ptr is None:
            listed = tl.where(alive, places, 0)
        else:
            listed = tl.load(list_ptr + block.to(tl.int64) * R.neurons + places, mask=alive, other=0)
        rows = listed * R.row_stride
        w = tl.load(elements_ptr + (rows[None, :] + at[:, None]), mask=alive[None, :], other=0)
        value = tl.load(neurons_ptr + pair[None, :] * R.neurons + places[:, None], mask=alive[:, None] & present[None, :], other=0.0)
        scales = 1.0
        if R.scaled:
            scales = tl.load(scales_ptr + ((rows // 2)[None, :] + _scale_at(lanes, R)[:, None]), mask=alive[None, :], other=0.0)
            scales = tl.broadcast_to(scales[:, None, :], (BC // R.together, R.together, BN))
            scales = tl.reshape(scales, (BC, BN)).to(tl.float32)
        total = dot(_numbers(w, scales, 0, value.dtype, R), value, total, UPCAST)
        if R.held == 2:
            upper = dot(_numbers(w, scales, 1, value.dtype, R), value, upper, UPCAST)
    for v in tl.static_range(HELD):
        sums = total if v == 0 else upper
        if R.down_bias_word >= 0:
            column = _column_of(at, v, R)
            bias_ptrs = biases_ptr + slot * R.expert_words + R.down_bias_word + column
            sums += tl.load(bias_ptrs, mask=column < R.hidden, other=0.0)[:, None]
        tl.store(out_ptr + pair[None, :] * (R.elements * R.held) + v * R.elements + at[:, None], sums, mask=present[None, :])


def _packed_tile(rows: ElementRows, block_pairs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows, elements a step, warps and stages of a program, by the registers they leave. Not timed yet."""
    if dtype == torch.float32:  # three passes over split operands
        return 64, 32, 4, 2
    if block_pairs >= 64:
        return 64, 64, 8, 2 if rows.scaled else 3
    return 64, 64, 4, 3


def up_packed_union(
    x: torch.Tensor,
    arena: Bytes,
    lists: Lists | None,
    act: torch.Tensor,
    out: torch.Tensor,
    groups: PairGroups,
    rows: ElementRows,
    gate: Gate,
    top_k: int,
    threshold: Threshold | None = None,
) -> None:
    """`out (P, I)` of the dtype of x: gated neurons by place.

    Args:
        x: (T, width) in element order.
        lists: of the blocks; None: every neuron, of which those below the `threshold` become zeros and the others are counted.
        act: (P, I) float32, with lists zeros where a neuron is left out.
    """
    assert (lists is None) == (threshold is not None), "who made the lists has judged and counted"
    listed, step, warps, stages = _packed_tile(rows, groups.block_pairs, x.dtype)
    _up_packed_union_kernel[groups.max_blocks, triton.cdiv(rows.neurons, listed)](
        x, arena.units.view(ELEMENT_DTYPES[rows.weights]), arena.scales, arena.biases, groups.pairs, groups.block_ids, groups.count,
        threshold and threshold.value, threshold and threshold.counts, act, lists and lists.neurons, lists and lists.lengths, out,
        groups.pair_count,
        R=rows, GATE=gate, TOP_K=top_k, BM=groups.block_pairs, BN=listed, STEP=step, UPCAST=interpreted(),
        num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip


def down_packed_union(
    arena: Bytes, lists: Lists | None, neurons: torch.Tensor, out: torch.Tensor, groups: PairGroups, rows: ElementRows
) -> None:
    """`out (P, width) float32`, in element order: each pair's sum over its block's rows of down, or over all, and the bias."""
    columns, listed, warps, stages = _packed_tile(rows, groups.block_pairs, neurons.dtype)
    if rows.scaled:  # bytes: 16 of a tile for each thread
        columns, listed = (64, 64) if neurons.dtype == torch.float32 else (128, 8 * warps)
    _down_packed_union_kernel[groups.max_blocks, rows.elements // columns](
        arena.units.view(ELEMENT_DTYPES[rows.weights]), arena.scales, arena.biases, groups.pairs, groups.block_ids, groups.count,
        lists and lists.neurons, lists and lists.lengths, neurons, out, groups.pair_count,
        R=rows, BM=groups.block_pairs, BN=listed, BC=columns, UPCAST=interpreted(), num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
