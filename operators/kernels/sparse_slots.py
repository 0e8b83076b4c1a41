"""Experts in slots of GPU memory in the CPU kernel's sparse layout: rows of inactive neurons need not be read.

Both paths compute the same function; the batch decides which one does, as in "Exploiting Intra-Expert Activation Sparsity", section 4.1.
`pair`: every pair of a token and an expert reads its own active rows. `dense`: all rows are read, on tensor cores, and neurons below the
threshold become zeros. Gates are always computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.launch import on
from moegraft.operators.kernels.packed_layout import sparse_layout
from moegraft.operators.kernels.packed_product import Threshold
from moegraft.operators.kernels.slots import MOST_TOKENS, check_call
from moegraft.operators.kernels.sparse_rows import SparseCall, gate_activations, run_dense, run_pair

# The largest batch of the path `pair`. With bfloat16 experts of Qwen3-30B-A3B's shapes and 85 % of the neurons left out, an H100
# takes 0.33 ms by it and 0.44 by `dense` for 64 tokens, 1.32 and 0.59 for 512.
PAIR_TOKENS = 64


SLOT_PATHS: Mapping[str, Callable[[SparseCall], None]] = {"pair": run_pair, "dense": run_dense}


class SparseSlotExperts:
    """`SlotExperts` for experts in the sparse layout, with a threshold below which neurons count as zero.

    Args:
        shape: sizes of the experts, and how many a layer has.
        weight_type: the type the slots' bytes were packed to, by `PackedExperts` with `sparse=True`.
        device: the GPU.

    Attributes:
        threshold: on the device, and counted there: a captured graph follows it. Drafts that leave out more have `draft_threshold`.
    """

    def __init__(self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str, device: torch.device) -> None:
        self.shape = shape
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
