// Expansion of packed weights to bfloat16 with AVX-512 (F, BW, DQ): a group of a block, 32 columns of 32 rows, becomes pairs of columns in the
// order of bfloat16 blocks ([pair][half][lane][2], 2 KiB), whatever its format.
//
// Expander<Kind>::begin reads the scales of a group, and each of eight steps expands 128 weights, so that tile instructions can stand between
// them. A step converts nothing: a code's bits are put into the mantissa of a power of two, one fused multiplication and addition removes that
// power and the code's offset and applies the scale, and the upper halves of two floats become a pair. Cutting off the lower halves makes
// magnitudes smaller, on average by kCut, so scales are larger by that: a weight's error is at most 2^-7 of it and has no bias.
//
// What holds an expander between tile instructions is inlined, or its constants would go through memory at every one of them.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "simd/avx512_traits.h"
#include "simd/kernels.h"
#include "simd/vector_tiles.h"

namespace moegraft {
namespace {

constexpr std::size_t kExpandedGroupBytes = std::size_t{kBlockRows} * kGroup * 2;
constexpr int kExpansionSteps = 8;
constexpr float kCut = 0.0026f;

MOEGRAFT_INLINE __m512i words_at(const std::byte* p) { return _mm512_loadu_si512(p); }
MOEGRAFT_INLINE __m512i all_words(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
MOEGRAFT_INLINE __m512 enlarged(__m512 scale) { return _mm512_mul_ps(scale, _mm512_set1_ps(1.0f + kCut)); }
// A shuffle of the bytes of each word.
MOEGRAFT_INLINE __m512i byte_order(int a, int b, int c, int d) {
  const auto word = static_cast<std::uint32_t>(a | b << 8 | c << 16 | d << 24);
  return _mm512_broadcast_i32x4(
      _mm_add_epi8(_mm_set1_epi32(static_cast<int>(word)), _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c)));
}
// (bits & mask) | power
MOEGRAFT_INLINE __m512 mantissa(__m512i bits, __m512i mask, __m512i power) {
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, mask, power, 0xea));
}

// Takes the upper halves of two vectors of floats as pairs.
struct PairMaker {
  __m512i upper = byte_order(2, 3, 2, 3);
  MOEGRAFT_INLINE void operator()(__m512 even, __m512 odd, std::byte* out) const {
    constexpr __mmask64 kLowerBytes = 0x3333333333333333ull;
    _mm512_storeu_si512(out, _mm512_mask_shuffle_epi8(_mm512_castps_si512(odd), kLowerBytes, _mm512_castps_si512(even), upper));
  }
};

constexpr std::size_t kLineStride =
    2 * 64;  // from a line of 16 rows to the line of the next pair, in blocks and in what they are expanded to

// Words of four codes of 8 bits, at bit 8 of the mantissa of 2^15, where 1 has weight 1.
struct ByteCodes {
  static constexpr float kPower = 32768.0f;
  __m512i mask = all_words(0xff00), power = all_words(0x47000000), first = byte_order(0, 0, 0, 0), third = byte_order(2, 2, 2, 2);
  PairMaker pairs;
  // 16 rows, 4 columns: value = scale * (power + code) + shift.
  MOEGRAFT_INLINE void operator()(__m512i codes, __m512 scale, __m512 shift, std::byte* out) const {
    constexpr __mmask64 kSecondByte = 0x2222222222222222ull;
    const __m512 c0 = _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(power, kSecondByte, codes, first));
    const __m512 c1 = mantissa(codes, mask, power);
    const __m512 c2 = _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(power, kSecondByte, codes, third));
    const __m512 c3 = mantissa(_mm512_srli_epi32(codes, 16), mask, power);
    pairs(_mm512_fmadd_ps(c0, scale, shift), _mm512_fmadd_ps(c1, scale, shift), out);
    pairs(_mm512_fmadd_ps(c2, scale, shift), _mm512_fmadd_ps(c3, scale, shift), out + kLineStride);
  }
};

// Words of eight codes of 4 bits: after a shift by 8 to the left or 12 to the right, or none, each stands at bit 8, 12 or 16, where 1 has
// weight 1 in the mantissa of 2^15, 2^11 or 2^7.
struct NibbleCodes {
  struct Scale {
    __m512 scale, shift8, shift12, shift16;
  };
  // value = scale * code + minimum
  static MOEGRAFT_INLINE Scale scale_of(__m512 scale, __m512 minimum) {
    const auto shift = [&](float power) { return _mm512_fnmadd_ps(scale, _mm512_set1_ps(power), minimum); };
    return {scale, shift(32768.0f), shift(2048.0f), shift(128.0f)};
  }

  __m512i mask8 = all_words(0x0f00), mask12 = all_words(0xf000), mask16 = all_words(0xf0000);
  __m512i power8 = all_words(0x47000000), power12 = all_words(0x45000000), power16 = all_words(0x43000000);
  PairMaker pairs;
  // 16 rows, 8 columns: byte k holds column k in its lower half and column k + 4 in its upper half.
  MOEGRAFT_INLINE void operator()(const std::byte* line, const Scale& s, std::byte* out) const {
    const __m512i codes = words_at(line), up = _mm512_slli_epi32(codes, 8), down = _mm512_srli_epi32(codes, 12);
    const auto at8 = [&](__m512i bits) { return _mm512_fmadd_ps(mantissa(bits, mask8, power8), s.scale, s.shift8); };
    const auto at12 = [&](__m512i bits) { return _mm512_fmadd_ps(mantissa(bits, mask12, power12), s.scale, s.shift12); };
    const auto at16 = [&](__m512i bits) { return _mm512_fmadd_ps(mantissa(bits, mask16, power16), s.scale, s.shift16); };
    pairs(at8(up), at8(codes), out);  // bits 0 and 8
    pairs(at16(codes), at12(down), out + kLineStride);  // 16 and 24
    pairs(at12(up), at12(codes), out + 2 * kLineStride);  // 4 and 12
    pairs(at8(down), at16(down), out + 3 * kLineStride);  // 20 and 28
  }
};

// A coded format.
template <Format Kind, class = void>
struct Expander {
  using Coded = CodedOf<Kind>;
  // Nibbles need no joining.
  static constexpr bool kNibbles = Coded::kLowBits == 4 && Coded::kHighBits == 0 && !kHasTable<Coded>;
  std::conditional_t<kNibbles, NibbleCodes, ByteCodes> codes;
  NibbleCodes::Scale nibble_scale[2];  // [half]
  __m512 scale[Coded::kParts][2], shift[Coded::kParts][2];
  __m512i table = table_of<Avx512Base, Coded>();
  const std::byte* lines;
  MOEGRAFT_INLINE void begin(const std::byte* block, int group) {
    const std::byte* base = block + static_cast<std::size_t>(group / Derived<Coded>::kGroups) * Derived<Coded>::kBytes;
    const int index = group % Derived<Coded>::kGroups;
    lines = base + Derived<Coded>::kLinesOffset + index * Derived<Coded>::kLinesBytes;
    for (int half = 0; half < 2; ++half) {
      typename Coded::template Reader<Avx512Base> reader;
      reader.block(base, half * kLanes);
      reader.group(index);
      for (int part = 0; part < Coded::kParts; ++part) {
        const __m512 factor = enlarged(reader.scale[part]);
        __m512 minimum;
        if constexpr (Coded::kMinimum) minimum = enlarged(reader.minimum[part]);
        else minimum = _mm512_mul_ps(factor, _mm512_set1_ps(static_cast<float>(-Coded::kOffset)));
        if constexpr (kNibbles) {
          nibble_scale[half] = NibbleCodes::scale_of(factor, minimum);
        } else {
          scale[part][half] = factor;
          shift[part][half] = _mm512_fnmadd_ps(factor, _mm512_set1_ps(ByteCodes::kPower), minimum);
        }
      }
    }
  }
  template <int J>  // eight columns of half the rows
  MOEGRAFT_INLINE void step(std::byte* out) const {
    constexpr int kStep = J / 2, kHalf = J % 2, kPart = kStep / (4 / Coded::kParts);
    std::byte* target = out + kStep * 4 * kLineStride + kHalf * 64;
    if constexpr (kNibbles) {
      codes(lines + J * 64, nibble_scale[kHalf], target);
    } else {
      __m512i first, second;
      load_codes<Avx512Base, Coded, kStep>(lines + kHalf * 64, table, first, second);
      codes(first, scale[kPart][kHalf], shift[kPart][kHalf], target);
      codes(second, scale[kPart][kHalf], shift[kPart][kHalf], target + 2 * kLineStride);
    }
  }
};

// FP8.
template <Format Kind>
struct Expander<Kind, std::enable_if_t<kIsFloat8<CodedOf<Kind>>>> {
  using Coded = CodedOf<Kind>;
  __m512 scale[2];  // [half]
  const std::byte* lines;
  PairMaker pairs;
  MOEGRAFT_INLINE void begin(const std::byte* block, int group) {
    const std::byte* base = block + static_cast<std::size_t>(group / Derived<Coded>::kGroups) * Derived<Coded>::kBytes;
    lines = base + Derived<Coded>::kLinesOffset + group % Derived<Coded>::kGroups * Derived<Coded>::kLinesBytes;
    for (int half = 0; half < 2; ++half) {
      typename Coded::template Reader<Avx512Base> reader;
      reader.block(base, half * kLanes);
      scale[half] = _mm512_mul_ps(enlarged(reader.scale[0]), _mm512_set1_ps(0x1p120f));
    }
  }
  template <int J>  // eight columns of half the rows
  MOEGRAFT_INLINE void step(std::byte* out) const {
    constexpr int kStep = J / 2, kHalf = J % 2;
    for (int i = 0; i < 2; ++i) {
      const __m512i codes = words_at(lines + (2 * kStep + i) * kWordsBytes + kHalf * 64);
      std::byte* target = out + (kStep * 4 + 2 * i) * kLineStride + kHalf * 64;
      pairs(_mm512_mul_ps(Avx512Base::small_float8<0>(codes), scale[kHalf]),
            _mm512_mul_ps(Avx512Base::small_float8<1>(codes), scale[kHalf]), target);
      pairs(_mm512_mul_ps(Avx512Base::small_float8<2>(codes), scale[kHalf]),
            _mm512_mul_ps(Avx512Base::small_float8<3>(codes), scale[kHalf]), target + kLineStride);
    }
  }
};

// Blocks of bfloat16 need no expansion.
template <>
struct Expander<Format::kBFloat16Dot> {
  MOEGRAFT_INLINE void begin(const std::byte*, int) {}
  template <int>
  MOEGRAFT_INLINE void step(std::byte*) const {}
};

// Where nothing else is computed meanwhile: at the beginning of a job, and what is left of a panel.
template <Format Kind>
__attribute__((noinline)) void expand_group(const std::byte* block, int group, std::byte* out) {
  Expander<Kind> expander;
  expander.begin(block, group);
  expander.template step<0>(out);
  expander.template step<1>(out);
  expander.template step<2>(out);
  expander.template step<3>(out);
  expander.template step<4>(out);
  expander.template step<5>(out);
  expander.template step<6>(out);
  expander.template step<7>(out);
}

// Prefetches some lines in each step of a product, the same number in all but the last ones: a branch that is taken irregularly costs more
// than the prefetches.
struct SpreadPrefetch {
  const std::byte* next;
  const std::byte* end;
  int lines;  // of a step
  SpreadPrefetch(const std::byte* first, int all_lines, int steps)
      : next(first), end(first + static_cast<std::size_t>(all_lines) * 64), lines((all_lines + steps - 1) / steps) {}
  MOEGRAFT_INLINE void step() {
    if (next >= end) return;
    for (int i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

}  // namespace
}  // namespace moegraft
