"""Experts in slots of GPU memory in the CPU kernel's sparse layout: of up and down only active neurons' rows are read."""

from __future__ import annotations

import torch

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.combine import combine
from moegraft.operators.kernels.finish import Threshold
from moegraft.operators.kernels.gates import gate_of
from moegraft.operators.kernels.launch import Bytes
from moegraft.operators.kernels.packed_product import grouped_columns, packed_product
from moegraft.operators.kernels.routing import PairGroups, group_pairs, pairs_a_block
from moegraft.operators.kernels.slots import DECODE_TOKENS, MOST_TOKENS, check_call
from moegraft.operators.kernels.slots_decode import rows_by_pair
from moegraft.operators.sparse.call import Lists
from moegraft.operators.sparse.kernels.gate_compact import compact_lists
from moegraft.operators.sparse.kernels.packed_rows import down_packed, from_unit_order, in_unit_order, sparse_layout, up_packed


class SparseSlotExperts:
    """`SlotExperts` for experts that are packed with `sparse=True`, and a threshold below which neurons count as zero.

    Args:
        shape: sizes of the experts; `num_experts` is of no matter.
        weight_type: the type the slots' bytes were packed to by `PackedExperts`, in its sparse layout.
        device: the GPU.

    Attributes:
        threshold: on the device, and counted there: a captured graph follows it. Drafts that leave out more have `draft_threshold`.
    """

    def __init__(self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str, device: torch.device) -> None:
        self.shape = shape
        self.weight_type = weight_type
        self.gate = gate_of(gate_spec, gated=shape.gated)
        self.gates, self.rows = sparse_layout(shape, weight_type)
        self.threshold, self.draft_threshold = (
            Threshold(torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(2, dtype=torch.int64, device=device))
            for _ in range(2)
        )
        self._taken = (0, 0)

    @property
    def expert_bytes(self) -> int:
        return 4 * self.rows.expert_words

    def set_threshold(self, threshold: float, sparsity: float, *, drafting: bool = False) -> None:
        (self.draft_threshold if drafting else self.threshold).value.fill_(threshold)

    def take_counts(self) -> tuple[int, int]:
        """Neurons that reached the threshold, and all, since the last call; waits for the device."""
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
        *,
        drafting: bool = False,
    ) -> None:
        """As `SlotExperts.forward`. Every pair reads its own rows: made for decode; prompts are faster with dense experts.

        `drafting` leaves out what drafts leave out.

        Gates and sums are float32, or on tensor cores rounded to the dtype of hidden_states for more than a few tokens.

        Raises:
            ValueError: a shape, dtype or layout in memory other than those.
        """
        check_call(self.shape.hidden, self.expert_bytes, hidden_states, arena, slots, top_k_weights, out)
        packed = Bytes.of(arena, self.weight_type)
        if slots.numel() == 0:
            out.zero_()
            return
        threshold = self.draft_threshold if drafting else self.threshold
        for first in range(0, len(slots), MOST_TOKENS):
            part = slice(first, first + MOST_TOKENS)
            self._forward(hidden_states[part], packed, len(arena), slots[part], top_k_weights[part], out[part], threshold)

    def activations(self, hidden_states: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`act(gate)` (T, K, I) float32; anything for slots of -1."""
        act = torch.empty(slots.numel(), self.shape.intermediate, dtype=torch.float32, device=hidden_states.device)
        self._gates(hidden_states, Bytes.of(arena, self.weight_type), len(arena), slots, act)
        return act.view(*slots.shape, -1)

    def _gates(self, x: torch.Tensor, packed: Bytes, num_slots: int, slots: torch.Tensor, act: torch.Tensor) -> None:
        if len(slots) <= DECODE_TOKENS:
            rows_by_pair(x, packed, self.gates, slots, act, self.gate, "act")
            return
        pairs = slots.numel()
        groups = PairGroups.allocate(pairs, num_slots, pairs_a_block(pairs, num_slots, x.dtype), x.device)
        group_pairs(slots, num_slots, groups)
        columns = grouped_columns(x, self.gates)
        packed_product(columns, packed, self.gates, act, groups=groups, gate=self.gate, finish="act", pairs_a_row=slots.shape[1])

    def _forward(
        self,
        x: torch.Tensor,
        packed: Bytes,
        num_slots: int,
        slots: torch.Tensor,
        top_k_weights: torch.Tensor,
        out: torch.Tensor,
        threshold: Threshold,
    ) -> None:
        pairs, rows, device = slots.numel(), self.rows, x.device
        act, values = (torch.empty(pairs, rows.neurons, dtype=torch.float32, device=device) for _ in range(2))
        listed = torch.empty(pairs, rows.neurons, dtype=torch.int32, device=device)
        lists = Lists(listed, values, torch.empty(pairs, dtype=torch.int32, device=device))
        self._gates(x, packed, num_slots, slots, act)
        compact_lists(act, slots, threshold, lists, rows)
        neurons = torch.empty(pairs, rows.places, dtype=torch.float32, device=device)
        up_packed(in_unit_order(x, rows), packed, slots, lists, neurons, rows, self.gate)
        sums = torch.empty(pairs, rows.width, dtype=torch.float32, device=device)
        down_packed(packed, slots, lists, neurons, sums, rows)
        in_units = torch.empty(len(slots), rows.width, dtype=torch.float32, device=device)
        combine(sums, slots, top_k_weights, in_units)
        out.copy_(from_unit_order(in_units, rows))
