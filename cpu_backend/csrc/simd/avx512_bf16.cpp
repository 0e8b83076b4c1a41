// AVX-512 with VNNI and BF16: Zen 4 and 5, Cooper Lake, Sapphire Rapids.
#include "simd/avx512_traits.h"
#include "simd/vector_kernels.h"

namespace moegraft {
namespace {

struct Avx512Bf16 : Avx512Base {
  static constexpr bool kHasBf16 = true;
  static constexpr float kDenseDots = 0.22f;  // int8 0.21, int4 and bfloat16 0.23 with 32 tokens; with 8 int8 is as fast (EPYC Zen 4)
  static F dot_bf16(F sum, I weights, I values) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(values));
  }
};

Kernels make_avx512_bf16() {
  Kernels kernels = avx512_vnni_kernels();
  kernels.isa = "avx512_bf16";
  add_pair_products<Avx512Bf16>(kernels);
  // Without VBMI, which Cooper Lake alone lacks, FP8 stays with products in float32.
  if (__builtin_cpu_supports("avx512vbmi")) kernels.matrix = avx512_bf16_vbmi_matrix();
  return kernels;
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = make_avx512_bf16();
  return kernels;
}

}  // namespace moegraft
