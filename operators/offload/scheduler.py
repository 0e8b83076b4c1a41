"""The schedules by name, over the C++ planner: who computes each expert of a layer, and which experts are brought for it.

What a schedule is asked and what it answers: one layer's active experts with their costs, and who computes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from moegraft.cpu_backend import Planner, check_problem

UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class LayerProblem:
    """A active experts of one layer. All times are ms from now and at least 0; a cost may be infinite.

    Attributes:
        loads: (A,) int32, tokens of each expert.
        cpu_ms: (A,) float64, what each takes on the CPU.
        gpu_ms: (A,) float64, what each takes on the GPU once it is there.
        arrival_ms: (A,) float64: 0 on the GPU; finite: on its way, lands then; infinite: not on the GPU.
        transfer_ms: what bringing one expert occupies the link for.
        first_cpu_ms: what the CPU pays once if it computes any expert.
        cpu_free_ms, gpu_free_ms, link_free_ms: when each has done what it is busy with.
        max_transfers: how many experts can be brought at most: the slots that can be had.

    Raises:
        TypeError: an array of another type, or not C-contiguous.
        ValueError: arrays of different lengths; a value that is negative or not a number.
    """

    loads: NDArray[np.int32]
    cpu_ms: NDArray[np.float64]
    gpu_ms: NDArray[np.float64]
    arrival_ms: NDArray[np.float64]
    transfer_ms: float
    first_cpu_ms: float = 0.0
    cpu_free_ms: float = 0.0
    gpu_free_ms: float = 0.0
    link_free_ms: float = 0.0
    max_transfers: int = UNBOUNDED

    def __post_init__(self) -> None:
        check_problem(self)


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """Who computes each expert of a LayerProblem.

    Attributes:
        on_cpu: (A,) bool; the others are the GPU's.
        transfers: (m,) int32, the positions of the experts to bring, in the order of their transfer.
        makespan_ms: when the last expert is done, as far as the costs are right.
    """

    on_cpu: NDArray[np.bool_]
    transfers: NDArray[np.int32]
    makespan_ms: float

    def check(self, problem: LayerProblem) -> None:
        """Raises ValueError unless exactly the missing experts of the GPU are brought, each once and no more than there are slots."""
        if self.on_cpu.shape != problem.loads.shape or self.on_cpu.dtype != np.bool_:
            raise ValueError(f"LayerPlan: on_cpu is {self.on_cpu.dtype} {self.on_cpu.shape} where bool {problem.loads.shape} is expected")
        needed = np.flatnonzero(~self.on_cpu & np.isinf(problem.arrival_ms))
        if sorted(self.transfers.tolist()) != needed.tolist():
            raise ValueError(f"LayerPlan: transfers are {self.transfers.tolist()} where the GPU needs {needed.tolist()}")
        if len(needed) > problem.max_transfers:
            raise ValueError(f"LayerPlan: {len(needed)} transfers where max_transfers is {problem.max_transfers}")


ScheduleName = Literal["all_cpu", "fixed", "layer_map", "on_demand", "greedy", "two_threshold"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class Scheduler(Protocol):
    """Plans layer after layer of one model. Not for two threads at once."""

    @property
    def name(self) -> ScheduleName: ...

    def plan(self, layer: int, problem: LayerProblem) -> LayerPlan: ...

    def makespan(self, problem: LayerProblem, on_cpu: NDArray[np.bool_]) -> float:
        """What any split takes, in ms, transfers in the best order.

        Raises:
            ValueError: `on_cpu` (A,) leaves more missing experts to the GPU than `max_transfers`.
        """
        ...

    def gains(self, layer: int, problem: LayerProblem) -> NDArray[np.float64]:
        """What having each missing expert on the GPU would save, (A,) ms, by this schedule's own plans (HybriMoE, section IV-C).

        The experts are made resident one after another, those with the most tokens first, in order of position where loads are
        equal; each gains what it saves on top of those before it. Where a later one saves more than those before it (the last
        expert off the CPU saves the first-expert penalty as well), they share their sum evenly. Never negative; 0 for experts
        that are on the GPU or on their way.
        """
        ...


class PlannedScheduler:
    """A schedule that needs to know nothing but the problem.

    - `all_cpu`: everything on the CPU, which is KTransformers' default.
    - `fixed`: what is resident on the GPU, the rest on the CPU, nothing is ever brought: a static map of hot experts, as long as
      nothing else fills the slots.
    - `on_demand`: everything on the GPU, most tokens first; the CPU computes only what gets no slot.
    - `greedy`: HybriMoE's simulation (section IV-B), which always takes the operation that finishes first.
    - `two_threshold`: near-optimal; never slower than `all_cpu` and `fixed`.
    """

    def __init__(self, name: ScheduleName) -> None:
        self._name = name
        self._planner = Planner(name)

    @property
    def name(self) -> ScheduleName:
        return self._name

    def plan(self, layer: int, problem: LayerProblem) -> LayerPlan:
        return LayerPlan(*self._planner.plan(problem))

    def makespan(self, problem: LayerProblem, on_cpu: NDArray[np.bool_]) -> float:
        return self._planner.makespan(problem, on_cpu)

    def gains(self, layer: int, problem: LayerProblem) -> NDArray[np.float64]:
        return self._planner.gains(problem)


class LayerMapScheduler:
    """Whole layers on one device, as llama.cpp places them.

    Args:
        gpu_layers: for each layer whether its experts are the GPU's. Should one not be resident, it is brought.
    """

    name: ScheduleName = "layer_map"

    def __init__(self, gpu_layers: Sequence[bool]) -> None:
        self._gpu_layers = tuple(gpu_layers)
        self._on_gpu = PlannedScheduler("on_demand")
        self._on_cpu = PlannedScheduler("all_cpu")

    def plan(self, layer: int, problem: LayerProblem) -> LayerPlan:
        return self._of(layer).plan(layer, problem)

    def makespan(self, problem: LayerProblem, on_cpu: NDArray[np.bool_]) -> float:
        return self._on_gpu.makespan(problem, on_cpu)

    def gains(self, layer: int, problem: LayerProblem) -> NDArray[np.float64]:
        return self._of(layer).gains(layer, problem)

    def _of(self, layer: int) -> PlannedScheduler:
        if not 0 <= layer < len(self._gpu_layers):
            raise ValueError(f"layer_map: layer {layer} where the map has {len(self._gpu_layers)} layers")
        return self._on_gpu if self._gpu_layers[layer] else self._on_cpu


def layers_that_fit(layers: int, num_experts: int, slots: int) -> tuple[bool, ...]:
    """A layer map for `slots` experts in all: as many whole layers as fit, the last ones of the model, as llama.cpp does."""
    on_gpu = min(layers, slots // num_experts)
    return tuple(layer >= layers - on_gpu for layer in range(layers))


def make_scheduler(name: ScheduleName, gpu_layers: Sequence[bool] | None = None) -> Scheduler:
    """The scheduler of one model.

    Args:
        gpu_layers: for `layer_map`, and only for it: which layers are the GPU's.

    Raises:
        ValueError: an unknown name, a map missing or of no use.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; there are: {', '.join(SCHEDULES)}")
    if (name == "layer_map") != (gpu_layers is not None):
        raise ValueError(
            f"schedule {name!r} {'needs' if name == 'layer_map' else 'takes no'} gpu_layers, a map of which layers are the GPU's"
        )
    return LayerMapScheduler(gpu_layers) if gpu_layers is not None else PlannedScheduler(name)
