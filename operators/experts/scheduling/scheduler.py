"""The schedules by name, over the C++ planner: who computes each expert of a layer, and which experts are brought for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from moegraft.cpu_backend import Planner
from moegraft.operators.experts.scheduling.problem import LayerPlan, LayerProblem

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
