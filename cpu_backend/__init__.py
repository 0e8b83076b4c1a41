"""The CPU experts kernel: packed expert weights, a thread pool, and a forward pass for every instruction set."""

from moegraft.cpu_backend._kernel import (
    LAYOUT_VERSION,
    ExpertsShape,
    GateSpec,
    HostCall,
    PackedExperts,
    PackedLinear,
    Runtime,
    activations,
    default_threads,
)

__all__ = [
    "LAYOUT_VERSION",
    "ExpertsShape",
    "GateSpec",
    "HostCall",
    "PackedExperts",
    "PackedLinear",
    "Runtime",
    "activations",
    "default_threads",
]
