"""Experts in slots of GPU memory in the CPU kernel's sparse layout: of up and down only active neurons' rows are read where that pays.

The ways through experts in slots in the CPU kernel's sparse layout. All compute the same function.

`pair`: every pair reads its own active rows. `union`: the pairs of an expert read the union of their rows, on tensor cores. `dense`: all
rows are read, and neurons below the threshold become zeros. Gates are read whole by all of them.

Times the paths of experts in slots on their GPU, before anybody uses the slots. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.epilogue import Threshold, combine
from moegraft.operators.kernels.launch import Bytes, on
from moegraft.operators.kernels.packed_layout import Gate, PackedMatrix, gate_of
from moegraft.operators.kernels.packed_product import grouped_columns, packed_product
from moegraft.operators.kernels.routing import PairGroups, group_pairs, pairs_a_block
from moegraft.operators.kernels.slots import DECODE_TOKENS, MOST_TOKENS, check_call, rows_by_pair
from moegraft.operators.kernels.sparse_call import Lists
from moegraft.operators.kernels.sparse_pairs import compact_lists
from moegraft.operators.kernels.sparse_rows import PackedRows, down_packed, from_unit_order, in_unit_order, sparse_layout, up_packed
from moegraft.operators.kernels.sparse_union import (
    ElementRows,
    compact_union,
    down_packed_union,
    element_rows,
    from_element_order,
    in_element_order,
    up_packed_union,
)
from moegraft.operators.sparse.choice import SLOT_DEFAULTS, PathChoices, TimedCase, default_path
from moegraft.operators.sparse.gpu_layer import ROUTINGS, replay_ms

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


ChooseSlotPath = Callable[["SparseSlotExperts", int, int], str]  # of a layer, for tokens and experts a token


class SparseSlotExperts:
    """`SlotExperts` for experts that are packed with `sparse=True`, and a threshold below which neurons count as zero.

    Args:
        shape: sizes of the experts; `num_experts` is of no matter to what is computed.
        weight_type: the type the slots' bytes were packed to by `PackedExperts`, in its sparse layout.
        device: the GPU.
        choose: the path of a batch size; by default an estimate.

    Attributes:
        threshold: on the device, and counted there: a captured graph follows it. Drafts that leave out more have `draft_threshold`.
        sparsity: the share of neurons that the threshold is meant to leave out: which path is fastest depends on it.
    """

    def __init__(
        self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str, device: torch.device, choose: ChooseSlotPath | None = None
    ) -> None:
        self.shape = shape
        self.weight_type = weight_type
        self.layout = SlotLayout.of(shape, gate_spec, weight_type)
        self.threshold, self.draft_threshold = (
            Threshold(torch.zeros(1, dtype=torch.float32, device=device), torch.zeros(2, dtype=torch.int64, device=device))
            for _ in range(2)
        )
        self.sparsity = 0.0
        self._choose = choose
        self._taken = (0, 0)

    @property
    def expert_bytes(self) -> int:
        return 4 * self.layout.rows.expert_words

    def set_threshold(self, threshold: float, sparsity: float, *, drafting: bool = False) -> None:
        (self.draft_threshold if drafting else self.threshold).value.fill_(threshold)
        if not drafting:
            self.sparsity = sparsity

    def take_counts(self) -> tuple[int, int]:
        """Neurons that reached the threshold, and all, since the last call; waits for the device."""
        active, neurons = self.threshold.counts.tolist()
        before, self._taken = self._taken, (active, neurons)  # not set to zero: what another stream counts meanwhile would be lost
        return active - before[0], neurons - before[1]

    def choose(self, tokens: int, top_k: int) -> str:
        """The path of batches of that size."""
        return default_path(tokens, SLOT_DEFAULTS) if self._choose is None else self._choose(self, tokens, top_k)

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
    ) -> None:
        """As `SlotExperts.forward`, by one of `SLOT_PATHS`; by default by the chosen one. `drafting` leaves out what drafts leave out.

        Gates and sums are float32; for more than a few tokens gates, and on all paths but `pair` everything, on tensor cores, rounded to
        the dtype of hidden_states.

        Raises:
            ValueError: a shape, dtype or layout in memory other than those.
        """
        check_call(self.shape.hidden, self.expert_bytes, hidden_states, arena, slots, top_k_weights, out)
        if slots.numel() == 0:
            out.zero_()
            return
        for first in range(0, len(slots), MOST_TOKENS):
            part = slice(first, first + MOST_TOKENS)
            call = self.call(hidden_states[part], arena, slots[part], top_k_weights[part], out[part], drafting=drafting)
            SLOT_PATHS[path or self.choose(len(call.slots), call.slots.shape[1])](call)

    def call(
        self,
        hidden_states: torch.Tensor,
        arena: torch.Tensor,
        slots: torch.Tensor,
        top_k_weights: torch.Tensor,
        out: torch.Tensor,
        threshold: Threshold | None = None,
        *,
        drafting: bool = False,
    ) -> SlotCall:
        """One call as the paths take it, of up to MOST_TOKENS tokens; by default with the layer's own threshold."""
        own = self.draft_threshold if drafting else self.threshold
        packed = Bytes.of(arena, self.weight_type)
        return SlotCall(hidden_states, packed, len(arena), slots, top_k_weights, out, self.layout, threshold or own)

    def activations(self, hidden_states: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`act(gate)` (T, K, I) float32; anything for slots of -1."""
        act = torch.empty(slots.numel(), self.shape.intermediate, dtype=torch.float32, device=hidden_states.device)
        gate_activations(self.call(hidden_states, arena, slots, slots, act), act)
        return act.view(*slots.shape, -1)


BATCHES = tuple(1 << power for power in range(10))  # beyond, all rows are needed; and slots leave little memory for timing that
MOST_ACTIVATIONS = 1 << 24  # of whom a quantile is taken
Fill = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TimedSlotPaths:
    """Chooses the path of each call of a model's layers by what was timed; what was not gets a default, as the slots are in use by then.

    Attributes:
        num_experts: of each layer.
        resident: of them those that have slots.
    """

    choices: PathChoices
    num_experts: int
    resident: int

    def __call__(self, experts: SparseSlotExperts, tokens: int, top_k: int) -> str:
        return self._path(experts, tokens, top_k, None)

    def time(self, experts: SparseSlotExperts, top_k: int, fill: Fill) -> None:
        """Times what was not timed before.

        Args:
            fill: asked for if there is something to time: the slots (S, expert_bytes) uint8, the first `resident` of them with experts.
        """
        filled: list[torch.Tensor] = []

        def measure(tokens: int) -> Mapping[str, float]:
            if not filled:
                filled.append(fill())
            return self._times(experts, filled[0], tokens, top_k)

        for tokens in BATCHES:
            self._path(experts, tokens, top_k, measure)

    def _path(self, experts: SparseSlotExperts, tokens: int, top_k: int, measure: Callable[[int], Mapping[str, float]] | None) -> str:
        return self.choices.path(self._case(experts, top_k), tokens, DENSE_SLOT_PATHS, measure, SLOT_DEFAULTS)

    def _case(self, experts: SparseSlotExperts, top_k: int) -> TimedCase:
        shape, device = experts.shape, experts.threshold.value.device
        return TimedCase(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            num_experts=self.num_experts,
            top_k=top_k,
            dtype=experts.weight_type,
            gated=shape.gated,
            group=1,
            gate="exact",
            sparsity=round(experts.sparsity, 2),
            gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            resident=self.resident,
        )

    def _times(self, experts: SparseSlotExperts, arena: torch.Tensor, tokens: int, top_k: int) -> Mapping[str, float]:
        """Median milliseconds of each path."""
        with on(arena.device):
            calls = synthetic_slot_calls(experts, arena, tokens, top_k, self.num_experts, self.resident)
            return {name: median(replay_ms([partial(path, call) for call in calls], arena.device)) for name, path in SLOT_PATHS.items()}


def synthetic_slot_calls(
    experts: SparseSlotExperts, arena: torch.Tensor, tokens: int, top_k: int, num_experts: int, resident: int, seed: int = 0
) -> list[SlotCall]:
    """Calls over random tokens and experts, of which the first `resident` are in the slots of their numbers.

    They have a threshold of their own that leaves out as large a share of these neurons as the layer's is to leave out.
    """
    device, generator = arena.device, torch.Generator(arena.device).manual_seed(seed)
    own = Threshold(torch.zeros_like(experts.threshold.value), torch.zeros_like(experts.threshold.counts))
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(experts.weight_type, torch.bfloat16)
    calls: list[SlotCall] = []
    for _ in range(ROUTINGS):
        x = torch.randn(tokens, experts.shape.hidden, generator=generator, device=device).to(dtype)
        shares, chosen = torch.rand(tokens, num_experts, generator=generator, device=device).topk(top_k, dim=-1)
        slots = torch.where(chosen < resident, chosen, -1).to(torch.int32)
        out = torch.empty(x.shape, dtype=torch.float32, device=device)
        calls.append(experts.call(x, arena, slots, shares, out, own))
    if experts.sparsity:
        first = torch.zeros_like(calls[0].slots) + torch.arange(top_k, dtype=torch.int32, device=device) % resident
        activations = experts.activations(calls[0].hidden_states, arena, first)
        own.value.fill_(activations.abs().flatten()[:MOST_ACTIVATIONS].quantile(experts.sparsity))
    return calls
