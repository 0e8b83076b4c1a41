"""Experts in slots of GPU memory in the CPU kernel's sparse layout: of up and down only active neurons' rows are read where that pays."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.finish import Threshold
from moegraft.operators.kernels.launch import Bytes
from moegraft.operators.kernels.slots import MOST_TOKENS, check_call
from moegraft.operators.sparse.choice import SLOT_DEFAULTS, default_path
from moegraft.operators.sparse.slot_paths import SLOT_PATHS, SlotCall, SlotLayout, gate_activations

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
