"""The formats of stored weights: bytes, blocks, scales and kernels. Every other table of formats derives from `FORMATS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class GpuFormat:
    """How Triton kernels read packed weights of one format.

    Attributes:
        unit_dtype: the dtype that packed bytes are viewed as; its elements are *units*.
        unit_columns: consecutive input columns in one unit.
        step_columns: input columns per step of a matrix product: 32 or 64 units, enough for one tensor-core instruction per column of a
            unit.
        element_dtype: the dtype that tensor-core kernels view rows of the sparse layout as.
        element_columns: input columns in one such element.
    """

    unit_dtype: torch.dtype
    unit_columns: int
    step_columns: int
    element_dtype: torch.dtype
    element_columns: int = 1


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format of weights.

    Attributes:
        name: as rule files and the C++ kernels spell it.
        block_weights: consecutive inputs of a row that are quantised together; 1 for formats without scales.
        block_bytes: bytes of such a block, its scales included.
        sparse: whether the CPU kernels support the format in the sparse layout; they support all formats in the dense one.
        gpu: how Triton kernels read the format; None where no GPU kernel exists.
    """

    name: str
    block_weights: int
    block_bytes: int
    sparse: bool = True
    gpu: GpuFormat | None = None

    @property
    def scaled(self) -> bool:
        """Whether blocks have scales."""
        return self.block_weights > 1

    @property
    def super_block(self) -> bool:
        """Whether weights of this format come unchanged from a GGUF file; the kernels do not quantise to it."""
        return self.block_weights == 256

    def nbytes(self, weights: int) -> int:
        """Return the bytes of `weights` weights, a multiple of `block_weights`, without padding."""
        assert weights % self.block_weights == 0, f"{weights} weights are not a whole number of blocks"
        return weights // self.block_weights * self.block_bytes


FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            WeightFormat("float32", 1, 4, gpu=GpuFormat(torch.float32, 1, 32, torch.float32)),
            WeightFormat("float16", 1, 2, gpu=GpuFormat(torch.float16, 1, 64, torch.float16)),
            WeightFormat("bfloat16", 1, 2, gpu=GpuFormat(torch.int32, 2, 128, torch.bfloat16)),
            # One float16 scale for 32 codes: GGUF's Q8_0 and Q4_0.
            WeightFormat("int8", 32, 34, gpu=GpuFormat(torch.int32, 4, 128, torch.uint8)),
            WeightFormat("int4", 32, 18, gpu=GpuFormat(torch.int32, 8, 256, torch.uint8, element_columns=2)),
            # GGUF's Q4_K and Q6_K
            WeightFormat("q4_k", 256, 144, sparse=False),
            WeightFormat("q6_k", 256, 210, sparse=False),
        )
    }
)
