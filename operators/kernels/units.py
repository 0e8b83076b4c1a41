"""Packed units inside kernels: their addresses, and how each format's are decoded.

Addresses are in elements of the pointer they are added to. `DECODERS`, at the end, has the functions of each format, which reach the
kernels as a part of a matrix's description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

# Flipping the top bit of each code turns the offset binary of the layout into two's complement.
FLIP_INT8, FLIP_INT4 = -0x7F7F7F80, -0x77777778  # 0x80808080, 0x88888888
# The 16 values of IQ4_NL and IQ4_XS, four in a word: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
IQ4_0, IQ4_4, IQ4_8, IQ4_12 = (
    tl.constexpr(int.from_bytes(bytes(value & 255 for value in values), "little", signed=True))
    for values in ((-127, -104, -83, -65), (-49, -35, -22, -10), (1, 13, 25, 38), (53, 69, 89, 113))
)

EACH_BYTE, ALTERNATE, TOP_BITS = tl.constexpr(0x01010101), tl.constexpr(0x00FF00FF), tl.constexpr(FLIP_INT8)
PARITY = tl.constexpr(0x6996)  # bit i is set where i has an odd number of ones


@triton.jit
def unit_at(rows, spans, units, M: tl.constexpr):
    """Address of the `units`-th unit of `spans` along the columns of `rows` of a matrix in blocks."""
    IN_GROUP: tl.constexpr = M.units_a_group // M.units_a_span
    at = (rows // 32) * M.block_stride + rows % 32 + M.header
    if M.groups == 1:
        at += (spans // IN_GROUP) * M.column_stride
    else:
        IN_BLOCK: tl.constexpr = M.groups * IN_GROUP
        at += (spans // IN_BLOCK) * M.column_stride + (spans % IN_BLOCK) // IN_GROUP * M.group_stride
    return at + (spans % IN_GROUP * M.units_a_span + units) * 32


@triton.jit
def high_at(rows, spans, M: tl.constexpr):
    """Address of the word that has the upper bits of `spans`: a word has those of 32 columns, or of 16 where they are two."""
    IN_GROUP: tl.constexpr = M.units_a_group // M.units_a_span
    at = unit_at(rows, spans - spans % IN_GROUP, M.units_a_group, M)
    return at + spans % IN_GROUP * 32 if M.high_bits == 2 else at


@triton.jit
def high_bits_of(words, spans, units, M: tl.constexpr):
    """Loaded words of upper bits, shifted so that those of the `units`-th unit of `spans` come first."""
    EACH: tl.constexpr = M.columns_a_unit // 4 * M.high_bits
    if M.high_bits == 1:
        IN_GROUP: tl.constexpr = M.units_a_group // M.units_a_span
        words = words >> (spans % IN_GROUP) * (M.units_a_span * EACH)
    return words >> units * EACH


@triton.jit
def scales_of(units_ptr, scales_ptr, rows, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    """The scales and minima, float32 or float16, of `rows` in the column blocks `block`, the `at`-th of each; without minima, a 0."""
    lanes = rows % 32
    block = (rows // 32) * M.block_stride + block * M.column_stride
    return M.decoder.scales(units_ptr, scales_ptr, lanes, block, at, mask, M, MASKED)


@triton.jit
def signed(units, M: tl.constexpr):
    """Loaded units, made ready for `number`."""
    if M.decoder.flip != 0:
        return units ^ M.decoder.flip
    else:
        return units


@triton.jit
def number(units, high, J, M: tl.constexpr):
    """The `J`-th column of each unit as float32, without its scale; `J` is a constant, or a tensor where codes have no upper bits.

    `high` is what `high_bits_of` or `expanded` returns, or anything where a code has no upper bits.
    """
    return M.decoder.number(units, high, J, M)


@triton.jit
def column(units, J, M: tl.constexpr):
    """`number` of a format whose codes have no upper bits."""
    return number(units, units, J, M)


@triton.jit
def expanded(units_ptr, grid_ptr, rows, spans, units, mask, M: tl.constexpr, MASKED: tl.constexpr):
    """The 8 columns of the `units`-th unit of `spans` as two words of four signed bytes: see `GpuFormat.group_words`."""
    IN_GROUP: tl.constexpr = M.units_a_group // M.units_a_span
    unit = units + spans % IN_GROUP * M.units_a_span
    group = spans // IN_GROUP % M.groups
    lanes = rows % 32
    block = (rows // 32) * M.block_stride + spans // IN_GROUP // M.groups * M.column_stride
    words = units_ptr + (block + M.header + group * M.group_stride + lanes)
    return M.decoder.expand(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M, MASKED)


@triton.jit
def column_as(units, J, dtype: tl.constexpr, M: tl.constexpr):
    """`number` of a format without scales in another type; a bfloat16 that stays one is only moved."""
    if M.columns_a_unit == 2 and dtype == tl.bfloat16:
        return (units >> 16 * J).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return number(units, units, J, M).to(dtype)


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


# Numbers, as `number`


@triton.jit
def _as_it_is(units, high, J, M: tl.constexpr):
    return units.to(tl.float32)


@triton.jit
def _bfloat16(units, high, J, M: tl.constexpr):
    # a bfloat16 is the upper half of a float32
    return ((units >> 16 * J) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _int8(units, high, J, M: tl.constexpr):
    return ((units << (24 - 8 * J)) >> 24).to(tl.float32)


@triton.jit
def _int4(units, high, J, M: tl.constexpr):
    # byte b holds column b in its low nibble and column b + 4 in its high one
    return ((units << (28 - 8 * (J % 4) - 4 * (J // 4))) >> 28).to(tl.float32)


@triton.jit
def _small_code(units, J, M: tl.constexpr):
    """The unsigned code without its upper bits: byte b of a word holds columns b, b + 4, ..."""
    BITS: tl.constexpr = 32 // M.columns_a_unit
    return units >> (8 * (J % 4) + BITS * (J // 4)) & (1 << BITS) - 1


@triton.jit
def _code(units, high, J, M: tl.constexpr):
    """A code with its upper bits; without minima, codes are numbers plus half their range."""
    BITS: tl.constexpr = 32 // M.columns_a_unit
    code = _small_code(units, J, M)
    if M.high_bits > 0:
        upper = high >> (8 * (J % 4) + M.high_bits * (J // 4)) & (1 << M.high_bits) - 1
        code = code | upper << BITS
    if not M.minima:
        code -= 1 << BITS + M.high_bits - 1
    return code.to(tl.float32)


@triton.jit
def _ternary(units, high, J, M: tl.constexpr):
    code = _small_code(units, J, M)
    code -= 1
    return code.to(tl.float32)


@triton.jit
def _unequal(units, high, J, M: tl.constexpr):
    code = _small_code(units, J, M)
    word = tl.where(code > 7, tl.where(code > 11, IQ4_12, IQ4_8), tl.where(code > 3, IQ4_4, IQ4_0))
    return ((word << 24 - 8 * (code & 3)) >> 24).to(tl.float32)


# Codes of E2M1 and E4M3 are taken as the float16 with their bits, which is 2^14 and 2^8 times too small; scales make up for it.


@triton.jit
def _e2m1(units, high, J, M: tl.constexpr):
    code = units >> (8 * (J % 4) + 4 * (J // 4))
    return ((code & 8) << 12 | (code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e4m3(units, high, J, M: tl.constexpr):
    return _small_e4m3(units >> 8 * J)


@triton.jit
def _small_e4m3(code):
    """The lowest byte of each word, 2^8 times too small; 127 and 255 are 480."""
    return ((code & 128) << 8 | (code & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _expanded_byte(units, high, J, M: tl.constexpr):
    if J < 4:
        return ((units << 24 - 8 * J) >> 24).to(tl.float32)
    else:
        return ((high << 56 - 8 * J) >> 24).to(tl.float32)


# Scales, as `scales_of`, from the fields of a block's header


@triton.jit
def _halves(scales_ptr, block, lanes, BEFORE: tl.constexpr, mask, MASKED: tl.constexpr):
    """A float16 field of each row, which has BEFORE bytes before it in a row's header."""
    return load(scales_ptr + (2 * block + BEFORE * 16 + lanes), mask, MASKED)


@triton.jit
def _words(units_ptr, block, lanes, BEFORE: tl.constexpr, mask, MASKED: tl.constexpr):
    return load(units_ptr + (block + BEFORE * 8 + lanes), mask, MASKED)


@triton.jit
def _bytes(scales_ptr, block, lanes, BEFORE: tl.constexpr, mask, MASKED: tl.constexpr):
    pointer = scales_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    return load(pointer + (4 * block + BEFORE * 32 + lanes), mask, MASKED).to(tl.int32)


@triton.jit
def _half(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED), 0.0


@triton.jit
def _two_halves(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED), _halves(scales_ptr, block, lanes, 2, mask, MASKED)


@triton.jit
def _six_bits(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    # six bits: of the first four in one word each, of the others four bits in the third word and two in the first ones
    shift = 8 * (at % 4)
    first = _words(units_ptr, block, lanes, 4, mask, MASKED) >> shift
    second = _words(units_ptr, block, lanes, 8, mask, MASKED) >> shift
    lower = _words(units_ptr, block, lanes, 12, mask, MASKED) >> shift
    scale = tl.where(at < 4, first & 63, (lower & 15) | (first >> 2 & 48))
    minimum = tl.where(at < 4, second & 63, (lower >> 4 & 15) | (second >> 2 & 48))
    of_minima = _halves(scales_ptr, block, lanes, 2, mask, MASKED).to(tl.float32)
    of_scales = _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32)
    return of_scales * scale.to(tl.float32), -(of_minima * minimum.to(tl.float32))


@triton.jit
def _q6_k(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    four = _words(units_ptr, block + at // 4 * 32, lanes, 2, mask, MASKED)
    scale = (four << 24 - 8 * (at % 4)) >> 24
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * scale.to(tl.float32), 0.0


@triton.jit
def _q3_k(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    lower = _words(units_ptr, block + at % 8 // 4 * 32, lanes, 2, mask, MASKED) >> 8 * (at % 4) + 4 * (at // 8)
    upper = _words(units_ptr, block, lanes, 10, mask, MASKED) >> 8 * (at % 4) + 2 * (at // 4)
    scale = ((lower & 15) | (upper & 3) << 4) - 32
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * scale.to(tl.float32), 0.0


@triton.jit
def _q2_k(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    both = _words(units_ptr, block + at // 4 * 32, lanes, 4, mask, MASKED) >> 8 * (at % 4)
    of_minima = _halves(scales_ptr, block, lanes, 2, mask, MASKED).to(tl.float32)
    scale = _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * (both & 15).to(tl.float32)
    return scale, -(of_minima * (both >> 4 & 15).to(tl.float32))


@triton.jit
def _iq4_xs(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    pointer = scales_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    upper = load(pointer + (2 * block + 32 + lanes), mask, MASKED).to(tl.int32) >> 2 * at
    lower = _words(units_ptr, block, lanes, 4, mask, MASKED) >> 4 * at
    scale = ((lower & 15) | (upper & 3) << 4) - 32
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * scale.to(tl.float32), 0.0


@triton.jit
def _zero_points(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    SCALES: tl.constexpr = M.header // 16  # of a row: two bytes each, before a byte of zero points
    index = at // (M.scales_a_block // SCALES)
    scale = _halves(scales_ptr, block + index * 16, lanes, 0, mask, MASKED).to(tl.float32)
    zero = _bytes(scales_ptr, block, lanes, 2 * SCALES, mask, MASKED) >> 4 * index & 15
    return scale, -(scale * zero.to(tl.float32))


@triton.jit
def _power(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    # 2^(exponent - 127), halved, times 2^15; codes above 2^112 do not occur
    exponent = _bytes(scales_ptr, block, lanes, 0, mask, MASKED) + 14
    return (tl.where(exponent > 254, 254, exponent) << 23).to(tl.float32, bitcast=True), 0.0


@triton.jit
def _nvfp4(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    # E4M3 of 16 columns, times that of the tensor, which four rows hold
    code = _words(units_ptr, block + at // 4 * 32, lanes, 1, mask, MASKED) >> 8 * (at % 4)
    of_tensor = _words(units_ptr, block, lanes // 4, 0, mask, MASKED).to(tl.float32, bitcast=True)
    scale = _small_e4m3(code) * 256.0 * of_tensor * 0.5  # in the CPU's order: it may be subnormal
    return scale * 32768.0, 0.0


@triton.jit
def _float32_of_four(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    return _words(units_ptr, block, lanes // 4, 0, mask, MASKED).to(tl.float32, bitcast=True) * 256.0, 0.0


@triton.jit
def _float32(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    return _words(units_ptr, block, lanes, 0, mask, MASKED).to(tl.float32, bitcast=True) * 256.0, 0.0


@triton.jit
def _above_signs(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    LAST: tl.constexpr = M.header + M.group_stride - 32  # a group's last word, above the signs
    scale = (load(units_ptr + (block + at * M.group_stride + LAST + lanes), mask, MASKED) >> 28 & 15).to(tl.float32) + 0.5
    unit: tl.constexpr = 0.5 if M.group_stride == 96 else 0.25  # of IQ3_XXS, which has three words, and of IQ2_XXS
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * scale * unit, 0.0


@triton.jit
def _odd_nibbles(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    scale = _words(units_ptr, block, lanes, 10, mask, MASKED) >> 4 * at & 15
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * (1 + 2 * scale).to(tl.float32), 0.0


@triton.jit
def _sixteen_nibbles(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    BEFORE: tl.constexpr = M.header // 8 - 8  # the last two words of the header
    scale = _words(units_ptr, block + at // 8 * 32, lanes, BEFORE, mask, MASKED) >> 4 * (at % 8) & 15
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * (scale.to(tl.float32) + 0.5) * 0.25, 0.0


@triton.jit
def _iq1_s(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    scale = _words(units_ptr, block + at // 2 * 32, lanes, 2, mask, MASKED) >> 16 * (at % 2) + 12 & 7
    return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * (1 + 2 * scale).to(tl.float32) * 0.125, 0.0


@triton.jit
def _iq1_m(units_ptr, scales_ptr, lanes, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    first, second = _words(units_ptr, block, lanes, 0, mask, MASKED), _words(units_ptr, block, lanes, 4, mask, MASKED)
    half = (first >> 12 & 15) | (first >> 24 & 240) | (second >> 4 & 3840) | (second >> 16 & 61440)
    scale = tl.where(at < 8, first, second) >> 16 * (at // 4 % 2) + 3 * (at % 4) & 7
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (1 + 2 * scale).to(tl.float32) * 0.125, 0.0


# Expansion, as `expanded`, of a unit of a group; the block's header is at `block`, the group's words at `words`


@triton.jit
def _expand_iq3_xxs(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M: tl.constexpr, MASKED: tl.constexpr):
    indexes = load(words + unit // 2 * 32, mask, MASKED) >> 16 * (unit % 2)
    signs = load(words + 64, mask, MASKED)
    first, second = indexes & 255, indexes >> 8 & 255
    signs = _even_signs(signs >> 7 * unit)
    return _with_signs(tl.load(grid_ptr + first), signs), _with_signs(tl.load(grid_ptr + second), signs >> 4)


@triton.jit
def _expand_iq3_s(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M: tl.constexpr, MASKED: tl.constexpr):
    indexes = load(words + unit // 2 * 32, mask, MASKED) >> 16 * (unit % 2)
    signs = load(words + 64, mask, MASKED)
    first, second = indexes & 255, indexes >> 8 & 255
    signs = signs >> 8 * unit
    upper = _words(units_ptr, block + group // 4 * 32, lanes, 2, mask, MASKED) >> 8 * (group % 4) + 2 * unit
    first, second = first | (upper & 1) << 8, second | (upper & 2) << 7
    return _with_signs(tl.load(grid_ptr + first), signs), _with_signs(tl.load(grid_ptr + second), signs >> 4)


@triton.jit
def _expand_iq2_xxs(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M: tl.constexpr, MASKED: tl.constexpr):
    index = load(words, mask, MASKED) >> 8 * unit & 255
    signs = _even_signs(load(words + 32, mask, MASKED) >> 7 * unit)
    first, second = _eight(grid_ptr, index)
    return _with_signs(first, signs), _with_signs(second, signs >> 4)


@triton.jit
def _expand_iq2_xs(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M: tl.constexpr, MASKED: tl.constexpr):
    both = load(words + unit // 2 * 32, mask, MASKED) >> 16 * (unit % 2)
    index, signs = both & 511, _even_signs(both >> 9)
    first, second = _eight(grid_ptr, index)
    return _with_signs(first, signs), _with_signs(second, signs >> 4)


@triton.jit
def _expand_iq2_s(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M: tl.constexpr, MASKED: tl.constexpr):
    upper = _words(units_ptr, block + group // 4 * 32, lanes, 2, mask, MASKED) >> 8 * (group % 4) + 2 * unit
    index = load(words, mask, MASKED) >> 8 * unit & 255 | (upper & 3) << 8
    signs = load(words + 32, mask, MASKED) >> 8 * unit
    first, second = _eight(grid_ptr, index)
    return _with_signs(first, signs), _with_signs(second, signs >> 4)


@triton.jit
def _expand_iq1_s(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M: tl.constexpr, MASKED: tl.constexpr):
    upper = _words(units_ptr, block + group // 2 * 32, lanes, 2, mask, MASKED) >> 16 * (group % 2)
    index = load(words, mask, MASKED) >> 8 * unit & 255 | (upper >> 3 * unit & 7) << 8
    first, second = _eight(grid_ptr, index)
    return _shifted(first, second, upper & 32768)


@triton.jit
def _expand_iq1_m(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M: tl.constexpr, MASKED: tl.constexpr):
    upper = _words(units_ptr, block + group // 2 * 32, lanes, 8, mask, MASKED) >> 16 * (group % 2) + 4 * unit
    index = load(words, mask, MASKED) >> 8 * unit & 255 | (upper & 7) << 8
    first, second = _eight(grid_ptr, index)
    return _shifted(first, second, upper & 8)


@triton.jit
def _expand_tq1_0(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M: tl.constexpr, MASKED: tl.constexpr):
    # digits of base 3: of 160 columns in 8 words, of 80 in 4, and of 16 in the one in front of them
    early, last = group < 5, (group == 7) & (unit > 1)
    place = tl.where(early, group, tl.where(last, 2 * unit - 4, 2 * group - 10 + unit // 2))
    word = 1 + tl.where(early, 2 * unit, 8 + unit % 2 * 2)
    word, next_word = tl.where(last, 0, word), tl.where(last, 0, word + 1)
    first = load(units_ptr + (block + word * 32 + 16 + lanes), mask, MASKED)
    second = load(units_ptr + (block + next_word * 32 + 16 + lanes), mask, MASKED)
    return _digits(first, place), _digits(second, tl.where(last, place + 1, place))


@triton.jit
def _eight(grid_ptr, index):
    """The magnitudes or digits of the 8 columns of an index."""
    eight = tl.load(grid_ptr + index)
    return eight.to(tl.int32), (eight >> 32).to(tl.int32)


@triton.jit
def _shifted(first, second, minus):
    """0, 8 or 16 of each column, minus 9 or 7."""
    shift = tl.where(minus != 0, 0, 2 * EACH_BYTE)
    return _minus(first + shift, 9), _minus(second + shift, 9)


@triton.jit
def _even_signs(seven):
    """Seven signs, and one that makes the number of set ones even."""
    seven = seven & 127
    return seven | ((PARITY >> ((seven ^ seven >> 4) & 15)) & 1) << 7


@triton.jit
def _with_signs(magnitudes, signs):
    """Four magnitudes of a byte each, none of them 0, negative where one of the lowest four bits is set."""
    ones = (signs & 15) * 0x204081 & EACH_BYTE
    return (magnitudes ^ ones * 255) + ones


@triton.jit
def _minus(codes, OFFSET: tl.constexpr):
    """Four unsigned codes of a byte each, below 128, minus the same number."""
    return codes + (128 - OFFSET) * EACH_BYTE ^ TOP_BITS


@triton.jit
def _digits(four, place):
    """The digits at a place of four numbers, minus 1: the integer parts of 3 / 256 times what is left of a byte times 3^place."""
    power = tl.where(place < 2, 1 + 2 * place, tl.where(place == 2, 9, 54 * place - 135))
    even = ((four & ALTERNATE) * power & ALTERNATE) * 3 >> 8 & ALTERNATE
    odd = ((four >> 8 & ALTERNATE) * power & ALTERNATE) * 3 >> 8 & ALTERNATE
    return _minus(even | odd << 8, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """How kernels decode a format; all functions are Triton's, of the matrix's description `M` among others.

    Attributes:
        number: `(units, high, J, M)`, as `number`.
        scales: `(units_ptr, scales_ptr, lanes, block, at, mask, M, MASKED)`, as `scales_of`; None for formats without.
        expand: `(units_ptr, grid_ptr, words, block, group, unit, lanes, mask, M, MASKED)`, as `expanded`, where codes are no bits of their
            own; `number` is then `_expanded_byte`.
        flip: bits of a loaded unit that are flipped before `number`.
    """

    number: Any
    scales: Any = None
    expand: Any = None
    flip: int = 0

    @property
    def cache_key(self) -> str:
        """A key of the functions' source, for Triton's cache of binaries."""
        functions = (each for each in (self.number, self.scales, self.expand) if each is not None)
        return "-".join(str(each.cache_key) for each in functions)


def _grid(scales: Any, expand: Any) -> Decoder:
    return Decoder(_expanded_byte, scales, expand)


# By the name in `FORMATS`.
DECODERS = {
    "float32": Decoder(_as_it_is),
    "float16": Decoder(_as_it_is),
    "bfloat16": Decoder(_bfloat16),
    "int8": Decoder(_int8, _half, flip=FLIP_INT8),
    "int4": Decoder(_int4, _half, flip=FLIP_INT4),
    "q4_k": Decoder(_code, _six_bits),
    "q6_k": Decoder(_code, _q6_k),
    "mxfp4": Decoder(_e2m1, _power),
    "iq4_nl": Decoder(_unequal, _half),
    "iq4_xs": Decoder(_unequal, _iq4_xs),
    "q4_1": Decoder(_code, _two_halves),
    "q5_0": Decoder(_code, _half),
    "q5_1": Decoder(_code, _two_halves),
    "q5_k": Decoder(_code, _six_bits),
    "q3_k": Decoder(_code, _q3_k),
    "q2_k": Decoder(_code, _q2_k),
    "int4_g32": Decoder(_code, _zero_points),
    "int4_g64": Decoder(_code, _zero_points),
    "int4_g128": Decoder(_code, _zero_points),
    "int4_g256": Decoder(_code, _half),
    "int8_g128": Decoder(_int8, _half, flip=FLIP_INT8),
    "fp8": Decoder(_e4m3, _float32_of_four),
    "fp8_rows": Decoder(_e4m3, _float32),
    "nvfp4": Decoder(_e2m1, _nvfp4),
    "iq3_s": _grid(_odd_nibbles, _expand_iq3_s),
    "iq3_xxs": _grid(_above_signs, _expand_iq3_xxs),
    "iq2_s": _grid(_sixteen_nibbles, _expand_iq2_s),
    "iq2_xs": _grid(_sixteen_nibbles, _expand_iq2_xs),
    "iq2_xxs": _grid(_above_signs, _expand_iq2_xxs),
    "iq1_s": _grid(_iq1_s, _expand_iq1_s),
    "iq1_m": _grid(_iq1_m, _expand_iq1_m),
    "tq2_0": Decoder(_ternary, _half),
    "tq1_0": _grid(_half, _expand_tq1_0),
}
