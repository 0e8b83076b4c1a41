// AVX2 with FMA and F16C: Haswell, Zen 1 and later.
#include <cpuid.h>

#include "simd/avx2_traits.h"
#include "simd/vector_kernels.h"
#include "simd/vector_matrix.h"

namespace moegraft {
namespace {

bool has_avx_vnni() {
#if defined(MOEGRAFT_EMULATED_AMX)
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");  // tests compile its instructions for AVX-512
#else
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 1u << 4) != 0;
#endif
}

Kernels make() {
  Kernels kernels = vector_kernels<Avx2>("avx2");
  // In bfloat16 0.89 of the tiles' time at 12 tokens and 0.77 at 32 (EPYC Zen 5); tiles of int8 take 0.75 of its time (Sapphire Rapids).
  kernels.matrix = float_matrix_kernels<Avx2, 12, kNeverMatrix, 12>();
  if (has_avx_vnni()) use_avx_vnni(kernels);
  return kernels;
}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
