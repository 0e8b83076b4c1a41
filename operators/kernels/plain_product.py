"""Grouped matrix products over experts as checkpoints store them, `(E, rows, columns)`: the dense path of sparse experts, and its gate.

As in `packed_product` the weights are the left operand, so that few tokens do not leave an instruction's rows empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.availability import interpreted
from moegraft.operators.kernels.epilogue import Epilogue, Threshold, finish_tile
from moegraft.operators.kernels.launch import LAUNCH
from moegraft.operators.kernels.packed_layout import Gate
from moegraft.operators.kernels.routing import PairGroups
from moegraft.operators.kernels.units import dot


class PlainMatrix(NamedTuple):
    """One matrix of each expert in a tensor of three dimensions; a compile-time constant. Strides and offsets in elements."""

    rows: int  # of a product's tiles, padded to 32; "gate": 16 gate rows and 16 up rows in turn
    outputs: int
    columns: int
    expert_stride: int
    row_stride: int
    column_stride: int
    up_offset: int  # from a neuron's gate row to its up row; 0: there is but one
    expert_words: int  # biases of an expert
    bias_word: int  # -1: no biases
    up_bias_word: int
    bias_stride: int


def gate_up_matrix(gate_up: torch.Tensor, *, interleaved: bool, finish: Epilogue, bias: bool) -> PlainMatrix:
    """Of `gate_up (E, 2I, H)`, gate rows first or in turn with up rows: both ("gate"), or the gate alone ("act")."""
    _, both, hidden = gate_up.shape
    neurons = both // 2
    up_rows = 1 if interleaved else neurons
    return PlainMatrix(
        rows=triton.cdiv(neurons, 32) * (64 if finish == "gate" else 32),
        outputs=neurons,
        columns=hidden,
        expert_stride=gate_up.stride(0),
        row_stride=gate_up.stride(1) * (2 if interleaved else 1),
        column_stride=gate_up.stride(2),
        up_offset=up_rows * gate_up.stride(1) if finish == "gate" else 0,
        expert_words=both,
        bias_word=0 if bias else -1,
        up_bias_word=up_rows if bias else -1,
        bias_stride=2 if interleaved else 1,
    )


def rows_matrix(weight: torch.Tensor, *, transposed: bool = False, bias: bool = False) -> PlainMatrix:
    """Of `weight (E, rows, columns)`, or `transposed` `(E, columns, rows)`."""
    stride = (weight.stride(0), weight.stride(2), weight.stride(1)) if transposed else weight.stride()
    rows, columns = (weight.shape[2], weight.shape[1]) if transposed else (weight.shape[1], weight.shape[2])
    return PlainMatrix(
        rows=triton.cdiv(rows, 32) * 32,
        outputs=rows,
        columns=columns,
        expert_stride=stride[0],
        row_stride=stride[1],
        column_stride=stride[2],
        up_offset=0,
        expert_words=rows,
        bias_word=0 if bias else -1,
        up_bias_word=-1,
        bias_stride=1,
    )


@triton.jit
def _tile_product(w_ptr, x_ptr, first_row, x_rows, present, M: tl.constexpr, FINISH: tl.constexpr, WIDTH: tl.constexpr,
                  ROWS: tl.constexpr, BM: tl.constexpr, STEP: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """`W[rows of the tile] @ x[x_rows].T`: (ROWS, BM) float32."""
    TAIL: tl.constexpr = M.columns % STEP != 0
    rows = first_row + tl.arange(0, ROWS)
    if FINISH == "gate":
        outputs = rows // 32 * 16 + rows % 16
        w_rows = outputs * M.row_stride + (rows % 32 // 16) * M.up_offset
    else:
        outputs = rows
        w_rows = rows * M.row_stride
    MASKED: tl.constexpr = TAIL or M.rows % ROWS != 0 or M.outputs % 32 != 0
    columns = tl.arange(0, STEP)
    w_ptrs = w_ptr + w_rows[:, None] + columns[None, :] * M.column_stride
    x_ptrs = x_ptr + x_rows.to(tl.int64)[None, :] * WIDTH + columns[:, None]
    total = tl.zeros((ROWS, BM), tl.float32)
    for first in range(0, M.columns, STEP):
        inside = first + columns < M.columns
        if MASKED:
            w = tl.load(w_ptrs + first * M.column_stride, mask=(outputs < M.outputs)[:, None] & inside[None, :], other=0.0)
        else:
            w = tl.load(w_ptrs + first * M.column_stride)
        mask = present[None, :]
        if TAIL:
            mask = mask & inside[:, None]
        x = tl.load(x_ptrs + first, mask=mask, other=0.0)
        total = dot(w, x, total, UPCAST)
    return total


@triton.jit
def _plain_product_kernel(
    x_ptr,  # (tokens or pairs, X_WIDTH), of the dtype of the weights
    w_ptr,  # (E, ...) floating
    biases_ptr,  # (E, expert_words) float32; anything where there are none
    pairs_ptr,  # of PairGroups
    block_ids_ptr,
    count_ptr,
    threshold_ptr,  # of Threshold, or None
    counts_ptr,
    out_ptr,  # (pairs, OUT_WIDTH) floating
    pair_count,
    M: tl.constexpr,
    GATE: tl.constexpr,
    FINISH: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,  # pairs that share a row of x
    X_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    STEP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (blocks, rows / ROWS): blocks of one expert run side by side, so its weights leave memory once."""
    block = tl.program_id(0)
    if block >= tl.load(count_ptr):
        return
    pair = tl.load(pairs_ptr + block * BM + tl.arange(0, BM))
    expert = tl.load(block_ids_ptr + block).to(tl.int64)
    present = pair < pair_count
    x_rows = tl.where(present, pair // PAIRS_A_ROW, 0)
    first_row = tl.program_id(1) * ROWS
    w_ptr += expert * M.expert_stride
    total = _tile_product(w_ptr, x_ptr, first_row, x_rows, present, M, FINISH, X_WIDTH, ROWS, BM, STEP, UPCAST)
    biases_ptr += expert * M.expert_words
    value, lanes = finish_tile(total, first_row, biases_ptr, present, threshold_ptr, counts_ptr, M, GATE, FINISH, GROUP, ROWS, BM)
    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * OUT_WIDTH + lanes[:, None]
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=present[None, :] & (lanes < OUT_WIDTH)[:, None])


def _tile(block_pairs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """A program's rows, columns a step, warps and stages, by the registers they leave: operators/kernels/compile_check.py. Not timed."""
    if dtype == torch.float32:  # three passes over split operands
        return 64, 32, 4, 3
    return 128, 64, 8 if block_pairs >= 64 else 4, 4


def plain_product(
    x: torch.Tensor,
    weights: torch.Tensor,
    matrix: PlainMatrix,
    out: torch.Tensor,
    groups: PairGroups,
    *,
    biases: torch.Tensor | None = None,
    gate: Gate | None = None,
    finish: Epilogue = "rows",
    pairs_a_row: int = 1,
    threshold: Threshold | None = None,
) -> None:
    """`out[pair] = finish(W[expert of pair] @ x[pair // pairs_a_row] + bias)`, accumulated in float32.

    Args:
        x: (tokens or pairs, width), contiguous, of the dtype of the weights; the first `matrix.columns` of each row are read.
        weights: (E, ...), as `matrix` describes them.
        out: (pairs, width), any floating dtype; columns up to its width are written.
        biases: (E, ...) float32, contiguous, where `matrix` has biases.
        threshold: with "gate" and "act": what is below it becomes zero.
    """
    rows, step, warps, stages = _tile(groups.block_pairs, x.dtype)
    _plain_product_kernel[groups.max_blocks, triton.cdiv(matrix.rows, rows)](
        x, weights, weights if biases is None else biases, groups.pairs, groups.block_ids, groups.count,
        threshold and threshold.value, threshold and threshold.counts, out, groups.pair_count,
        M=matrix, GATE=gate, FINISH=finish, GROUP=threshold.group if threshold else 1, PAIRS_A_ROW=pairs_a_row,
        X_WIDTH=x.shape[1], OUT_WIDTH=out.shape[1], ROWS=rows, BM=groups.block_pairs, STEP=step, UPCAST=interpreted(),
        num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
