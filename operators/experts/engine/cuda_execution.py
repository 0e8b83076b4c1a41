"""A call of one layer's experts whose tokens lie in GPU memory: no GPU has run this yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.experts.devices.interface import CpuTicket, Event, Waiter
from moegraft.operators.experts.engine.host_execution import CpuPart, HostTokens

Ids = NDArray[np.int64]
SlotKernels = Callable[..., None]  # `SlotExperts.forward`, or that of `SparseSlotExperts`


class HostMirror:
    """Page-locked host copies of a call's tensors, all fetched with one wait. Kept between calls: one call at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A page-locked host tensor, grown as needed; what it held before is lost."""
        key = f"{name} {dtype}"
        held = self._buffers.get(key)
        if held is None or held.numel() < shape.numel():
            held = self._buffers[key] = torch.empty(shape.numel(), dtype=dtype, pin_memory=True)
        return held[: shape.numel()].view(shape)

    def fetch(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors in host memory; the GPU has done all work before them when this returns."""
        fetched = {name: self.buffer(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            fetched[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            torch.cuda.current_stream(device).synchronize()
        return fetched


class CudaExecution:
    """One call on a CUDA device, on its current stream; `result` (T, H) float32 is queued there when `join` has returned.

    Args:
        cpu: computes from `tokens`, host copies of what follows.
        arena: (S, expert_bytes) uint8 on the device.
        hidden_states: (T, H) on the device; `top_k_weights`: (T, K) there.
    """

    def __init__(
        self,
        cpu: CpuPart,
        tokens: HostTokens,
        kernels: SlotKernels,
        arena: torch.Tensor,
        hidden_states: torch.Tensor,
        top_k_weights: torch.Tensor,
        num_experts: int,
    ) -> None:
        self.result = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
        self._cpu = cpu
        self._kernels = kernels
        self._arena = arena
        self._hidden_states = hidden_states
        self._top_k_weights = top_k_weights
        self._num_experts = num_experts
        self._places = tokens.places(num_experts)

    def on_cpu(self, experts: Ids) -> Callable[[], Waiter | None]:
        return partial(self._cpu.start, experts)

    def on_gpu(self, experts: Ids, slots: NDArray[np.int32]) -> Callable[[], None]:
        slot_of = np.full(self._num_experts + 1, -1, np.int32)
        slot_of[experts] = slots
        return partial(self._launch, torch.from_numpy(slot_of[self._places]))

    def _launch(self, slots: torch.Tensor) -> None:
        part = torch.empty_like(self.result)
        on_device = slots.to(self.result.device, non_blocking=True)
        self._kernels(self._hidden_states, self._arena, on_device, self._top_k_weights, part)
        self.result += part

    def join(self, cpu: CpuTicket | None, gpu: Sequence[Event]) -> None:
        if cpu is not None:
            cpu.wait()
            self.result += self._cpu.out.to(self.result.device, non_blocking=True)

    def restart(self) -> None:
        self.result.zero_()
