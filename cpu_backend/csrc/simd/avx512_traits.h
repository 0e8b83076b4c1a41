// The traits of 512-bit vectors; each file that includes this adds the dot products of its instruction set.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace moegraft {
namespace {

struct Avx512Base {
  using F = __m512;
  using I = __m512i;
  static constexpr int kWidth = 16;
  static constexpr int kVectors = 2;
  static constexpr int kFloatTokens = 12;    // 24 sums, 2 weights and a broadcast in 32 registers
  static constexpr bool kSignedBytes = false, kAddsShorts = false;
  // With 2, 4 and 6 tokens, and 8 of bytes, sums in memory take 1.05 to 1.15 of the time (Sapphire Rapids). On EPYC Zen 4 it is 1.02 to 1.07
  // with 4, 0.95 to 1.06 with 6, and of bytes 1.4 with 4 and 6 and 1.1 with 8.
  static constexpr int kFewTokens = 4;
  // Of nibbles from L2, 1 and 2 tokens take 1.1 of the time otherwise, and of bytes up to 8 tokens 1.1 to 1.4 (EPYC Zen 4).
  static constexpr int kUnrolledByteTokens = 8, kUnrolledTokens = 2;
  static constexpr int kWholeTokens = 12;
  static constexpr int kDotRows = 4;  // by 4 tokens: 16 sums and 4 rows
  static constexpr int kDotTokens = 4;
  static constexpr int kAddTokens = 6;  // by 4 columns: 24 sums and 4 weights
  static constexpr float kDenseFloats = 0.4f;  // bfloat16, 32 tokens (EPYC Zen 4); others of floats are taken to be the same

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float value) { return _mm512_set1_ps(value); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F abs(F x) { return _mm512_abs_ps(x); }
  static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale_by_power(F x, F n) { return _mm512_scalef_ps(x, n); }
  static bool all_finite(F magnitude) { return _mm512_cmp_ps_mask(magnitude, set(__FLT_MAX__), _CMP_LE_OQ) == 0xffff; }
  static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

  static I zero_int() { return _mm512_setzero_si512(); }
  static I load_int(const void* p) { return _mm512_loadu_si512(p); }
  static void store_int(void* p, I x) { _mm512_storeu_si512(p, x); }
  static I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
  static I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I mul_shorts(I a, I b) { return _mm512_mullo_epi16(a, b); }
  static I max_shorts(I a, I b) { return _mm512_max_epi16(a, b); }
  static I abs_shorts(I x) { return _mm512_abs_epi16(x); }
  // Products of signed halves of words in units of 2^-15, rounded.
  static I scale_shorts(I a, I b) { return _mm512_mulhrs_epi16(a, b); }
  static I all_shorts(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
  static int reduce_add(I x) { return _mm512_reduce_add_epi32(x); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I round_to_int(F x) { return _mm512_cvtps_epi32(x); }
  static void store_int8(std::int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }
  static void store_shorts(std::uint16_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x)); }
  static float reduce_add_float(F x) { return _mm512_reduce_add_ps(x); }
  // Stores the sums of four vectors side by side: one transposed addition instead of four reductions.
  static void store_four_sums(float* p, F a, F b, F c, F d) {
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const F low = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    const F high = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    const F lanes = _mm512_add_ps(low, high);
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }
  // Moves byte `Index` of each word to its upper byte and clears the rest: the signed byte times 2^24.
  template <int Index>
  static I top_byte(I x) {
    constexpr char kFrom = Index;
    const __m128i order =
        _mm_setr_epi8(-128, -128, -128, kFrom, -128, -128, -128, kFrom + 4, -128, -128, -128, kFrom + 8, -128, -128, -128, kFrom + 12);
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(order));
  }
  static I minus_bytes(I x, int value) { return _mm512_sub_epi8(x, _mm512_set1_epi8(static_cast<char>(value))); }
  static I low_nibbles(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static I high_nibbles(I x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }

  static I low_bytes(I x) { return _mm512_and_si512(x, _mm512_set1_epi32(255)); }
  static I signed_low_bytes(I x) { return _mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24); }
  static I next_bytes(I x) { return _mm512_srli_epi32(x, 8); }
  static I and_words(I x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi32(mask)); }
  static I and_bytes(I x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask))); }
  static I or_int(I a, I b) { return _mm512_or_si512(a, b); }
  static I add_bytes(I a, I b) { return _mm512_add_epi8(a, b); }
  // The integer part of 3 / 256 times each byte.
  static I first_digits(I x) {
    const __mmask64 one = _mm512_cmpge_epu8_mask(x, _mm512_set1_epi8(86)), two = _mm512_cmpge_epu8_mask(x, _mm512_set1_epi8(-85));
    return _mm512_mask_mov_epi8(_mm512_maskz_mov_epi8(one, _mm512_set1_epi8(1)), two, _mm512_set1_epi8(2));
  }
  // Shifts words to the left, or to the right where `By` is negative.
  template <int By>
  static I shifted(I x) {
    if constexpr (By > 0) return _mm512_slli_epi32(x, By);
    else if constexpr (By < 0) return _mm512_srli_epi32(x, -By);
    else return x;
  }
  // Exchanges every odd run of `Step` lanes of `a` with the even run of `b` before it.
  template <int Step>
  static void exchange_lanes(I& a, I& b) {
    const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), step = _mm512_set1_epi32(Step);
    const __mmask16 odd = _mm512_test_epi32_mask(lanes, step);
    const I first = _mm512_mask_add_epi32(lanes, odd, _mm512_sub_epi32(lanes, step), _mm512_set1_epi32(16));
    const I second = _mm512_mask_add_epi32(_mm512_add_epi32(lanes, step), odd, lanes, _mm512_set1_epi32(16));
    const I found = _mm512_permutex2var_epi32(a, first, b);
    b = _mm512_permutex2var_epi32(a, second, b);
    a = found;
  }
  // Word j of vector i becomes word i of vector j.
  static void transpose(I (&x)[16]) {
    I pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int half = 0; half < 2; ++half) {
        fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + half + 2]);
        fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + half + 2]);
      }
    for (int i = 0; i < 4; ++i) {  // of fours[i], [4 + i] and so on, the lanes of four words
      const I a = fours[i], b = fours[4 + i], c = fours[8 + i], d = fours[12 + i];
      const I even = _mm512_shuffle_i32x4(a, b, 0x88), odd = _mm512_shuffle_i32x4(a, b, 0xdd);
      const I next_even = _mm512_shuffle_i32x4(c, d, 0x88), next_odd = _mm512_shuffle_i32x4(c, d, 0xdd);
      x[i] = _mm512_shuffle_i32x4(even, next_even, 0x88);
      x[4 + i] = _mm512_shuffle_i32x4(odd, next_odd, 0x88);
      x[8 + i] = _mm512_shuffle_i32x4(even, next_even, 0xdd);
      x[12 + i] = _mm512_shuffle_i32x4(odd, next_odd, 0xdd);
    }
  }
  // Pairs of the shorts of two vectors, in the order in which split() has floats.
  static void pair_shorts(I a, I b, I& first, I& second) {
    first = _mm512_unpacklo_epi16(a, b);
    second = _mm512_unpackhi_epi16(a, b);
  }
  static void split(F& a, F& b) {
    const F first = _mm512_shuffle_f32x4(a, b, 0x88);
    b = _mm512_shuffle_f32x4(a, b, 0xdd);
    a = first;
  }
  static void join(F& a, F& b) {
    const F first = _mm512_shuffle_f32x4(a, b, 0x44), second = _mm512_shuffle_f32x4(a, b, 0xee);
    a = _mm512_shuffle_f32x4(first, first, 0xd8);
    b = _mm512_shuffle_f32x4(second, second, 0xd8);
  }
  // Shifts signed halves of words by 4 to the right.
  static I shift_shorts(I x) { return _mm512_srai_epi16(x, 4); }
  // Byte `Index` of each word, an E4M3 float, as a float that is 2^120 times as small.
  template <int Index>
  static F small_float8(I x) {
    const I bits = _mm512_srai_epi32(shifted<24 - 8 * Index>(x), 4);
    return _mm512_castsi512_ps(and_words(bits, static_cast<int>(0x87f00000u)));
  }
  // Each float four times.
  static F load_quarters(const std::byte* p) {
    const I order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(order, _mm512_castps128_ps512(_mm_loadu_ps(reinterpret_cast<const float*>(p))));
  }
  static I shift_right(I x, int by) { return _mm512_srl_epi32(x, _mm_cvtsi32_si128(by)); }
  static I load_bytes(const std::byte* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static I load_signed_bytes(const std::byte* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static I load_half(const std::byte* p) { return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static I flip_signs(I bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
  static I set_int(int value) { return _mm512_set1_epi32(value); }
  static I load_bytes_as_shorts(const std::byte* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static I load_shorts(const std::byte* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  // A table of 16 bytes, and its bytes at the indexes in the bytes of x.
  static I table(const std::uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static I lookup(I table, I x) { return _mm512_shuffle_epi8(table, x); }

  static F broadcast_float(const std::uint32_t* p) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*p))); }
  static I broadcast_int(const std::uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }

  // The first `count` of 64 bytes, and zeros behind them.
  static void copy_first(std::byte* target, const std::byte* p, int count) {
    _mm512_store_si512(target, _mm512_maskz_loadu_epi8(~std::uint64_t{0} >> (64 - count), p));
  }
  static F load_f16(const std::uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F halves_to_float(I x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
  static void store_f16(std::uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F load_bf16(const std::uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static F low_bf16(I x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
  static F high_bf16(I x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }
  // Stores `low` in the lower half of each word and `high` in the upper half; values are finite and rounded half up.
  static void store_pairs(std::uint32_t* p, F low, F high) {
    const I half = _mm512_set1_epi32(0x8000);
    const I lower = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
    const I upper = _mm512_add_epi32(_mm512_castps_si512(high), half);
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaa, lower, upper));
  }
  // Rounds in integers, because the instruction for this conversion flushes subnormals.
  static void store_bf16(std::uint16_t* p, F x) {
    const I bits = _mm512_castps_si512(x);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const I quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const I kept = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
  }
};

}  // namespace
}  // namespace moegraft
