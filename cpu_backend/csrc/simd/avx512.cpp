// AVX-512 without VNNI, such as Skylake-X.
#include "simd/avx512_traits.h"
#include "simd/vector_kernels.h"
#include "simd/vector_matrix.h"

namespace moegraft {
namespace {

struct Avx512 : Avx512Base {
  static constexpr bool kHasBf16 = false;
  // The products below need registers of their own. Together with the loops over columns, 0.6 to 1.05 of the time of tiles of 6; at 5 and 6
  // tokens, Q6_K, Q3_K, Q5_K and MXFP4 take up to 1.14 (EPYC Zen 4).
  static constexpr int kByteTokens = 4, kIntegerTokens = 4;
  static constexpr int kUnrolledByteTokens = 2;
  static constexpr float kDenseDots = kNeverDense;  // int8 takes 1.05 of the time without a threshold
  // vpmaddubsw would saturate, since 2 * 255 * 127 does not fit 16 bits: even and odd bytes are widened and multiplied separately.
  static I dot_int8(I sum, I weights, I codes) {
    const I even = _mm512_madd_epi16(_mm512_and_si512(weights, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8));
    const I odd = _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), _mm512_srai_epi16(codes, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
  }
  // Of codes up to kMostSmallCode.
  static I dot_small(I sum, I weights, I codes) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(weights, codes), _mm512_set1_epi16(1)));
  }
};

Kernels make() {
  Kernels kernels = vector_kernels<Avx512>("avx512");
  // In int8 0.89 of the tiles' time at 13 tokens and 0.77 at 32 (EPYC Zen 5).
  kernels.matrix = float_matrix_kernels<Avx512>(kNeverMatrix, 13, 13);
  return kernels;
}

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
