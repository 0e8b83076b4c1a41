"""The experts of a layer as far as they lie in slots of GPU memory, computed from the CPU kernel's own packed bytes."""

from __future__ import annotations

from typing import Literal

import torch

from moegraft.cpu_backend import ExpertsShape, GateSpec
from moegraft.operators.kernels.gates import gate_of
from moegraft.operators.kernels.launch import Bytes
from moegraft.operators.kernels.layout import expert_matrices
from moegraft.operators.kernels.slots_decode import run_decode
from moegraft.operators.kernels.slots_grouped import run_grouped

# Up to here every pair reads its expert's weights itself; an estimate, no GPU has measured it.
DECODE_TOKENS = 4
# Tokens computed in one go: bounds the scratch memory, of which the rows of pairs, (T * K, H) float32, are the most.
MOST_TOKENS = 2048


class SlotExperts:
    """Computes experts out of an arena of slots; holds no weights itself.

    Args:
        shape: sizes of the experts; `num_experts` is of no matter.
        weight_type: the type the slots' bytes were packed to by `PackedExperts`, in its dense layout.
    """

    def __init__(self, shape: ExpertsShape, gate_spec: GateSpec, weight_type: str) -> None:
        self.shape = shape
        self.weight_type = weight_type
        self.gate = gate_of(gate_spec, gated=shape.gated)
        self.matrices = expert_matrices(shape, weight_type)

    def forward(
        self,
        hidden_states: torch.Tensor,
        arena: torch.Tensor,
        slots: torch.Tensor,
        top_k_weights: torch.Tensor,
        out: torch.Tensor,
        path: Literal["decode", "grouped"] | None = None,
    ) -> None:
        """Queues the work on the current stream; waits for nothing, and can be captured in a CUDA graph.

        Args:
            hidden_states: (T, H) float32, float16 or bfloat16.
            arena: (S, expert_bytes) uint8; what lies in slots that no id names is not read.
            slots: (T, K) int32, the slot of each chosen expert, -1 for one that is not here. A slot beyond S is not checked.
            top_k_weights: (T, K) floating.
            out: (T, H) float32, written in full; a token with no expert here gets zeros.
            path: by default `decode` for few tokens, where each pair streams its expert, else `grouped`, on tensor cores.

        Both paths accumulate in float32; `grouped` rounds unpacked weights and the neurons between the matrices to the dtype of
        hidden_states. Equal inputs give equal bits.

        Raises:
            ValueError: a shape, dtype or layout in memory other than these.
        """
        check_call(self.shape.hidden, self.matrices.expert_bytes, hidden_states, arena, slots, top_k_weights, out)
        packed = Bytes.of(arena, self.weight_type)
        tokens, top_k = slots.shape
        if top_k == 0:
            out.zero_()
            return
        if (path or ("decode" if tokens <= DECODE_TOKENS else "grouped")) == "decode":
            if tokens:
                run_decode(hidden_states, packed, slots, top_k_weights, out, self.matrices, self.gate)
            return
        for first in range(0, tokens, MOST_TOKENS):
            part = slice(first, first + MOST_TOKENS)
            run_grouped(hidden_states[part], packed, len(arena), slots[part], top_k_weights[part], out[part], self.matrices, self.gate)


def check_call(
    hidden: int,
    expert_bytes: int,
    hidden_states: torch.Tensor,
    arena: torch.Tensor,
    slots: torch.Tensor,
    top_k_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """
    Raises:
        ValueError: what `SlotExperts.forward` does not take.
    """
    tokens = hidden_states.shape[0]
    if hidden_states.shape != (tokens, hidden) or out.shape != hidden_states.shape:
        raise ValueError(f"hidden_states {tuple(hidden_states.shape)} and out {tuple(out.shape)} must both be (T, {hidden})")
    if slots.dim() != 2 or slots.shape[0] != tokens or slots.shape != top_k_weights.shape:
        raise ValueError(f"slots {tuple(slots.shape)} and top_k_weights {tuple(top_k_weights.shape)} must both be ({tokens}, K)")
    if hidden_states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"hidden_states of {hidden_states.dtype}; float32, float16 and bfloat16 can be computed")
    if slots.dtype != torch.int32 or out.dtype != torch.float32:
        raise ValueError(f"slots must be int32 and out float32, not {slots.dtype} and {out.dtype}")
    if arena.dim() != 2 or arena.shape[1] != expert_bytes:
        raise ValueError(f"arena {tuple(arena.shape)} must be (S, {expert_bytes}) for experts of this shape, weight type and layout")
    for name, tensor in (("hidden_states", hidden_states), ("slots", slots), ("top_k_weights", top_k_weights), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous")
