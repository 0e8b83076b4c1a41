// NEON with dot products of int8: Neoverse N1 (Graviton 2, Ampere Altra), Cortex-A75 and later, Apple M1.
#include "simd/neon_traits.h"
#include "simd/vector_kernels.h"
#include "simd/vector_matrix.h"

namespace moegraft {
namespace {

Kernels make() {
  Kernels kernels = neon_kernels();
  kernels.isa = "neon_dotprod";
  add_integer_products<Neon>(kernels);
  // Five products of integers by the instruction, four in float32: codes of 8 bits have no matrix kernel.
  kernels.matrix = float_matrix_kernels<Neon, 12, kNeverMatrix, 12>();
  return kernels;
}

}  // namespace

const Kernels& neon_dotprod_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
