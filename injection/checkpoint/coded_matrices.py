"""Matrices in codes: one number for each weight, and a scale and zero point for each block of rows and columns.

They are read as values, or converted without rounding to the blocks that a kernel computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.weight_formats import FORMATS
from moegraft.operators.weights import Codes, StoredBlocks

Block = tuple[int, int]  # rows and columns; 0 means all of them
# The 16 values of a float of 1 sign, 2 exponent and 1 mantissa bits (OCP Microscaling Formats 1.0, section 5.3.3).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
MXFP4_BLOCK = (1, 32)
NVFP4_BLOCK = (1, 16)
ROWS_AT_A_TIME = 512
KERNEL_GROUP = 32  # columns of a group of the kernels' int8 and int4


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
        own = [None if each is None else each.repeat_interleave(self.block[0], 0)[:count][chosen] for each in (self.scales, self.zeros)]
        assert own[0] is not None
        of_matrix = self.of_matrix if self.of_matrix is None or len(self.of_matrix) == 1 else self.of_matrix[chosen]
        return replace(self, codes=self.codes[chosen], scales=own[0], zeros=own[1], block=(1, self.block[1]), of_matrix=of_matrix)

    def held_as(self, weight_type: str) -> Codes | StoredBlocks | None:
        """Return the matrix in the codes of a kernel's type; None if that type cannot hold it without rounding.

        Scales of integers become float16, in which bfloat16 scales below 2^-17, of weights around 10^-5, lose bits. A number that divides
        the scales of E2M1 becomes its reciprocal: scales change by at most one unit in the last place of a float32, and weights by two.
        """
        if weight_type in ("int4", "int8"):
            return self._in_groups(bits=4 if weight_type == "int4" else 8)
        layout, form = _BLOCKS.get(weight_type), FORMATS[weight_type]
        rows, columns = self.codes.shape
        if layout is None or columns % form.block_weights:
            return None
        packed = np.empty((rows, form.nbytes(columns)), np.uint8)
        for first in range(0, rows, ROWS_AT_A_TIME):  # intermediate tensors take several times the memory of the blocks
            found = layout(self.rows(slice(first, first + ROWS_AT_A_TIME)))
            if found is None:
                return None
            packed[first : first + ROWS_AT_A_TIME] = found.reshape(len(found), -1)
        return StoredBlocks(packed, weight_type)

    def _in_groups(self, bits: Literal[4, 8]) -> Codes | None:
        scales = self.of_columns(self.scales, KERNEL_GROUP)
        if self.codes.dtype != torch.int8 or scales is None:
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


def _nibbles(codes: torch.Tensor) -> NDArray[np.uint8]:
    """Return codes from 0 to 15 (rows, columns) as GGUF's nibbles: 16 bytes of 32 columns, the first half of which is in the low bits."""
    halves = codes.numpy().view(np.uint8).reshape(len(codes), -1, 2, KERNEL_GROUP // 2)
    return halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)


def _bytes_of(numbers: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of (rows, n) numbers as (rows, n, bytes of a number)."""
    found: NDArray[np.uint8] = numbers.contiguous().numpy().view(np.uint8).reshape(*numbers.shape, -1)
    return found


def _int4_blocks(matrix: ScaledCodes, group: int, groups: int) -> NDArray[np.uint8] | None:
    """Return blocks of `groups` float16 scales, as many zero points of 4 bits in a byte, and nibbles; integer_formats.h has the same."""
    scales = matrix.of_columns(matrix.scales, group)
    if matrix.codes.dtype != torch.int8 or scales is None or not scales.half().isfinite().all():
        return None
    low, high = torch.aminmax(matrix.codes)
    if low < -8 or high > 7:
        return None
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    if matrix.zeros is not None:
        found = matrix.of_columns(matrix.zeros, group)
        assert found is not None, "zero points have the blocks of the scales"
        zeros = (found + 8).to(torch.uint8)
    rows, blocks = len(scales), scales.shape[1] // groups
    points = zeros.reshape(rows, blocks, groups)
    of_block = points[..., :1] if groups == 1 else points[..., :1] | points[..., 1:] << 4
    halves = _bytes_of(scales.half()).reshape(rows, blocks, -1)
    return np.concatenate([halves, of_block.numpy(), _nibbles((matrix.codes + 8).contiguous()).reshape(rows, blocks, -1)], axis=-1)


def _symmetric_int4_blocks(matrix: ScaledCodes) -> NDArray[np.uint8] | None:
    """Return blocks of 256 codes of 4 bits behind a float16 scale."""
    blocks = _int4_blocks(matrix, 256, 1) if matrix.zeros is None else None
    return None if blocks is None else np.delete(blocks, 2, axis=-1)  # a zero point


def _mxfp4_blocks(matrix: ScaledCodes) -> NDArray[np.uint8] | None:
    """Return GGUF's blocks: the exponent with its bias, then the nibbles."""
    scales = matrix.of_columns(matrix.scales, MXFP4_BLOCK[1])
    if matrix.codes.dtype != torch.uint8 or matrix.block[1] != MXFP4_BLOCK[1] or scales is None:
        return None
    mantissa, exponents = torch.frexp(scales)
    if not (mantissa == 0.5).all():  # the largest exponent means NaN
        return None
    exponent = _bytes_of((exponents - 1 + EXPONENT_BIAS).to(torch.uint8))
    return np.concatenate([exponent, _nibbles(matrix.codes.contiguous())], axis=-1)


def _nvfp4_blocks(matrix: ScaledCodes) -> NDArray[np.uint8] | None:
    """Return blocks of a byte of the second scale, of which four rows have all; eight E4M3 scales; and nibbles."""
    codes, scales, whole = matrix.codes, matrix.scales, matrix.of_matrix
    if codes.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn or whole is None or matrix.block != NVFP4_BLOCK or len(codes) % 4:
        return None
    whole = (whole.reciprocal() if matrix.divides else whole).float().expand(len(codes), 1).reshape(-1, 4)
    bits = scales.contiguous().view(torch.uint8)
    # The kernel has no NaN among E4M3's scales, and multiplies them by the matrix's and by twice the codes, up to 12.
    if (bits & 127 == 127).any() or not (whole * (448 * 12)).isfinite().all() or not torch.equal(whole, whole[:, :1].expand_as(whole)):
        return None
    rows, blocks = len(codes), codes.shape[1] // FORMATS["nvfp4"].block_weights
    quarters = _bytes_of(whole[:, :1]).reshape(rows, 1, 1).repeat(blocks, axis=1)
    nibbles = _nibbles(codes.contiguous()).reshape(rows, blocks, -1)
    return np.concatenate([quarters, bits.numpy().reshape(rows, blocks, -1), nibbles], axis=-1)


def _float8_blocks(matrix: ScaledCodes, columns: int, rows: int) -> NDArray[np.uint8] | None:
    """Return blocks of codes behind a float32 scale, of whose bytes each of `rows` rows has some."""
    scales = matrix.of_columns(matrix.scales.float(), columns)
    if matrix.codes.dtype != torch.float8_e4m3fn or scales is None or len(scales) % rows:
        return None
    shared = scales.reshape(-1, rows, scales.shape[1])
    codes = matrix.codes.contiguous().view(torch.uint8)
    # The kernel computes with 2^120 times the scale.
    if (codes & 127 == 127).any() or not (scales.abs() < 128).all() or not torch.equal(shared, shared[:, :1].expand_as(shared)):
        return None
    header = _bytes_of(shared[:, 0]).reshape(len(shared), -1, rows, 4 // rows).swapaxes(1, 2)
    return np.concatenate([header.reshape(*scales.shape, 4 // rows), codes.numpy().reshape(*scales.shape, columns)], axis=-1)


def _int8_blocks(matrix: ScaledCodes) -> NDArray[np.uint8] | None:
    """Return blocks of 128 codes behind a float16 scale."""
    scales = matrix.of_columns(matrix.scales, 128)
    if matrix.codes.dtype != torch.int8 or matrix.zeros is not None or scales is None or not scales.half().isfinite().all():
        return None
    return np.concatenate([_bytes_of(scales.half()), matrix.codes.contiguous().numpy().view(np.uint8).reshape(*scales.shape, 128)], axis=-1)


_BLOCKS: Mapping[str, Callable[[ScaledCodes], NDArray[np.uint8] | None]] = {
    "mxfp4": _mxfp4_blocks,
    "nvfp4": _nvfp4_blocks,
    "int4_g32": partial(_int4_blocks, group=32, groups=2),
    "int4_g64": partial(_int4_blocks, group=64, groups=2),
    "int4_g128": partial(_int4_blocks, group=128, groups=1),
    "int4_g256": _symmetric_int4_blocks,
    "int8_g128": _int8_blocks,
    "fp8": partial(_float8_blocks, columns=128, rows=4),
    "fp8_rows": partial(_float8_blocks, columns=256, rows=1),
}
