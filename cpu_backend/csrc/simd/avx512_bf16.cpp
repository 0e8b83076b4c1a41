// AVX-512 with VNNI and BF16: Zen 4 and 5, Cooper Lake, Sapphire Rapids.
#include <math.h>

#include "simd/avx512_traits.h"
#include "simd/vector_kernels.h"
#include "simd/vector_matrix.h"

namespace moegraft {
namespace {

struct Avx512Bf16 : Avx512Base {
  static constexpr bool kHasBf16 = true;
  static I dot_int8(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  static I dot_small(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  // Floats of eight bits of precision, of which the first goes to the lower half of each word.
  static I exact_pairs(F low, F high) { return or_int(shifted<-16>(_mm512_castps_si512(low)), _mm512_castps_si512(high)); }
  static F dot_bf16(F sum, I weights, I values) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(values));
  }
};

// With VBMI, as Zen 4 and 5 have it: FP8 by tables of the lower and of the upper bytes in bfloat16.
struct Avx512Bf16Vbmi : Avx512Bf16 {};

struct Float8Tables {
  alignas(64) std::uint8_t lower[128], upper[128];
};
constexpr Float8Tables float8_tables() {
  Float8Tables found{};
  for (int code = 0; code < 128; ++code) {
    int exponent = (code >> 3) + 120, mantissa = code & 7;
    if (code < 8) {  // a subnormal
      for (exponent = 121; mantissa > 0 && mantissa < 8; mantissa *= 2) --exponent;
      if (mantissa == 0) exponent = 0;
    }
    const int bits = exponent << 7 | (mantissa & 7) << 4;
    found.lower[code] = static_cast<std::uint8_t>(bits & 255);
    found.upper[code] = static_cast<std::uint8_t>(bits >> 8);
  }
  return found;
}
constexpr Float8Tables kFloat8Tables = float8_tables();

template <Format Kind>
struct PairExpansion<Avx512Bf16Vbmi, Kind> {
  __attribute__((target("avx512vbmi"))) static void expand(const std::byte* block, int group, PairPanel& out) {
    using I = __m512i;
    const I lower_first = _mm512_load_si512(kFloat8Tables.lower), lower_second = _mm512_load_si512(kFloat8Tables.lower + 64);
    const I upper_first = _mm512_load_si512(kFloat8Tables.upper), upper_second = _mm512_load_si512(kFloat8Tables.upper + 64);
    const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I first_order = _mm512_add_epi8(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x04040404)), _mm512_set1_epi32(0x41014000));
    const I second_order = _mm512_add_epi8(first_order, _mm512_set1_epi8(2)), sign = _mm512_set1_epi8(-128);
    using Coded = CodedOf<Kind>;
    const std::byte* base = block + static_cast<std::size_t>(group / Derived<Coded>::kGroups) * Derived<Coded>::kBytes;
    for (int row = 0; row < kBlockRows; row += kLanes) {
      typename Coded::template Reader<Avx512Base> reader;
      reader.block(base, row);
      Avx512Base::store(out.scale + row, reader.scale[0]);
      const std::byte* lines =
          base + Derived<Coded>::kLinesOffset + group % Derived<Coded>::kGroups * Derived<Coded>::kLinesBytes + row * 4;
      for (int pair = 0; pair < kFloatPanelGroups * kGroup / 2; pair += 2, lines += kWordsBytes) {
        const I codes = _mm512_loadu_si512(lines), lower = _mm512_permutex2var_epi8(lower_first, codes, lower_second);
        const I magnitude = _mm512_permutex2var_epi8(upper_first, codes, upper_second);
        const I upper = _mm512_ternarylogic_epi32(codes, sign, magnitude, 0xea);  // (codes & sign) | magnitude
        _mm512_store_si512(out.pairs[pair] + row, _mm512_permutex2var_epi8(lower, first_order, upper));
        _mm512_store_si512(out.pairs[pair + 1] + row, _mm512_permutex2var_epi8(lower, second_order, upper));
      }
    }
  }
};

Kernels make() {
  const Kernels& integers = avx512_vnni_kernels();
  Kernels kernels = float_kernels<Avx512Bf16>("avx512_bf16");
  for (int format = kFirstCoded; format < kWeightTypes; ++format) {
    kernels.max_tokens[format] = integers.max_tokens[format];
    kernels.tile[format] = integers.tile[format];
    kernels.panel[format] = integers.panel[format];
    kernels.encode[format] = integers.encode[format];
  }
  const bool vbmi = __builtin_cpu_supports("avx512vbmi");
  kernels.matrix = vbmi ? pair_matrix_kernels<Avx512Bf16Vbmi>(4) : pair_matrix_kernels<Avx512Bf16>(4);
  return kernels;
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
