"""Packed units inside kernels: their addresses, and the columns they hold. Addresses are in elements of the pointer they are added to."""

from __future__ import annotations

import triton
import triton.language as tl

# Flipping the top bit of each code turns the offset binary of the layout into two's complement.
FLIP_INT8 = tl.constexpr(-0x7F7F7F80)  # 0x80808080
FLIP_INT4 = tl.constexpr(-0x77777778)  # 0x88888888
# The 16 values of IQ4_NL and IQ4_XS, four in a word: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
IQ4_0, IQ4_4, IQ4_8, IQ4_12 = (
    tl.constexpr(int.from_bytes(bytes(value & 255 for value in values), "little", signed=True))
    for values in ((-127, -104, -83, -65), (-49, -35, -22, -10), (1, 13, 25, 38), (53, 69, 89, 113))
)

EACH_BYTE, ALTERNATE = tl.constexpr(0x01010101), tl.constexpr(0x00FF00FF)
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
def scales_of(units_ptr, scales_ptr, rows, block, at, mask, M: tl.constexpr, MASKED: tl.constexpr):
    """The scales and minima, float32 or float16, of `rows` in the column blocks `block`, the `at`-th of each; without minima, a 0.

    The codes of MXFP4, NVFP4 and FP8 are too small by a power of two, which their scales make up for: those of MXFP4 are below 2^112.
    """
    lanes = rows % 32
    block = (rows // 32) * M.block_stride + block * M.column_stride
    if M.weights == "q4_k" or M.weights == "q5_k":
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
    elif M.weights == "q6_k":
        four = _words(units_ptr, block + at // 4 * 32, lanes, 2, mask, MASKED)
        scale = (four << 24 - 8 * (at % 4)) >> 24
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * scale.to(tl.float32), 0.0
    elif M.weights == "q3_k":
        lower = _words(units_ptr, block + at % 8 // 4 * 32, lanes, 2, mask, MASKED) >> 8 * (at % 4) + 4 * (at // 8)
        upper = _words(units_ptr, block, lanes, 10, mask, MASKED) >> 8 * (at % 4) + 2 * (at // 4)
        scale = ((lower & 15) | (upper & 3) << 4) - 32
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * scale.to(tl.float32), 0.0
    elif M.weights == "q2_k":
        both = _words(units_ptr, block + at // 4 * 32, lanes, 4, mask, MASKED) >> 8 * (at % 4)
        of_minima = _halves(scales_ptr, block, lanes, 2, mask, MASKED).to(tl.float32)
        scale = _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * (both & 15).to(tl.float32)
        return scale, -(of_minima * (both >> 4 & 15).to(tl.float32))
    elif M.weights == "iq4_xs":
        pointer = scales_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        upper = load(pointer + (2 * block + 32 + lanes), mask, MASKED).to(tl.int32) >> 2 * at
        lower = _words(units_ptr, block, lanes, 4, mask, MASKED) >> 4 * at
        scale = ((lower & 15) | (upper & 3) << 4) - 32
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * scale.to(tl.float32), 0.0
    elif M.weights == "int4_g32" or M.weights == "int4_g64" or M.weights == "int4_g128":
        SCALES: tl.constexpr = 1 if M.weights == "int4_g128" else 2
        index = at // (M.scales_a_block // SCALES)
        scale = _halves(scales_ptr, block + index * 16, lanes, 0, mask, MASKED).to(tl.float32)
        zero = _bytes(scales_ptr, block, lanes, 2 * SCALES, mask, MASKED) >> 4 * index & 15
        return scale, -(scale * zero.to(tl.float32))
    elif M.weights == "q4_1" or M.weights == "q5_1":
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED), _halves(scales_ptr, block, lanes, 2, mask, MASKED)
    elif M.weights == "mxfp4":
        # 2^(exponent - 127), halved, times 2^15
        exponent = _bytes(scales_ptr, block, lanes, 0, mask, MASKED) + 14
        return (tl.where(exponent > 254, 254, exponent) << 23).to(tl.float32, bitcast=True), 0.0
    elif M.weights == "nvfp4":  # E4M3 of 16 columns, times that of the tensor, which four rows hold
        code = _words(units_ptr, block + at // 4 * 32, lanes, 1, mask, MASKED) >> 8 * (at % 4)
        of_tensor = _words(units_ptr, block, lanes // 4, 0, mask, MASKED).to(tl.float32, bitcast=True)
        scale = _small_e4m3(code) * 256.0 * of_tensor * 0.5  # in the CPU's order: it may be subnormal
        return scale * 32768.0, 0.0
    elif M.weights == "iq3_xxs" or M.weights == "iq2_xxs":  # above the signs, in the last word of a group
        LAST: tl.constexpr = M.header + M.group_stride - 32
        scale = (load(units_ptr + (block + at * M.group_stride + LAST + lanes), mask, MASKED) >> 28 & 15).to(tl.float32) + 0.5
        unit: tl.constexpr = 0.5 if M.weights == "iq3_xxs" else 0.25
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * scale * unit, 0.0
    elif M.weights == "iq3_s":
        scale = _words(units_ptr, block, lanes, 10, mask, MASKED) >> 4 * at & 15
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * (1 + 2 * scale).to(tl.float32), 0.0
    elif M.weights == "iq2_xs" or M.weights == "iq2_s":
        BEFORE: tl.constexpr = 2 if M.weights == "iq2_xs" else 10
        scale = _words(units_ptr, block + at // 8 * 32, lanes, BEFORE, mask, MASKED) >> 4 * (at % 8) & 15
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * (scale.to(tl.float32) + 0.5) * 0.25, 0.0
    elif M.weights == "iq1_s":
        scale = _words(units_ptr, block + at // 2 * 32, lanes, 2, mask, MASKED) >> 16 * (at % 2) + 12 & 7
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED).to(tl.float32) * (1 + 2 * scale).to(tl.float32) * 0.125, 0.0
    elif M.weights == "fp8":  # four rows have a scale
        return _words(units_ptr, block, lanes // 4, 0, mask, MASKED).to(tl.float32, bitcast=True) * 256.0, 0.0
    elif M.weights == "fp8_rows":
        return _words(units_ptr, block, lanes, 0, mask, MASKED).to(tl.float32, bitcast=True) * 256.0, 0.0
    else:
        return _halves(scales_ptr, block, lanes, 0, mask, MASKED), 0.0


@triton.jit
def signed(units, M: tl.constexpr):
    """Loaded units, made ready for `column`."""
    if M.weights == "int8" or M.weights == "int8_g128":
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
    elif M.weights == "int8" or M.weights == "int8_g128":
        return ((units << (24 - 8 * J)) >> 24).to(tl.float32)
    elif M.weights == "int4":
        # byte b holds column b in its low nibble and column b + 4 in its high one
        return ((units << (28 - 8 * (J % 4) - 4 * (J // 4))) >> 28).to(tl.float32)
    else:
        return units.to(tl.float32)


@triton.jit
def number(units, high, J, M: tl.constexpr):
    """`column` of any format, before its scale.

    `high` is what `high_bits_of` or `expanded` returns, or anything where a code has no upper bits.
    """
    BITS: tl.constexpr = 32 // M.columns_a_unit
    if M.expanded:
        if J < 4:
            return ((units << 24 - 8 * J) >> 24).to(tl.float32)
        else:
            return ((high << 56 - 8 * J) >> 24).to(tl.float32)
    elif M.weights == "mxfp4" or M.weights == "nvfp4" or M.weights == "fp8" or M.weights == "fp8_rows":
        return _small_float(units, J, M)
    elif BITS == 32 or BITS == 16 or BITS == 8 or M.weights == "int4":
        return column(units, J, M)
    else:
        # byte b of a word holds columns b, b + 4, ...
        code = units >> (8 * (J % 4) + BITS * (J // 4)) & (1 << BITS) - 1
        if M.weights == "iq4_nl" or M.weights == "iq4_xs":
            word = tl.where(code > 7, tl.where(code > 11, IQ4_12, IQ4_8), tl.where(code > 3, IQ4_4, IQ4_0))
            return ((word << 24 - 8 * (code & 3)) >> 24).to(tl.float32)
        if M.high_bits > 0:
            upper = high >> (8 * (J % 4) + M.high_bits * (J // 4)) & (1 << M.high_bits) - 1
            code = code | upper << BITS
        if M.weights == "tq2_0":
            code -= 1
        elif not M.minima:
            code -= 1 << BITS + M.high_bits - 1
        return code.to(tl.float32)


@triton.jit
def _small_float(units, J, M: tl.constexpr):
    """Codes of MXFP4, NVFP4 or FP8 as the float16 with their bits, 2^14 and 2^8 times too small."""
    if M.weights == "mxfp4" or M.weights == "nvfp4":
        code = units >> (8 * (J % 4) + 4 * (J // 4))
        return ((code & 8) << 12 | (code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return _small_e4m3(units >> 8 * J)


@triton.jit
def _small_e4m3(code):
    """The lowest byte of each word, 2^8 times too small; 127 and 255 are 480."""
    return ((code & 128) << 8 | (code & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def expanded(units_ptr, grid_ptr, rows, spans, units, mask, M: tl.constexpr, MASKED: tl.constexpr):
    """The 8 columns of the `units`-th unit of `spans` as two words of four signed bytes: see `GpuFormat.group_words`."""
    IN_GROUP: tl.constexpr = M.units_a_group // M.units_a_span
    unit = units + spans % IN_GROUP * M.units_a_span
    group = spans // IN_GROUP % M.groups
    lanes = rows % 32
    block = (rows // 32) * M.block_stride + spans // IN_GROUP // M.groups * M.column_stride
    words = units_ptr + (block + M.header + group * M.group_stride + lanes)
    if M.weights == "iq3_xxs" or M.weights == "iq3_s":  # two indexes of 4 columns
        indexes = load(words + unit // 2 * 32, mask, MASKED) >> 16 * (unit % 2)
        signs = load(words + 64, mask, MASKED)
        first, second = indexes & 255, indexes >> 8 & 255
        if M.weights == "iq3_xxs":
            signs = _even_signs(signs >> 7 * unit)
        else:
            signs = signs >> 8 * unit
            upper = _words(units_ptr, block + group // 4 * 32, lanes, 2, mask, MASKED) >> 8 * (group % 4) + 2 * unit
            first, second = first | (upper & 1) << 8, second | (upper & 2) << 7
        return _with_signs(tl.load(grid_ptr + first), signs), _with_signs(tl.load(grid_ptr + second), signs >> 4)
    elif M.weights == "tq1_0":  # digits of base 3: of 160 columns in 8 words, of 80 in 4, and of 16 in the one in front of them
        early, last = group < 5, (group == 7) & (unit > 1)
        place = tl.where(early, group, tl.where(last, 2 * unit - 4, 2 * group - 10 + unit // 2))
        word = 1 + tl.where(early, 2 * unit, 8 + unit % 2 * 2)
        word, next_word = tl.where(last, 0, word), tl.where(last, 0, word + 1)
        first = load(units_ptr + (block + word * 32 + 16 + lanes), mask, MASKED)
        second = load(units_ptr + (block + next_word * 32 + 16 + lanes), mask, MASKED)
        return _digits(first, place), _digits(second, tl.where(last, place + 1, place))
    else:  # an index of 8 columns
        if M.weights == "iq2_xxs":
            index = load(words, mask, MASKED) >> 8 * unit & 255
            signs = _even_signs(load(words + 32, mask, MASKED) >> 7 * unit)
        elif M.weights == "iq2_xs":
            both = load(words + unit // 2 * 32, mask, MASKED) >> 16 * (unit % 2)
            index, signs = both & 511, _even_signs(both >> 9)
        elif M.weights == "iq2_s":
            upper = _words(units_ptr, block + group // 4 * 32, lanes, 2, mask, MASKED) >> 8 * (group % 4) + 2 * unit
            index = load(words, mask, MASKED) >> 8 * unit & 255 | (upper & 3) << 8
            signs = load(words + 32, mask, MASKED) >> 8 * unit
        else:
            tl.static_assert(M.weights == "iq1_s")
            upper = _words(units_ptr, block + group // 2 * 32, lanes, 2, mask, MASKED) >> 16 * (group % 2)
            index = load(words, mask, MASKED) >> 8 * unit & 255 | (upper >> 3 * unit & 7) << 8
            signs = upper
        eight = tl.load(grid_ptr + index)
        first, second = eight.to(tl.int32), (eight >> 32).to(tl.int32)
        if M.weights == "iq1_s":  # 0, 8 or 16, minus 9 or 7
            shift = tl.where((signs & 32768) != 0, 0, 2 * EACH_BYTE)
            return _minus(first + shift, 9), _minus(second + shift, 9)
        else:
            return _with_signs(first, signs), _with_signs(second, signs >> 4)


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
    return codes + (128 - OFFSET) * EACH_BYTE ^ FLIP_INT8


@triton.jit
def _digits(four, place):
    """The digits at a place of four numbers, minus 1: the integer parts of 3 / 256 times what is left of a byte times 3^place."""
    power = tl.where(place < 2, 1 + 2 * place, tl.where(place == 2, 9, 54 * place - 135))
    even = ((four & ALTERNATE) * power & ALTERNATE) * 3 >> 8 & ALTERNATE
    odd = ((four >> 8 & ALTERNATE) * power & ALTERNATE) * 3 >> 8 & ALTERNATE
    return _minus(even | odd << 8, 1)


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
