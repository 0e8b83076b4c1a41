// The traits of 256-bit vectors with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "simd/kernels.h"

namespace moegraft {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kWidth = 8;
  static constexpr int kVectors = 4;
  static constexpr int kFloatTokens = 6;    // for half a block: 12 sums, 2 weights and a broadcast in 16 registers
  static constexpr bool kSignedBytes = true, kAddsShorts = true;
  static constexpr int kFewTokens = 2;  // with 2, sums in memory take 1.15 of the time (Sapphire Rapids)
  static constexpr int kUnrolledByteTokens = 0, kUnrolledTokens = 0;
  static constexpr int kWholeTokens = 1;  // a single token reads each line once, in order
  static constexpr int kDotRows = 2;  // by 4 tokens, for half the lanes: 8 sums and 2 rows
  static constexpr int kDotTokens = 4;
  static constexpr int kAddTokens = 2;  // by 4 columns, for half the lanes: 8 sums and 4 weights
  static constexpr float kDenseFloats = 0.3f;  // bfloat16, 32 tokens (EPYC Zen 4); others of floats are taken to be the same
  static constexpr float kDenseDots = kNeverDense;  // int8 is as fast without a threshold, and slower with one
  static constexpr bool kHasBf16 = false;

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float value) { return _mm256_set1_ps(value); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F abs(F x) { return _mm256_andnot_ps(set(-0.0f), x); }
  static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // Scales in two steps, because 2^n alone may overflow or be subnormal where the product is not.
  static F scale_by_power(F x, F n) {
    const I exponent = _mm256_cvtps_epi32(n);
    const I half = _mm256_srai_epi32(exponent, 1);
    return mul(mul(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(exponent, half)));
  }
  static F power_of_two(I n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
  static bool all_finite(F magnitude) { return _mm256_movemask_ps(_mm256_cmp_ps(magnitude, set(__FLT_MAX__), _CMP_LE_OQ)) == 0xff; }
  static float reduce_max(F x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_shuffle_ps(most, most, 1)));
  }

  static void store_four_sums(float* p, F a, F b, F c, F d) {
    const F lanes = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1)));
  }

  static I zero_int() { return _mm256_setzero_si256(); }
  static I load_int(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store_int(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
  static I mul_int(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I mul_shorts(I a, I b) { return _mm256_mullo_epi16(a, b); }
  static int reduce_add(I x) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
  }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static I round_to_int(F x) { return _mm256_cvtps_epi32(x); }
  static void store_int8(std::int8_t* p, I x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  static float reduce_add_float(F x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
  }
  // Moves byte `Index` of each word to its upper byte and clears the rest: the signed byte times 2^24.
  template <int Index>
  static I top_byte(I x) {
    constexpr char kFrom = Index;
    const __m128i order =
        _mm_setr_epi8(-128, -128, -128, kFrom, -128, -128, -128, kFrom + 4, -128, -128, -128, kFrom + 8, -128, -128, -128, kFrom + 12);
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order));
  }
  static I minus_bytes(I x, int value) { return _mm256_sub_epi8(x, _mm256_set1_epi8(static_cast<char>(value))); }
  static I low_nibbles(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static I high_nibbles(I x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }

  static I low_bytes(I x) { return _mm256_and_si256(x, _mm256_set1_epi32(255)); }
  static I signed_low_bytes(I x) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 24), 24); }
  static I next_bytes(I x) { return _mm256_srli_epi32(x, 8); }
  static I and_words(I x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi32(mask)); }
  static I and_bytes(I x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }
  static I or_int(I a, I b) { return _mm256_or_si256(a, b); }
  static I xor_int(I a, I b) { return _mm256_xor_si256(a, b); }
  static I add_bytes(I a, I b) { return _mm256_add_epi8(a, b); }
  // The integer part of 3 / 256 times each byte.
  static I first_digits(I x) {
    const auto minus_reached = [x](char least) { return _mm256_cmpeq_epi8(_mm256_max_epu8(x, _mm256_set1_epi8(least)), x); };
    return _mm256_abs_epi8(_mm256_add_epi8(minus_reached(86), minus_reached(-85)));
  }
  // Shifts words to the left, or to the right where `By` is negative.
  template <int By>
  static I shifted(I x) {
    if constexpr (By > 0) return _mm256_slli_epi32(x, By);
    else if constexpr (By < 0) return _mm256_srli_epi32(x, -By);
    else return x;
  }
  // Exchanges every odd run of `Step` lanes of `a` with the even run of `b` before it.
  template <int Step>
  static void exchange_lanes(I& a, I& b) {
    const I before = a;
    if constexpr (Step == 1) {
      a = _mm256_blend_epi32(before, _mm256_slli_epi64(b, 32), 0xaa);
      b = _mm256_blend_epi32(_mm256_srli_epi64(before, 32), b, 0xaa);
    } else if constexpr (Step == 2) {
      a = _mm256_unpacklo_epi64(before, b);
      b = _mm256_unpackhi_epi64(before, b);
    } else {
      a = _mm256_permute2x128_si256(before, b, 0x20);
      b = _mm256_permute2x128_si256(before, b, 0x31);
    }
  }
  // Shifts signed halves of words by 4 to the right.
  static I shift_shorts(I x) { return _mm256_srai_epi16(x, 4); }
  // Byte `Index` of each word, an E4M3 float, as a float that is 2^120 times as small.
  template <int Index>
  static F small_float8(I x) {
    const I bits = _mm256_srai_epi32(shifted<24 - 8 * Index>(x), 4);
    return _mm256_castsi256_ps(and_words(bits, static_cast<int>(0x87f00000u)));
  }
  // Each float four times.
  static F load_quarters(const std::byte* p) {
    const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_permutevar8x32_ps(_mm256_castsi256_ps(_mm256_castsi128_si256(two)), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
  }
  static I shift_right(I x, int by) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(by)); }
  static I load_bytes(const std::byte* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static I load_signed_bytes(const std::byte* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static I load_shorts(const std::byte* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  // A table of 16 bytes, and its bytes at the indexes in the bytes of x.
  static I table(const std::uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static I lookup(I table, I x) { return _mm256_shuffle_epi8(table, x); }

  // The eight bytes of each index as two words, and the lower four of them.
  static void load_points(const std::uint64_t* points, I index, I& first, I& second) {
    const Lanes at(index);
    const auto two = [&](int i) {
      const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(points + at[i]));
      return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low), reinterpret_cast<const __m64*>(points + at[i + 1])));
    };
    const F a = _mm256_castsi256_ps(_mm256_set_m128i(two(4), two(0))), b = _mm256_castsi256_ps(_mm256_set_m128i(two(6), two(2)));
    first = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    second = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
  }
  static I load_half_points(const std::uint64_t* points, I index) {
    const Lanes at(index);
    const auto half = [&](int i) { return static_cast<int>(points[at[i]]); };
    return _mm256_setr_epi32(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7));
  }
  // Words in registers for integers: as pairs, since only one in a cycle comes from a vector.
  struct Lanes {
    std::uint64_t pairs[4];
    explicit Lanes(I x) {
      const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
      pairs[0] = static_cast<std::uint64_t>(_mm_cvtsi128_si64(low));
      pairs[1] = static_cast<std::uint64_t>(_mm_extract_epi64(low, 1));
      pairs[2] = static_cast<std::uint64_t>(_mm_cvtsi128_si64(high));
      pairs[3] = static_cast<std::uint64_t>(_mm_extract_epi64(high, 1));
    }
    std::uint64_t operator[](int lane) const { return lane % 2 == 0 ? pairs[lane / 2] & 0xffffffffu : pairs[lane / 2] >> 32; }
  };
  // Bits 4 * index to 4 * index + 3 of each word, each as a byte of ones or zeros.
  static I spread_bits(I x, int index) {
    const I first = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    const I bytes = _mm256_shuffle_epi8(x, _mm256_or_si256(_mm256_set1_epi8(static_cast<char>(index / 2)), first));
    const I bits = _mm256_set1_epi32(index % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010u));
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
  }
  // With the other sign where a mask has ones.
  static I negated(I bytes, I mask) { return _mm256_sub_epi8(_mm256_xor_si256(bytes, mask), mask); }
  static F halves_to_float(I x) { return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1))); }

  static F broadcast_float(const std::uint32_t* p) { return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(*p))); }
  static I broadcast_int(const std::uint32_t* p) { return _mm256_set1_epi32(static_cast<int>(*p)); }

  static F load_f16(const std::uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static void store_f16(std::uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F load_bf16(const std::uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }
  static F low_bf16(I x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
  static F high_bf16(I x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }
  static void store_bf16(std::uint16_t* p, F x) {
    const I bits = _mm256_castps_si256(x);
    const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const I rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const F quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x00400000)));
    const F kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const I high = _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }

  // The sparse layout's. vpmaddubsw would saturate, since 2 * 255 * 127 does not fit 16 bits: even and odd bytes are widened and multiplied
  // separately.
  static I dot_int8(I sum, I weights, I codes) {
    const I even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8));
    const I odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(codes, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
  }
  // Sums of two products of an unsigned byte and a signed one, in 16 bits.
  static I mul_bytes(I weights, I codes) { return _mm256_maddubs_epi16(weights, codes); }
  static I add_shorts(I a, I b) { return _mm256_add_epi16(a, b); }
  static I add_pairs(I sum, I shorts) { return _mm256_add_epi32(sum, _mm256_madd_epi16(shorts, _mm256_set1_epi16(1))); }
  static I abs_bytes(I x) { return _mm256_abs_epi8(x); }
  // Of signed bytes, of which `magnitudes` are the absolute values, up to 128: 2 * 128 * 127 fits 16 bits.
  static I dot_signed(I sum, I magnitudes, I weights, I codes) { return dot_small(sum, magnitudes, _mm256_sign_epi8(codes, weights)); }
  // Of codes up to kMostSmallCode.
  static I dot_small(I sum, I weights, I codes) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, codes), _mm256_set1_epi16(1)));
  }
};

}  // namespace
}  // namespace moegraft
