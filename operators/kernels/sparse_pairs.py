"""The pair path, for decode: every pair of a token and an expert finds its own active neurons and reads their rows, and no other.

Four launches, no sorting, no atomics on results: equal inputs give equal bits. A list of active neurons has room for all of them, so
launches have one size and can be captured in a CUDA graph; a program whose part of the list is empty returns at once.

The gate between two products that others computed: PyTorch's grouped_mm gives all gate and up sums of a pair at once.

The rows of up and down that a pair's list names, and no other.

What the kernels of the pair path share: which pair a program has, and the dot products of rows with a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.epilogue import Threshold, acted, limited_up, reaches
from moegraft.operators.kernels.launch import LAUNCH
from moegraft.operators.kernels.sparse_call import Call, Lists, Order
from moegraft.operators.kernels.sparse_rows import NeuronRows, PackedRows, columns_a_step, neuron_rows

WARPS = 4


@triton.jit
def pair_of(order_ptr, count_ptr):
    """The pair of this program: its number, or with an order the one at its place; -1 beyond the last."""
    place = tl.program_id(0)
    if order_ptr is None:
        return place
    else:
        return tl.where(place < tl.load(count_ptr), tl.load(order_ptr + place), -1)


@triton.jit
def row_sums(w_ptrs, x_ptr, alive, ALL: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):
    """The dot products of BN rows, `w_ptrs` (BN, 1) their beginnings, with x: (BN,) float32; zeros where not `alive`, unless ALL are."""
    columns = tl.arange(0, BH)[None, :]
    total = tl.zeros((BN, BH), tl.float32)
    for first in tl.static_range(0, H, BH):
        if first + BH <= H:
            if ALL:
                w = tl.load(w_ptrs + first + columns, eviction_policy="evict_first")
            else:
                w = tl.load(w_ptrs + first + columns, mask=alive, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + first + columns)
        else:
            inside = first + columns < H
            w = tl.load(w_ptrs + first + columns, mask=alive & inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + first + columns, mask=inside, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)
    return tl.sum(total, 1)


def order_tensors(order: Order) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if order is None else (order.pairs, order.count)


FUSED_NEURONS = 1024  # listing more in the gate's own launch would cost its programs registers
GATE_NEURONS = 8  # a program's, in one go


@triton.jit
def _compact(act_ptr, list_ptr, value_ptr, length_ptr, counts_ptr, threshold, R: tl.constexpr, GROUP: tl.constexpr, GUESS: tl.constexpr):
    """Lists the neurons of one pair, or their groups, that reach the threshold, in their order."""
    LANES: tl.constexpr = R.lanes
    PADDED: tl.constexpr = R.padded_neurons
    active = 0
    length = 0
    for first in tl.static_range(0, PADDED, LANES):
        lanes = first + tl.arange(0, LANES)
        # written by other programs a moment ago: not from this multiprocessor's own cache
        activations = tl.load(act_ptr + lanes, mask=lanes < R.neurons, other=0.0, cache_modifier=".cg")
        kept = (reaches(activations, threshold) & (lanes < R.neurons)).to(tl.int32)
        active += tl.sum(kept)
        if GROUP == 1:
            place = length + tl.cumsum(kept, 0) - kept
            tl.store(list_ptr + place, lanes, mask=kept != 0)
            tl.store(value_ptr + place, activations, mask=kept != 0)
        else:
            kept = tl.max(tl.reshape(kept, (LANES // GROUP, GROUP)), 1)
            place = length + tl.cumsum(kept, 0) - kept
            tl.store(list_ptr + place, first // GROUP + tl.arange(0, LANES // GROUP), mask=kept != 0)
        length += tl.sum(kept)
    tl.store(length_ptr, length)
    tl.atomic_add(counts_ptr + 1, R.neurons, sem="relaxed")
    if not GUESS:  # else they are counted when their exact gates are known
        tl.atomic_add(counts_ptr, tl.cast(active, tl.int64), sem="relaxed")


@triton.jit
def _gate_compact_kernel(
    x_ptr,  # (T, H) floating
    gate_up_ptr,  # (E, rows, H) of the same dtype
    biases_ptr,  # (E, rows) float32, or anything
    ids_ptr,  # (P,) int32, -1: skipped
    order_ptr,  # (P,) int32: pairs by expert, or None
    order_count_ptr,
    threshold_ptr,  # (1,) float32
    counts_ptr,  # (2,) int64
    done_ptr,  # (P,) int32 zeros, and zeros again when the launch is done
    act_ptr,  # (P, I) float32
    list_ptr,  # (P, I) int32
    value_ptr,  # (P, I) float32
    length_ptr,  # (P,) int32
    R: tl.constexpr,
    GATE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    COMPACT: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
):
    """Grid (P, I / BN). Activations of a pair's neurons; if COMPACT the last program of a pair lists those that reach the threshold."""
    pair = pair_of(order_ptr, order_count_ptr)
    if pair < 0:
        return
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < 0:
        tl.store(length_ptr + pair, 0)
        return
    neurons = tl.program_id(1) * BN + tl.arange(0, BN)
    alive = neurons < R.neurons
    rows = expert * R.rows + neurons * R.step
    x_ptr += (pair // TOP_K).to(tl.int64) * R.hidden
    gate = row_sums(gate_up_ptr + rows[:, None] * R.hidden, x_ptr, alive[:, None], R.neurons % BN == 0, R.hidden, BN, BH)
    if R.bias:
        gate += tl.load(biases_ptr + rows, mask=alive, other=0.0)
    act_ptr += pair.to(tl.int64) * R.neurons
    tl.store(act_ptr + neurons, acted(gate, GATE), mask=alive)
    if COMPACT:
        tl.debug_barrier()  # all threads have stored before one of them tells
        if tl.atomic_add(done_ptr + pair, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
            offset = pair.to(tl.int64) * R.neurons
            _compact(act_ptr, list_ptr + offset, value_ptr + offset, length_ptr + pair, counts_ptr, tl.load(threshold_ptr), R, GROUP, False)
            tl.store(done_ptr + pair, 0)


@triton.jit
def _compact_kernel(
    act_ptr,  # (P, I) float32
    ids_ptr,  # (P,) int32
    threshold_ptr,  # (1,) float32
    counts_ptr,
    list_ptr,  # (P, I) int32
    value_ptr,  # (P, I) float32
    length_ptr,  # (P,) int32
    margin,  # of the threshold: what a guess has to reach, else 1
    R: tl.constexpr,
    GROUP: tl.constexpr,
    GUESS: tl.constexpr,
):
    """Grid (P,). Lists the neurons that reach the threshold, or that may when activations are a guess."""
    pair = tl.program_id(0)
    if tl.load(ids_ptr + pair) < 0:
        tl.store(length_ptr + pair, 0)
        return
    offset = pair.to(tl.int64) * R.neurons
    threshold = tl.load(threshold_ptr) * margin
    _compact(act_ptr + offset, list_ptr + offset, value_ptr + offset, length_ptr + pair, counts_ptr, threshold, R, GROUP, GUESS)


def compact_lists(
    act: torch.Tensor,
    ids: torch.Tensor,
    threshold: Threshold,
    lists: Lists,
    rows: NeuronRows | PackedRows,
    margin: float = 1.0,
    *,
    guess: bool = False,
) -> None:
    """Fills `lists` with the neurons of each present pair whose activations `act (P, I)` float32 reach `margin` times the threshold.

    Args:
        guess: the activations are, so active neurons are not counted yet.
    """
    _compact_kernel[ids.numel(),](
        act, ids, threshold.value, threshold.counts, lists.neurons, lists.values, lists.lengths, margin,
        R=rows, GROUP=threshold.group, GUESS=guess, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip


def gate_compact(call: Call, lists: Lists, act: torch.Tensor, done: torch.Tensor, order: Order = None) -> None:
    """Fills `lists` from the exact gates; `act (P, I)` float32 is scratch, `done (P,)` int32 must be zeros and is left so."""
    weights = call.weights
    rows = neuron_rows(weights)
    x = call.hidden_states
    fused = rows.padded_neurons <= FUSED_NEURONS
    _gate_compact_kernel[call.ids.numel(), triton.cdiv(rows.neurons, GATE_NEURONS)](
        x, weights.gate_up, weights.gate_up_bias, call.ids, *order_tensors(order), call.threshold.value, call.threshold.counts, done, act,
        lists.neurons, lists.values, lists.lengths,
        R=rows, GATE=weights.gate, TOP_K=call.top_k, GROUP=call.threshold.group, COMPACT=fused, BN=GATE_NEURONS,
        BH=columns_a_step(rows.hidden, x.dtype, WARPS), num_warps=WARPS, **LAUNCH,
    )  # fmt: skip

    if not fused:
        compact_lists(act, call.ids, call.threshold, lists, rows)


def compact_candidates(call: Call, lists: Lists, act: torch.Tensor) -> None:
    """Fills `lists` with the neurons whose sketched activations `act (P, I)` float32 come near enough to the threshold."""
    compact_lists(act, call.ids, call.threshold, lists, neuron_rows(call.weights), call.margin, guess=True)


@triton.jit
def _gate_rows_kernel(
    sums_ptr,  # (P, rows of gate_up) floating, pairs by expert
    experts_ptr,  # (P,) int, sorted; E: a padded slot
    biases_ptr,  # (E, rows) float32, or anything
    threshold_ptr,  # (1,) float32
    counts_ptr,  # (2,) int64
    out_ptr,  # (P, I) of the dtype of the sums
    R: tl.constexpr,
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
):
    """Grid (P, I / R.lanes). A pair's gated neurons, zeros where they do not reach the threshold."""
    pair = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * R.lanes + tl.arange(0, R.lanes)
    inside = lanes < R.neurons
    out_ptr += pair * R.neurons
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert >= NUM_EXPERTS:  # no product wrote its sums
        tl.store(out_ptr + lanes, tl.zeros((R.lanes,), out_ptr.dtype.element_ty), mask=inside)
        return
    rows = lanes * R.step
    gate = tl.load(sums_ptr + pair * R.rows + rows, mask=inside, other=0.0).to(tl.float32)
    if R.bias:
        gate += tl.load(biases_ptr + expert * R.rows + rows, mask=inside, other=0.0)
    value = acted(gate, GATE)
    kept = (reaches(value, tl.load(threshold_ptr)) & inside).to(tl.int32)
    tl.atomic_add(counts_ptr, tl.sum(kept).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, tl.sum(inside.to(tl.int32)).to(tl.int64), sem="relaxed")
    if GROUP > 1:
        GROUPS: tl.constexpr = R.lanes // GROUP
        one = tl.max(tl.reshape(kept, (GROUPS, GROUP)), 1)
        kept = tl.reshape(tl.broadcast_to(one[:, None], (GROUPS, GROUP)), (R.lanes,))
    if R.gated:
        up = tl.load(sums_ptr + pair * R.rows + rows + R.up_offset, mask=inside, other=0.0).to(tl.float32)
        if R.bias:
            up += tl.load(biases_ptr + expert * R.rows + rows + R.up_offset, mask=inside, other=0.0)
        value *= limited_up(up, GATE)
    tl.store(out_ptr + lanes, tl.where(kept != 0, value, 0.0).to(out_ptr.dtype.element_ty), mask=inside)


def gate_rows(call: Call, sums: torch.Tensor, experts: torch.Tensor, out: torch.Tensor) -> None:
    """`out (P, I)`: the gated neurons from the sums (P, rows of gate_up) of pairs that are sorted by `experts (P,)`."""
    weights = call.weights
    rows = neuron_rows(weights)
    _gate_rows_kernel[len(sums), triton.cdiv(rows.neurons, rows.lanes)](
        sums, experts, weights.gate_up_bias, call.threshold.value, call.threshold.counts, out,
        R=rows, GATE=weights.gate, GROUP=call.threshold.group, NUM_EXPERTS=weights.num_experts, num_warps=4, **LAUNCH,
    )  # fmt: skip


UP_NEURONS = 4  # a program's, in one go
DOWN_NEURONS = 32
DOWN_COLUMNS = 64  # 128 bytes of a bfloat16 row: a quarter of a warp
PROGRAMS = 528  # four for each multiprocessor of an H200: with fewer pairs, more programs share a pair's list


@triton.jit
def _listed(list_ptr, places, alive, GROUP: tl.constexpr):
    """The neurons at some places of a list of neurons or of groups."""
    if GROUP == 1:
        return tl.load(list_ptr + places, mask=alive, other=0)
    else:
        return tl.load(list_ptr + places // GROUP, mask=alive, other=0) * GROUP + places % GROUP


@triton.jit
def _up_kernel(
    x_ptr,  # (T, H)
    gate_up_ptr,  # (E, rows, H)
    biases_ptr,
    ids_ptr,  # (P,) int32
    order_ptr,
    order_count_ptr,
    threshold_ptr,
    counts_ptr,
    list_ptr,  # (P, I) int32
    value_ptr,  # (P, I) float32: activations by place in the list, or for groups by neuron
    length_ptr,  # (P,) int32
    neurons_ptr,  # (P, R.places) float32: gated neurons by place
    R: tl.constexpr,
    GATE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,  # the list is a guess: the gate is computed here, and what does not reach the threshold is dropped
    BN: tl.constexpr,
    BH: tl.constexpr,
):
    """Grid (P, S). `act(gate) * up` of a pair's listed neurons; the S programs of a pair take turns of BN."""
    pair = pair_of(order_ptr, order_count_ptr)
    if pair < 0:
        return
    length = tl.load(length_ptr + pair) * GROUP
    first = tl.program_id(1) * BN
    if first >= length:
        return
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    x_ptr += (pair // TOP_K).to(tl.int64) * R.hidden
    offset = pair.to(tl.int64) * R.neurons
    while first < length:
        places = first + tl.arange(0, BN)
        alive = places < length
        listed = _listed(list_ptr + offset, places, alive, GROUP)
        alive = alive & (listed < R.neurons)  # the last group may reach beyond the last neuron
        rows = expert * R.rows + listed.to(tl.int64) * R.step
        if EXACT:
            gate = row_sums(gate_up_ptr + rows[:, None] * R.hidden, x_ptr, alive[:, None], False, R.hidden, BN, BH)
            if R.bias:
                gate += tl.load(biases_ptr + rows, mask=alive, other=0.0)
            value = acted(gate, GATE)
            kept = reaches(value, tl.load(threshold_ptr)) & alive
            value = tl.where(kept, value, 0.0)
            tl.atomic_add(counts_ptr, tl.sum(kept.to(tl.int32)).to(tl.int64), sem="relaxed")
        else:
            value = tl.load(value_ptr + offset + (places if GROUP == 1 else listed), mask=alive, other=0.0)
        if R.gated:
            up_rows = rows + R.up_offset
            up = row_sums(gate_up_ptr + up_rows[:, None] * R.hidden, x_ptr, alive[:, None], False, R.hidden, BN, BH)
            if R.bias:
                up += tl.load(biases_ptr + up_rows, mask=alive, other=0.0)
            value *= limited_up(up, GATE)
        tl.store(neurons_ptr + pair.to(tl.int64) * R.places + places, value, mask=places < length)
        first += tl.num_programs(1) * BN


@triton.jit
def _down_kernel(
    down_ptr,  # (E, I, H) floating
    biases_ptr,  # (E, H) float32, or anything
    ids_ptr,  # (P,) int32
    order_ptr,
    order_count_ptr,
    list_ptr,  # (P, I) int32
    length_ptr,  # (P,) int32
    neurons_ptr,  # (P, R.places) float32 by place
    out_ptr,  # (P, H) float32; rows of skipped pairs are not written
    R: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
):
    """Grid (P, H / BH). The sum of a pair's listed rows of down."""
    pair = pair_of(order_ptr, order_count_ptr)
    if pair < 0:
        return
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    columns = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = columns < R.hidden
    length = tl.load(length_ptr + pair) * GROUP
    offset = pair.to(tl.int64) * R.neurons
    total = tl.zeros((BN, BH), tl.float32)
    first = 0
    while first < length:
        places = first + tl.arange(0, BN)
        alive = places < length
        listed = _listed(list_ptr + offset, places, alive, GROUP)
        alive = alive & (listed < R.neurons)
        rows = expert * R.neurons + listed.to(tl.int64)
        value = tl.load(neurons_ptr + pair.to(tl.int64) * R.places + places, mask=alive, other=0.0)
        w = tl.load(down_ptr + rows[:, None] * R.hidden + columns[None, :], mask=alive[:, None] & inside[None, :], other=0.0)
        total += w.to(tl.float32) * value[:, None]
        first += BN
    row = tl.sum(total, 0)
    if R.bias:
        row += tl.load(biases_ptr + expert * R.hidden + columns, mask=inside, other=0.0)
    tl.store(out_ptr + pair.to(tl.int64) * R.hidden + columns, row, mask=inside)


def up_listed(call: Call, lists: Lists, values: torch.Tensor, out: torch.Tensor, order: Order = None, *, candidates: bool = False) -> None:
    """`out (P, I padded to 32) float32`: the gated neurons by place in the lists.

    Args:
        values: activations by place; of groups, by neuron.
        candidates: the lists are guesses: gates are computed here, and neurons below the threshold become zeros.
    """
    weights, pairs, x = call.weights, call.ids.numel(), call.hidden_states
    rows = neuron_rows(weights)
    turns = max(1, min(triton.cdiv(rows.neurons, UP_NEURONS), triton.cdiv(PROGRAMS, pairs)))
    _up_kernel[pairs, turns](
        x, weights.gate_up, weights.gate_up_bias, call.ids, *order_tensors(order), call.threshold.value, call.threshold.counts,
        lists.neurons, values, lists.lengths, out,
        R=rows, GATE=weights.gate, TOP_K=call.top_k, GROUP=call.threshold.group, EXACT=candidates, BN=UP_NEURONS,
        BH=columns_a_step(rows.hidden, x.dtype, WARPS), num_warps=WARPS, **LAUNCH,
    )  # fmt: skip


def down_listed(call: Call, lists: Lists, neurons: torch.Tensor, out: torch.Tensor, order: Order = None) -> None:
    """`out (P, H) float32`: each pair's sum over its listed rows of down, and the bias."""
    weights = call.weights
    rows = neuron_rows(weights)
    _down_kernel[call.ids.numel(), triton.cdiv(rows.hidden, DOWN_COLUMNS)](
        weights.down_t, weights.down_bias, call.ids, *order_tensors(order), lists.neurons, lists.lengths, neurons, out,
        R=rows, GROUP=call.threshold.group, BN=DOWN_NEURONS, BH=DOWN_COLUMNS, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip
