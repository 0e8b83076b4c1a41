"""Experts in slots for many tokens: pairs put together by slot, one grouped product for each of the two matrices, one sum."""

from __future__ import annotations

import torch

from moegraft.operators.kernels.combine import combine
from moegraft.operators.kernels.gates import Gate
from moegraft.operators.kernels.launch import Bytes
from moegraft.operators.kernels.layout import ExpertMatrices, round_up
from moegraft.operators.kernels.packed_product import grouped_columns, packed_product
from moegraft.operators.kernels.routing import PairGroups, group_pairs, pairs_a_block


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
