// AVX-512 with VNNI, such as Cascade Lake and Ice Lake.
#include "simd/avx512_traits.h"
#include "simd/vector_kernels.h"

namespace moegraft {
namespace {

struct Avx512Vnni : Avx512Base {
  static constexpr bool kHasBf16 = false;
  static constexpr float kDenseDots = 0.22f;  // int8 0.21, int4 0.23 with 32 tokens; with 8 int8 is as fast (EPYC Zen 4)
  static I dot_int8(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  // In a type of its own, GCC copies no sum from register to register.
  using Sums = int __attribute__((vector_size(64)));
  static Sums to_sums(I x) { return reinterpret_cast<Sums>(x); }
  using Avx512Base::to_float;
  static F to_float(Sums x) { return _mm512_cvtepi32_ps(reinterpret_cast<I>(x)); }
  static Sums add_shorts(Sums sum, I a, I b) { return to_sums(_mm512_dpwssd_epi32(reinterpret_cast<I>(sum), a, b)); }
  using Avx512Base::add_bytes;
  static Sums add_bytes(Sums sum, I weights, I codes) { return to_sums(_mm512_dpbusd_epi32(reinterpret_cast<I>(sum), weights, codes)); }
  static I dot_small(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
};

Kernels make() {
  Kernels kernels = avx512_kernels();
  kernels.isa = "avx512_vnni";
  add_integer_products<Avx512Vnni>(kernels);
  add_code_attention<Avx512Vnni>(kernels.attention);
  if (__builtin_cpu_supports("avx512vbmi")) use_vbmi(kernels);
  for (int format = kFirstCoded; format < kWeightTypes; ++format)  // the tiles of integers are faster (vector_matrix.h)
    if (has_codes(static_cast<Format>(format))) kernels.matrix.multiply[format] = nullptr;
  return kernels;
}

}  // namespace

const Kernels& avx512_vnni_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
