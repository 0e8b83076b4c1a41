"""Where a neuron's rows lie, and how many of their columns a program reads in one go.

The rows of up and down in the CPU kernel's sparse layout (cpu_backend/csrc/experts/block_layout.h), read neuron by neuron.

A row is its scales, for int8 and int4, and then chunks of 512 columns: unit i of lane l of a chunk holds consecutive columns of the
lane's group of 32. So a row is read from front to back, and what it is multiplied with is stored in *unit order*: first what each unit of
the row holds first, then what each holds second, and so on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from moegraft.cpu_backend import ExpertsShape, PackedExperts
from moegraft.operators.kernels.epilogue import limited_up
from moegraft.operators.kernels.launch import LAUNCH, Bytes
from moegraft.operators.kernels.packed_layout import COLUMNS_A_UNIT, Gate, PackedMatrix, block_bytes, packed_matrix, round_up, unit_bytes
from moegraft.operators.kernels.sparse_call import Lists
from moegraft.operators.kernels.sparse_weights import SparseWeights
from moegraft.operators.kernels.units import signed

LARGEST_GROUP = 32
MOST_LANES = 2048  # 16 neurons a thread


class NeuronRows(NamedTuple):
    """The neurons of each expert as rows of H: gate and up in `gate_up (E, rows, H)`, down in `down_t (E, I, H)`.

    A compile-time constant.
    """

    hidden: int
    neurons: int
    padded_neurons: int  # a power of two
    lanes: int  # neurons that a program looks at in one go
    places: int  # neurons of whole groups: what a list of groups may hold
    gated: bool
    rows: int  # of gate_up: 2I, ungated I
    step: int  # rows from a neuron's gate to the next one's
    up_offset: int  # rows from a neuron's gate to its up
    bias: bool


def neuron_rows(weights: SparseWeights) -> NeuronRows:
    neurons, gated = weights.neurons, weights.gated
    step, up_offset = (2, 1) if weights.interleaved else (1, neurons)
    return NeuronRows(
        hidden=weights.hidden,
        neurons=neurons,
        padded_neurons=triton.next_power_of_2(neurons),
        lanes=min(MOST_LANES, triton.next_power_of_2(neurons)),
        places=round_up(neurons, LARGEST_GROUP),
        gated=gated,
        rows=weights.gate_up.shape[1],
        step=step if gated else 1,
        up_offset=up_offset if gated else 0,
        bias=weights.gate_up_bias is not None,
    )


def columns_a_step(hidden: int, dtype: torch.dtype, warps: int) -> int:
    """16 bytes a thread, where the hidden size has as many: then x, a row of one, gets the weights' layout and the loop no barrier."""
    most: int = 16 // dtype.itemsize * 32 * warps
    padded: int = triton.next_power_of_2(hidden)
    return min(most, max(32, padded))


CHUNK_COLUMNS = 512
LANES = 16
WARPS = 4
UP_NEURONS = 4  # a program's, in one go
UP_UNITS = 512  # 16 bytes a thread
DOWN_NEURONS = 16
DOWN_UNITS = 64
PROGRAMS = 528  # four for each multiprocessor of an H200


class PackedRows(NamedTuple):
    """The neurons of each expert in the sparse layout, a compile-time constant; offsets and strides in units unless named otherwise."""

    weights: str
    columns_a_unit: int
    hidden: int
    neurons: int
    padded_neurons: int  # a power of two
    lanes: int  # neurons that a program looks at in one go
    places: int  # neurons, padded to 32: the width of a list
    gated: bool
    header: int  # scales before a row's units, for int8 and int4
    units: int  # of a row
    row_stride: int
    expert_stride: int
    up_first: int
    down_first: int
    expert_words: int
    up_bias_word: int  # -1: no biases
    down_bias_word: int

    @property
    def width(self) -> int:
        """Values of a vector in unit order."""
        return self.units * self.columns_a_unit


def sparse_layout(shape: ExpertsShape, weight_type: str) -> tuple[PackedMatrix, PackedRows]:
    """The gates (of ungated experts the ups), which lie in blocks, and the rows that follow them."""
    size, held = unit_bytes(weight_type), COLUMNS_A_UNIT[weight_type]
    neurons = round_up(shape.intermediate, 32)
    chunks = round_up(shape.hidden, CHUNK_COLUMNS) // CHUNK_COLUMNS
    header_bytes = round_up(chunks * LANES * 2, 64) if weight_type in ("int8", "int4") else 0
    units = chunks * CHUNK_COLUMNS // held
    row_bytes = header_bytes + units * size
    up_at = block_bytes(weight_type, shape.hidden) * (neurons // 32)
    down_at = up_at + (row_bytes * neurons if shape.gated else 0)
    gate_bias_at = down_at + row_bytes * neurons
    up_bias_at = gate_bias_at + (4 * neurons if shape.bias and shape.gated else 0)
    down_bias_at = up_bias_at + (4 * neurons if shape.bias else 0)
    expert_bytes = down_bias_at + (4 * round_up(shape.hidden, 32) if shape.bias else 0)
    assert expert_bytes == PackedExperts.expert_bytes_for(shape, weight_type, sparse=True), "this layout is not the CPU kernel's"
    first_bias = gate_bias_at if shape.gated else up_bias_at
    gates = packed_matrix(
        weight_type,
        neurons,
        shape.hidden,
        outputs=shape.intermediate,
        expert_bytes=expert_bytes,
        biases=(first_bias, -1) if shape.bias else (-1, -1),
    )
    rows = PackedRows(
        weights=weight_type,
        columns_a_unit=held,
        hidden=shape.hidden,
        neurons=shape.intermediate,
        padded_neurons=triton.next_power_of_2(shape.intermediate),
        lanes=min(MOST_LANES, triton.next_power_of_2(shape.intermediate)),
        places=neurons,
        gated=shape.gated,
        header=header_bytes // size,
        units=units,
        row_stride=row_bytes // size,
        expert_stride=expert_bytes // size,
        up_first=up_at // size,
        down_first=down_at // size,
        expert_words=expert_bytes // 4,
        up_bias_word=up_bias_at // 4 if shape.bias else -1,
        down_bias_word=down_bias_at // 4 if shape.bias else -1,
    )
    return gates, rows


def in_unit_order(x: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """(T, columns) -> (T, width) float32: of its four bytes a thread reads as many values as it reads units, so the loop has no barrier."""
    held = rows.columns_a_unit
    padded = F.pad(x.float(), (0, rows.width - x.shape[1]))
    return padded.view(len(x), -1, LANES, 32 // held, held).permute(0, 4, 1, 3, 2).reshape(len(x), -1)


def from_unit_order(y: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """(T, width) -> (T, H), a copy."""
    held = rows.columns_a_unit
    return y.view(len(y), held, -1, 32 // held, LANES).permute(0, 2, 4, 3, 1).reshape(len(y), -1)[:, : rows.hidden]


@triton.jit
def _columns(units, j, R: tl.constexpr):
    """The columns `j`, a tensor, of each unit as float32, without their scales."""
    if R.weights == "bfloat16":
        return ((units >> 16 * j) << 16).to(tl.float32, bitcast=True)
    elif R.weights == "int8":
        return ((units << (24 - 8 * j)) >> 24).to(tl.float32)
    elif R.weights == "int4":
        return ((units << (28 - 8 * (j % 4) - 4 * (j // 4))) >> 28).to(tl.float32)
    else:
        return units.to(tl.float32)


@triton.jit
def _column_of(units, j, R: tl.constexpr):
    """The number of the `j`-th column of units of a row."""
    CHUNK: tl.constexpr = 512 // R.columns_a_unit
    in_chunk = units % CHUNK
    return units // CHUNK * 512 + in_chunk % 16 * 32 + in_chunk // 16 * R.columns_a_unit + j


@triton.jit
def _scale_at(units, R: tl.constexpr):
    """Of a unit's scale among those of its row."""
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
    neurons_ptr,  # (P, places) float32
    R: tl.constexpr,
    GATE: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
):
    """Grid (P, S). `act(gate) * up` of a pair's listed neurons; the S programs of a pair take turns of BN."""
    pair = tl.program_id(0)
    length = tl.load(length_ptr + pair)
    first = tl.program_id(1) * BN
    if first >= length:
        return
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    x_ptr += (pair // TOP_K).to(tl.int64) * WIDTH
    HELD: tl.constexpr = R.columns_a_unit
    UNITS: tl.constexpr = R.units
    steps = tl.arange(0, BU)[None, :]
    while first < length:
        places = first + tl.arange(0, BN)
        alive = places < length
        listed = tl.load(list_ptr + pair.to(tl.int64) * R.neurons + places, mask=alive, other=0)
        value = tl.load(value_ptr + pair.to(tl.int64) * R.neurons + places, mask=alive, other=0.0)
        if R.gated:
            row = (slot * R.expert_stride + R.up_first + listed.to(tl.int64) * R.row_stride)[:, None]
            total = tl.zeros((BN, BU), tl.float32)
            for begin in tl.static_range(0, UNITS, BU):
                at = begin + steps
                inside = alive[:, None] & (at < UNITS)
                units = signed(tl.load(units_ptr + row + R.header + at, mask=inside, other=0), R)
                part = tl.zeros((BN, BU), tl.float32)
                for j in tl.static_range(HELD):
                    x = tl.load(x_ptr + j * UNITS + at, mask=at < UNITS, other=0.0)
                    part += _columns(units, j, R) * x
                if R.header > 0:
                    part *= tl.load(scales_ptr + 2 * row + _scale_at(at, R), mask=inside, other=0.0).to(tl.float32)
                total += part
            up = tl.sum(total, 1)
            if R.up_bias_word >= 0:
                up += tl.load(biases_ptr + slot * R.expert_words + R.up_bias_word + listed, mask=alive, other=0.0)
            value *= limited_up(up, GATE)
        tl.store(neurons_ptr + pair.to(tl.int64) * R.places + places, value, mask=alive)
        first += tl.num_programs(1) * BN


@triton.jit
def _down_kernel(
    units_ptr,
    scales_ptr,
    biases_ptr,
    slots_ptr,  # (P,) int32
    list_ptr,  # (P, I) int32
    length_ptr,  # (P,) int32
    neurons_ptr,  # (P, places) float32
    out_ptr,  # (P, WIDTH) float32, in unit order; rows of absent pairs are not written
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
):
    """Grid (P, units / BU). The sum of a pair's listed rows of down."""
    pair = tl.program_id(0)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    if slot < 0:
        return
    at = tl.program_id(1) * BU + tl.arange(0, BU)
    HELD: tl.constexpr = R.columns_a_unit
    j = tl.arange(0, HELD)
    length = tl.load(length_ptr + pair)
    total = tl.zeros((BN, BU, HELD), tl.float32)
    first = 0
    while first < length:
        places = first + tl.arange(0, BN)
        alive = places < length
        listed = tl.load(list_ptr + pair.to(tl.int64) * R.neurons + places, mask=alive, other=0)
        value = tl.load(neurons_ptr + pair.to(tl.int64) * R.places + places, mask=alive, other=0.0)[:, None]
        row = (slot * R.expert_stride + R.down_first + listed.to(tl.int64) * R.row_stride)[:, None]
        units = signed(tl.load(units_ptr + row + R.header + at[None, :], mask=alive[:, None], other=0), R)
        if R.header > 0:
            value *= tl.load(scales_ptr + 2 * row + _scale_at(at, R)[None, :], mask=alive[:, None], other=0.0).to(tl.float32)
        total += _columns(units[:, :, None], j[None, None, :], R) * value[:, :, None]
        first += BN
    rows = tl.sum(total, 0)
    if R.down_bias_word >= 0:
        column = _column_of(at[:, None], j[None, :], R)
        rows += tl.load(biases_ptr + slot * R.expert_words + R.down_bias_word + column, mask=column < R.hidden, other=0.0)
    tl.store(out_ptr + pair.to(tl.int64) * WIDTH + j[None, :] * R.units + at[:, None], rows)


def up_packed(
    x_units: torch.Tensor, arena: Bytes, slots: torch.Tensor, lists: Lists, neurons: torch.Tensor, rows: PackedRows, gate: Gate
) -> None:
    """`neurons (P, places) float32`: the gated neurons of the listed ones, by place."""
    pairs = slots.numel()
    turns = max(1, min(triton.cdiv(rows.neurons, UP_NEURONS), triton.cdiv(PROGRAMS, pairs)))
    units = min(UP_UNITS, triton.next_power_of_2(rows.units))
    _up_kernel[pairs, turns](
        x_units, arena.units, arena.scales, arena.biases, slots, lists.neurons, lists.values, lists.lengths, neurons,
        R=rows, GATE=gate, TOP_K=slots.shape[1], WIDTH=rows.width, BN=UP_NEURONS, BU=units,
        num_warps=max(1, WARPS * units // UP_UNITS), **LAUNCH,
    )  # fmt: skip


def down_packed(arena: Bytes, slots: torch.Tensor, lists: Lists, neurons: torch.Tensor, out: torch.Tensor, rows: PackedRows) -> None:
    """`out (P, width) float32`, in unit order: each pair's sum over its listed rows of down, and the bias."""
    _down_kernel[slots.numel(), rows.units // DOWN_UNITS](
        arena.units, arena.scales, arena.biases, slots, lists.neurons, lists.lengths, neurons, out,
        R=rows, WIDTH=rows.width, BN=DOWN_NEURONS, BU=DOWN_UNITS, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip
