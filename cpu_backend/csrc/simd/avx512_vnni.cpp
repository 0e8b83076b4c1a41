// AVX-512 with VNNI, such as Cascade Lake and Ice Lake.
#include <math.h>

#include "simd/avx512_traits.h"
#include "simd/vector_kernels.h"

namespace moegraft {
namespace {

struct Avx512Vnni : Avx512Base {
  static constexpr bool kHasBf16 = false;
  static I dot_int8(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  static I dot_small(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
};

}  // namespace

const Kernels& avx512_vnni_kernels() {
  static const Kernels kernels = vector_kernels<Avx512Vnni>("avx512_vnni");
  return kernels;
}

}  // namespace moegraft
