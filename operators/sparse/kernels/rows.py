"""Where a neuron's rows lie, and how many of their columns a program reads in one go."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from moegraft.operators.kernels.layout import round_up
from moegraft.operators.sparse.weights import SparseWeights

LARGEST_GROUP = 32
MOST_LANES = 2048  # 16 neurons a thread


class NeuronRows(NamedTuple):
    """The neurons of each expert as rows of H: gate and up in `gate_up (E, rows, H)`, down in `down_t (E, I, H)`.

    A compile-time constant.
    """

    hidden: int
    neurons: int
    padded_neurons: int  # a power of two
    lanes: int  # neurons that a program looks at in one go
    places: int  # neurons of whole groups: what a list of groups may hold
    gated: bool
    rows: int  # of gate_up: 2I, ungated I
    step: int  # rows from a neuron's gate to the next one's
    up_offset: int  # rows from a neuron's gate to its up
    bias: bool


def neuron_rows(weights: SparseWeights) -> NeuronRows:
    neurons, gated = weights.neurons, weights.gated
    step, up_offset = (2, 1) if weights.interleaved else (1, neurons)
    return NeuronRows(
        hidden=weights.hidden,
        neurons=neurons,
        padded_neurons=triton.next_power_of_2(neurons),
        lanes=min(MOST_LANES, triton.next_power_of_2(neurons)),
        places=round_up(neurons, LARGEST_GROUP),
        gated=gated,
        rows=weights.gate_up.shape[1],
        step=step if gated else 1,
        up_offset=up_offset if gated else 0,
        bias=weights.gate_up_bias is not None,
    )


def columns_a_step(hidden: int, dtype: torch.dtype, warps: int) -> int:
    """16 bytes a thread, where the hidden size has as many: then x, a row of one, gets the weights' layout and the loop no barrier."""
    most: int = 16 // dtype.itemsize * 32 * warps
    padded: int = triton.next_power_of_2(hidden)
    return min(most, max(32, padded))
