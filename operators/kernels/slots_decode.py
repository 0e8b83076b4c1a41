"""Experts in slots for a few tokens: each pair of a token and an expert streams its weights once, as a CPU core would.

Two launches, nothing is sorted, no atomics: the same inputs give the same bits. Threads run along the rows of a block, so a warp reads 512
consecutive bytes, and the activations come out of the L1 cache. Tile sizes keep a tile's columns fewer than the threads: then Triton gives
activations the layout of the weights, and the loop has no barrier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.activations import acted, limited_up
from moegraft.operators.kernels.finish import Finish
from moegraft.operators.kernels.gates import Gate
from moegraft.operators.kernels.launch import LAUNCH, Bytes
from moegraft.operators.kernels.layout import ExpertMatrices, PackedMatrix
from moegraft.operators.kernels.units import column, load, scale_at, signed, unit_at

WARPS = 4
UNITS = 64  # a tile; below 32 * WARPS, see above
DOWN_ROWS = 16  # half a block: H / 16 programs a token, so that one token keeps 128 multiprocessors reading


@triton.jit
def row_products(units_ptr, scales_ptr, x_ptr, first_row, weight, M: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """`weight * W[first_row : first_row + ROWS] * x` before the sum over columns: (UNITS, ROWS) float32."""
    rows = first_row + tl.arange(0, ROWS)[None, :]
    HELD: tl.constexpr = M.columns_a_unit
    COUNT: tl.constexpr = (M.columns + 31) // 32 * 32 // HELD
    MASKED: tl.constexpr = COUNT % UNITS != 0 or M.columns % 32 != 0
    steps = tl.arange(0, UNITS)[:, None]
    total = tl.zeros((UNITS, ROWS), tl.float32)
    UNROLL: tl.constexpr = 2 if MASKED else 4  # masks take registers
    for first in tl.range(0, COUNT, UNITS, loop_unroll_factor=UNROLL):
        at = first + steps
        units = signed(load(units_ptr + unit_at(rows, at, M), at < COUNT, MASKED), M)
        part = tl.zeros((UNITS, ROWS), tl.float32)
        for j in tl.static_range(HELD):
            columns = at * HELD + j
            part += column(units, j, M) * load(x_ptr + columns, columns < M.columns, MASKED).to(tl.float32)
        if M.header > 0:
            scales = load(scales_ptr + scale_at(rows, at // M.units_a_group, M), at < COUNT, MASKED)
            part *= scales.to(tl.float32)
        total += part * weight
    return total


@triton.jit
def _gate_up_kernel(
    x_ptr,  # (T, H) floating
    units_ptr,  # (S, expert_bytes), as units
    scales_ptr,  # the same bytes as float16
    biases_ptr,  # the same bytes as float32
    slots_ptr,  # (T, K) int32, -1: not here
    neurons_ptr,  # (T * K, NEURONS) float32
    M: tl.constexpr,
    GATE: tl.constexpr,
    FINISH: tl.constexpr,  # "gate": 16 gate rows and 16 up rows become neurons; "act": rows become activations
    NEURONS: tl.constexpr,
    TOP_K: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Grid (T * K, blocks of 32 rows). The neurons of a pair; nothing is written for one that is not here."""
    pair = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    if slot < 0:
        return
    start = slot * M.expert_stride + M.first
    x_ptr += (pair // TOP_K).to(tl.int64) * M.columns
    sums = tl.sum(row_products(units_ptr + start, scales_ptr + 2 * start, x_ptr, block * 32, 1.0, M, 32, UNITS), 0)
    biases_ptr += slot * M.expert_words
    if FINISH == "gate":
        lanes = block * 16 + tl.arange(0, 16)
        gate, up = tl.split(tl.trans(tl.reshape(sums, (2, 16))))
        if M.bias_word >= 0:
            gate += tl.load(biases_ptr + M.bias_word + lanes * M.bias_stride, mask=lanes < M.outputs, other=0.0)
            up += tl.load(biases_ptr + M.up_bias_word + lanes * M.bias_stride, mask=lanes < M.outputs, other=0.0)
        value = acted(gate, GATE) * limited_up(up, GATE)
    else:
        lanes = block * 32 + tl.arange(0, 32)
        if M.bias_word >= 0:
            sums += tl.load(biases_ptr + M.bias_word + lanes * M.bias_stride, mask=lanes < M.outputs, other=0.0)
        value = acted(sums, GATE)
    # a gate need not map zero to zero, and neurons beyond the last must not reach the output
    value = tl.where(lanes < M.outputs, value, 0.0)
    tl.store(neurons_ptr + pair.to(tl.int64) * NEURONS + lanes, value, mask=lanes < NEURONS)


@triton.jit
def _down_kernel(
    neurons_ptr,  # (T * K, columns) float32
    units_ptr,
    scales_ptr,
    biases_ptr,
    slots_ptr,  # (T, K) int32
    weights_ptr,  # (T, K) floating
    out_ptr,  # (T, H) float32
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Grid (T, H / ROWS). A token's experts one after the other, so the sum has one order."""
    token = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    total = tl.zeros((UNITS, ROWS), tl.float32)
    bias = tl.zeros((ROWS,), tl.float32)
    for k in range(0, TOP_K):
        pair = token * TOP_K + k
        slot = tl.load(slots_ptr + pair).to(tl.int64)
        if slot >= 0:
            weight = tl.load(weights_ptr + pair).to(tl.float32)
            start = slot * M.expert_stride + M.first
            x_ptr = neurons_ptr + pair.to(tl.int64) * M.columns
            total += row_products(units_ptr + start, scales_ptr + 2 * start, x_ptr, first_row, weight, M, ROWS, UNITS)
            if M.bias_word >= 0:
                bias += weight * tl.load(biases_ptr + slot * M.expert_words + M.bias_word + first_row + tl.arange(0, ROWS))
    lanes = first_row + tl.arange(0, ROWS)
    tl.store(out_ptr + token.to(tl.int64) * M.outputs + lanes, tl.sum(total, 0) + bias, mask=lanes < M.outputs)


def rows_by_pair(
    x: torch.Tensor, packed: Bytes, matrix: PackedMatrix, ids: torch.Tensor, out: torch.Tensor, gate: Gate, finish: Finish
) -> None:
    """`out (T * K, width) float32 = finish(W[id] @ x[token] + bias)` for each pair whose id is not -1: "gate" or "act"."""
    tokens, top_k = ids.shape
    _gate_up_kernel[tokens * top_k, matrix.rows // 32](
        x, packed.units, packed.scales, packed.biases, ids, out,
        M=matrix, GATE=gate, FINISH=finish, NEURONS=out.shape[1], TOP_K=top_k, UNITS=UNITS, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip


def run_decode(
    x: torch.Tensor, arena: Bytes, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, matrices: ExpertMatrices, gate: Gate
) -> None:
    """Writes the weighted sum of each token's present experts to `out`; arguments as in `slots.SlotExperts`."""
    tokens, top_k = slots.shape
    down = matrices.down
    neurons = torch.empty(tokens * top_k, matrices.neurons, dtype=torch.float32, device=x.device)
    rows_by_pair(x, arena, matrices.gate_up, slots, neurons, gate, "gate" if gate.gated else "act")
    _down_kernel[tokens, down.rows // DOWN_ROWS](
        neurons, arena.units, arena.scales, arena.biases, slots, weights, out,
        M=down, TOP_K=top_k, ROWS=DOWN_ROWS, UNITS=UNITS, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip
