// AVX-512 without VNNI, such as Skylake-X.
#include "simd/avx512_traits.h"
#include "simd/vector_kernels.h"
#include "simd/vector_matrix.h"

namespace moegraft {
namespace {

struct Avx512 : Avx512Base {
  static constexpr bool kHasBf16 = false;
  static constexpr float kDenseDots = kNeverDense;  // of no format here
};

// Products of integers are AVX2's, as a copy in twice the width costs seconds to compile for Skylake-SP and its relatives alone. From the
// second-level cache, int4 takes 1.6 of the time with 1 and 4 tokens and 1.25 with 32, and int8 1.3 (Sapphire Rapids without VNNI).
Kernels make() {
  Kernels kernels = avx2_kernels();
  kernels.isa = "avx512";
  add_float_products<Avx512>(kernels);
  kernels.matrix = float_matrix_kernels<Avx512, kNeverMatrix, kNeverMatrix, 13>();
  return kernels;
}

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
