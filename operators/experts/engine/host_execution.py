"""A call of one layer's experts whose tokens lie in host memory: the CPU's part everywhere, and the GPU's on emulated devices.

On an emulated device slots are host memory, and the CPU kernel computes out of them by the number of the slot: an expert that is not
there, not yet there or not there any more gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import ExpertsShape, PackedExperts, Runtime
from moegraft.operators.cpu import as_array
from moegraft.operators.experts.devices.interface import Bytes, CpuTicket, Event, Waiter
from moegraft.operators.sparse.layer import LayerSparsity

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostTokens:
    """The tokens of a call and their routing, in host memory.

    Attributes:
        hidden_states: (T, H) float32, float16 or bfloat16, contiguous.
        top_k_index: (T, K) int64; ids out of range are padded slots.
        top_k_weights: (T, K) float32.
    """

    hidden_states: torch.Tensor
    top_k_index: Ids
    top_k_weights: NDArray[np.float32]

    def places(self, num_experts: int) -> Ids:
        """(T, K): the ids, with `num_experts` for padded slots."""
        index = self.top_k_index
        return np.where((index < 0) | (index >= num_experts), num_experts, index)


class CpuPart:
    """The experts of a call that the CPU computes.

    Args:
        out: (T, H), where they are summed; of the dtype of the hidden states.
    """

    def __init__(
        self, runtime: Runtime, packed: PackedExperts, tokens: HostTokens, out: torch.Tensor, sparsity: LayerSparsity | None = None
    ) -> None:
        self.out = out
        self._runtime = runtime
        self._packed = packed
        self._tokens = tokens
        self._options = sparse_arguments(sparsity)
        self._places = tokens.places(packed.shape.num_experts)

    def start(self, experts: Ids) -> Waiter:
        """Submits them; what it returns blocks until they are summed in `out`."""
        ids = np.full(self._packed.shape.num_experts + 1, -1, np.int64)
        ids[experts] = experts
        tokens = self._tokens
        ticket = self._runtime.submit(
            self._packed,
            as_array(tokens.hidden_states),
            ids[self._places],
            tokens.top_k_weights,
            as_array(self.out),
            **self._options,
        )
        return partial(self._runtime.wait, ticket)


def sparse_arguments(sparsity: LayerSparsity | None) -> dict[str, Any]:
    """What the kernel is told of a layer's sparsity."""
    if sparsity is None:
        return {}
    now = sparsity.in_force()
    return {"threshold": now.threshold, "neuron_counts": now.counts}


class SlotArena:
    """The slots of an emulated device, computed by the CPU kernel."""

    def __init__(self, runtime: Runtime, packed: PackedExperts, array: Bytes) -> None:
        shape = packed.shape
        slots = array.nbytes // packed.expert_bytes
        self.runtime = runtime
        self.experts = PackedExperts(
            ExpertsShape(slots, shape.hidden, shape.intermediate, gated=shape.gated, bias=shape.bias),
            packed.gate_spec,
            packed.weight_type,
            _read_only(array),
            sparse=packed.sparse,
        )


def _read_only(array: Bytes) -> Bytes:
    """What is packed elsewhere counts as whole."""
    view = array.view()
    view.flags.writeable = False
    return view


class HostExecution:
    """One call on an emulated device; `result` (T, H) float32 holds the sum when `join` has returned."""

    def __init__(self, cpu: CpuPart, arena: SlotArena, tokens: HostTokens, num_experts: int, sparsity: LayerSparsity | None = None) -> None:
        self.result = torch.zeros_like(tokens.hidden_states, dtype=torch.float32)
        self._cpu = cpu
        self._arena = arena
        self._tokens = tokens
        self._options = sparse_arguments(sparsity)
        self._num_experts = num_experts
        self._places = tokens.places(num_experts)

    def on_cpu(self, experts: Ids) -> Callable[[], Waiter | None]:
        return partial(self._cpu.start, experts)

    def on_gpu(self, experts: Ids, slots: NDArray[np.int32]) -> Callable[[], None]:
        slot_of = np.full(self._num_experts + 1, -1, np.int64)
        slot_of[experts] = slots
        return partial(self._launch, slot_of[self._places])

    def _launch(self, ids: Ids) -> None:
        tokens = self._tokens
        part = torch.empty_like(tokens.hidden_states)
        self._arena.runtime.forward(
            self._arena.experts, as_array(tokens.hidden_states), ids, tokens.top_k_weights, as_array(part), **self._options
        )
        self.result += part

    def join(self, cpu: CpuTicket | None, gpu: Sequence[Event]) -> None:
        for event in gpu:
            event.wait()
        if cpu is not None:
            cpu.wait()
            self.result += self._cpu.out

    def restart(self) -> None:
        self.result.zero_()
