// Expansion of packed weights to bfloat16 with AVX-512 (F, BW, DQ): a group of a block, 32 columns of 32 rows, becomes pairs of columns in
// the order of bfloat16 blocks ([pair][half][lane][2], 2 KiB), whatever its format.
//
// Expander<Form>::begin takes the scales of a group, and each of eight steps expands 128 weights, so that tile instructions can stand
// between them. Only the reading of scales is compiled for each format (ExpandedFormat): all else is shared by formats whose codes are
// packed alike. A step converts nothing: a code's bits are put into the mantissa of a power of two, one fused multiplication and addition
// removes that power and the code's offset and applies the scale, and the upper halves of two floats become a pair. Cutting off the lower
// halves makes magnitudes smaller, on average by kCut, so scales are larger by that: a weight's error is at most 2^-7 of it and has no
// bias.
//
// What holds an expander between tile instructions is inlined, or its constants would go through memory at every one of them.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "formats/coded_formats.h"
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

// The scales of a group and what is added to the products with them, whether a minimum or the offset of the codes.
struct ExpansionScales {
  alignas(64) float scale[2][kBlockRows];  // [part]
  float minimum[2][kBlockRows];
};

// A format as a form's functions see it.
struct ExpandedFormat {
  int log_groups;  // of a block; a power of two
  int block_bytes, lines_offset, lines_bytes;
  const std::uint8_t* table;
  void (*read)(const std::byte* block, int first, int count, ExpansionScales* out);
};

// Reads the scales of some groups of a block of weights.
template <class Coded>
void read_expansion_scales(const std::byte* block, int first, int count, ExpansionScales* out) {
  constexpr int kGroups = Derived<Coded>::kGroups;
  block += static_cast<std::size_t>(first / kGroups) * Derived<Coded>::kBytes;
  for (int row = 0; row < kBlockRows; row += kLanes) {
    const std::byte* base = block;
    ExpansionScales* target = out;
    for (int index = first % kGroups, left = count; left > 0; index = 0, base += Derived<Coded>::kBytes) {
      typename Coded::template Reader<Avx512Base> reader;
      reader.block(base, row);
      for (; index < kGroups && left > 0; ++index, --left, ++target) {
        reader.group(index);
        for (int part = 0; part < Coded::kParts; ++part) {
          const __m512 scale = enlarged(reader.scale[part]);
          _mm512_store_ps(target->scale[part] + row, scale);
          if constexpr (Coded::kMinimum) _mm512_store_ps(target->minimum[part] + row, enlarged(reader.minimum[part]));
          else if constexpr (!kIsFloat8<Coded>)
            _mm512_store_ps(target->minimum[part] + row, _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(-Coded::kOffset))));
        }
      }
    }
  }
}

template <class Coded>
constexpr const std::uint8_t* table_address() {
  if constexpr (kHasTable<Coded>) return Coded::kTable;
  else return nullptr;
}
constexpr int log_of(int power_of_two) { return power_of_two == 1 ? 0 : 1 + log_of(power_of_two / 2); }
template <class Coded>
constexpr ExpandedFormat kExpandedFormat = {log_of(Derived<Coded>::kGroups), Derived<Coded>::kBytes, Derived<Coded>::kLinesOffset,
                                            Derived<Coded>::kLinesBytes,     table_address<Coded>(), read_expansion_scales<Coded>};

struct Float8Form {};
struct PlainForm {};  // blocks of bfloat16, which need no expansion
struct NearForm {};  // such blocks, of which lines are prefetched instead
constexpr ExpandedFormat kNoFormat{};
template <class Coded>
using ExpansionForm = std::conditional_t<kIsFloat8<Coded>, Float8Form, CodeFormOf<Coded>>;

// The scales of the next groups, which are read together. Not a part of an expander, which stays in registers.
class ScaleReader {
 public:
  ScaleReader(const ExpandedFormat& format, int groups) : format(format), groups_(groups) {}
  const ExpandedFormat& format;
  const std::byte* lines(const std::byte* block, int group) const {
    return block + static_cast<std::size_t>(group >> format.log_groups) * static_cast<std::size_t>(format.block_bytes) +
           format.lines_offset + (group & ((1 << format.log_groups) - 1)) * format.lines_bytes;
  }
  MOEGRAFT_INLINE const ExpansionScales& scales(const std::byte* block, int group) {
    if (block_ != block || group < first_ || group - first_ >= kRead) {
      block_ = block;
      first_ = group;
      format.read(block, group, groups_ - group < kRead ? groups_ - group : kRead, scales_);
    }
    return scales_[group - first_];
  }

 private:
  static constexpr int kRead = 8;
  const int groups_;  // of a block
  const std::byte* block_ = nullptr;  // whose scales were read
  int first_ = 0;  // of these groups
  ExpansionScales scales_[kRead];
};

// Codes.
template <class Form>
struct Expander {
  // Nibbles need no joining.
  static constexpr bool kNibbles = Form::kLowBits == 4 && Form::kHighBits == 0 && !Form::kHasTable;
  std::conditional_t<kNibbles, NibbleCodes, ByteCodes> codes;
  NibbleCodes::Scale nibble_scale[2];  // [half]
  __m512 scale[Form::kParts][2], shift[Form::kParts][2];
  __m512i table;
  const std::byte* lines;
  MOEGRAFT_INLINE explicit Expander(const ExpandedFormat& format) {
    if constexpr (Form::kHasTable) table = Avx512Base::table(format.table);
    else table = _mm512_setzero_si512();
  }
  MOEGRAFT_INLINE void begin(ScaleReader& reader, const std::byte* block, int group) {
    lines = reader.lines(block, group);
    const ExpansionScales& scales = reader.scales(block, group);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
#pragma GCC unroll 2
      for (int part = 0; part < Form::kParts; ++part) {
        const __m512 factor = _mm512_load_ps(scales.scale[part] + half * kLanes),
                     minimum = _mm512_load_ps(scales.minimum[part] + half * kLanes);
        if constexpr (kNibbles) {
          nibble_scale[half] = NibbleCodes::scale_of(factor, minimum);
        } else {
          scale[part][half] = factor;
          shift[part][half] = _mm512_fnmadd_ps(factor, _mm512_set1_ps(ByteCodes::kPower), minimum);
        }
      }
  }
  template <int J>  // eight columns of half the rows
  MOEGRAFT_INLINE void step(std::byte* out) const {
    constexpr int kStep = J / 2, kHalf = J % 2, kPart = kStep / (4 / Form::kParts);
    std::byte* target = out + kStep * 4 * kLineStride + kHalf * 64;
    if constexpr (kNibbles) {
      codes(lines + J * 64, nibble_scale[kHalf], target);
    } else {
      __m512i first, second;
      load_codes<Avx512Base, Form, kStep>(lines + kHalf * 64, table, first, second);
      codes(first, scale[kPart][kHalf], shift[kPart][kHalf], target);
      codes(second, scale[kPart][kHalf], shift[kPart][kHalf], target + 2 * kLineStride);
    }
  }
};

template <>
struct Expander<Float8Form> {
  __m512 scale[2];  // [half]
  PairMaker pairs;
  const std::byte* lines;
  MOEGRAFT_INLINE explicit Expander(const ExpandedFormat&) {}
  MOEGRAFT_INLINE void begin(ScaleReader& reader, const std::byte* block, int group) {
    lines = reader.lines(block, group);
    const ExpansionScales& scales = reader.scales(block, group);
    for (int half = 0; half < 2; ++half)
      scale[half] = _mm512_mul_ps(_mm512_load_ps(scales.scale[0] + half * kLanes), _mm512_set1_ps(0x1p120f));
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

template <>
struct Expander<PlainForm> {
  MOEGRAFT_INLINE explicit Expander(const ExpandedFormat&) {}
  MOEGRAFT_INLINE void begin(ScaleReader&, const std::byte*, int) {}
  template <int>
  MOEGRAFT_INLINE void step(std::byte*) const {}
};

template <>
struct Expander<NearForm> {
  const std::byte* lines;  // a group's
  template <int J>
  MOEGRAFT_INLINE void step(std::byte*) const {
    constexpr std::size_t kBytes = kExpandedGroupBytes / kExpansionSteps;
    for (std::size_t byte = J * kBytes; byte < (J + 1) * kBytes; byte += 64) __builtin_prefetch(lines + byte, 0, 2);
  }
};

// Where nothing else is computed meanwhile: at the beginning of a job, and what is left of a panel.
template <class Form>
__attribute__((noinline)) void expand_group(const ExpandedFormat& format, const std::byte* block, int group, std::byte* out) {
  ScaleReader reader(format, group + 1);
  Expander<Form> expander(format);
  expander.begin(reader, block, group);
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
