"""The CPU kernel's packed layouts (cpu_backend/csrc/experts/block_layout.h) as the GPU kernels address them.

Both devices compute from the same bytes. In the *dense* layout a matrix is a row of blocks of 32 output rows. A block consists of groups
of 32 input columns, and a group holds the 32 rows of one *unit* side by side: a unit is a 4-byte word with 1, 2, 4 or 8 consecutive
columns of one row (float16: a half with one column). So consecutive threads read consecutive bytes. Of formats with scales, groups form
column blocks of one (int8, int4) to eight groups, which begin with the scales of the 32 rows, field by field; the upper bits of codes whose
bits are no power of two follow a group's units. Where codes are indexes into a grid, a group has the words of the file instead, from which
kernels expand units of 8 columns.

In the *sparse* layout the gates (of ungated experts the ups) are stored in such blocks, but up and down neuron by neuron, each neuron a row
of H columns, so that those of inactive neurons need not be read. A row is its scales, for int8 and int4, and then chunks of 512 columns:
unit i of lane l of a chunk holds consecutive columns of the lane's group of 32.

The descriptions here are compile-time constants of the kernels. Offsets and strides are in units unless they are named otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts
from moegraft.operators.weight_formats import FORMATS, GpuFormat
from moegraft.operators.weights import WeightTypes

BLOCK_ROWS = 32
GROUP_COLUMNS = 32
LINE_BYTES = 64  # which blocks of rows are whole multiples of
CHUNK_COLUMNS = 512
LANES = 16  # of a chunk
MOST_LANES = 2048  # neurons that a program looks at in one go: 16 a thread


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def gpu_format(weight_type: str) -> GpuFormat:
    """Return how kernels read a weight type.

    Raises:
        ValueError: an unknown one.
    """
    if weight_type not in FORMATS:
        raise ValueError(f"no GPU kernel computes with weight type {weight_type!r}; they compute with {', '.join(FORMATS)}")
    return FORMATS[weight_type].gpu


class Gate(NamedTuple):
    """`min(act(min(gate, gate_limit); alpha), act_limit) * (clamp(up, +-up_limit) + up_offset)`; ungated `act(up; alpha)`."""

    gated: bool
    activation: str
    alpha: float
    gate_limit: float
    act_limit: float
    up_limit: float
    up_offset: float


def gate_of(spec: GateSpec, *, gated: bool = True) -> Gate:
    return Gate(gated, spec.activation, spec.alpha, spec.gate_limit, spec.act_limit, spec.up_limit, spec.up_offset)


@cache
def decoder_of(weight_type: str) -> Any:
    """Return the `Decoder` of a weight type; None where Triton is not installed, and layouts are only measured."""
    if find_spec("triton") is None:
        return None
    from moegraft.operators.kernels.units import DECODERS

    return DECODERS[weight_type]


class PackedMatrix(NamedTuple):
    """One matrix of an expert in blocks."""

    weights: str
    decoder: Any  # as by `decoder_of`
    rows: int  # padded to 32; a gated gate_up matrix alternates 16 gate rows and 16 up rows
    outputs: int  # true outputs: neurons or hidden size
    columns: int  # true inputs
    columns_a_unit: int
    step_columns: int  # whole column blocks
    units_a_group: int
    units_a_span: int  # that a thread of the decode kernels reads together, with one scale
    spans_a_scale: int
    scales_a_block: int  # of a row of a column block
    groups: int  # of a column block
    group_stride: int
    header: int  # scales before a column block's units
    high_bits: int
    minima: bool
    expanded: bool  # codes are no bits of their own: see `GpuFormat.group_words`
    column_stride: int  # of column blocks
    block_stride: int
    expert_stride: int
    first: int
    expert_words: int  # 4-byte words between two experts
    bias_word: int  # word of the first bias within an expert, -1 without
    up_bias_word: int

    @property
    def cache_key(self) -> str:
        """Triton's key of compiled kernels: the decoder's functions are arguments, whose source its own key does not cover."""
        return f"{self} {self.decoder.cache_key}"


def packed_matrix(
    weight_type: str,
    rows: int,
    columns: int,
    *,
    outputs: int,
    first_byte: int = 0,
    expert_bytes: int = 0,
    biases: tuple[int, int] = (-1, -1),
) -> PackedMatrix:
    """Describe a matrix of `rows` (a multiple of 32) whose bytes begin `first_byte` into an expert; `biases` are byte offsets."""
    assert rows % BLOCK_ROWS == 0, f"{rows} rows are not whole blocks"
    read, form = gpu_format(weight_type), FORMATS[weight_type]
    size = read.unit_dtype.itemsize
    units_a_group = GROUP_COLUMNS // read.unit_columns
    groups = max(1, form.block_weights // GROUP_COLUMNS)
    group_words = units_a_group + read.high_bits if read.group_words is None else read.group_words
    group_stride = group_words * BLOCK_ROWS
    column_stride = groups * group_stride if not form.scaled else form.block_bytes * BLOCK_ROWS // size
    column_blocks = round_up(columns, GROUP_COLUMNS * groups) // (GROUP_COLUMNS * groups)
    assert read.step_columns % (GROUP_COLUMNS * groups) == 0, f"steps of {weight_type} are no whole blocks"
    units_a_span = units_a_group // read.scales if form.stored else 1
    return PackedMatrix(
        weights=weight_type,
        decoder=decoder_of(weight_type),
        rows=rows,
        outputs=outputs,
        columns=columns,
        columns_a_unit=read.unit_columns,
        step_columns=read.step_columns,
        units_a_group=units_a_group,
        units_a_span=units_a_span,
        spans_a_scale=units_a_group // read.scales // units_a_span,
        scales_a_block=groups * read.scales,
        groups=groups,
        group_stride=group_stride,
        header=column_stride - groups * group_stride,
        high_bits=read.high_bits,
        minima=read.minima,
        expanded=read.group_words is not None,
        column_stride=column_stride,
        block_stride=round_up(column_stride * column_blocks, LINE_BYTES // size),
        expert_stride=expert_bytes // size,
        first=first_byte // size,
        expert_words=expert_bytes // 4,
        bias_word=biases[0] // 4 if biases[0] >= 0 else -1,
        up_bias_word=biases[1] // 4 if biases[1] >= 0 else -1,
    )


def block_bytes(weight_type: str, columns: int) -> int:
    """Return the bytes of one block of 32 rows."""
    matrix = packed_matrix(weight_type, BLOCK_ROWS, columns, outputs=BLOCK_ROWS)
    return matrix.block_stride * gpu_format(weight_type).unit_dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The two matrices of an expert in the dense layout."""

    gate_up: PackedMatrix  # ungated: up alone
    down: PackedMatrix
    neurons: int  # intermediate size, padded to 32
    expert_bytes: int


def expert_matrices(shape: ExpertsShape, weight_type: str) -> ExpertMatrices:
    """Return where the matrices and biases of each expert are in the dense layout.

    Args:
        weight_type: one type, or that of gate and up, and that of down, as in `q4_k+q6_k`.

    Raises:
        ValueError: an unknown weight type.
    """
    types = WeightTypes.parse(weight_type)
    gate_up, down = types.gate_up, types.down
    neurons = round_up(shape.intermediate, BLOCK_ROWS)
    up_rows = neurons * (2 if shape.gated else 1)
    down_rows = round_up(shape.hidden, BLOCK_ROWS)
    down_at = block_bytes(gate_up, shape.hidden) * (up_rows // BLOCK_ROWS)
    biases = _Biases.after(down_at + block_bytes(down, shape.intermediate) * (down_rows // BLOCK_ROWS), shape)
    assert biases.end == PackedExperts.expert_bytes_for(shape, weight_type), "this layout is not the CPU kernel's"
    return ExpertMatrices(
        gate_up=packed_matrix(
            gate_up,
            up_rows,
            shape.hidden,
            outputs=shape.intermediate,
            expert_bytes=biases.end,
            biases=(biases.gate, biases.up) if shape.gated else (biases.up, -1),
        ),
        # Columns of neurons beyond the intermediate size, which the first matrix makes zeros, are zeros too.
        down=packed_matrix(
            down,
            down_rows,
            neurons,
            outputs=shape.hidden,
            first_byte=down_at,
            expert_bytes=biases.end,
            biases=(biases.down, -1),
        ),
        neurons=neurons,
        expert_bytes=biases.end,
    )


class _Biases(NamedTuple):
    """Byte offsets of float32 biases behind an expert's matrices, -1 without; and of the expert's end."""

    gate: int
    up: int
    down: int
    end: int

    @classmethod
    def after(cls, matrices_end: int, shape: ExpertsShape) -> _Biases:
        if not shape.bias:
            return cls(-1, -1, -1, matrices_end)
        neurons_bytes = 4 * round_up(shape.intermediate, BLOCK_ROWS)
        up = matrices_end + (neurons_bytes if shape.gated else 0)
        down = up + neurons_bytes
        return cls(matrices_end if shape.gated else -1, up, down, down + 4 * round_up(shape.hidden, BLOCK_ROWS))


class PackedRows(NamedTuple):
    """The neurons of each expert as rows of units. For tensor cores, a unit is an element: one number, or a byte with two of int4.

    Offsets and strides are in units.
    """

    weights: str
    decoder: Any  # as by `decoder_of`
    columns_a_unit: int
    together: int  # units of one lane that are side by side, and share a scale
    hidden: int
    neurons: int
    padded_neurons: int  # a power of two
    lanes: int  # neurons that a program looks at in one go
    gated: bool
    header: int  # scales before a row's units, for int8 and int4
    units: int  # of a row
    row_stride: int
    expert_stride: int
    up_first: int
    down_first: int
    expert_words: int
    up_bias_word: int
    down_bias_word: int

    @property
    def width(self) -> int:
        """Values of a vector in unit order."""
        return self.units * self.columns_a_unit

    @property
    def cache_key(self) -> str:
        """As of a `PackedMatrix`."""
        return f"{self} {self.decoder.cache_key}"


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """Where the parts of an expert are in the sparse layout.

    Attributes:
        gates: the blocks that gates (of ungated experts ups) are computed from.
        elements: `rows` by elements, for tensor cores.
    """

    weight_type: str
    gates: PackedMatrix
    rows: PackedRows
    elements: PackedRows
    gate: Gate
    expert_bytes: int


def sparse_layout(shape: ExpertsShape, gate_spec: GateSpec, weight_type: str) -> SparseLayout:
    """Describe the sparse layout."""
    read = gpu_format(weight_type)
    size, held = read.unit_dtype.itemsize, read.unit_columns
    neurons = round_up(shape.intermediate, BLOCK_ROWS)
    chunks = round_up(shape.hidden, CHUNK_COLUMNS) // CHUNK_COLUMNS
    header_bytes = round_up(chunks * LANES * 2, 64) if FORMATS[weight_type].scaled else 0
    units = chunks * CHUNK_COLUMNS // held
    row_bytes = header_bytes + units * size
    up_at = block_bytes(weight_type, shape.hidden) * (neurons // BLOCK_ROWS)
    down_at = up_at + (row_bytes * neurons if shape.gated else 0)
    biases = _Biases.after(down_at + row_bytes * neurons, shape)
    expected = PackedExperts.expert_bytes_for(shape, weight_type, sparse=True)
    assert biases.end == expected, "this layout is not the CPU kernel's"
    first_bias = biases.gate if shape.gated else biases.up
    rows = PackedRows(
        weights=weight_type,
        decoder=decoder_of(weight_type),
        columns_a_unit=held,
        together=1,
        hidden=shape.hidden,
        neurons=shape.intermediate,
        padded_neurons=next_power_of_two(shape.intermediate),
        lanes=min(MOST_LANES, next_power_of_two(shape.intermediate)),
        gated=shape.gated,
        header=header_bytes // size,
        units=units,
        row_stride=row_bytes // size,
        expert_stride=biases.end // size,
        up_first=up_at // size,
        down_first=down_at // size,
        expert_words=biases.end // 4,
        up_bias_word=biases.up // 4 if shape.bias else -1,
        down_bias_word=biases.down // 4 if shape.bias else -1,
    )
    return SparseLayout(
        weight_type=weight_type,
        gates=packed_matrix(
            weight_type, neurons, shape.hidden, outputs=shape.intermediate, expert_bytes=biases.end, biases=(first_bias, -1)
        ),
        rows=rows,
        elements=_by_elements(rows, read),
        gate=gate_of(gate_spec, gated=shape.gated),
        expert_bytes=biases.end,
    )


def _by_elements(rows: PackedRows, read: GpuFormat) -> PackedRows:
    together = rows.columns_a_unit // read.element_columns
    assert rows.expert_stride * together < 1 << 31, "offsets within an expert have 32 bits"
    counted = ("header", "units", "row_stride", "expert_stride", "up_first", "down_first")
    in_elements = {name: getattr(rows, name) * together for name in counted}
    return rows._replace(columns_a_unit=read.element_columns, together=together, **in_elements)


def in_unit_order(x: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """(T, columns) -> (T, width) of the same dtype: first what each unit of a row holds first, then what each holds second, and so on.

    A thread then reads as many bytes of x as of units, and the loop over a row needs no barrier.
    """
    held, together = rows.columns_a_unit, rows.together
    padded = F.pad(x, (0, rows.width - x.shape[1]))
    by_lane = padded.view(len(x), -1, LANES, GROUP_COLUMNS // (held * together), held, together)
    return by_lane.permute(0, 4, 1, 3, 2, 5).reshape(len(x), -1)
