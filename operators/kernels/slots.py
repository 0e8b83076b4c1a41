"""The experts of a layer as far as they lie in slots of GPU memory, computed from the CPU kernel's own packed bytes.

Experts in slots for a few tokens: each pair of a token and an expert streams its weights once, as a CPU core would.

Two launches, nothing is sorted, no atomics: the same inputs give the same bits. Threads run along the rows of a block, so a warp reads 512
consecutive bytes, and the activations come out of the L1 cache. Tile sizes keep a tile's columns fewer than the threads: then Triton gives
activations the layout of the weights, and the loop has no barrier.

Experts in slots for many tokens: pairs put together by slot, one grouped product for each of the two matrices, one sum.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.epilogue import Epilogue, acted, combine, limited_up
from moegraft.operators.kernels.launch import LAUNCH, Bytes
from moegraft.operators.kernels.packed_layout import ExpertMatrices, Gate, PackedMatrix, expert_matrices, gate_of, round_up
from moegraft.operators.kernels.packed_product import grouped_columns, packed_product
from moegraft.operators.kernels.routing import PairGroups, group_pairs, pairs_a_block
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
    x: torch.Tensor, packed: Bytes, matrix: PackedMatrix, ids: torch.Tensor, out: torch.Tensor, gate: Gate, finish: Epilogue
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


def run_grouped(
    x: torch.Tensor,
    arena: Bytes,
    num_slots: int,
    slots: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    matrices: ExpertMatrices,
    gate: Gate,
) -> None:
    """Writes the weighted sum of each token's present experts to `out`; arguments as in `slots.SlotExperts`."""
    tokens, top_k = slots.shape
    pair_count = tokens * top_k
    gate_up, down = matrices.gate_up, matrices.down
    groups = PairGroups.allocate(pair_count, num_slots, pairs_a_block(pair_count, num_slots, x.dtype), x.device)
    group_pairs(slots, num_slots, groups)
    neurons = torch.empty(pair_count, round_up(matrices.neurons, down.step_columns), dtype=x.dtype, device=x.device)
    packed_product(
        grouped_columns(x, gate_up),
        arena,
        gate_up,
        neurons,
        groups=groups,
        gate=gate,
        finish="gate" if gate.gated else "act",
        pairs_a_row=top_k,
        following=down,
    )
    rows = torch.empty(pair_count, down.outputs, dtype=torch.float32, device=x.device)
    packed_product(neurons, arena, down, rows, groups=groups)
    combine(rows, slots, weights, out)


# Up to here every pair reads its expert's weights itself; an estimate, no GPU has measured it.
DECODE_TOKENS = 4
# Tokens computed in one go: bounds the scratch memory, of which the rows of pairs, (T * K, H) float32, are the most.
MOST_TOKENS = 2048


class SlotExperts:
    """Computes experts out of an arena of slots; holds no weights itself.

    Args:
        shape: sizes of the experts; `num_experts` is of no matter.
        weight_type: the type the slots' bytes were packed to by `PackedExperts`, in its dense layout.
    """

    def __init__(self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str) -> None:
        self.shape = shape
        self.weight_type = weight_type
        self.gate = gate_of(gate_spec, gated=shape.gated)
        self.matrices = expert_matrices(shape, weight_type)

    def forward(
        self,
        hidden_states: torch.Tensor,
        arena: torch.Tensor,
        slots: torch.Tensor,
        top_k_weights: torch.Tensor,
        out: torch.Tensor,
        path: Literal["decode", "grouped"] | None = None,
    ) -> None:
        """Queues the work on the current stream; waits for nothing, and can be captured in a CUDA graph.

        Args:
            hidden_states: (T, H) float32, float16 or bfloat16.
            arena: (S, expert_bytes) uint8; what lies in slots that no id names is not read.
            slots: (T, K) int32, the slot of each chosen expert, -1 for one that is not here. A slot beyond S is not checked.
            top_k_weights: (T, K) floating.
            out: (T, H) float32, written in full; a token with no expert here gets zeros.
            path: by default `decode` for few tokens, where each pair streams its expert, else `grouped`, on tensor cores.

        Both paths accumulate in float32; `grouped` rounds unpacked weights and the neurons between the matrices to the dtype of
        hidden_states. Equal inputs give equal bits.

        Raises:
            ValueError: a shape, dtype or layout in memory other than these.
        """
        check_call(self.shape.hidden, self.matrices.expert_bytes, hidden_states, arena, slots, top_k_weights, out)
        packed = Bytes.of(arena, self.weight_type)
        tokens, top_k = slots.shape
        if top_k == 0:
            out.zero_()
            return
        if (path or ("decode" if tokens <= DECODE_TOKENS else "grouped")) == "decode":
            if tokens:
                run_decode(hidden_states, packed, slots, top_k_weights, out, self.matrices, self.gate)
            return
        for first in range(0, tokens, MOST_TOKENS):
            part = slice(first, first + MOST_TOKENS)
            run_grouped(hidden_states[part], packed, len(arena), slots[part], top_k_weights[part], out[part], self.matrices, self.gate)


def check_call(
    hidden: int,
    expert_bytes: int,
    hidden_states: torch.Tensor,
    arena: torch.Tensor,
    slots: torch.Tensor,
    top_k_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """
    Raises:
        ValueError: what `SlotExperts.forward` does not take.
    """
    tokens = hidden_states.shape[0]
    if hidden_states.shape != (tokens, hidden) or out.shape != hidden_states.shape:
        raise ValueError(f"hidden_states {tuple(hidden_states.shape)} and out {tuple(out.shape)} must both be (T, {hidden})")
    if slots.dim() != 2 or slots.shape[0] != tokens or slots.shape != top_k_weights.shape:
        raise ValueError(f"slots {tuple(slots.shape)} and top_k_weights {tuple(top_k_weights.shape)} must both be ({tokens}, K)")
    if hidden_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"hidden_states of {hidden_states.dtype}; float32, float16 and bfloat16 can be computed")
    if slots.dtype != torch.int32 or out.dtype != torch.float32:
        raise ValueError(f"slots must be int32 and out float32, not {slots.dtype} and {out.dtype}")
    if arena.dim() != 2 or arena.shape[1] != expert_bytes:
        raise ValueError(f"arena {tuple(arena.shape)} must be (S, {expert_bytes}) for experts of this shape, weight type and layout")
    for name, tensor in (("hidden_states", hidden_states), ("slots", slots), ("top_k_weights", top_k_weights), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous")
