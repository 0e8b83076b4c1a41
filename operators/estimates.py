"""What planning and operators exchange about memory and speed before a weight is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from moegraft.operators.base import Footprint

GPU_MARGIN_SHARE, GPU_MARGIN_BYTES = 0.06, 768 << 20


def gpu_margin_bytes(total_bytes: int) -> int:
    """Return what stays free on a GPU of this size: activations of a prompt, PyTorch's own blocks, the display."""
    return max(GPU_MARGIN_BYTES, int(GPU_MARGIN_SHARE * total_bytes))


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of one kind of layer on a CPU: weights read per second with one token, arithmetic per second with many."""

    decode_gbps: float
    prefill_gflops: float


@dataclass(frozen=True, slots=True)
class GpuRates:
    """What a GPU reaches, which is less than its data sheet has.

    Attributes:
        gbps: of its own memory.
        tflops: of 16-bit arithmetic.
        link_gbps: of copies to it from host memory.
        origin: where the figures are from, for people.
    """

    gbps: float
    tflops: float
    link_gbps: float
    origin: str

    def describe(self) -> str:
        return f"a GPU of {self.gbps:.4g} GB/s and {self.tflops:.3g} TFLOP/s behind a link of {self.link_gbps:.3g} GB/s ({self.origin})"


@dataclass(frozen=True, slots=True)
class Saving:
    """A way to hold a module in fewer bytes; `advice` names what to write into a rule."""

    advice: str
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The routed experts of one layer.

    Attributes:
        resident: share of the experts that have a slot on a GPU.
        left_out: share of the neurons that a token does not need.
        gated: whether a gate decides which neurons those are; else the up projection does.
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
    """Slots on a GPU: `resident` experts stay there, `total` slots include those that experts are loaded into."""

    resident: int
    total: int


class ExpertSlots(ABC):
    """How experts in host memory share a GPU: some have a slot there. Layers with equal objects share the slots."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens of the key-value cache that room is left for when slots take what is free."""

    @property
    @abstractmethod
    def is_sized(self) -> bool:
        """Whether the rule gives the number of slots; else they take what is free."""

    @abstractmethod
    def with_ratio(self, ratio: float) -> Self:
        """Return the same with slots for this share of the experts."""

    @abstractmethod
    def count(self, layers: int, num_experts: int, expert_bytes: int, free_bytes: int) -> SlotCount:
        """Return the slots of `layers` layers on a GPU with `free_bytes` for them."""

    @abstractmethod
    def layer_ms(self, layer: RoutedExperts, tokens: int, cpu: Rate, gpu: GpuRates, shared_ms: float) -> float:
        """Return what one layer takes for `tokens` tokens, routed evenly.

        Args:
            shared_ms: what the GPU computes first, while the CPU and the link are at work: shared experts. The result includes it.
        """
