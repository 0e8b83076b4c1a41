"""Experts in slots of GPU memory in the CPU kernel's sparse layout, in which a neuron's weights are one row of up and one of down.

Rows of inactive neurons need not be read. Gates are always computed whole. Both paths compute the same function; the batch decides which
one does, as in "Exploiting Intra-Expert Activation Sparsity", section 4.1.

`pair`, for decode: every pair of a token and an expert reads the rows of its own active neurons only, by units. A list of active neurons
has room for all of them, so launches have one size and can be captured in a CUDA graph; a program whose part of the list is empty returns
at once.

`dense`, for many tokens: the pairs of one expert share its rows, on tensor cores. All rows are read, and neurons below the threshold become
exact zeros. A row is read in place, so what it is multiplied with is stored in the order of its units: `in_unit_order`.

No atomics on results: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.launch import LAUNCH, PackedBytes, avoid_wrong_wgmma, interpreted, on
from moegraft.operators.kernels.packed_layout import PackedRows, SparseLayout, gpu_format, in_unit_order, next_power_of_two, sparse_layout
from moegraft.operators.kernels.packed_product import Threshold, count, grouped_columns, limited_up, packed_product, reaches
from moegraft.operators.kernels.routing import PairGroups, combine, group_pairs, pairs_a_block
from moegraft.operators.kernels.slots import DECODE_TOKENS, MOST_TOKENS, check_call, rows_by_pair
from moegraft.operators.kernels.units import column, dot, signed

# The largest batch of the path `pair`. With bfloat16 experts of Qwen3-30B-A3B's shapes and 85 % of the neurons left out, an H100
# takes 0.33 ms by it and 0.44 by `dense` for 64 tokens, 1.32 and 0.59 for 512.
PAIR_TOKENS = 64
WARPS = 4
UP_NEURONS = 4  # a program's, in one go
UP_UNITS = 512  # 16 bytes a thread
DOWN_NEURONS = 16
DOWN_UNITS = 64
PROGRAMS = 528  # four for each multiprocessor of an H200: with fewer pairs, more programs share a pair's list


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
        active = (reaches(activations, threshold) & (lanes < R.neurons)).to(tl.int32)
        place = length + tl.cumsum(active, 0) - active
        tl.store(list_ptr + offset + place, lanes, mask=active != 0)
        tl.store(value_ptr + offset + place, activations, mask=active != 0)
        length += tl.sum(active)
    tl.store(length_ptr + pair, length)
    tl.atomic_add(counts_ptr + 1, R.neurons, sem="relaxed")
    tl.atomic_add(counts_ptr, tl.cast(length, tl.int64), sem="relaxed")


@triton.jit
def _scale_at(lanes, R: tl.constexpr):
    """Address of a scale among those of its row, by the number in the row of what a lane has side by side."""
    LANES: tl.constexpr = 512 // (R.columns_a_unit * R.together)
    return lanes // LANES * 16 + lanes % 16


@triton.jit
def _column_number(units, j, R: tl.constexpr):
    """The number of the `j`-th column of units of a row."""
    CHUNK: tl.constexpr = 512 // R.columns_a_unit
    in_chunk = units % CHUNK
    lane = in_chunk // R.together % 16
    line = in_chunk // (R.together * 16)
    return units // CHUNK * 512 + lane * 32 + (line * R.columns_a_unit + j) * R.together + in_chunk % R.together


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
    """Rows, by where they begin, times `x[tokens].T`, x in element order: (BN, BM) float32."""
    HELD: tl.constexpr = R.columns_a_unit
    at = tl.arange(0, STEP)
    w_ptrs = elements_ptr + (rows[:, None] + R.header + at[None, :])
    x_ptrs = x_ptr + tokens.to(tl.int64)[None, :] * (R.units * R.columns_a_unit) + at[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, R.units, STEP):
        w = tl.load(w_ptrs + first)
        scales = 1.0
        if R.header > 0:
            lanes = first // R.together + tl.arange(0, STEP // R.together)
            scales = tl.load(scales_ptr + ((rows // 2)[:, None] + _scale_at(lanes, R)[None, :]))
            scales = tl.broadcast_to(scales[:, :, None], (BN, STEP // R.together, R.together))
            scales = tl.reshape(scales, (BN, STEP)).to(tl.float32)
        for v in tl.static_range(HELD):
            x = tl.load(x_ptrs + v * R.units + first, mask=present[None, :], other=0.0)
            total = dot(_numbers(w, scales, v, x.dtype, R), x, total, UPCAST)
    return total


@triton.jit
def _up_dense_kernel(
    x_ptr,  # (T, width) floating, in element order
    elements_ptr,  # (S, expert_bytes), as elements
    scales_ptr,  # the same bytes as float16
    biases_ptr,  # the same bytes as float32
    pairs_ptr,  # of PairGroups
    block_ids_ptr,
    count_ptr,
    threshold_ptr,  # (1,) float32
    counts_ptr,  # (2,) int64
    act_ptr,  # (P, I) float32
    neurons_ptr,  # (P, I) of the dtype of x: gated neurons
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
    pair = tl.load(pairs_ptr + block * BM + tl.arange(0, BM))
    present = pair < pair_count
    pair = tl.where(present, pair, 0)
    lanes = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = present[None, :] & (lanes < R.neurons)[:, None]
    neurons = tl.where(lanes < R.neurons, lanes, 0)
    value = tl.load(act_ptr + pair.to(tl.int64)[None, :] * R.neurons + neurons[:, None], mask=inside, other=0.0)
    active = reaches(value, tl.load(threshold_ptr)) & inside
    count(counts_ptr, active, inside)
    value = tl.where(active, value, 0.0)
    if R.gated:
        slot = tl.load(block_ids_ptr + block).to(tl.int64)
        start = slot * R.expert_stride + R.up_first
        rows = neurons * R.row_stride  # offsets within an expert have 32 bits, which takes half of the registers
        up = _row_product(elements_ptr + start, scales_ptr + start // 2, x_ptr, rows, pair // TOP_K, present, R, BN, BM, STEP, UPCAST)
        if R.up_bias_word >= 0:
            up += tl.load(biases_ptr + slot * R.expert_words + R.up_bias_word + neurons)[:, None]
        value *= limited_up(up, GATE)
    out_ptrs = neurons_ptr + pair.to(tl.int64)[None, :] * R.neurons + lanes[:, None]
    tl.store(out_ptrs, value.to(neurons_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _down_dense_kernel(
    elements_ptr,
    scales_ptr,
    biases_ptr,
    pairs_ptr,
    block_ids_ptr,
    count_ptr,
    neurons_ptr,  # (P, I) floating
    out_ptr,  # (P, H) float32
    pair_count,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (max blocks, elements / BC). The block's rows of down, transposed, times its neurons."""
    HELD: tl.constexpr = R.columns_a_unit
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
    total = tl.zeros((BC, BM), tl.float32)
    upper = tl.zeros((BC, BM), tl.float32)
    for first in range(0, R.neurons, BN):
        neurons = first + tl.arange(0, BN)
        inside = neurons < R.neurons
        rows = tl.where(inside, neurons, 0) * R.row_stride
        w = tl.load(elements_ptr + (rows[None, :] + at[:, None]), mask=inside[None, :], other=0)
        value = tl.load(neurons_ptr + pair[None, :] * R.neurons + neurons[:, None], mask=inside[:, None] & present[None, :], other=0.0)
        scales = 1.0
        if R.header > 0:
            scales = tl.load(scales_ptr + ((rows // 2)[None, :] + _scale_at(lanes, R)[:, None]), mask=inside[None, :], other=0.0)
            scales = tl.broadcast_to(scales[:, None, :], (BC // R.together, R.together, BN))
            scales = tl.reshape(scales, (BC, BN)).to(tl.float32)
        total = dot(_numbers(w, scales, 0, value.dtype, R), value, total, UPCAST)
        if R.columns_a_unit == 2:
            upper = dot(_numbers(w, scales, 1, value.dtype, R), value, upper, UPCAST)
    for v in tl.static_range(HELD):
        sums = total if v == 0 else upper
        columns = _column_number(at, v, R)
        inside = columns < R.hidden
        if R.down_bias_word >= 0:
            sums += tl.load(biases_ptr + slot * R.expert_words + R.down_bias_word + columns, mask=inside, other=0.0)[:, None]
        tl.store(out_ptr + pair[None, :] * R.hidden + columns[:, None], sums, mask=present[None, :] & inside[:, None])


def _tile(rows: PackedRows, block_pairs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return a program's rows, elements a step, warps and stages, by the registers they leave. Not timed yet."""
    if dtype == torch.float32:  # three passes over split operands
        return 64, 32, 4, 2
    if block_pairs >= 64:
        return 64, 64, 8, 2 if rows.header else 3
    return 64, 64, 4, 3


@dataclass(frozen=True, slots=True)
class SparseCall:
    """One pass over a part of a batch.

    Attributes:
        hidden_states: (T, H) floating, contiguous.
        arena: (S, expert_bytes) uint8.
        slots: (T, K) int32, contiguous, -1: absent.
        top_k_weights: (T, K) floating, contiguous.
        out: (T, H) floating, written in full.
        num_experts: of the layer.
        experts: (T, K) integers, the layer's expert of each pair, by which pairs are grouped; None: they are grouped by slot.
    """

    hidden_states: torch.Tensor
    arena: torch.Tensor
    slots: torch.Tensor
    top_k_weights: torch.Tensor
    out: torch.Tensor
    layout: SparseLayout
    threshold: Threshold
    num_experts: int = 0
    experts: torch.Tensor | None = None

    @property
    def packed(self) -> PackedBytes:
        return PackedBytes.of(self.arena, self.layout.weight_type)

    @property
    def pairs(self) -> int:
        return self.slots.numel()

    @property
    def top_k(self) -> int:
        return self.slots.shape[1]

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.hidden_states.device)

    def groups(self) -> PairGroups:
        """Return the pairs by expert."""
        ids, num_ids, slots = self.slots, len(self.arena), None
        if self.experts is not None:
            ids, num_ids, slots = self.experts, self.num_experts, self.slots
        block_pairs = pairs_a_block(self.pairs, num_ids, self.hidden_states.dtype)
        groups = PairGroups.allocate(self.pairs, num_ids, block_pairs, self.hidden_states.device)
        group_pairs(ids, num_ids, groups, slots)
        return groups


def gate_activations(call: SparseCall, act: torch.Tensor, groups: PairGroups | None = None) -> None:
    """Fill `act (P, I)` float32 with `act(gate)` of every present pair, of ungated experts `act(up)`."""
    x, layout = call.hidden_states, call.layout
    packed = PackedBytes.of(call.arena, layout.gates.weights)
    if len(x) <= DECODE_TOKENS:
        rows_by_pair(x, packed, layout.gates, call.slots, act, layout.gate, "act")
        return
    packed_product(
        grouped_columns(x, layout.gates),
        packed,
        layout.gates,
        act,
        groups=groups or call.groups(),
        gate=layout.gate,
        epilogue="act",
        pairs_a_row=call.top_k,
    )


def run_pair(call: SparseCall) -> None:
    """Compute a pass by the path `pair`."""
    layout, rows, pairs, packed = call.layout, call.layout.rows, call.pairs, call.packed
    act = call.empty(pairs, rows.neurons)
    gate_activations(call, act)
    # Of each pair, the first `lengths` places have its active neurons in ascending order, and their activations.
    listed, lengths = call.empty(pairs, rows.neurons, dtype=torch.int32), call.empty(pairs, dtype=torch.int32)
    values = torch.empty_like(act)
    _compact_kernel[pairs,](
        act, call.slots, call.threshold.value, call.threshold.counts, listed, values, lengths, R=rows, num_warps=WARPS, **LAUNCH
    )
    x = in_unit_order(call.hidden_states.float(), rows)
    neurons = act  # its activations are in the lists now
    programs = max(1, min(triton.cdiv(rows.neurons, UP_NEURONS), triton.cdiv(PROGRAMS, pairs)))
    units = min(UP_UNITS, next_power_of_two(rows.units))
    _up_kernel[pairs, programs](
        x, packed.units, packed.scales, packed.biases, call.slots, listed, values, lengths, neurons,
        R=rows, GATE=layout.gate, TOP_K=call.top_k, WIDTH=rows.width, BN=UP_NEURONS, BU=units,
        num_warps=max(1, WARPS * units // UP_UNITS), **LAUNCH,
    )  # fmt: skip
    sums = call.empty(pairs, rows.hidden)
    _down_kernel[pairs, rows.units // DOWN_UNITS](
        packed.units, packed.scales, packed.biases, call.slots, listed, lengths, neurons, sums,
        R=rows, BN=DOWN_NEURONS, BU=DOWN_UNITS, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip
    combine(sums, call.slots, call.top_k_weights, call.out)


def run_dense(call: SparseCall) -> None:
    """Compute a pass by the path `dense`."""
    rows, dtype, packed, groups = call.layout.elements, call.hidden_states.dtype, call.packed, call.groups()
    act = call.empty(call.pairs, rows.neurons)
    gate_activations(call, act, groups)
    avoid_wrong_wgmma()
    element_dtype = gpu_format(rows.weights).element_dtype
    assert element_dtype is not None, "types with a sparse layout have one"
    elements, in_groups = packed.units.view(element_dtype), (groups.pairs, groups.block_ids, groups.count)
    block, step, warps, stages = _tile(rows, groups.block_pairs, dtype)
    x, neurons = in_unit_order(call.hidden_states, rows), call.empty(call.pairs, rows.neurons, dtype=dtype)
    _up_dense_kernel[groups.max_blocks, triton.cdiv(rows.neurons, block)](
        x, elements, packed.scales, packed.biases, *in_groups, call.threshold.value, call.threshold.counts, act, neurons, groups.pair_count,
        R=rows, GATE=call.layout.gate, TOP_K=call.top_k, BM=groups.block_pairs, BN=block, STEP=step, UPCAST=interpreted(),
        num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
    if rows.header:  # bytes: 16 of a tile for each thread
        block, step = (64, 64) if dtype == torch.float32 else (128, 8 * warps)
    sums = call.empty(call.pairs, rows.hidden)
    _down_dense_kernel[groups.max_blocks, rows.units // block](
        elements, packed.scales, packed.biases, *in_groups, neurons, sums, groups.pair_count,
        R=rows, BM=groups.block_pairs, BN=step, BC=block, UPCAST=interpreted(), num_warps=warps, num_stages=stages, **LAUNCH,
    )  # fmt: skip
    combine(sums, call.slots, call.top_k_weights, call.out)


SLOT_PATHS: Mapping[str, Callable[[SparseCall], None]] = {"pair": run_pair, "dense": run_dense}


class SparseSlotExperts:
    """`SlotExperts` for experts in the sparse layout, with a threshold below which neurons count as zero.

    Args:
        shape: sizes of the experts, and how many a layer has.
        weight_type: the type the slots' bytes were packed to, by `PackedExperts` with `sparse=True`.
        device: the GPU.

    Attributes:
        threshold: on the device, and counted there: a captured graph follows it. Drafts that leave out more have `draft_threshold`.
    """

    def __init__(self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str, device: torch.device) -> None:
        self.shape = shape
        self.layout = sparse_layout(shape, gate_spec, weight_type)
        self.threshold, self.draft_threshold = Threshold.zero(device), Threshold.zero(device)
        self._taken = (0, 0)

    @property
    def expert_bytes(self) -> int:
        return self.layout.expert_bytes

    def set_threshold(self, threshold: float, *, drafting: bool = False) -> None:
        """Set the threshold of every call, or that of drafts that leave out more."""
        (self.draft_threshold if drafting else self.threshold).value.fill_(threshold)

    def take_counts(self) -> tuple[int, int]:
        """Return the neurons that reached the threshold, and all, since the last call; waits for the device."""
        active, neurons = self.threshold.counts.tolist()
        before, self._taken = self._taken, (active, neurons)  # not set to zero: what another stream counts meanwhile would be lost
        return active - before[0], neurons - before[1]

    def forward(
        self,
        hidden_states: torch.Tensor,
        arena: torch.Tensor,
        slots: torch.Tensor,
        top_k_weights: torch.Tensor,
        out: torch.Tensor,
        path: str | None = None,
        *,
        drafting: bool = False,
        experts: torch.Tensor | None = None,
    ) -> None:
        """As `SlotExperts.forward`, by one of `SLOT_PATHS`, by default the one for the batch; `drafting` leaves out what drafts leave out.

        Sums are float32. Gates of more than a few tokens, and on the path `dense` all products, are computed on tensor cores,
        with unpacked weights rounded to the dtype of hidden_states.

        Raises:
            ValueError: a shape, dtype or memory layout other than those.
        """
        check_call(self.shape.hidden, self.expert_bytes, hidden_states, arena, slots, top_k_weights, out)
        if slots.numel() == 0:
            out.zero_()
            return
        path = path or ("pair" if len(slots) <= PAIR_TOKENS else "dense")
        threshold = self.draft_threshold if drafting else self.threshold
        with on(arena.device):
            for first in range(0, len(slots), MOST_TOKENS):
                part = slice(first, first + MOST_TOKENS)
                chosen = None if experts is None else experts[part]
                tensors = hidden_states[part], arena, slots[part], top_k_weights[part], out[part]
                SLOT_PATHS[path](SparseCall(*tensors, self.layout, threshold, self.shape.num_experts, chosen))

    def activations(
        self, hidden_states: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of `slots (T, K)` with `act(gate) (T', K, I)` float32; arbitrary for slots of -1."""
        for first in range(0, len(slots), MOST_TOKENS):
            x, part = hidden_states[first : first + MOST_TOKENS], slots[first : first + MOST_TOKENS]
            act = torch.empty(part.numel(), self.shape.intermediate, dtype=torch.float32, device=x.device)
            if part.numel():
                with on(x.device):
                    gate_activations(SparseCall(x, arena, part, part, x, self.layout, self.threshold), act)
            yield part, act.view(*part.shape, -1)
