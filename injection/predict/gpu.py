"""GPUs to plan for, which need not be here: their memory and what they and the link to them reach."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moegraft.injection.plan import Plan, Swap
from moegraft.operators.experts.devices.profiles import PROFILES
from moegraft.operators.machine import Machine

ASSUMED = PROFILES["a6000_10core"]


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

    def stated(self, gbps: float | None, link_gbps: float | None) -> GpuRates:
        """With the rates that the user gave."""
        given = {name: value for name, value in (("gbps", gbps), ("link_gbps", link_gbps)) if value is not None}
        if not given:
            return self
        said = " and ".join("--gpu-bandwidth" if name == "gbps" else "--link-bandwidth" for name in given)
        return replace(self, **given, origin=f"stated by {said}" + ("" if len(given) == 2 else f", else {self.origin}"))

    def describe(self) -> str:
        return f"a GPU of {self.gbps:.4g} GB/s and {self.tflops:.3g} TFLOP/s behind a link of {self.link_gbps:.3g} GB/s ({self.origin})"


ASSUMED_RATES = GpuRates(
    ASSUMED.gpu_gb_s, ASSUMED.gpu_tflop_s, ASSUMED.link_gb_s, "assumed, as an A6000; --gpu-bandwidth and --link-bandwidth state others"
)


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """GPUs of one kind; a model's layers are shared out among them evenly.

    Attributes:
        available_bytes: of each, free for the model.
    """

    available_bytes: int
    count: int
    rates: GpuRates


def budget_of(
    machine: Machine, stated_bytes: tuple[int, ...] | None, measured: GpuRates | None, *, gbps: float | None, link_gbps: float | None
) -> GpuBudget | None:
    """What to plan for: the stated GPUs, else those of this machine; None where there are none, or where none are wanted (0 bytes).

    Args:
        measured: rates of this machine's GPU.
    """
    sizes = tuple(gpu.free_bytes for gpu in machine.gpus) if stated_bytes is None else stated_bytes
    if not sizes or not min(sizes):
        return None
    return GpuBudget(min(sizes), len(sizes), (measured or ASSUMED_RATES).stated(gbps, link_gbps))


def gpu_option(swap: Swap) -> str:
    """The `gpu` that a rule gives: `none`, `auto`, or devices with commas between."""
    options: Any = swap.options
    return getattr(options, "gpu", None) or "none"


def wants_gpu(swap: Swap) -> bool:
    return gpu_option(swap) != "none" and not gpu_option(swap).startswith("emulated")


def gpus_used(plan: Plan, budget: GpuBudget) -> int:
    """How many GPUs the rest of the model is put on by what rules ask for; 0: it stays on the CPU."""
    wanted = {device for swap in plan.swaps if wants_gpu(swap) for device in gpu_option(swap).split(",")}
    if not wanted:
        return 0
    return 1 if len(wanted) == 1 and "auto" not in wanted else budget.count


def held_on_gpu(swap: Swap) -> bool:
    """Whether all that the operator holds is on a GPU: a packed linear layer, or experts that are there alone."""
    return wants_gpu(swap) and not shares_experts(swap)


def shares_experts(swap: Swap) -> bool:
    """Whether it has experts in host memory, and some of them in slots on a GPU."""
    return wants_gpu(swap) and getattr(swap.options, "cache", None) is not None
