"""C++ kernels: packed expert weights, a thread pool, forward passes for every instruction set, and the planner of hybrid layers."""

from collections.abc import Iterator
from contextlib import contextmanager

from moegraft.cpu_backend._kernel import (
    LAYOUT_VERSION,
    CachePolicy,
    ExpertFrames,
    ExpertsShape,
    GateSpec,
    HostCall,
    NormSpec,
    PackedExperts,
    PackedLinear,
    Planner,
    Program,
    RouterSpec,
    activations,
    check_problem,
    crc32,
    default_threads,
    grid_points,
    search_grid,
)
from moegraft.cpu_backend._kernel import Runtime as _Runtime


class Runtime(_Runtime):
    """The thread pool and kernels of one model. A Python class, so that what records a step can replace methods of one object."""

    @contextmanager
    def keep_awake(self) -> Iterator[None]:
        """Let the runtime's own threads wait for work without sleeping while the body runs, for work that comes in small pieces.

        They sleep after 2 ms without work all the same, and give their cores to other threads that need one. Several threads may do this
        at once.

        Raises:
            RuntimeError: the runtime was made before a fork.
        """
        self._keep_awake()
        try:
            yield
        finally:
            self._let_sleep()


__all__ = [
    "LAYOUT_VERSION",
    "CachePolicy",
    "ExpertFrames",
    "ExpertsShape",
    "GateSpec",
    "HostCall",
    "NormSpec",
    "PackedExperts",
    "PackedLinear",
    "Planner",
    "Program",
    "RouterSpec",
    "Runtime",
    "activations",
    "check_problem",
    "crc32",
    "default_threads",
    "grid_points",
    "search_grid",
]
