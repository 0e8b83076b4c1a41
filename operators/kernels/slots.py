"""Experts in slots of GPU memory, computed from the CPU kernel's own packed bytes in the dense layout.

*decode*, for a few tokens: each pair of a token and an expert streams its weights once, as a CPU core would. Two launches, no sorting, no
atomics: equal inputs give equal bits. Threads run along the rows of a block, so a warp reads 512 consecutive bytes, and activations come
from the L1 cache. A tile has fewer columns than the program has threads: Triton then gives activations the layout of the weights, and the
loop has no barrier.

*grouped*, for many tokens: pairs are grouped by slot; one grouped product for each of the two matrices, then one sum.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.launch import LAUNCH, PackedBytes, constant
from moegraft.operators.kernels.packed_layout import Gate, PackedMatrix, expert_matrices, gate_of, round_up
from moegraft.operators.kernels.packed_product import Epilogue, activated, bias_of, grouped_columns, limited_up, packed_product
from moegraft.operators.kernels.routing import PairGroups, combine, group_pairs, pairs_a_block
from moegraft.operators.kernels.units import expanded, high_at, high_bits_of, load, number, scales_of, signed, unit_at

WARPS = 4
UNITS = 64  # a tile; below 32 * WARPS, see above
DOWN_ROWS = 16  # half a block: H / 16 programs a token, so that one token keeps 128 multiprocessors reading
# Up to here every pair reads its expert's weights itself; an estimate, no GPU has measured it.
DECODE_TOKENS = 4
# Tokens computed in one go: bounds the scratch memory, of which the rows of pairs, (T * K, H) float32, are the most.
MOST_TOKENS = 2048
ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tile_spans(matrix: PackedMatrix, rows: int, units: int) -> int:
    """Return the spans of a tile of about `units` units: at least as many as give each thread a load of 16 bytes."""
    return max(units // matrix.units_a_span, 512 // rows) if matrix.units_a_span > 1 else units


@triton.jit
def row_products(units_ptr, scales_ptr, grid_ptr, x_ptr, first_row, weight, M: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr):
    """`weight * W[first_row : first_row + ROWS] * x` before the sum over columns: (SPANS, ROWS) float32."""
    rows = first_row + tl.arange(0, ROWS)[None, :]
    HELD: tl.constexpr = M.columns_a_unit
    SPAN: tl.constexpr = M.units_a_span
    COUNT: tl.constexpr = (M.columns + 31) // 32 * 32 // (HELD * SPAN)
    MASKED: tl.constexpr = COUNT % SPANS != 0 or M.columns % 32 != 0
    steps = tl.arange(0, SPANS)[:, None]
    total = tl.zeros((SPANS, ROWS), tl.float32)
    UNROLL: tl.constexpr = 1 if SPAN > 1 else 2 if MASKED else 4  # masks take registers
    for first in tl.range(0, COUNT, SPANS, loop_unroll_factor=UNROLL):
        at = first + steps
        inside = at < COUNT
        part = tl.zeros((SPANS, ROWS), tl.float32)
        sums = tl.zeros((SPANS, 1), tl.float32)  # of x
        high = part
        if M.high_bits > 0:
            high = load(units_ptr + high_at(rows, at, M), inside, MASKED)
        for unit in tl.static_range(SPAN):
            if M.expanded:
                units, upper = expanded(units_ptr, grid_ptr, rows, at, unit, inside, M, MASKED)
            else:
                units = signed(load(units_ptr + unit_at(rows, at, unit, M), inside, MASKED), M)
                upper = high_bits_of(high, at, unit, M) if M.high_bits > 0 else high
            for j in tl.static_range(HELD):
                columns = (at * SPAN + unit) * HELD + j
                x = load(x_ptr + columns, columns < M.columns, MASKED).to(tl.float32)
                part += number(units, upper, j, M) * x
                if M.minima:
                    sums += x
        if M.header > 0:
            cell = at // M.spans_a_scale
            block, in_block = cell // M.scales_a_block, cell % M.scales_a_block
            scales, minima = scales_of(units_ptr, scales_ptr, rows, block, in_block, inside, M, MASKED)
            part *= scales.to(tl.float32)
            if M.minima:
                part += minima.to(tl.float32) * sums
        total += part * weight
    return total


@triton.jit
def _gate_up_kernel(
    x_ptr,  # (T, H) floating
    units_ptr,  # (S, expert_bytes), as units
    scales_ptr,  # the same bytes as float16
    grid_ptr,  # of `PackedBytes`
    biases_ptr,  # the same bytes as float32
    slots_ptr,  # (T, K) int32, -1: absent
    neurons_ptr,  # (T * K, NEURONS) float32
    M: tl.constexpr,
    GATE: tl.constexpr,
    EPILOGUE: tl.constexpr,  # "gate" or "act"
    NEURONS: tl.constexpr,
    TOP_K: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Grid (T * K, blocks of 32 rows). The neurons of a pair; nothing is written for an absent one."""
    pair = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + pair).to(tl.int64)
    if slot < 0:
        return
    start = slot * M.expert_stride + M.first
    x_ptr += (pair // TOP_K).to(tl.int64) * M.columns
    sums = tl.sum(row_products(units_ptr + start, scales_ptr + 2 * start, grid_ptr, x_ptr, block * 32, 1.0, M, 32, SPANS), 0)
    biases_ptr += slot * M.expert_words
    if EPILOGUE == "gate":
        lanes = block * 16 + tl.arange(0, 16)
        gate, up = tl.split(tl.trans(tl.reshape(sums, (2, 16))))
        if M.bias_word >= 0:
            gate += bias_of(biases_ptr, lanes, M)
            up += tl.load(biases_ptr + M.up_bias_word + lanes, mask=lanes < M.outputs, other=0.0)
        value = activated(gate, GATE) * limited_up(up, GATE)
    else:
        lanes = block * 32 + tl.arange(0, 32)
        if M.bias_word >= 0:
            sums += bias_of(biases_ptr, lanes, M)
        value = activated(sums, GATE)
    # a gate need not map zero to zero, and neurons beyond the last must not reach the output
    value = tl.where(lanes < M.outputs, value, 0.0)
    tl.store(neurons_ptr + pair.to(tl.int64) * NEURONS + lanes, value, mask=lanes < NEURONS)


@triton.jit
def _down_kernel(
    neurons_ptr,  # (T * K, columns) float32
    units_ptr,
    scales_ptr,
    grid_ptr,
    biases_ptr,
    slots_ptr,  # (T, K) int32
    weights_ptr,  # (T, K) floating
    out_ptr,  # (T, H) floating
    M: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Grid (T, H / ROWS). A token's experts are added in their order, so the result is deterministic."""
    token = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    total = tl.zeros((SPANS, ROWS), tl.float32)
    bias = tl.zeros((ROWS,), tl.float32)
    for k in range(0, TOP_K):
        pair = token * TOP_K + k
        slot = tl.load(slots_ptr + pair).to(tl.int64)
        if slot >= 0:
            weight = tl.load(weights_ptr + pair).to(tl.float32)
            start = slot * M.expert_stride + M.first
            x_ptr = neurons_ptr + pair.to(tl.int64) * M.columns
            total += row_products(units_ptr + start, scales_ptr + 2 * start, grid_ptr, x_ptr, first_row, weight, M, ROWS, SPANS)
            if M.bias_word >= 0:
                bias += weight * tl.load(biases_ptr + slot * M.expert_words + M.bias_word + first_row + tl.arange(0, ROWS))
    lanes = first_row + tl.arange(0, ROWS)
    value = (tl.sum(total, 0) + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * M.outputs + lanes, value, mask=lanes < M.outputs)


def rows_by_pair(
    x: torch.Tensor, packed: PackedBytes, matrix: PackedMatrix, ids: torch.Tensor, out: torch.Tensor, gate: Gate, epilogue: Epilogue
) -> None:
    """`out (T * K, width) float32 = epilogue(W[id] @ x[token] + bias)` for each pair whose id is not -1: "gate" or "act"."""
    tokens, top_k = ids.shape
    units, warps = (constant(name, value, matrix.weights, x.device) for name, value in (("gate_units", UNITS), ("gate_warps", WARPS)))
    spans = tile_spans(matrix, 32, units)
    _gate_up_kernel[tokens * top_k, matrix.rows // 32](
        x, packed.units, packed.scales, packed.grid, packed.biases, ids, out,
        M=matrix, GATE=gate, EPILOGUE=epilogue, NEURONS=out.shape[1], TOP_K=top_k, SPANS=spans, num_warps=warps, **LAUNCH,
    )  # fmt: skip


class SlotExperts:
    """Computes experts from an arena of slots; holds no weights itself.

    Args:
        shape: sizes of the experts, and how many a layer has.
        weight_type: the type the slots' bytes were packed to by `PackedExperts`, in its dense layout; `q4_k+q6_k` has the first in gate
            and up and the second in down.
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
        *,
        experts: torch.Tensor | None = None,
    ) -> None:
        """Queue the work on the current stream; nothing waits, so it can be captured in a CUDA graph.

        Args:
            hidden_states: (T, H) float32, float16 or bfloat16.
            arena: (S, expert_bytes) uint8; slots that no id names are not read.
            slots: (T, K) int32, the slot of each chosen expert, -1 for an absent one. A slot beyond S is not checked.
            top_k_weights: (T, K) floating.
            out: (T, H) float32, float16 or bfloat16, written in full; a token whose experts are all absent gets zeros.
            path: by default `decode` for few tokens, where each pair streams its expert, otherwise `grouped`, on tensor cores.
            experts: (T, K) integers, the layer's expert of each pair, by which pairs are grouped; by default they are grouped by slot, with
                one program for each slot of the arena.

        Both paths accumulate in float32; `grouped` rounds unpacked weights and the neurons between the matrices to the dtype of
        hidden_states. Equal inputs give equal bits.

        Raises:
            ValueError: a shape, dtype or memory layout other than these.
        """
        check_call(self.shape.hidden, self.matrices.expert_bytes, hidden_states, arena, slots, top_k_weights, out)
        packed = PackedBytes.of(arena, self.matrices.gate_up.weights)
        if slots.numel() == 0:
            out.zero_()
        elif (path or self._path(len(slots), arena.device)) == "decode":
            self._decode(hidden_states, packed, slots, top_k_weights, out)
        else:
            ids, num_ids = (slots, len(arena)) if experts is None else (experts, self.shape.num_experts)
            for first in range(0, len(slots), MOST_TOKENS):
                part = slice(first, first + MOST_TOKENS)
                self._grouped(hidden_states[part], packed, ids[part], num_ids, slots[part], top_k_weights[part], out[part])

    def begin(
        self, hidden_states: torch.Tensor, arena: torch.Tensor, experts: torch.Tensor, top_k_weights: torch.Tensor
    ) -> GroupedCall | None:
        """Return a call of the grouped path whose experts are computed as they arrive; None where a call takes another path, or is cut."""
        tokens = len(hidden_states)
        grouped = tokens <= MOST_TOKENS and experts.numel() > 0 and self._path(tokens, arena.device) == "grouped"
        return GroupedCall(self, hidden_states, arena, experts, top_k_weights) if grouped else None

    def _path(self, tokens: int, device: torch.device) -> Literal["decode", "grouped"]:
        return "decode" if tokens <= constant("decode_tokens", DECODE_TOKENS, self.weight_type, device) else "grouped"

    def _decode(self, x: torch.Tensor, packed: PackedBytes, slots: torch.Tensor, top_k_weights: torch.Tensor, out: torch.Tensor) -> None:
        tokens, top_k = slots.shape
        down = self.matrices.down
        neurons = torch.empty(tokens * top_k, self.matrices.neurons, dtype=torch.float32, device=x.device)
        rows_by_pair(x, packed, self.matrices.gate_up, slots, neurons, self.gate, "gate" if self.gate.gated else "act")
        defaults = {"rows": DOWN_ROWS, "units": UNITS, "warps": WARPS}
        rows, units, warps = (constant(f"down_{name}", value, down.weights, x.device) for name, value in defaults.items())
        packed = packed if down.weights == self.matrices.gate_up.weights else packed.units_as(down.weights)
        _down_kernel[tokens, down.rows // rows](
            neurons, packed.units, packed.scales, packed.grid, packed.biases, slots, top_k_weights, out,
            M=down, TOP_K=top_k, ROWS=rows, SPANS=tile_spans(down, rows, units), num_warps=warps, **LAUNCH,
        )  # fmt: skip

    def _grouped(
        self,
        x: torch.Tensor,
        packed: PackedBytes,
        ids: torch.Tensor,
        num_ids: int,
        slots: torch.Tensor,
        top_k_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        pair_count = slots.numel()
        groups = PairGroups.allocate(pair_count, num_ids, pairs_a_block(pair_count, num_ids, x.dtype), x.device)
        group_pairs(ids, num_ids, groups, None if ids is slots else slots)
        neurons, rows = self.scratch(pair_count, x)
        self.products(grouped_columns(x, self.matrices.gate_up), packed, groups, slots.shape[1], neurons, rows)
        combine(rows, slots, top_k_weights, out)

    def scratch(self, pair_count: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the neurons (P, padded intermediate size) and the outputs (P, H) float32 of each pair."""
        down = self.matrices.down
        neurons = torch.empty(pair_count, round_up(self.matrices.neurons, down.step_columns), dtype=x.dtype, device=x.device)
        return neurons, torch.empty(pair_count, down.outputs, dtype=torch.float32, device=x.device)

    def products(
        self, columns: torch.Tensor, packed: PackedBytes, groups: PairGroups, top_k: int, neurons: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Compute the outputs of the pairs in `groups`; `columns` are the hidden states as `grouped_columns`."""
        gate_up, down = self.matrices.gate_up, self.matrices.down
        epilogue: Epilogue = "gate" if self.gate.gated else "act"
        packed_product(
            columns, packed, gate_up, neurons, groups=groups, gate=self.gate, epilogue=epilogue, pairs_a_row=top_k, following=down
        )
        packed = packed if down.weights == gate_up.weights else packed.units_as(down.weights)
        packed_product(neurons, packed, down, rows, groups=groups)


class GroupedCall:
    """A call on tensor cores whose experts are computed in parts, as they arrive: three launches for each part, and one that sums them.

    Args:
        hidden_states, arena, top_k_weights: as of `SlotExperts.forward`.
        experts: (T, K) integers, the layer's expert of each pair.
    """

    def __init__(
        self, kernel: SlotExperts, hidden_states: torch.Tensor, arena: torch.Tensor, experts: torch.Tensor, top_k_weights: torch.Tensor
    ) -> None:
        self._kernel = kernel
        self._packed = PackedBytes.of(arena, kernel.matrices.gate_up.weights)
        self._experts = experts
        self._weights = top_k_weights
        self._columns = grouped_columns(hidden_states, kernel.matrices.gate_up)
        self._neurons, self._rows = kernel.scratch(experts.numel(), hidden_states)
        self._slots = torch.full(experts.shape, -1, dtype=torch.int32, device=hidden_states.device)  # of the pairs that were computed

    def add(self, slot_of: torch.Tensor, count: int, pairs: int) -> None:
        """Compute the `count` experts that have a slot in `slot_of` (E,) int32; they have so many `pairs` in all."""
        num_experts, dtype, device = self._kernel.shape.num_experts, self._columns.dtype, self._columns.device
        groups = PairGroups.allocate(self._experts.numel(), count, pairs_a_block(pairs, count, dtype), device, pairs)
        group_pairs(self._experts, num_experts, groups, slot_of=slot_of, listed=self._slots)
        self._kernel.products(self._columns, self._packed, groups, self._experts.shape[1], self._neurons, self._rows)

    def finish(self, out: torch.Tensor) -> None:
        """Write the sums over the experts that were computed: (T, H) floating."""
        combine(self._rows, self._slots, self._weights, out)


def check_call(
    hidden: int,
    expert_bytes: int,
    hidden_states: torch.Tensor,
    arena: torch.Tensor,
    slots: torch.Tensor,
    top_k_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Raise ValueError where an argument of `SlotExperts.forward` is not as described there."""
    tokens = hidden_states.shape[0]
    if hidden_states.shape != (tokens, hidden) or out.shape != hidden_states.shape:
        raise ValueError(f"hidden_states {tuple(hidden_states.shape)} and out {tuple(out.shape)} must both be (T, {hidden})")
    if slots.dim() != 2 or slots.shape[0] != tokens or slots.shape != top_k_weights.shape:
        raise ValueError(f"slots {tuple(slots.shape)} and top_k_weights {tuple(top_k_weights.shape)} must both be ({tokens}, K)")
    for name, tensor in (("hidden_states", hidden_states), ("out", out)):
        if tensor.dtype not in ACTIVATION_DTYPES:
            raise ValueError(f"{name} must be float32, float16 or bfloat16, not {tensor.dtype}")
    if slots.dtype != torch.int32:
        raise ValueError(f"slots must be int32, not {slots.dtype}")
    if arena.dim() != 2 or arena.shape[1] != expert_bytes:
        raise ValueError(f"arena {tuple(arena.shape)} must be (S, {expert_bytes}) for experts of this shape, weight type and layout")
    for name, tensor in (("hidden_states", hidden_states), ("slots", slots), ("top_k_weights", top_k_weights), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous")
