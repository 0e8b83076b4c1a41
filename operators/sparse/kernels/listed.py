"""The rows of up and down that a pair's list names, and no other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.activations import acted, limited_up
from moegraft.operators.kernels.finish import reaches
from moegraft.operators.kernels.launch import LAUNCH
from moegraft.operators.sparse.call import Call, Lists, Order
from moegraft.operators.sparse.kernels.pairs import WARPS, order_tensors, pair_of, row_sums
from moegraft.operators.sparse.kernels.rows import columns_a_step, neuron_rows

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
