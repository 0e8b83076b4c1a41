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

// Products of integers are AVX2's. The instructions are the same ones, in twice the width: with 32 tokens of an expert, int4 takes 1.2 of the
// time that it took with 512 bits (Sapphire Rapids without VNNI), and one token as long.
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
