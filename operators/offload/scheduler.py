"""One call of one layer's experts, as the host plans it: its routing, and schedules by name, over the C++ planner.

A schedule decides who computes each active expert of a layer, and which experts are transferred for it.

Shapes: T tokens, E experts, K experts per token, A active experts (those with at least one token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from moegraft.cpu_backend import Planner, check_problem

Ids = NDArray[np.int64]
UNBOUNDED = 2**31 - 1
ScheduleName = Literal["all_cpu", "fixed", "layer_map", "on_demand", "greedy", "two_threshold"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Experts that a later layer is expected to choose.

    Attributes:
        layer: the later layer.
        experts: (P,) distinct ids, ascending.
        loads: (P,) tokens of each.
        ranks: (P,) the best rank of each in a token's choice, 0 for the likeliest.
    """

    layer: int
    experts: Ids
    loads: NDArray[np.int32]
    ranks: NDArray[np.intp]

    @classmethod
    def of(cls, layer: int, chosen: Ids) -> Self:
        """Make a prediction of a choice (T, K), each token's likeliest expert first, -1 for padded slots."""
        experts, first, counts = np.unique(chosen.T, return_index=True, return_counts=True)  # rank by rank
        start = int(np.searchsorted(experts, 0))
        return cls(layer, experts[start:], counts[start:].astype(np.int32), first[start:] // len(chosen))


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A call that belongs to a draft, which uses fewer experts than the router chose.

    Attributes:
        chosen: (T, K), everything that the router chose, -1 for padded slots: what the verification is expected to need.
        top_k: experts per token that the draft uses.
    """

    chosen: Ids
    top_k: int


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One call of one layer's experts.

    Attributes:
        experts: (A,) distinct ids, ascending.
        loads: (A,) tokens of each.
        chosen: (T, K), -1 for padded slots.
        scores: (T, E) float32 of the router, where a cache learns from them.
        predictions: of later layers, the next one first.
        draft: given for calls of a draft.
        deferrable: (D,) ids of those experts that may be added to the next layer's, if the CPU computes them.
    """

    layer: int
    experts: Ids
    loads: NDArray[np.int32]
    chosen: Ids
    scores: NDArray[np.float32] | None
    predictions: Sequence[Prediction]
    draft: DraftStep | None
    deferrable: Ids = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(
        cls,
        layer: int,
        chosen: Ids,
        scores: NDArray[np.float32] | None = None,
        predictions: Sequence[Prediction] = (),
        draft: DraftStep | None = None,
    ) -> Self:
        """Make the step of a layer's routing (T, K), -1 for padded slots."""
        experts, counts = np.unique(chosen, return_counts=True)
        start = int(np.searchsorted(experts, 0))
        return cls(layer, experts[start:], counts[start:].astype(np.int32), chosen, scores, predictions, draft)


@dataclass(frozen=True, slots=True, eq=False)
class LayerProblem:
    """The A active experts of one layer and their costs. All times are ms from now and at least 0; a cost may be infinite.

    Attributes:
        loads: (A,) int32, tokens of each expert.
        cpu_ms: (A,) float64, time of each on the CPU.
        gpu_ms: (A,) float64, time of each on the GPU once it is resident.
        arrival_ms: (A,) float64: 0 for resident experts, finite for those in flight, infinite for missing ones.
        transfer_ms: how long the transfer of one expert occupies the link.
        first_cpu_ms: what the CPU pays once if it computes any expert.
        cpu_free_ms, gpu_free_ms, link_free_ms: when each finishes what it is busy with.
        max_transfers: the number of experts that can be transferred, limited by the available slots.

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
    """The solution of a LayerProblem.

    Attributes:
        on_cpu: (A,) bool; the other experts are computed on the GPU.
        transfers: (m,) int32, the positions of the experts to transfer, in order; exactly the missing experts of the GPU.
        makespan_ms: when the last expert is done, by the problem's costs.
    """

    on_cpu: NDArray[np.bool_]
    transfers: NDArray[np.int32]
    makespan_ms: float


class Scheduler:
    """Plans the layers of one model, one after another. Not for two threads at once.

    - `all_cpu`: everything on the CPU, which is KTransformers' default.
    - `fixed`: resident experts on the GPU, the rest on the CPU, no transfers: a static map of hot experts, as long as nothing else
      fills the slots.
    - `layer_map`: whole layers on one device, as llama.cpp places them.
    - `on_demand`: everything on the GPU, most tokens first; the CPU computes only experts that get no slot.
    - `greedy`: HybriMoE's simulation (section IV-B), which always takes the operation that finishes first.
    - `two_threshold`: near-optimal; never slower than `all_cpu` and `fixed`.

    Args:
        gpu_layers: for `layer_map`, and only for it: which layers are computed on the GPU. Their missing experts are transferred.

    Raises:
        ValueError: an unknown name; a layer map that is missing, or given for another schedule.
    """

    def __init__(self, name: ScheduleName, gpu_layers: Sequence[bool] | None = None) -> None:
        if name not in SCHEDULES:
            raise ValueError(f"unknown schedule {name!r}; available schedules: {', '.join(SCHEDULES)}")
        if (name == "layer_map") != (gpu_layers is not None):
            raise ValueError(f"schedule {name!r} {'needs' if name == 'layer_map' else 'takes no'} gpu_layers, the map of the GPU's layers")
        self.name = name
        self._gpu_layers = None if gpu_layers is None else tuple(gpu_layers)
        self._planner = Planner("on_demand" if name == "layer_map" else name)
        self._cpu_planner = Planner("all_cpu")

    def plan(self, layer: int, problem: LayerProblem) -> LayerPlan:
        return LayerPlan(*self._planner_of(layer).plan(problem))

    def gains(self, layer: int, problem: LayerProblem) -> NDArray[np.float64]:
        """Return what making each missing expert resident would save, (A,) ms, by this schedule's own plans (HybriMoE, section IV-C).

        The experts are made resident one after another, those with the most tokens first, in order of position where loads are
        equal; each gains what it saves on top of those before it. Where a later one saves more than those before it (the last
        expert off the CPU saves the first-expert penalty as well), they share their sum evenly. Never negative; 0 for experts
        that are resident or in flight.
        """
        return self._planner_of(layer).gains(problem)

    def _planner_of(self, layer: int) -> Planner:
        if self._gpu_layers is None:
            return self._planner
        if not 0 <= layer < len(self._gpu_layers):
            raise ValueError(f"layer_map: layer {layer} is outside the map of {len(self._gpu_layers)} layers")
        return self._planner if self._gpu_layers[layer] else self._cpu_planner


def layers_that_fit(layers: int, num_experts: int, slots: int) -> tuple[bool, ...]:
    """Return the layer map for `slots` experts in all: as many whole layers as fit, the last ones of the model, as llama.cpp does."""
    on_gpu = min(layers, slots // num_experts)
    return tuple(layer >= layers - on_gpu for layer in range(layers))
