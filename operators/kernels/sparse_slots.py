"""Experts in slots of GPU memory in the CPU kernel's sparse layout: rows of inactive neurons need not be read.

Both paths compute the same function; the batch decides which one does, as in "Exploiting Intra-Expert Activation Sparsity", section 4.1.
`pair`: every pair of a token and an expert reads its own active rows. `dense`: all rows are read, on tensor cores, and neurons below the
threshold become zeros. Gates are always computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts
from moegraft.operators.kernels.launch import PackedBytes, on
from moegraft.operators.kernels.packed_layout import SparseLayout, in_unit_order, sparse_layout
from moegraft.operators.kernels.packed_product import Threshold, grouped_columns, packed_product
from moegraft.operators.kernels.routing import PairGroups, combine, group_pairs, pairs_a_block
from moegraft.operators.kernels.slots import DECODE_TOKENS, MOST_TOKENS, check_call, rows_by_pair
from moegraft.operators.kernels.sparse_rows import ActiveNeurons, down_dense, down_pairs, list_active, up_dense, up_pairs
from moegraft.operators.weights import Part

# The largest batch of the path `pair`. With bfloat16 experts of Qwen3-30B-A3B's shapes and 85 % of the neurons left out, an H100
# takes 0.33 ms by it and 0.44 by `dense` for 64 tokens, 1.32 and 0.59 for 512.
PAIR_TOKENS = 64


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
    layout, rows, pairs = call.layout, call.layout.rows, call.pairs
    act = call.empty(pairs, rows.neurons)
    active = ActiveNeurons(
        call.empty(pairs, rows.neurons, dtype=torch.int32), call.empty(pairs, rows.neurons), call.empty(pairs, dtype=torch.int32)
    )
    gate_activations(call, act)
    list_active(act, call.slots, call.threshold, active, rows)
    x = in_unit_order(call.hidden_states.float(), rows)
    neurons = act  # its activations are in the lists now
    up_pairs(x, call.packed, call.slots, active, neurons, rows, layout.gate)
    sums = call.empty(pairs, rows.hidden)
    down_pairs(call.packed, call.slots, active, neurons, sums, rows)
    combine(sums, call.slots, call.top_k_weights, call.out)


def run_dense(call: SparseCall) -> None:
    rows, x = call.layout.elements, call.hidden_states
    groups = call.groups()
    act = call.empty(call.pairs, rows.neurons)
    gate_activations(call, act, groups)
    neurons = call.empty(call.pairs, rows.neurons, dtype=x.dtype)
    up_dense(in_unit_order(x, rows), call.packed, act, neurons, groups, rows, call.layout.gate, call.top_k, call.threshold)
    sums = call.empty(call.pairs, rows.hidden)
    down_dense(call.packed, neurons, sums, groups, rows)
    combine(sums, call.slots, call.top_k_weights, call.out)


SLOT_PATHS: Mapping[str, Callable[[SparseCall], None]] = {"pair": run_pair, "dense": run_dense}


class SparseSlotExperts:
    """`SlotExperts` for experts in the sparse layout, with a threshold below which neurons count as zero.

    Args:
        shape: sizes of the experts, and how many a layer has.
        weight_type: the type the slots' bytes were packed to, by `PackedExperts` with `sparse=True` or by `SlotPacker`.
        device: the GPU.

    Attributes:
        threshold: on the device, and counted there: a captured graph follows it. Drafts that leave out more have `draft_threshold`.
    """

    def __init__(self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str, device: torch.device) -> None:
        self.shape = shape
        self.weight_type = weight_type
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


class SlotPacker:
    """Packs one expert at a time to the bytes that its slot holds, in host memory.

    Every part of an expert is packed again before `slot_bytes` is called again.
    """

    def __init__(self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str) -> None:
        one = ExpertsShape(1, shape.hidden, shape.intermediate, shape.gated, shape.bias)
        self._packed = PackedExperts(one, gate_spec, weight_type, sparse=True)

    def pack(self, part: Part, values: NDArray[Any]) -> None:
        """Pack one matrix in `nn.Linear` orientation, or one bias; bfloat16 is given as its bits, biases as float32."""
        if part.endswith("_bias"):
            self._packed.pack_bias(0, part.removesuffix("_bias"), values)
            return
        self._packed.pack(0, part, values)

    def slot_bytes(self) -> torch.Tensor:
        """Return (expert_bytes,) uint8 in place, valid until the next `pack`."""
        return torch.from_numpy(self._packed.buffer)
