"""Experts in slots of GPU memory in the CPU kernel's sparse layout: rows of inactive neurons need not be read.

Both paths compute the same function; which is faster depends on the batch (`choice`), as in "Exploiting Intra-Expert Activation Sparsity",
section 4.1. `pair`: every pair of a token and an expert reads its own active rows. `dense`: all rows are read, on tensor cores, and neurons
below the threshold become zeros. Gates are always computed whole.

Nothing here has run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts
from moegraft.operators.kernels.epilogue import Threshold
from moegraft.operators.kernels.launch import PackedBytes, on
from moegraft.operators.kernels.packed_layout import SparseLayout, in_element_order, in_unit_order, sparse_layout
from moegraft.operators.kernels.packed_product import grouped_columns, packed_product
from moegraft.operators.kernels.routing import PairGroups, combine, group_pairs, pairs_a_block
from moegraft.operators.kernels.slots import DECODE_TOKENS, MOST_TOKENS, check_call, rows_by_pair
from moegraft.operators.kernels.sparse_dense import down_dense, up_dense
from moegraft.operators.kernels.sparse_pairs import ActiveNeurons, down_pairs, list_active, up_pairs
from moegraft.operators.sparse.choice import PathChoices, TimedCase, default_path
from moegraft.operators.stream_capture import capture_graph
from moegraft.operators.weights import Part


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
    x = in_unit_order(call.hidden_states, rows)
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
    up_dense(in_element_order(x, rows), call.packed, act, neurons, groups, rows, call.layout.gate, call.top_k, call.threshold)
    sums = call.empty(call.pairs, rows.hidden)
    down_dense(call.packed, neurons, sums, groups, rows)
    combine(sums, call.slots, call.top_k_weights, call.out)


SLOT_PATHS: Mapping[str, Callable[[SparseCall], None]] = {"pair": run_pair, "dense": run_dense}

ChooseSlotPath = Callable[["SparseSlotExperts", int, int], str]  # of a layer, for tokens and experts per token


class SparseSlotExperts:
    """`SlotExperts` for experts in the sparse layout, with a threshold below which neurons count as zero.

    Args:
        shape: sizes of the experts, and how many a layer has.
        weight_type: the type the slots' bytes were packed to, by `PackedExperts` with `sparse=True` or by `SlotPacker`.
        device: the GPU.
        choose: the path of a batch size; by default an estimate.

    Attributes:
        threshold: on the device, and counted there: a captured graph follows it. Drafts that leave out more have `draft_threshold`.
        sparsity: the share of neurons that the threshold is meant to leave out: which path is faster depends on it.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        gate_spec: GateSpec,
        weight_type: str,
        device: torch.device,
        choose: ChooseSlotPath | None = None,
    ) -> None:
        self.shape = shape
        self.weight_type = weight_type
        self.layout = sparse_layout(shape, gate_spec, weight_type)
        self.threshold, self.draft_threshold = Threshold.zero(device), Threshold.zero(device)
        self.sparsity = 0.0
        self._choose = choose
        self._taken = (0, 0)

    @property
    def expert_bytes(self) -> int:
        return self.layout.expert_bytes

    def set_threshold(self, threshold: float, sparsity: float, *, drafting: bool = False) -> None:
        """Set the threshold of every call, or that of drafts that leave out more."""
        (self.draft_threshold if drafting else self.threshold).value.fill_(threshold)
        if not drafting:
            self.sparsity = sparsity

    def take_counts(self) -> tuple[int, int]:
        """Return the neurons that reached the threshold, and all, since the last call; waits for the device."""
        active, neurons = self.threshold.counts.tolist()
        before, self._taken = self._taken, (active, neurons)  # not set to zero: what another stream counts meanwhile would be lost
        return active - before[0], neurons - before[1]

    def choose(self, tokens: int, top_k: int) -> str:
        """Return the path of batches of that size."""
        return default_path(tokens) if self._choose is None else self._choose(self, tokens, top_k)

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
        """As `SlotExperts.forward`, by one of `SLOT_PATHS`, by default the chosen one; `drafting` leaves out what drafts leave out.

        Sums are float32. Gates of more than a few tokens, and on the path `dense` all products, are computed on tensor cores,
        with unpacked weights rounded to the dtype of hidden_states.

        Raises:
            ValueError: a shape, dtype or memory layout other than those.
        """
        check_call(self.shape.hidden, self.expert_bytes, hidden_states, arena, slots, top_k_weights, out)
        if slots.numel() == 0:
            out.zero_()
            return
        with on(arena.device):
            for first in range(0, len(slots), MOST_TOKENS):
                part = slice(first, first + MOST_TOKENS)
                chosen = None if experts is None else experts[part]
                call = self.call(hidden_states[part], arena, slots[part], top_k_weights[part], out[part], drafting=drafting, experts=chosen)
                SLOT_PATHS[path or self.choose(len(call.slots), call.top_k)](call)

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
        experts: torch.Tensor | None = None,
    ) -> SparseCall:
        """Return a call as the paths take it, of up to MOST_TOKENS tokens; by default with the layer's own threshold."""
        own = self.draft_threshold if drafting else self.threshold
        given = hidden_states, arena, slots, top_k_weights, out
        return SparseCall(*given, self.layout, threshold or own, self.shape.num_experts, experts)

    def activations(
        self, hidden_states: torch.Tensor, arena: torch.Tensor, slots: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of `slots (T, K)` with `act(gate) (T', K, I)` float32; arbitrary for slots of -1."""
        for first in range(0, len(slots), MOST_TOKENS):
            x, part = hidden_states[first : first + MOST_TOKENS], slots[first : first + MOST_TOKENS]
            act = torch.empty(part.numel(), self.shape.intermediate, dtype=torch.float32, device=x.device)
            if part.numel():
                with on(x.device):
                    gate_activations(self.call(x, arena, part, part, x), act)
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


BATCHES = tuple(1 << power for power in range(10))  # timed when a model is loaded; beyond, all rows are needed
ROUTINGS = 4  # different experts from one replayed call to the next, so that the L2 cache does not hold them all
REPLAYS = 11
MOST_ACTIVATIONS = 1 << 24  # of which a quantile is taken
GetArena = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TimedSlotPaths:
    """Chooses the path of each call of a model's layers by measured times; a batch size that was not timed gets a default.

    Attributes:
        num_experts: of each layer.
        resident: the experts of a layer that have slots.
        arena: slots that may be used for timing at any time, the first `resident` of them with experts; None where they change.
    """

    choices: PathChoices
    num_experts: int
    resident: int
    arena: GetArena | None = None

    def __call__(self, experts: SparseSlotExperts, tokens: int, top_k: int) -> str:
        device = experts.threshold.value.device
        timing = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return self._path(experts, tokens, top_k, self.arena if timing else None)

    def time(self, experts: SparseSlotExperts, top_k: int, arena: GetArena) -> None:
        """Time the batch sizes that were not timed before.

        Args:
            arena: called if there is something to time: the slots (S, expert_bytes) uint8, the first `resident` of them with experts.
        """
        arena = cache(arena)
        for tokens in BATCHES:
            self._path(experts, tokens, top_k, arena)

    def _path(self, experts: SparseSlotExperts, tokens: int, top_k: int, arena: GetArena | None) -> str:
        def measure(tokens: int) -> Mapping[str, float]:
            """Return the median milliseconds of each path."""
            assert arena is not None, "no slots to time with"
            slots = arena()
            calls = synthetic_slot_calls(experts, slots, tokens, top_k, self.num_experts, self.resident)
            with on(slots.device):
                return {name: median(replay_ms([partial(path, call) for call in calls], slots.device)) for name, path in SLOT_PATHS.items()}

        shape, device = experts.shape, experts.threshold.value.device
        case = TimedCase(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            num_experts=self.num_experts,
            top_k=top_k,
            weights=experts.weight_type,
            gated=shape.gated,
            sparsity=round(experts.sparsity, 2),
            gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            resident=self.resident,
        )
        return self.choices.path(case, tokens, None if arena is None else measure)


def synthetic_slot_calls(
    experts: SparseSlotExperts, arena: torch.Tensor, tokens: int, top_k: int, num_experts: int, resident: int, seed: int = 0
) -> list[SparseCall]:
    """Return calls over random tokens and experts, of which the first `resident` are in the slots of their numbers.

    They have a threshold of their own that leaves out as large a share of these neurons as the layer is meant to leave out.
    """
    device, generator = arena.device, torch.Generator(arena.device).manual_seed(seed)
    own = Threshold.zero(device)
    dtype = {"float32": torch.float32, "float16": torch.float16}.get(experts.weight_type, torch.bfloat16)
    calls: list[SparseCall] = []
    for _ in range(ROUTINGS):
        x = torch.randn(tokens, experts.shape.hidden, generator=generator, device=device).to(dtype)
        shares, chosen = torch.rand(tokens, num_experts, generator=generator, device=device).topk(top_k, dim=-1)
        slots = torch.where(chosen < resident, chosen, -1).to(torch.int32)
        calls.append(experts.call(x, arena, slots, shares, torch.empty_like(x), own, experts=chosen))
    if experts.sparsity:
        first = torch.zeros_like(calls[0].slots) + torch.arange(top_k, dtype=torch.int32, device=device) % resident
        _, activations = next(experts.activations(calls[0].hidden_states, arena, first))
        own.value.fill_(activations.abs().flatten()[:MOST_ACTIVATIONS].quantile(experts.sparsity))
    return calls


def replay_ms(calls: Sequence[Callable[[], object]], device: torch.device, replays: int = REPLAYS) -> list[float]:
    """Return the milliseconds of one of `calls`, for each replay of a graph that runs them all once."""

    def run() -> None:
        for call in calls:
            call()

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles
        graph = capture_graph(device, stream, run)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        graph.replay()
        for event in events[:-1]:
            event.record(stream)
            graph.replay()
        events[-1].record(stream)
        stream.synchronize()
    torch.cuda.current_stream(device).wait_stream(stream)
    return [start.elapsed_time(end) / len(calls) for start, end in pairwise(events)]
