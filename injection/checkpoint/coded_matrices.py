"""Matrices in codes: one number for each weight, and a scale and zero point for each block of rows and columns.

They are read as values, or converted without rounding to the blocks that a kernel computes with, as the rows of `FORMATS` describe these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.weight_formats import FORMATS, CheckpointCodes, CodeKind, ScaleForm, WeightFormat
from moegraft.operators.weights import Codes, StoredBlocks

Block = tuple[int, int]  # rows and columns; 0 means all of them
# The 16 values of a float of 1 sign, 2 exponent and 1 mantissa bits (OCP Microscaling Formats 1.0, section 5.3.3).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
MXFP4_BLOCK = (1, 32)
NVFP4_BLOCK = (1, 16)
ROWS_AT_A_TIME = 512
KERNEL_GROUP = 32  # columns of a group of the kernels' int8 and int4
INTEGER_BITS: Mapping[str, int] = {"int4": 4, "int8": 8}
# What kernels multiply float32 scales by: those of E4M3 by 2^120; those of NVFP4 by E4M3's scales and twice the codes, up to 12.
KERNEL_FACTORS: Mapping[str, float] = {"fp8": 2.0**120, "nvfp4": 448.0 * 12}
_CODE_DTYPES: Mapping[CodeKind, torch.dtype] = {
    "int4": torch.int8,
    "int8": torch.int8,
    "mxfp4": torch.uint8,
    "nvfp4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class ScaledCodes:
    """A matrix in `nn.Linear` orientation: value = (code - zero) * scale.

    Attributes:
        codes: (rows, columns): int8; float8; or uint8, places in `FP4_VALUES`.
        scales: (blocks of rows, blocks of columns), floating point.
        zeros: int8 of the same shape; None for symmetric codes.
        block: the rows and columns of a block; the last one may be cut off.
        of_matrix: float32 numbers by which scales are multiplied, or divided: (1, 1) for all, or (rows, 1); None for one level of scales.
        divides: whether they divide them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    block: Block
    of_matrix: torch.Tensor | None = None
    divides: bool = False

    def values(self) -> torch.Tensor:
        """Return float32; exact for integers and E2M1 with 16-bit scales, else rounded once, and with two levels of scales twice."""
        codes = torch.tensor(FP4_VALUES)[self.codes.int()] if self.codes.dtype == torch.uint8 else self.codes.float()
        if self.zeros is not None:
            codes -= self._spread(self.zeros.float())
        scales = self.scales.float()
        if self.of_matrix is not None:
            scales = scales / self.of_matrix if self.divides else scales * self.of_matrix
        return codes.mul_(self._spread(scales))

    def _spread(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """Return what each weight has of its block; one row if all rows have the same."""
        rows, columns = self.codes.shape
        if of_blocks.shape[1] > 1:
            of_blocks = of_blocks.repeat_interleave(self.block[1], 1)[:, :columns]
        return of_blocks.repeat_interleave(self.block[0], 0)[:rows] if 1 < of_blocks.shape[0] < rows else of_blocks

    def rows(self, chosen: slice) -> ScaledCodes:
        """Return the matrix of some rows, with scales of each row."""
        count = self.codes.shape[0]
        parts = [None if each is None else each.repeat_interleave(self.block[0], 0)[:count][chosen] for each in (self.scales, self.zeros)]
        assert parts[0] is not None
        of_matrix = self.of_matrix if self.of_matrix is None or len(self.of_matrix) == 1 else self.of_matrix[chosen]
        return replace(self, codes=self.codes[chosen], scales=parts[0], zeros=parts[1], block=(1, self.block[1]), of_matrix=of_matrix)

    def packed_as(self, weight_type: str) -> Codes | StoredBlocks | None:
        """Return the matrix in the codes of a kernel's type; None if that type cannot hold it without rounding.

        Scales of integers become float16, in which bfloat16 scales below 2^-17, of weights around 10^-5, lose bits. A number that divides
        the scales of E2M1 becomes its reciprocal: scales change by at most one unit in the last place of a float32, and weights by two.
        """
        form = FORMATS[weight_type]
        rows, columns = self.codes.shape
        if form.codes is None or self.codes.dtype != _CODE_DTYPES[form.codes.kind] or columns % form.block_weights:
            return None
        if not form.stored:
            return self._in_groups(bits=4 if form.codes.kind == "int4" else 8)
        packed = np.empty((rows, form.nbytes(columns)), np.uint8)
        for first in range(0, rows, ROWS_AT_A_TIME):  # intermediate tensors take several times the memory of the blocks
            blocks = _stored_blocks(self.rows(slice(first, first + ROWS_AT_A_TIME)), form, form.codes)
            if blocks is None:
                return None
            packed[first : first + ROWS_AT_A_TIME] = blocks.reshape(len(blocks), -1)
        return StoredBlocks(packed, weight_type)

    def _in_groups(self, bits: Literal[4, 8]) -> Codes | None:
        scales = self.of_columns(self.scales, KERNEL_GROUP)
        if scales is None:
            return None
        codes = self.codes.short()
        if self.zeros is not None:
            codes -= self._spread(self.zeros.short())
        low, high = torch.aminmax(codes)
        scales = scales.half()
        if low < -(1 << bits - 1) or high >= 1 << bits - 1 or not scales.isfinite().all():
            return None
        return Codes(codes.to(torch.int8).contiguous().numpy(), scales.contiguous().numpy(), bits)

    def of_columns(self, of_blocks: torch.Tensor, size: int) -> torch.Tensor | None:
        """Return what each row has for each `size` columns, (rows, columns / size); None if these are not within a block."""
        rows, columns = self.codes.shape
        if self.block[1] % size or columns % size:
            return None
        wide = of_blocks.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1] // size, 1)
        return wide[:, : columns // size]


def types_holding(kind: CodeKind, shape: Sequence[int], block: Block, *, symmetric: bool = True) -> tuple[str, ...]:
    """Return the kernels' types that hold codes of a kind without rounding, the smallest first.

    Args:
        shape: of the matrix, or of one for each expert; the last two sizes count.
        block: the rows and columns that share a scale.
        symmetric: whether there are no zero points.
    """
    rows, columns = shape[-2:]

    def holds(form: WeightFormat) -> bool:
        codes = form.codes
        if codes is None or block[1] % codes.group or columns % form.block_weights:
            return False
        if not form.stored:  # holds differences from the zero points, which have a bit more
            return kind in INTEGER_BITS and INTEGER_BITS[kind] + (not symmetric) <= INTEGER_BITS[codes.kind]
        # Four rows share a scale, also where gate and up are alternating rows or halves of the rows.
        shared = form.scale_form != "quarters" or (rows % 8 == 0 and (kind == "nvfp4" or block[0] % 8 == 0))
        return codes.kind == kind and shared and (symmetric or form.zero_points is not None)

    return tuple(form.name for form in sorted(filter(holds, FORMATS.values()), key=lambda form: form.nbytes(256)))


def _stored_blocks(matrix: ScaledCodes, form: WeightFormat, held: CheckpointCodes) -> NDArray[np.uint8] | None:
    """Return a matrix in a format's blocks, (rows, blocks, bytes): scales, zero points, codes; None if they cannot hold it."""
    scales = matrix.of_columns(matrix.scales, held.group)
    if scales is None or (matrix.zeros is not None and form.zero_points is None):
        return None
    of_blocks, rows, blocks = scales, len(scales), matrix.codes.shape[1] // form.block_weights
    if held.kind == "nvfp4":
        if scales.dtype != torch.float8_e4m3fn or matrix.of_matrix is None:
            return None
        of_blocks = (matrix.of_matrix.reciprocal() if matrix.divides else matrix.of_matrix).float().expand(rows, blocks)
    parts = [_scale_bytes(of_blocks, form.scale_form, KERNEL_FACTORS.get(held.kind, 1.0))]
    if held.kind == "nvfp4":
        parts.append(_float8_bytes(scales))
    if form.zero_points is not None:
        zeros = torch.zeros_like(scales, dtype=torch.int8) if matrix.zeros is None else matrix.of_columns(matrix.zeros, held.group)
        assert zeros is not None, "zero points have the blocks of the scales"
        points = (zeros + 8).numpy().view(np.uint8).reshape(rows, blocks, -1)
        parts.append(points if points.shape[2] == 1 else points[..., :1] | points[..., 1:] << np.uint8(4))
    parts.append(_code_bytes(matrix.codes, held.kind))
    found = [part.reshape(rows, blocks, -1) for part in parts if part is not None]
    return np.concatenate(found, axis=-1) if len(found) == len(parts) else None


def _scale_bytes(scales: torch.Tensor, form: ScaleForm, factor: float) -> NDArray[np.uint8] | None:
    """Return the bytes of (rows, n) scales, (rows, n, bytes of a scale); None where one times `factor` is too large, or no number."""
    if form == "exponent":
        mantissa, exponents = torch.frexp(scales)  # the largest exponent means NaN
        return _bytes_of((exponents - 1 + EXPONENT_BIAS).to(torch.uint8)) if (mantissa == 0.5).all() else None
    numbers = scales.half() if form == "float16" else scales.float()
    if not (numbers * factor).isfinite().all():
        return None
    scale_bytes = _bytes_of(numbers)
    if form != "quarters":
        return scale_bytes
    shared = scale_bytes.reshape(-1, 4, *scale_bytes.shape[1:]) if len(scale_bytes) % 4 == 0 else None
    if shared is None or not (shared == shared[:, :1]).all():
        return None
    rows = np.arange(len(scale_bytes))
    return scale_bytes[rows, :, rows % 4]


def _code_bytes(codes: torch.Tensor, kind: CodeKind) -> NDArray[np.uint8] | None:
    """Return the bytes of (rows, columns) codes; those of 4 bits as GGUF's nibbles, the first 16 columns of 32 in the low bits."""
    if kind == "fp8":
        return _float8_bytes(codes)
    if kind == "int8":
        return _bytes_of(codes)
    if kind == "int4":
        low, high = torch.aminmax(codes)
        if low < -8 or high > 7:
            return None
        codes = codes + 8
    halves = _bytes_of(codes).reshape(len(codes), -1, 2, KERNEL_GROUP // 2)
    return halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)


def _float8_bytes(numbers: torch.Tensor) -> NDArray[np.uint8] | None:
    """Return the bytes of E4M3; None where one is NaN, which kernels do not know."""
    scale_bytes = _bytes_of(numbers.contiguous().view(torch.uint8))
    return None if (scale_bytes & 127 == 127).any() else scale_bytes


def _bytes_of(numbers: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of (rows, n) numbers as (rows, n, bytes of a number)."""
    as_bytes: NDArray[np.uint8] = numbers.contiguous().numpy().view(np.uint8).reshape(*numbers.shape, -1)
    return as_bytes
