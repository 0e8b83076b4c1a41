"""What an engine did, in numbers for people: who computed, what was there, what plans promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moegraft.operators.experts.scheduling.problem import LayerProblem


@dataclass(slots=True)
class EngineStatistics:
    """Counts since the model was loaded.

    Attributes:
        used: active experts, layer by layer; `found` of them had a slot when their layer began, `arriving` were on their way.
        on_cpu: active experts that the CPU computed; `stolen` of them had a slot.
        transferred: loaded because the plan asked for it.
        planned_ms: what the plans promised, summed.
        recoveries: layers that had to be computed anew on the CPU.
        replayed: decode steps that were captured ones.
    """

    layers: int
    steps: int = 0
    used: int = 0
    found: int = 0
    arriving: int = 0
    on_cpu: int = 0
    stolen: int = 0
    transferred: int = 0
    planned_ms: float = 0.0
    recoveries: int = 0
    replayed: int = 0
    found_by_layer: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    used_by_layer: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.found_by_layer = np.zeros(self.layers, np.int64)
        self.used_by_layer = np.zeros(self.layers, np.int64)

    def count(self, layer: int, problem: LayerProblem, on_cpu: NDArray[np.bool_], makespan_ms: float) -> None:
        there = problem.arrival_ms == 0
        absent = np.isinf(problem.arrival_ms)
        found, used = int(there.sum()), len(there)
        self.steps += 1
        self.used += used
        self.found += found
        self.used_by_layer[layer] += used
        self.found_by_layer[layer] += found
        self.arriving += used - found - int(absent.sum())
        self.on_cpu += int(on_cpu.sum())
        self.stolen += int((on_cpu & there).sum())
        self.transferred += int((absent & ~on_cpu).sum())
        self.planned_ms += makespan_ms

    def count_split(self, layer: int, used: int, on_cpu: int) -> None:
        """Of a layer in a captured step, where the CPU computes what has no slot."""
        self.steps += 1
        self.used += used
        self.found += used - on_cpu
        self.used_by_layer[layer] += used
        self.found_by_layer[layer] += used - on_cpu
        self.on_cpu += on_cpu

    @property
    def hit_rate(self) -> float:
        """Share of the active experts that had a slot when their layer began; 0 before the first."""
        return self.found / self.used if self.used else 0.0

    def as_mapping(self) -> Mapping[str, object]:
        used = max(self.used, 1)
        return {
            "layers computed": self.steps,
            "decode steps replayed": self.replayed,
            "experts found on the GPU": f"{self.hit_rate:.1%}",
            "experts computed by the CPU": f"{self.on_cpu / used:.1%}",
            "experts transferred on demand": self.transferred,
            "layers computed anew after a failure": self.recoveries,
        }
