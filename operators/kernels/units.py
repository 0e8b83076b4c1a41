"""Packed units inside kernels: their addresses, and the columns they hold. Addresses are in elements of the pointer they are added to."""

from __future__ import annotations

import triton
import triton.language as tl

# Flipping the top bit of each code turns the offset binary of the layout into two's complement.
FLIP_INT8 = tl.constexpr(-0x7F7F7F80)  # 0x80808080
FLIP_INT4 = tl.constexpr(-0x77777778)  # 0x88888888


@triton.jit
def unit_at(rows, units, M: tl.constexpr):
    """Address of `units` along the columns of `rows` of a matrix in blocks."""
    block = (rows // 32) * M.block_stride + rows % 32
    return block + (units // M.units_a_group) * M.group_stride + M.header + (units % M.units_a_group) * 32


@triton.jit
def scale_at(rows, groups, M: tl.constexpr):
    """Address of the float16 scale of `rows` for `groups` of 32 columns; only words have scales."""
    return 2 * ((rows // 32) * M.block_stride + groups * M.group_stride) + rows % 32


@triton.jit
def signed(units, M: tl.constexpr):
    """Loaded units, made ready for `column`."""
    if M.weights == "int8":
        return units ^ FLIP_INT8
    elif M.weights == "int4":
        return units ^ FLIP_INT4
    else:
        return units


@triton.jit
def column(units, J, M: tl.constexpr):
    """The `J`-th column of each unit as float32, without its scale; `J` is a constant or a tensor."""
    if M.weights == "bfloat16":
        # a bfloat16 is the upper half of a float32
        return ((units >> 16 * J) << 16).to(tl.float32, bitcast=True)
    elif M.weights == "int8":
        return ((units << (24 - 8 * J)) >> 24).to(tl.float32)
    elif M.weights == "int4":
        # byte b holds column b in its low nibble and column b + 4 in its high one
        return ((units << (28 - 8 * (J % 4) - 4 * (J // 4))) >> 28).to(tl.float32)
    else:
        return units.to(tl.float32)


@triton.jit
def column_as(units, J, dtype: tl.constexpr, M: tl.constexpr):
    """`column` in another type; a bfloat16 that stays one is only moved."""
    if M.weights == "bfloat16" and dtype == tl.bfloat16:
        return (units >> 16 * J).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return column(units, J, M).to(dtype)


@triton.jit
def dot(a, b, total, UPCAST: tl.constexpr):
    """`total + a @ b`; float32 in three passes of tf32, whose error is of the order of float32 rounding."""
    # Triton's interpreter multiplies the bit patterns of bfloat16
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision="tf32x3")
    else:
        return tl.dot(a, b, total)


@triton.jit
def load(pointers, mask, MASKED: tl.constexpr):
    """Load; without MASKED the mask is not applied, as it costs registers in every thread."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)
