// AVX-512 with VNNI and BF16: Zen 4 and 5, Cooper Lake, Sapphire Rapids.
#include "simd/avx512_traits.h"
#include "simd/vector_kernels.h"
#include "simd/vector_matrix.h"

namespace moegraft {
namespace {

struct Avx512Bf16 : Avx512Base {
  static constexpr bool kHasBf16 = true;
  static constexpr float kDenseDots = 0.22f;  // int8 0.21, int4 and bfloat16 0.23 with 32 tokens; with 8 int8 is as fast (EPYC Zen 4)
  // The bytes of each word, E4M3 floats, in bfloat16: two of them in a word of `first`, and the next two in one of `second`.
  static void float8_pairs(I codes, I& first, I& second) {
    const F enlarge = set(0x1p120f);
    const auto pairs = [](F low, F high) { return or_int(shifted<-16>(_mm512_castps_si512(low)), _mm512_castps_si512(high)); };
    first = pairs(mul(small_float8<0>(codes), enlarge), mul(small_float8<1>(codes), enlarge));
    second = pairs(mul(small_float8<2>(codes), enlarge), mul(small_float8<3>(codes), enlarge));
  }
  static F dot_bf16(F sum, I weights, I values) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(values));
  }
};

Kernels make_avx512_bf16() {
  Kernels kernels = avx512_vnni_kernels();
  kernels.isa = "avx512_bf16";
  add_pair_products<Avx512Bf16>(kernels);
  kernels.matrix = __builtin_cpu_supports("avx512vbmi") ? avx512_bf16_vbmi_matrix() : pair_matrix_kernels<Avx512Bf16>();
  return kernels;
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = make_avx512_bf16();
  return kernels;
}

}  // namespace moegraft
