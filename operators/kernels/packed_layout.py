"""The CPU kernel's dense block layout (cpu_backend/csrc/experts/block_layout.h) as the GPU kernels address it.

A matrix is a row of blocks of 32 output rows. Within a block lie groups of 32 input columns, and in a group the 32 rows of one *unit* side
by side: a unit is a 4-byte word with 1, 2, 4 or 8 consecutive columns of one row (float16: a half with one column). int8 and int4 groups
begin with a line of 32 float16 scales. So consecutive threads read consecutive bytes, and the bytes that the CPU computes from need no
second form on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts

BLOCK_ROWS = 32
GROUP_COLUMNS = 32
COLUMNS_A_UNIT = {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4, "int4": 8}
# What a tensor of bytes is viewed as, so that one element is one unit.
UNIT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.int32, "int8": torch.int32, "int4": torch.int32}
# Input columns that a step of a matrix product takes: 32 or 64 units, enough for a tensor-core instruction a column of the unit.
STEP_COLUMNS = {"float32": 32, "float16": 64, "bfloat16": 128, "int8": 128, "int4": 256}


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def unit_bytes(weight_type: str) -> int:
    return UNIT_DTYPES[weight_type].itemsize


class PackedMatrix(NamedTuple):
    """One matrix of an expert, a compile-time constant of the kernels; strides and offsets in units unless named otherwise."""

    weights: str
    rows: int  # padded to 32; a gated gate_up matrix has 16 gate rows and 16 up rows in turn
    outputs: int  # true outputs: neurons or hidden size
    columns: int  # true inputs
    columns_a_unit: int
    step_columns: int
    units_a_group: int
    group_stride: int
    header: int  # scales before a group's units
    block_stride: int
    expert_stride: int
    first: int
    expert_words: int  # 4-byte words between two experts
    bias_word: int  # word of the first bias within an expert, -1 without
    up_bias_word: int
    bias_stride: int = 1


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
    """The description of a matrix of `rows` (a multiple of 32) whose bytes begin `first_byte` into an expert; `biases` are byte offsets."""
    assert rows % BLOCK_ROWS == 0, f"{rows} rows are no whole blocks"
    size = unit_bytes(weight_type)
    units_a_group = GROUP_COLUMNS // COLUMNS_A_UNIT[weight_type]
    header = BLOCK_ROWS * 2 // size if weight_type in ("int8", "int4") else 0
    group_stride = header + units_a_group * BLOCK_ROWS
    return PackedMatrix(
        weights=weight_type,
        rows=rows,
        outputs=outputs,
        columns=columns,
        columns_a_unit=COLUMNS_A_UNIT[weight_type],
        step_columns=STEP_COLUMNS[weight_type],
        units_a_group=units_a_group,
        group_stride=group_stride,
        header=header,
        block_stride=group_stride * (round_up(columns, GROUP_COLUMNS) // GROUP_COLUMNS),
        expert_stride=expert_bytes // size,
        first=first_byte // size,
        expert_words=expert_bytes // 4,
        bias_word=biases[0] // 4 if biases[0] >= 0 else -1,
        up_bias_word=biases[1] // 4 if biases[1] >= 0 else -1,
    )


def block_bytes(weight_type: str, columns: int) -> int:
    """Bytes of one block of 32 rows."""
    matrix = packed_matrix(weight_type, BLOCK_ROWS, columns, outputs=BLOCK_ROWS)
    return matrix.block_stride * unit_bytes(weight_type)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The two matrices of an expert in its `expert_bytes`."""

    gate_up: PackedMatrix  # ungated: up alone
    down: PackedMatrix
    gated: bool
    neurons: int  # intermediate size, padded to 32
    expert_bytes: int


def expert_matrices(shape: ExpertsShape, weight_type: str) -> ExpertMatrices:
    """Where the matrices and biases of each expert lie.

    Raises:
        ValueError: an unknown weight type.
    """
    if weight_type not in COLUMNS_A_UNIT:
        raise ValueError(f"unknown weight type {weight_type!r}; known are {', '.join(COLUMNS_A_UNIT)}")
    neurons = round_up(shape.intermediate, BLOCK_ROWS)
    up_rows = neurons * (2 if shape.gated else 1)
    down_rows = round_up(shape.hidden, BLOCK_ROWS)
    down_at = block_bytes(weight_type, shape.hidden) * (up_rows // BLOCK_ROWS)
    gate_bias_at = down_at + block_bytes(weight_type, shape.intermediate) * (down_rows // BLOCK_ROWS)
    up_bias_at = gate_bias_at + (4 * neurons if shape.bias and shape.gated else 0)
    down_bias_at = up_bias_at + (4 * neurons if shape.bias else 0)
    expert_bytes = down_bias_at + (4 * down_rows if shape.bias else 0)
    assert expert_bytes == PackedExperts.expert_bytes_for(shape, weight_type), "this layout is not the CPU kernel's"
    none = (-1, -1)
    return ExpertMatrices(
        gate_up=packed_matrix(
            weight_type,
            up_rows,
            shape.hidden,
            outputs=shape.intermediate,
            expert_bytes=expert_bytes,
            biases=none if not shape.bias else (gate_bias_at, up_bias_at) if shape.gated else (up_bias_at, -1),
        ),
        # Of the neurons beyond the intermediate size, which the first matrix makes zeros, the columns are zeros too.
        down=packed_matrix(
            weight_type,
            down_rows,
            neurons,
            outputs=shape.hidden,
            first_byte=down_at,
            expert_bytes=expert_bytes,
            biases=(down_bias_at, -1) if shape.bias else none,
        ),
        gated=shape.gated,
        neurons=neurons,
        expert_bytes=expert_bytes,
    )


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
