"""The ways through experts in slots in the CPU kernel's sparse layout. All compute the same function.

`pair`: every pair reads its own active rows. `union`: the pairs of an expert read the union of their rows, on tensor cores. `dense`: all
rows are read, and neurons below the threshold become zeros. Gates are read whole by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.combine import combine
from moegraft.operators.kernels.finish import Threshold
from moegraft.operators.kernels.gates import Gate, gate_of
from moegraft.operators.kernels.launch import Bytes
from moegraft.operators.kernels.layout import PackedMatrix
from moegraft.operators.kernels.packed_product import grouped_columns, packed_product
from moegraft.operators.kernels.routing import PairGroups, group_pairs, pairs_a_block
from moegraft.operators.kernels.slots import DECODE_TOKENS
from moegraft.operators.kernels.slots_decode import rows_by_pair
from moegraft.operators.sparse.call import Lists
from moegraft.operators.sparse.kernels.gate_compact import compact_lists
from moegraft.operators.sparse.kernels.packed_rows import (
    PackedRows,
    down_packed,
    from_unit_order,
    in_unit_order,
    sparse_layout,
    up_packed,
)
from moegraft.operators.sparse.kernels.packed_union import (
    ElementRows,
    down_packed_union,
    element_rows,
    from_element_order,
    in_element_order,
    up_packed_union,
)
from moegraft.operators.sparse.kernels.union import compact_union

DENSE_SLOT_PATHS = ("dense",)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where the parts of an expert lie in its slot.

    Attributes:
        gates: of ungated experts the ups.
        rows: of up and down, by units; `elements`: the same for tensor cores.
    """

    gates: PackedMatrix
    rows: PackedRows
    elements: ElementRows
    gate: Gate

    @classmethod
    def of(cls, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str) -> SlotLayout:
        gates, rows = sparse_layout(shape, weight_type)
        return cls(gates, rows, element_rows(rows), gate_of(gate_spec, gated=shape.gated))


@dataclass(frozen=True, slots=True)
class SlotCall:
    """One pass over a part of a batch.

    Attributes:
        hidden_states: (T, H) floating, contiguous.
        packed: the slots' bytes, of `num_slots` slots.
        slots: (T, K) int32, contiguous, -1: not here.
        top_k_weights: (T, K) floating, contiguous.
        out: (T, H) float32, written in full.
    """

    hidden_states: torch.Tensor
    packed: Bytes
    num_slots: int
    slots: torch.Tensor
    top_k_weights: torch.Tensor
    out: torch.Tensor
    layout: SlotLayout
    threshold: Threshold

    @property
    def pairs(self) -> int:
        return self.slots.numel()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.hidden_states.device)

    def groups(self) -> PairGroups:
        """The pairs by slot."""
        block_pairs = pairs_a_block(self.pairs, self.num_slots, self.hidden_states.dtype)
        groups = PairGroups.allocate(self.pairs, self.num_slots, block_pairs, self.hidden_states.device)
        group_pairs(self.slots, self.num_slots, groups)
        return groups


def gate_activations(call: SlotCall, act: torch.Tensor, groups: PairGroups | None = None) -> None:
    """Fills `act (P, I)` float32 with `act(gate)` of every present pair; ungated `act(up)`."""
    x, gates, gate = call.hidden_states, call.layout.gates, call.layout.gate
    if len(x) <= DECODE_TOKENS:
        rows_by_pair(x, call.packed, gates, call.slots, act, gate, "act")
        return
    columns = grouped_columns(x, gates)
    by_slot = groups or call.groups()
    packed_product(columns, call.packed, gates, act, groups=by_slot, gate=gate, finish="act", pairs_a_row=call.slots.shape[1])


def run_pair(call: SlotCall) -> None:
    rows, pairs = call.layout.rows, call.pairs
    act, values = call.empty(pairs, rows.neurons), call.empty(pairs, rows.neurons)
    lists = Lists(call.empty(pairs, rows.neurons, dtype=torch.int32), values, call.empty(pairs, dtype=torch.int32))
    gate_activations(call, act)
    compact_lists(act, call.slots, call.threshold, lists, rows)
    neurons = call.empty(pairs, rows.places)
    up_packed(in_unit_order(call.hidden_states, rows), call.packed, call.slots, lists, neurons, rows, call.layout.gate)
    sums = call.empty(pairs, rows.width)
    down_packed(call.packed, call.slots, lists, neurons, sums, rows)
    in_units = call.empty(len(call.slots), rows.width)
    combine(sums, call.slots, call.top_k_weights, in_units)
    call.out.copy_(from_unit_order(in_units, rows))


def run_union(call: SlotCall) -> None:
    groups, act = call.groups(), call.empty(call.pairs, call.layout.rows.neurons)
    listed = call.empty(groups.max_blocks, call.layout.rows.neurons, dtype=torch.int32)
    lists = Lists(listed, listed, call.empty(groups.max_blocks, dtype=torch.int32))
    gate_activations(call, act, groups)
    compact_union(call.threshold, lists, act, groups, call.layout.rows)
    _finish_blocks(call, groups, act, lists)


def run_dense(call: SlotCall) -> None:
    groups, act = call.groups(), call.empty(call.pairs, call.layout.rows.neurons)
    gate_activations(call, act, groups)
    _finish_blocks(call, groups, act, None)


def _finish_blocks(call: SlotCall, groups: PairGroups, act: torch.Tensor, lists: Lists | None) -> None:
    rows, x, gate = call.layout.elements, call.hidden_states, call.layout.gate
    neurons = call.empty(call.pairs, rows.neurons, dtype=x.dtype)
    threshold = call.threshold if lists is None else None
    up_packed_union(in_element_order(x, rows), call.packed, lists, act, neurons, groups, rows, gate, call.slots.shape[1], threshold)
    sums = call.empty(call.pairs, rows.width)
    down_packed_union(call.packed, lists, neurons, sums, groups, rows)
    in_elements = call.empty(len(x), rows.width)
    combine(sums, call.slots, call.top_k_weights, in_elements)
    call.out.copy_(from_element_order(in_elements, rows))


SLOT_PATHS: Mapping[str, Callable[[SlotCall], None]] = {"pair": run_pair, "union": run_union, "dense": run_dense}
