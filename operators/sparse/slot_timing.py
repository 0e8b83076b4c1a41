"""Times the paths of experts in slots on their GPU, before anybody uses the slots. Nothing here has run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from moegraft.operators.kernels.finish import Threshold
from moegraft.operators.kernels.launch import on
from moegraft.operators.sparse.choice import SLOT_DEFAULTS, PathChoices, TimedCase
from moegraft.operators.sparse.slot_paths import DENSE_SLOT_PATHS, SLOT_PATHS, SlotCall
from moegraft.operators.sparse.slots import SparseSlotExperts
from moegraft.operators.sparse.timing import ROUTINGS, replay_ms

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
