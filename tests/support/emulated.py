"""`gpu: emulated` in rules: a modelled machine whose slots are host memory, from which the CPU's kernel computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import ExpertsShape, PackedExperts
from moegraft.operators.cpu import as_array
from moegraft.operators.experts.forecast import Neurons
from moegraft.operators.offload import gpu_layer, model_experts
from moegraft.operators.offload.devices.base import DEVICE_KINDS, CpuTicket, DeviceKind, Event, Waiter
from moegraft.operators.offload.executors import CallExecutor, EngineLayers, SlotKernel, sparse_arguments
from moegraft.operators.offload.scheduler import Ids
from moegraft.operators.sparsity import LayerSparsity
from support.virtual_device import PROFILES, Timed, VirtualDevice, Work

PROFILE = "a6000_10core"


class HostSlotLayers(EngineLayers):
    """Computes by the number of the slot: an expert that is missing, still in flight or already evicted gives wrong numbers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        first, slots = self.packed[0], self._slot_memory.flatten().numpy()
        slots.flags.writeable = False  # read-only bytes count as completely packed
        shape = first.shape
        in_slots = ExpertsShape(len(self._slot_memory), shape.hidden, shape.intermediate, gated=shape.gated, bias=shape.bias)
        self._slot_experts = PackedExperts(in_slots, first.gate_spec, first.weight_type, slots, sparse=first.sparse)

    def device_kernel(self, sparsity: LayerSparsity | None) -> None:
        return None

    def bound_kernel(self, kernel: Any, sparsity: LayerSparsity | None) -> SlotKernel:
        return partial(self.compute, sparse_arguments(sparsity))

    def compute(
        self,
        arguments: dict[str, Any],
        x: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        experts: torch.Tensor | None = None,
    ) -> None:
        part = torch.empty_like(x)
        self.runtime.forward(self._slot_experts, as_array(x), slots.long().numpy(), weights.numpy(), as_array(part), **arguments)
        with torch.inference_mode():  # a kernel writes whatever it is given
            out.copy_(part)

    def fetch(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    def host_buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def write_routing(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor | None,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        slot_of: torch.Tensor,
        row: Mapping[str, torch.Tensor],
    ) -> None:
        index = top_k_index.long()
        real = (index >= 0) & (index < len(slot_of))
        slots = slot_of[index.where(real, 0)].where(real, -1)
        row["tokens"].copy_(tokens)
        if scores is not None:
            row["scores"].copy_(scores)
        row["weights"].copy_(top_k_weights)
        row["chosen"].copy_(index.where(real, -1))
        row["ids"].copy_(index.where(real & (slots < 0), -1))
        row["slots"].copy_(slots)

    def wait_for(self, launches: Sequence[Event]) -> None:
        for event in launches:
            event.wait()


class TimedExecutor(CallExecutor):
    """Gives virtual devices the time of the experts that it computes."""

    def __init__(self, layers: EngineLayers, packed: PackedExperts, sparsity: LayerSparsity | None, *call: Any, **more: Any) -> None:
        super().__init__(layers, packed, sparsity, *call, **more)
        self._neurons = None if sparsity is None else Neurons.without(sparsity.routed_target, gated=packed.shape.gated)
        self._expert_bytes = packed.expert_bytes
        self._loads = np.bincount(self._index.reshape(-1), minlength=layers.num_experts)

    def on_cpu(self, experts: Ids) -> Callable[[], Waiter]:
        return self._timed(experts, super().on_cpu(experts))

    def defer(self, experts: Ids, submit: Callable[[Callable[[], Waiter]], CpuTicket]) -> None:
        super().defer(experts, lambda job: submit(self._timed(experts, job)))

    def on_gpu(self, experts: Ids, slots: NDArray[np.int32]) -> Callable[[], None]:
        return self._timed(experts, super().on_gpu(experts, slots))

    def _timed(self, experts: Ids, function: Callable[[], Any]) -> Timed:
        return Timed(Work(tuple(self._loads[experts].tolist()), self._expert_bytes, neurons=self._neurons), function)


gpu_layer.CallExecutor = model_experts.CallExecutor = TimedExecutor  # type: ignore[misc]
DEVICE_KINDS["emulated"] = DeviceKind(lambda index: VirtualDevice(PROFILES[PROFILE], index=index), HostSlotLayers)


@contextmanager
def device_kind(device: type[VirtualDevice] = VirtualDevice, layers: type[EngineLayers] = HostSlotLayers, **options: Any) -> Iterator[str]:
    """Register devices of a test's own for the body, and give their name, which is that of `gpu:` in rules."""
    DEVICE_KINDS["tested"] = DeviceKind(lambda index: device(PROFILES[PROFILE], index=index, **options), layers)
    try:
        yield "tested"
    finally:
        del DEVICE_KINDS["tested"]
