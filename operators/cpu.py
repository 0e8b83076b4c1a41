"""The C++ kernels: tensors as their arrays, their runtime, and a self-test of each instruction set that this CPU has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moegraft.cpu_backend import LAYOUT_VERSION as LAYOUT_VERSION
from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, Runtime
from moegraft.cpu_backend import crc32 as crc32
from moegraft.operators.errors import MoegraftError
from moegraft.operators.reference import reference_experts
from moegraft.operators.weight_formats import FORMATS, STORED_FORMATS


def open_runtime(threads: int) -> Runtime:
    """Start the CPU kernels with this many threads; 0: one for each physical core this process may use.

    Raises:
        MoegraftError: MOEGRAFT_ISA names an instruction set that this CPU or build does not have, or MOEGRAFT_NODES is no number.
    """
    try:
        return Runtime(threads=threads)
    except ValueError as error:
        if "MOEGRAFT_NODES" in str(error):
            raise MoegraftError(f"{error}; 1 does not divide weights over memory nodes") from error
        if "MOEGRAFT_ISA" not in str(error):
            raise
        raise MoegraftError(f"{error}; set MOEGRAFT_ISA to one of these, or unset it") from error


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a CPU tensor as an array over the same memory; bfloat16, which numpy lacks, becomes its bits in uint16."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


ELEMENTS = (torch.float32, torch.float16, torch.bfloat16)  # in the kernel's order
ELEMENT_CODES = {dtype: code for code, dtype in enumerate(ELEMENTS)}


def element_name(dtype: torch.dtype) -> str:
    """Return the kernel's name of a dtype, such as `bfloat16`.

    Raises:
        ValueError: the kernel does not support the dtype.
    """
    if dtype not in ELEMENT_CODES:
        raise ValueError(f"the CPU kernel does not support {dtype}")
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the kernel can read a tensor in place: on the CPU, contiguous, of a dtype that the kernel supports."""
    return tensor.is_cpu and is_dense(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a kernel of the tensor's own device can read it in place: contiguous, of a dtype that the kernels support."""
    return tensor.dtype in ELEMENT_CODES and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that the kernel supports: float64 is rounded to float32."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def describe(runtime: Runtime) -> str:
    """Return the instruction set and threads of a runtime, as in `avx512_bf16, 2 threads`, and its memory nodes if there are several."""
    nodes = f" on {runtime.memory_nodes} memory nodes" if runtime.memory_nodes > 1 else ""
    return f"{runtime.isa}, {runtime.threads} thread{'s' if runtime.threads != 1 else ''}{nodes}"


SHAPE = ExpertsShape(num_experts=3, hidden=96, intermediate=40)  # widths that are no multiple of a vector
STORED_SHAPE = ExpertsShape(num_experts=3, hidden=512, intermediate=256)
TOKENS = 90  # about 60 per expert: full and partial tiles of every instruction set, and several passes of matrix kernels
# The reference uses the packed weights, so the error comes from rounded activations: bfloat16 with bfloat16 weights, else int8 or float32.
LIMITS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 2e-2} | {name: 3e-2 for name, found in FORMATS.items() if found.scaled}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One instruction set of the kernel.

    Attributes:
        usable: whether this CPU has it.
        errors: relative error of the kernel's output by weight type; empty where the instruction set is not usable.
    """

    name: str
    usable: bool
    errors: Mapping[str, float]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The weight types that give wrong results."""
        return tuple(name for name, error in self.errors.items() if not error <= LIMITS[name])


def instruction_sets() -> list[InstructionSet]:
    """Test every compiled instruction set on a small layer in every weight type."""
    usable = Runtime.available_isas()
    errors = {weights: _errors(usable, weights) for weights in LIMITS}
    return [
        InstructionSet(name, name in usable, {weights: errors[weights][name] for weights in LIMITS} if name in usable else {})
        for name in Runtime.compiled_isas()
    ]


@dataclass(frozen=True, slots=True)
class KernelInUse:
    """How the kernel runs on this machine.

    Attributes:
        isa: the instruction set in use: the environment variable MOEGRAFT_ISA, or else `default_isa`.
        matrix_tokens: the tokens of an expert from which on its matrix kernel computes, by weight type; others use vector tiles alone.
        default_isa: the kernel's choice for this CPU.
        threads: the default number of threads: physical cores within affinity and quota.
        memory_nodes: the memory nodes over which these are shared out.
    """

    isa: str
    matrix_tokens: Mapping[str, int]
    default_isa: str
    threads: int
    memory_nodes: int


def kernel_in_use() -> KernelInUse:
    """
    Raises:
        MoegraftError: MOEGRAFT_ISA names an instruction set that this CPU or build does not have, or MOEGRAFT_NODES is no number.
    """
    runtime = open_runtime(threads=0)
    return KernelInUse(runtime.isa, runtime.matrix_tokens, Runtime.default_isa(), runtime.threads, runtime.memory_nodes)


def _errors(isas: Sequence[str], weight_type: str) -> dict[str, float]:
    """Return the relative errors of instruction sets on random tokens, bfloat16 for bfloat16 weights, else float32.

    An error is infinite where the output is not finite.
    """
    random = np.random.default_rng(0)
    gate_spec, sizes = GateSpec(), STORED_SHAPE if weight_type in STORED_FORMATS else SHAPE
    packed = PackedExperts(sizes, gate_spec, weight_type)
    shapes = {
        "gate": (sizes.intermediate, sizes.hidden),
        "up": (sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
    }
    for expert in range(sizes.num_experts):
        for part, shape in shapes.items():
            if weight_type in STORED_FORMATS:
                packed.pack_blocks(expert, part, FORMATS[weight_type].random_blocks(shape, random))
                continue
            packed.pack(expert, part, random.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[1])))
    dtype = torch.bfloat16 if weight_type == "bfloat16" else torch.float32
    tokens = torch.from_numpy(random.standard_normal((TOKENS, sizes.hidden), dtype=np.float32)).to(dtype)
    index = np.stack([random.permutation(sizes.num_experts)[:2] for _ in range(TOKENS)]).astype(np.int64)
    weights = random.random((TOKENS, 2), dtype=np.float32)
    gate, up, down = (torch.from_numpy(np.stack([packed.unpack(expert, part) for expert in range(sizes.num_experts)])) for part in shapes)
    expected = reference_experts(tokens, torch.from_numpy(index), torch.from_numpy(weights), gate, up, down, gate_spec)
    errors = {}
    for isa in isas:
        out = torch.empty_like(tokens)
        Runtime(threads=1, isa=isa).forward(packed, as_array(tokens), index, weights, as_array(out))
        error = float((out - expected).norm() / expected.norm())
        errors[isa] = error if math.isfinite(error) else math.inf
    return errors
