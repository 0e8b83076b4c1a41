"""The input of a prediction: a planned model, its workload, and the GPUs of this machine or those that are stated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moegraft.injection.meta_model import MetaModel
from moegraft.injection.planning import Plan, Swap
from moegraft.operators.base import MAX_REPLAYED_SEQUENCES
from moegraft.operators.cache_form import QuantisedForm
from moegraft.operators.estimates import GpuRates
from moegraft.operators.machine import Machine
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.thresholds import experts_layer

ASSUMED_RATES = GpuRates(540.0, 60.0, 24.0, "assumed, as an A6000; --gpu-bandwidth and --link-bandwidth state others")


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch` sequences at once, each with a prompt of `prompt` tokens, decoded after `context` tokens."""

    context: int
    batch: int
    prompt: int


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """GPUs of one kind; a model's layers are distributed evenly over them.

    Attributes:
        available_bytes: free memory of each.
    """

    available_bytes: int
    count: int
    rates: GpuRates


def budget_of(
    machine: Machine, stated_bytes: tuple[int, ...] | None, measured: GpuRates | None, *, gbps: float | None, link_gbps: float | None
) -> GpuBudget | None:
    """Return the stated GPUs, by default those of this machine; None if there are none, or if 0 bytes are stated.

    Args:
        measured: the rates of this machine's GPU.
        gbps, link_gbps: stated rates.
    """
    sizes = tuple(gpu.free_bytes for gpu in machine.gpus) if stated_bytes is None else stated_bytes
    if not sizes or not min(sizes):
        return None
    rates = measured or ASSUMED_RATES
    stated = {"gbps": gbps, "link_gbps": link_gbps}
    given = {name: value for name, value in stated.items() if value is not None}
    if given:
        options = " and ".join("--gpu-bandwidth" if name == "gbps" else "--link-bandwidth" for name in given)
        rates = replace(rates, **given, origin=f"stated by {options}" + ("" if len(given) == len(stated) else f", else {rates.origin}"))
    return GpuBudget(min(sizes), len(sizes), rates)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model with its plan, and the answers of the plan's operators on their modules."""

    meta_model: MetaModel
    plan: Plan
    registry: OperatorRegistry

    def __post_init__(self) -> None:
        if self.plan.mtp:
            object.__setattr__(self, "meta_model", self.meta_model.with_mtp)

    def gpus_used(self, budget: GpuBudget) -> int:
        """Return how many GPUs hold what is not replaced; 0 if no rule asks for a GPU, and it stays on the CPU."""
        wanted = {device for swap in self.plan.swaps for device in swap.traits.devices}
        if not wanted:
            return 0
        return 1 if len(wanted) == 1 and "auto" not in wanted else budget.count

    def on_gpu_alone(self, swap: Swap) -> bool:
        """Whether all weights of the operator are on a GPU."""
        return bool(swap.traits.devices) and swap.traits.slots is None

    def weight_type(self, swap: Swap) -> str:
        packing = swap.operator_type.packing
        return "unknown" if packing is None else packing.type_for(swap.options, self.meta_model.stored)

    def left_out(self, swap: Swap) -> float:
        """Return the share of the routed experts' neurons that a token does not need.

        Raises:
            UnsupportedModelError: the config does not give the number of experts per token.
        """
        sparsity = swap.traits.sparsity
        return 0.0 if sparsity is None else experts_layer(swap.module, self.meta_model.skeleton).routed_target(sparsity)

    def replays_steps(self, load: Workload) -> bool:
        """Return whether decode steps on the CPU may be replayed as native programs, which record the kernels of operators."""
        operators = [swap.traits.replays_steps for swap in self.plan.swaps]
        return bool(operators) and all(operators) and self.cache_form() is None and load.batch <= MAX_REPLAYED_SEQUENCES

    def cache_form(self) -> QuantisedForm | None:
        """Return the form of a quantised key-value cache; None if it is in the model's dtype."""
        return self.plan.cache_form(self.meta_model.source.config)

    def host_bytes(self) -> int:
        """Return the bytes of weights in host memory if there is a GPU: without operators that are on the GPU alone."""
        return sum(swap.footprint.by_device.get("cpu", 0) for swap in self.plan.swaps if not self.on_gpu_alone(swap))
