"""The formats of stored weights: bytes, blocks, scales and kernels. Every other table of formats derives from `FORMATS`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

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
        element_dtype: the dtype that tensor-core kernels view rows of the sparse layout as; None without such a layout.
        element_columns: input columns in one such element.
        high_bits: bits of each code that are packed apart from its unit.
        scales: of 32 columns, 1 or 2.
        minima: whether each scale has a minimum.
        group_words: where codes are no bits of their own, but indexes into a grid or digits: 32-bit words of 32 columns behind the header.
            A unit is then 8 columns, which kernels expand from them. None for other formats.
    """

    unit_dtype: torch.dtype
    unit_columns: int
    step_columns: int
    element_dtype: torch.dtype | None = None
    element_columns: int = 1
    high_bits: int = 0
    scales: int = 1
    minima: bool = False
    group_words: int | None = None


ScaleForm = Literal["float16", "float32", "exponent", "quarters"]


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
        scale_form: of such a scale: a float16; a float32; a byte, the exponent of a power of two with a bias of 127; or a float32 of which
            each of four rows has a byte.
        zero_points: the offset of a byte of zero points, if a block has one.
        floats: whether codes are floats, whose products are in float: exact, and slower for prompts than those of integers.
        gpu: how Triton kernels read the format; None where no GPU kernel exists.
    """

    name: str
    block_weights: int
    block_bytes: int
    gguf: str | None = None
    stored: bool = False
    unit_scales: tuple[tuple[int, float], ...] = ()
    scale_form: ScaleForm = "float16"
    zero_points: int | None = None
    floats: bool = False
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
        if self.floats:
            blocks[blocks & 127 == 127] -= 1  # no NaN
        if self.zero_points is not None:
            blocks[..., self.zero_points] = 0x79  # 9 and 7: means far from 0 would be all that is left of a product
        for offset, unit in self.unit_scales:
            scale = unit / math.sqrt(shape[-1])
            if self.scale_form == "exponent":
                blocks[..., offset] = 127 + round(math.log2(scale))
            elif self.scale_form == "quarters":
                blocks[..., offset] = np.array([scale], np.float32).view(np.uint8)[3]  # four of which are about as large
            else:
                size = 2 if self.scale_form == "float16" else 4
                blocks[..., offset : offset + size] = np.array([scale], self.scale_form).view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)


def _gguf(
    name: str,
    block_weights: int,
    block_bytes: int,
    *unit_scales: tuple[int, float],
    form: ScaleForm = "float16",
    gpu: GpuFormat | None = None,
) -> WeightFormat:
    return WeightFormat(name, block_weights, block_bytes, name.upper(), True, unit_scales, form, gpu=gpu)


def _integers(
    name: str, block_weights: int, block_bytes: int, *unit_scales: tuple[int, float], gpu: GpuFormat, zero_points: int | None = None
) -> WeightFormat:
    return WeightFormat(name, block_weights, block_bytes, None, True, unit_scales, zero_points=zero_points, gpu=gpu)


def _float8(name: str, block_weights: int, block_bytes: int, form: ScaleForm, gpu: GpuFormat) -> WeightFormat:
    return WeightFormat(name, block_weights, block_bytes, None, True, ((0, 1 / 110),), form, floats=True, gpu=gpu)


def _codes(bits: int, step_columns: int, high_bits: int = 0, scales: int = 1, *, minima: bool = False) -> GpuFormat:
    """Words of codes of 8, 4 or 2 bits; a step has whole blocks."""
    return GpuFormat(torch.int32, 32 // bits, step_columns, high_bits=high_bits, scales=scales, minima=minima)


def _expanded(group_words: int, scales: int = 1) -> GpuFormat:
    return GpuFormat(torch.int32, 8, 256, scales=scales, group_words=group_words)


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
            _gguf("q4_k", 256, 144, (0, 1 / 200), (2, 7.5 / 200), gpu=_codes(4, 256, minima=True)),
            _gguf("q6_k", 256, 210, (208, 1 / 1400), gpu=_codes(4, 256, 2, 2)),
            _gguf("mxfp4", 32, 17, (0, 1 / 2.9), form="exponent", gpu=_codes(4, 256)),
            _gguf("iq4_nl", 32, 18, (0, 1 / 66), gpu=_codes(4, 256)),
            _gguf("iq4_xs", 256, 136, (0, 1 / 1200), gpu=_codes(4, 256)),
            _gguf("q4_1", 32, 20, (0, 1 / 4.6), (2, -7.5 / 4.6), gpu=_codes(4, 256, minima=True)),
            _gguf("q5_0", 32, 22, (0, 1 / 9.2), gpu=_codes(4, 256, 1)),
            _gguf("q5_1", 32, 24, (0, 1 / 9.2), (2, -15.5 / 9.2), gpu=_codes(4, 256, 1, minima=True)),
            _gguf("q5_k", 256, 176, (0, 1 / 530), (2, 15.5 / 530), gpu=_codes(4, 256, 1, minima=True)),
            _gguf("q3_k", 256, 110, (108, 1 / 43), gpu=_codes(2, 256, 1, 2)),
            _gguf("q2_k", 256, 84, (80, 1 / 14), (82, 1.5 / 14), gpu=_codes(2, 256, 0, 2, minima=True)),
            # Groups of 4-bit codes with float16 scales and zero points: compressed-tensors, AWQ, GPTQ.
            _integers("int4_g32", 64, 37, (0, 1 / 4.7), (2, 1 / 4.7), zero_points=4, gpu=_codes(4, 256, minima=True)),
            _integers("int4_g64", 128, 69, (0, 1 / 4.7), (2, 1 / 4.7), zero_points=4, gpu=_codes(4, 256, minima=True)),
            _integers("int4_g128", 128, 67, (0, 1 / 4.7), zero_points=2, gpu=_codes(4, 256, minima=True)),
            _integers("int4_g256", 256, 130, (0, 1 / 4.7), gpu=_codes(4, 256)),  # without zero points: scales of rows
            _integers("int8_g128", 128, 130, (0, 1 / 74), gpu=_codes(8, 128)),
            # Blocks of 128 by 128, whose scale four rows hold together; and scales of rows.
            _float8("fp8", 128, 129, "quarters", gpu=_codes(8, 128)),
            _float8("fp8_rows", 256, 260, "float32", gpu=_codes(8, 256)),
            # NVFP4 with a float32 scale of the tensor, which four rows hold together for 128 columns.
            WeightFormat("nvfp4", 128, 73, None, True, ((0, 1 / 317),), "quarters", gpu=_codes(4, 256, scales=2)),
            # Indexes into grids, and numbers of -1 to 1.
            _gguf("iq3_s", 256, 110, (0, 1 / 140), gpu=_expanded(3)),
            _gguf("iq3_xxs", 256, 98, (0, 1 / 140), gpu=_expanded(3)),
            _gguf("iq2_s", 256, 82, (0, 1 / 56), gpu=_expanded(2, 2)),
            _gguf("iq2_xs", 256, 74, (0, 1 / 56), gpu=_expanded(2, 2)),
            _gguf("iq2_xxs", 256, 66, (0, 1 / 53), gpu=_expanded(2)),
            _gguf("iq1_s", 256, 50, (0, 1 / 7.2), gpu=_expanded(1)),
            _gguf("tq2_0", 256, 66, (64, 1 / 1.1), gpu=_codes(2, 256)),
            _gguf("tq1_0", 256, 54, (52, 1 / 0.82), gpu=_expanded(0)),
        )
    }
)


def has_gpu_kernels(weight_type: str) -> bool:
    """Return whether Triton kernels compute with a type, or with both types of `q4_k+q6_k`."""
    return all(name in FORMATS and FORMATS[name].gpu is not None for name in weight_type.split("+"))
