"""A layer's experts inside of a captured decode step: no decision and no wait, both devices read one routing and one slot table.

What has a slot is computed out of it, the rest by the CPU: a host function that the GPU calls, on a branch of its own beside the GPU's
experts. Shapes: L layers, T tokens (fixed), E experts, K experts a token, H hidden. No GPU has run this yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.cpu import as_array, rounded
from moegraft.operators.experts.devices.interface import Device, Work

if TYPE_CHECKING:
    from moegraft.operators.experts.engine.assembly import EngineParts

HOST_STREAM = "experts on the host"


@dataclass(frozen=True, slots=True)
class CallShape:
    """One call of a layer's experts: (T, H) hidden states of `dtype`, (T, K) choices."""

    tokens: int
    top_k: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Routed:
    """What the layers of a step chose: (L, T, K) int64, -1 for padded slots, of whom those `on_cpu` (L, T, K) had no slot; and the scores
    (L, T, E) float32 of the layers whose routers have told them, (L,)."""

    chosen: NDArray[np.int64]
    on_cpu: NDArray[np.bool_]
    scores: NDArray[np.float32]
    scored: NDArray[np.bool_]


class StepBuffers:
    """Memory at fixed addresses that a captured step reads and writes; all layers share what is of use within one alone.

    Attributes:
        table: (L, E + 1) int32 on the device, the slots while a step runs; the last column, of padded places, is -1.
        tokens, ids, weights, out: the CPU's part of a layer, in host memory: (T, H), (T, K) int64, (T, K) float32, (T, H).
        returned: (T, H) on the device, where `out` is copied.
    """

    def __init__(self, device: Device, layers: int, num_experts: int, hidden: int, call: CallShape) -> None:
        on_device, pinned = device.torch_device, device.torch_device.type == "cuda"
        rows, choices = (call.tokens, hidden), (call.tokens, call.top_k)
        self._host_table = torch.full((layers, num_experts + 1), -1, dtype=torch.int32, pin_memory=pinned)
        self.table = self._host_table.to(on_device, copy=True)
        self.tokens = torch.zeros(rows, dtype=call.dtype, pin_memory=pinned)
        self.ids = torch.full(choices, -1, dtype=torch.int64, pin_memory=pinned)
        self.weights = torch.zeros(choices, dtype=torch.float32, pin_memory=pinned)
        self.out = torch.zeros(rows, dtype=call.dtype, pin_memory=pinned)
        self.returned = torch.zeros(rows, dtype=call.dtype, device=on_device)
        self._chosen = torch.full((layers, *choices), -1, dtype=torch.int64, pin_memory=pinned)
        self._slots = torch.full((layers, *choices), -1, dtype=torch.int32, pin_memory=pinned)
        self._scores = torch.zeros(layers, call.tokens, num_experts, dtype=torch.float32, pin_memory=pinned)
        self._scored = np.zeros(layers, bool)
        self._version = -1

    def show(self, table: NDArray[np.int32], version: int) -> None:
        """Queues a new slot table for the next step; the last one is done."""
        if version != self._version:
            self._host_table.numpy()[:, :-1] = table
            self.table.copy_(self._host_table, non_blocking=True)
            self._version = version

    def note(self, layer: int, chosen: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor | None) -> None:
        """Queues copies of a layer's routing, for `routed`."""
        self._chosen[layer].copy_(chosen, non_blocking=True)
        self._slots[layer].copy_(slots, non_blocking=True)
        self._scored[layer] = scores is not None
        if scores is not None:
            self._scores[layer].copy_(scores, non_blocking=True)

    def fetch_out(self) -> None:
        """Queues the copy of the CPU's part to the device."""
        self.returned.copy_(self.out, non_blocking=True)

    def routed(self) -> Routed:
        """A copy of what the last step, which is done, has noted."""
        chosen = self._chosen.numpy().copy()
        on_cpu = (self._slots.numpy() < 0) & (chosen >= 0)
        return Routed(chosen, on_cpu, self._scores.numpy().copy(), self._scored.copy())


class CapturedLayer:
    """One layer of a step; must live as long as the graph, which holds the address of its host call."""

    def __init__(self, device: Device, parts: EngineParts, index: int, buffers: StepBuffers) -> None:
        self._device = device
        self._parts = parts
        self._index = index
        self._buffers = buffers
        self._num_experts = parts.packed[index].shape.num_experts
        self._function, make = parts.runtime.host_function()
        arrays = (as_array(buffers.tokens), buffers.ids.numpy(), buffers.weights.numpy(), as_array(buffers.out))
        self._call = make(parts.packed[index], *arrays)

    def check(self) -> None:
        """Raises what the CPU's part of the last step raised, once."""
        self._call.check()

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scores: torch.Tensor | None,
        between: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """(T, H), (T, K), (T, K), (T, E) or None -> (T, H); hands work over and waits for nothing. `between`: see `Engine.run`."""
        buffers, device = self._buffers, self._device
        compute, host = device.stream("compute"), device.stream(HOST_STREAM)
        tokens = rounded(hidden_states.detach()).contiguous()
        index, weights = top_k_index.detach().long(), top_k_weights.detach().float().contiguous()
        real = (index >= 0) & (index < self._num_experts)
        slots = buffers.table[self._index][index.where(real, self._num_experts)]
        buffers.tokens.copy_(tokens, non_blocking=True)
        buffers.weights.copy_(weights, non_blocking=True)
        buffers.ids.copy_(index.where(real & (slots < 0), -1), non_blocking=True)
        buffers.note(self._index, index.where(real, -1), slots, scores)
        device.order(compute, host)
        device.launch_host(host, self._function, self._call.address, Work("host"))
        device.launch(host, buffers.fetch_out, Work("host"))
        resident = self._resident(tokens, slots, weights)
        if between is not None:
            between()
        device.order(host, compute)
        return (resident + buffers.returned).to(hidden_states.dtype)

    def _resident(self, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(T, H) float32: the experts that have a slot."""
        arena = self._parts.arena
        if arena is None:
            part = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
            self._parts.kernels_for(self._index)(tokens, self._parts.slot_memory, slots, weights, part)
            return part
        ids, part = slots.long(), torch.empty_like(tokens)
        arrays = (as_array(tokens), ids.numpy(), weights.numpy(), as_array(part))
        neurons = self._parts.neurons_of(self._parts.sparsity[self._index])
        work = Work("experts", (len(tokens),), self._parts.packed[0].expert_bytes, neurons=neurons)
        self._device.launch(self._device.stream("compute"), lambda: arena.runtime.forward(arena.experts, *arrays), work)
        return part.float()
