// NEON without further extensions: Cortex-A53 to A73, Graviton 1.
#include "simd/neon_traits.h"
#include "simd/vector_kernels.h"
#include "simd/vector_matrix.h"

namespace moegraft {
namespace {

Kernels make() {
  Kernels kernels = vector_kernels<Neon>("neon");
  // AVX2's numbers of tokens, whose tiles have the same sizes; not measured.
  kernels.matrix = float_matrix_kernels<Neon, 12, 32, 12>();
  return kernels;
}

}  // namespace

const Kernels& neon_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
