"""C++ kernels: packed expert weights, a thread pool, forward passes for every instruction set, and the planner of hybrid layers."""

from moegraft.cpu_backend._kernel import (
    LAYOUT_VERSION,
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
    default_threads,
    grid_points,
    search_grid,
)
from moegraft.cpu_backend._kernel import Runtime as _Runtime


class Runtime(_Runtime):
    """The thread pool and kernels of one model. A Python class, so that what records a step can replace methods of one object."""


__all__ = [
    "LAYOUT_VERSION",
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
    "default_threads",
    "grid_points",
    "search_grid",
]
