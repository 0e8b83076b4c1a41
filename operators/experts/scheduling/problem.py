"""What a schedule is asked and what it answers: one layer's active experts with their costs, and who computes each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moegraft.cpu_backend import check_problem

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
