// AVX-512 with VNNI, BF16 and VBMI: Zen 4 and 5, Sapphire Rapids. The products of FP8 in bfloat16, whose bytes are looked up in tables of
// the lower and of the upper ones.
#include "simd/avx512_traits.h"
#include "simd/vector_matrix.h"

namespace moegraft {
namespace {

struct Float8Tables {
  alignas(64) std::uint8_t lower[128], upper[128];
};
constexpr Float8Tables float8_tables() {
  Float8Tables found{};
  for (int code = 0; code < 128; ++code) {
    int exponent = (code >> 3) + 120, mantissa = code & 7;
    if (code < 8) {  // a subnormal
      for (exponent = 121; mantissa > 0 && mantissa < 8; mantissa *= 2) --exponent;
      if (mantissa == 0) exponent = 0;
    }
    const int bits = exponent << 7 | (mantissa & 7) << 4;
    found.lower[code] = static_cast<std::uint8_t>(bits & 255);
    found.upper[code] = static_cast<std::uint8_t>(bits >> 8);
  }
  return found;
}
constexpr Float8Tables kFloat8Tables = float8_tables();

struct Avx512Bf16Vbmi : Avx512Base {
  static F dot_bf16(F sum, I weights, I values) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(values));
  }
  // The bytes of each word, E4M3 floats, in bfloat16: two of them in a word of `first`, and the next two in one of `second`.
  static void float8_pairs(I codes, I& first, I& second) {
    const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I first_order = _mm512_add_epi8(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x04040404)), _mm512_set1_epi32(0x41014000));
    const I second_order = _mm512_add_epi8(first_order, _mm512_set1_epi8(2)), sign = _mm512_set1_epi8(-128);
    const auto looked_up = [codes](const std::uint8_t (&table)[128]) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    };
    const I lower = looked_up(kFloat8Tables.lower);
    const I upper = _mm512_ternarylogic_epi32(codes, sign, looked_up(kFloat8Tables.upper), 0xea);  // (codes & sign) | magnitude
    first = _mm512_permutex2var_epi8(lower, first_order, upper);
    second = _mm512_permutex2var_epi8(lower, second_order, upper);
  }
};

}  // namespace

MatrixKernels avx512_bf16_vbmi_matrix() { return pair_matrix_kernels<Avx512Bf16Vbmi>(); }

}  // namespace moegraft
