"""Conversion of CPU tensors to arrays of the C++ kernels, and the description of their runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moegraft.cpu_backend import Runtime
from moegraft.operators.errors import MoegraftError


def open_runtime(threads: int) -> Runtime:
    """Start the CPU kernels with this many threads; 0: one for each physical core this process may use.

    Raises:
        MoegraftError: MOEGRAFT_ISA names an instruction set that this CPU or build does not have.
    """
    try:
        return Runtime(threads=threads)
    except ValueError as error:
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
    return (
        tensor.is_cpu
        and tensor.dtype in ELEMENT_CODES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a dtype that the kernel supports: float64 is rounded to float32."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def describe(runtime: Runtime) -> str:
    """Return the instruction set and threads of a runtime, as in `avx512_bf16, 2 threads`."""
    return f"{runtime.isa}, {runtime.threads} thread{'s' if runtime.threads != 1 else ''}"
