"""The formats of stored weights: bytes, blocks, scales and kernels. Every other table of formats derives from `FORMATS`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray


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
        gguf: the name of the type in GGUF files; None where they have none.
        stored: whether weights of this format come unchanged from a file: the kernels do not quantise to it, and only those of the CPU's
            dense layout compute with it.
        unit_scales: of stored formats, offsets of a block's scales and minima, and values that give random codes a variance of about 1.
        exponent: whether such a scale is one byte, the exponent of a power of two with a bias of 127, instead of a float16.
        gpu: how Triton kernels read the format; None where no GPU kernel exists.
    """

    name: str
    block_weights: int
    block_bytes: int
    gguf: str | None = None
    stored: bool = False
    unit_scales: tuple[tuple[int, float], ...] = ()
    exponent: bool = False
    gpu: GpuFormat | None = None

    @property
    def scaled(self) -> bool:
        """Whether blocks have scales."""
        return self.block_weights > 1

    def nbytes(self, weights: int) -> int:
        """Return the bytes of `weights` weights, a multiple of `block_weights`, without padding."""
        assert weights % self.block_weights == 0, f"{weights} weights are not a whole number of blocks"
        return weights // self.block_weights * self.block_bytes

    def random_blocks(self, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.uint8]:
        """Return a random matrix (..., cols) as a file stores it, (..., bytes), with a variance of about 1 / cols, to test kernels."""
        assert self.stored, f"blocks of {self.name} are not packed as they are"
        blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // self.block_weights, self.block_bytes), np.uint8)
        for offset, unit in self.unit_scales:
            scale = unit / math.sqrt(shape[-1])
            if self.exponent:
                blocks[..., offset] = 127 + round(math.log2(scale))
            else:
                blocks[..., offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)


def _stored(
    name: str, block_weights: int, block_bytes: int, *unit_scales: tuple[int, float], exponent: bool = False, gguf: bool = True
) -> WeightFormat:
    """Return a format of files; GGUF's type, where it has these blocks, has the same name."""
    return WeightFormat(name, block_weights, block_bytes, name.upper() if gguf else None, True, unit_scales, exponent)


FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            WeightFormat("float32", 1, 4, "F32", gpu=GpuFormat(torch.float32, 1, 32, torch.float32)),
            WeightFormat("float16", 1, 2, "F16", gpu=GpuFormat(torch.float16, 1, 64, torch.float16)),
            WeightFormat("bfloat16", 1, 2, "BF16", gpu=GpuFormat(torch.int32, 2, 128, torch.bfloat16)),
            # One float16 scale for 32 codes.
            WeightFormat("int8", 32, 34, "Q8_0", gpu=GpuFormat(torch.int32, 4, 128, torch.uint8)),
            WeightFormat("int4", 32, 18, "Q4_0", gpu=GpuFormat(torch.int32, 8, 256, torch.uint8, element_columns=2)),
            # Formats of files: a row here is a struct in coded_formats.h.
            _stored("q4_k", 256, 144, (0, 1 / 200), (2, 7.5 / 200)),
            _stored("q6_k", 256, 210, (208, 1 / 1400)),
            _stored("mxfp4", 32, 17, (0, 1 / 2.9), exponent=True),
            _stored("iq4_nl", 32, 18, (0, 1 / 66)),
            _stored("iq4_xs", 256, 136, (0, 1 / 1200)),
            _stored("q4_1", 32, 20, (0, 1 / 4.6), (2, -7.5 / 4.6)),
            _stored("q5_0", 32, 22, (0, 1 / 9.2)),
            _stored("q5_1", 32, 24, (0, 1 / 9.2), (2, -15.5 / 9.2)),
            _stored("q5_k", 256, 176, (0, 1 / 530), (2, 15.5 / 530)),
            _stored("q3_k", 256, 110, (108, 1 / 43)),
            _stored("q2_k", 256, 84, (80, 1 / 14), (82, 1.5 / 14)),
        )
    }
)
