"""The pair path over the sparse layout, for decode: every pair of a token and an expert reads the rows of its own active neurons only.

No atomics on results: equal inputs give equal bits. A list of active neurons has room for all of them, so launches have one size and can be
captured in a CUDA graph; a program whose part of the list is empty returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.epilogue import Threshold, limited_up, reaches
from moegraft.operators.kernels.launch import LAUNCH, PackedBytes
from moegraft.operators.kernels.packed_layout import Gate, PackedRows, next_power_of_two
from moegraft.operators.kernels.units import column, signed

WARPS = 4
UP_NEURONS = 4  # a program's, in one go
UP_UNITS = 512  # 16 bytes a thread
DOWN_NEURONS = 16
DOWN_UNITS = 64
PROGRAMS = 528  # four for each multiprocessor of an H200: with fewer pairs, more programs share a pair's list


@dataclass(frozen=True, slots=True)
class ActiveNeurons:
    """The active neurons of each pair.

    Attributes:
        neurons: (count, I) int32: neurons in ascending order; only the first `lengths` are written.
        values: (count, I) float32: their activations.
        lengths: (count,) int32.
    """

    neurons: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor


@triton.jit
def _compact_kernel(
    act_ptr,  # (P, I) float32
    slots_ptr,  # (P,) int32
    threshold_ptr,  # (1,) float32
    counts_ptr,
    list_ptr,  # (P, I) int32
    value_ptr,  # (P, I) float32
    length_ptr,  # (P,) int32
    R: tl.constexpr,
):
    """Grid (P,). List the neurons that reach the threshold."""
    pair = tl.program_id(0)
    if tl.load(slots_ptr + pair) < 0:
        tl.store(length_ptr + pair, 0)
        return
    offset = pair.to(tl.int64) * R.neurons
    threshold = tl.load(threshold_ptr)
    LANES: tl.constexpr = R.lanes
    PADDED: tl.constexpr = R.padded_neurons
    length = 0
    for first in tl.static_range(0, PADDED, LANES):
        lanes = first + tl.arange(0, LANES)
        activations = tl.load(act_ptr + offset + lanes, mask=lanes < R.neurons, other=0.0)
        kept = (reaches(activations, threshold) & (lanes < R.neurons)).to(tl.int32)
        place = length + tl.cumsum(kept, 0) - kept
        tl.store(list_ptr + offset + place, lanes, mask=kept != 0)
        tl.store(value_ptr + offset + place, activations, mask=kept != 0)
        length += tl.sum(kept)
    tl.store(length_ptr + pair, length)
    tl.atomic_add(counts_ptr + 1, R.neurons, sem="relaxed")
    tl.atomic_add(counts_ptr, tl.cast(length, tl.int64), sem="relaxed")


@triton.jit
def _row_sums(units_ptr, scales_ptr, x_ptr, rows, alive, R: tl.constexpr, BN: tl.constexpr, BU: tl.constexpr):
    """The dot products of BN rows, `rows` (BN, 1) their beginnings, with x in unit order: (BN,) float32; zeros where not `alive`."""
    steps = tl.arange(0, BU)[None, :]
    UNITS: tl.constexpr = R.units
    HELD: tl.constexpr = R.columns_a_unit  # Triton 3.6 takes a field itself for a number of the run
    total = tl.zeros((BN, BU), tl.float32)
    for begin in tl.static_range(0, UNITS, BU):
        at = begin + steps
        inside = alive[:, None] & (at < UNITS)
        units = signed(tl.load(units_ptr + rows + R.header + at, mask=inside, other=0), R)
        part = tl.zeros((BN, BU), tl.float32)
        for j in tl.static_range(HELD):
            x = tl.load(x_ptr + j * UNITS + at, mask=at < UNITS, other=0.0)
            part += column(units, j, R) * x
        if R.header > 0:
            part *= tl.load(scales_ptr + 2 * rows + _scale_at(at, R), mask=inside, other=0.0).to(tl.float32)
        total += part
    return tl.sum(total, 1)


@triton.jit
def _column_number(units, j, R: tl.constexpr):
    """The number of the `j`-th column of units of a row."""
    CHUNK: tl.constexpr = 512 // R.columns_a_unit
    in_chunk = units % CHUNK
    return units // CHUNK * 512 + in_chunk % 16 * 32 + in_chunk // 16 * R.columns_a_unit + j


@triton.jit
def _scale_at(units, R: tl.constexpr):
    """Address of a unit's scale among those of its row."""
    return units // (512 // R.columns_a_unit) * 16 + units % 16


@triton.jit
def _up_kernel(
    x_ptr,  # (T, width) float32, in unit order
    units_ptr,  # (S, expert_bytes), as units
    scales_ptr,  # the same bytes as float16
    biases_ptr,  # the same bytes as float32
    slots_ptr,  # (P,) int32
    list_ptr,  # (P, I) int32
    value_ptr,  # (P, I) float32: activations by place
    length_ptr,  # (P,) int32
    neurons_ptr,  # (P, I) float32 by place
    R: tl.constexpr,
    GATE: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
):
    """Grid (P, S). `act(gate) * up` of a pair's listed neurons; the S programs of a pair alternate over parts of BN."""
    pair = tl.program_id(0)
    length = tl.load(length_ptr + pair)
    first = tl.program_id(1) * BN
    if first >= length:
        return
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    x_ptr += (pair // TOP_K).to(tl.int64) * WIDTH
    offset = pair.to(tl.int64) * R.neurons
    start = slot * R.expert_stride
    biases_ptr += slot * R.expert_words
    while first < length:
        places = first + tl.arange(0, BN)
        alive = places < length
        listed = tl.load(list_ptr + offset + places, mask=alive, other=0)
        rows = (start + listed.to(tl.int64) * R.row_stride)[:, None]
        value = tl.load(value_ptr + offset + places, mask=alive, other=0.0)
        if R.gated:
            up = _row_sums(units_ptr, scales_ptr, x_ptr, rows + R.up_first, alive, R, BN, BU)
            if R.up_bias_word >= 0:
                up += tl.load(biases_ptr + R.up_bias_word + listed, mask=alive, other=0.0)
            value *= limited_up(up, GATE)
        tl.store(neurons_ptr + offset + places, value, mask=alive)
        first += tl.num_programs(1) * BN


@triton.jit
def _down_kernel(
    units_ptr,
    scales_ptr,
    biases_ptr,
    slots_ptr,  # (P,) int32
    list_ptr,  # (P, I) int32
    length_ptr,  # (P,) int32
    neurons_ptr,  # (P, I) float32 by place
    out_ptr,  # (P, H) float32; rows of absent pairs are not written
    R: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
):
    """Grid (P, units / BU). The sum of a pair's listed rows of down, and the bias."""
    pair = tl.program_id(0)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    if slot < 0:
        return
    at = tl.program_id(1) * BU + tl.arange(0, BU)
    HELD: tl.constexpr = R.columns_a_unit
    j = tl.arange(0, HELD)
    length = tl.load(length_ptr + pair)
    offset = pair.to(tl.int64) * R.neurons
    total = tl.zeros((BN, BU, HELD), tl.float32)
    first = 0
    while first < length:
        places = first + tl.arange(0, BN)
        alive = places < length
        listed = tl.load(list_ptr + offset + places, mask=alive, other=0)
        value = tl.load(neurons_ptr + offset + places, mask=alive, other=0.0)[:, None]
        row = (slot * R.expert_stride + R.down_first + listed.to(tl.int64) * R.row_stride)[:, None]
        units = signed(tl.load(units_ptr + row + R.header + at[None, :], mask=alive[:, None], other=0), R)
        if R.header > 0:
            value *= tl.load(scales_ptr + 2 * row + _scale_at(at, R)[None, :], mask=alive[:, None], other=0.0).to(tl.float32)
        total += column(units[:, :, None], j[None, None, :], R) * value[:, :, None]
        first += BN
    sums = tl.sum(total, 0)
    columns = _column_number(at[:, None], j[None, :], R)
    inside = columns < R.hidden
    if R.down_bias_word >= 0:
        sums += tl.load(biases_ptr + slot * R.expert_words + R.down_bias_word + columns, mask=inside, other=0.0)
    tl.store(out_ptr + pair.to(tl.int64) * R.hidden + columns, sums, mask=inside)


def list_active(
    act: torch.Tensor,
    slots: torch.Tensor,
    threshold: Threshold,
    active: ActiveNeurons,
    rows: PackedRows,
) -> None:
    """Fill `active` with the neurons of each present pair whose activations `act (P, I)` float32 reach the threshold, and count them."""
    _compact_kernel[slots.numel(),](
        act, slots, threshold.value, threshold.counts, active.neurons, active.values, active.lengths,
        R=rows, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip


def up_pairs(
    x_units: torch.Tensor,
    arena: PackedBytes,
    slots: torch.Tensor,
    active: ActiveNeurons,
    out: torch.Tensor,
    rows: PackedRows,
    gate: Gate,
) -> None:
    """`out (P, I) float32`: the gated neurons of the active ones, by place; `x_units (T, width)` float32 is in unit order."""
    pairs = slots.numel()
    programs = max(1, min(triton.cdiv(rows.neurons, UP_NEURONS), triton.cdiv(PROGRAMS, pairs)))
    units = min(UP_UNITS, next_power_of_two(rows.units))
    _up_kernel[pairs, programs](
        x_units, arena.units, arena.scales, arena.biases, slots, active.neurons, active.values, active.lengths, out,
        R=rows, GATE=gate, TOP_K=slots.shape[1], WIDTH=rows.width, BN=UP_NEURONS, BU=units,
        num_warps=max(1, WARPS * units // UP_UNITS), **LAUNCH,
    )  # fmt: skip


def down_pairs(
    arena: PackedBytes,
    slots: torch.Tensor,
    active: ActiveNeurons,
    neurons: torch.Tensor,
    out: torch.Tensor,
    rows: PackedRows,
) -> None:
    """`out (P, H) float32`: each pair's sum over its active rows of down, and the bias."""
    _down_kernel[slots.numel(), rows.units // DOWN_UNITS](
        arena.units, arena.scales, arena.biases, slots, active.neurons, active.lengths, neurons, out,
        R=rows, BN=DOWN_NEURONS, BU=DOWN_UNITS, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip
