"""Estimates of memory and speed that planning and operators exchange before a weight is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

GPU_MARGIN_SHARE, GPU_MARGIN_BYTES = 0.06, 768 << 20


def gpu_margin_bytes(total_bytes: int) -> int:
    """Return the bytes to leave free on a GPU of this size, for a prompt's activations, PyTorch's own blocks and the display."""
    return max(GPU_MARGIN_BYTES, int(GPU_MARGIN_SHARE * total_bytes))


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of one kind of layer on a CPU: GB/s of weights with one token, GFLOP/s with many."""

    decode_gbps: float
    prefill_gflops: float


@dataclass(frozen=True, slots=True)
class GpuRates:
    """The speed that a GPU reaches in practice.

    Attributes:
        gbps: bandwidth of its own memory.
        tflops: 16-bit arithmetic.
        link_gbps: bandwidth of copies from host memory.
        origin: where the figures are from, for people.
    """

    gbps: float
    tflops: float
    link_gbps: float
    origin: str

    def describe(self) -> str:
        return f"a GPU of {self.gbps:.4g} GB/s and {self.tflops:.3g} TFLOP/s behind a link of {self.link_gbps:.3g} GB/s ({self.origin})"


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The routed experts of one layer.

    Attributes:
        resident: share of the experts that have a slot on a GPU.
        left_out: share of the neurons that are left out.
        gated: whether the gate selects these neurons; otherwise the up projection does.
    """

    num_experts: int
    top_k: int
    expert_bytes: int
    bits_per_weight: float
    resident: float
    left_out: float = 0.0
    gated: bool = True


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Slots on a GPU: `resident` experts stay there; `total` also counts the slots that other experts are loaded into."""

    resident: int
    total: int


class ExpertSlots(ABC):
    """How experts in host memory share the slots of a GPU. Layers with equal objects share slots."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens of the key-value cache to reserve memory for where slots take the free memory."""

    @property
    @abstractmethod
    def is_sized(self) -> bool:
        """Whether the rule gives the number of slots; otherwise they take the free memory."""

    @abstractmethod
    def with_ratio(self, ratio: float) -> Self:
        """Return a copy with slots for this share of the experts."""

    @abstractmethod
    def count(self, layers: int, num_experts: int, expert_bytes: int, free_bytes: int, share: float = 1.0) -> SlotCount:
        """Return the slots of `layers` layers on a GPU with `free_bytes` of memory for slots, of which they may take `share`."""

    @abstractmethod
    def layer_ms(self, layer: RoutedExperts, tokens: int, cpu: Rate, gpu: GpuRates, shared_ms: float) -> float:
        """Return the ms that one layer takes for `tokens` tokens with even routing.

        Args:
            shared_ms: time of the shared experts, which the GPU computes first while the CPU and the link work. The result includes it.
        """
