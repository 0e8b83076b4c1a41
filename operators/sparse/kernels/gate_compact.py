"""The pair path, for decode: every pair of a token and an expert finds its own active neurons and reads their rows, and no other.

Four launches, no sorting, no atomics on results: equal inputs give equal bits. A list of active neurons has room for all of them, so
launches have one size and can be captured in a CUDA graph; a program whose part of the list is empty returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moegraft.operators.kernels.activations import acted
from moegraft.operators.kernels.finish import Threshold, reaches
from moegraft.operators.kernels.launch import LAUNCH
from moegraft.operators.sparse.call import Call, Lists, Order
from moegraft.operators.sparse.kernels.packed_rows import PackedRows
from moegraft.operators.sparse.kernels.pairs import WARPS, order_tensors, pair_of, row_sums
from moegraft.operators.sparse.kernels.rows import NeuronRows, columns_a_step, neuron_rows

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
