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
    RouterSpec,
    Runtime,
    activations,
    check_problem,
    default_threads,
)

__all__ = [
    "LAYOUT_VERSION",
    "ExpertsShape",
    "GateSpec",
    "HostCall",
    "NormSpec",
    "PackedExperts",
    "PackedLinear",
    "Planner",
    "RouterSpec",
    "Runtime",
    "activations",
    "check_problem",
    "default_threads",
]
