// AMX, since Sapphire Rapids: the matrix unit computes tiles of more than a few tokens; everything else, Q4_K and Q6_K included, runs as
// with AVX-512 and BF16. isa.cpp selects the tiles that are used by default.
#include <math.h>

#include "simd/amx_tiles.h"
#include "simd/avx512_traits.h"
#include "simd/vector_kernels.h"

namespace moegraft {
namespace {

constexpr int kVectorTokens = 4;  // up to this many tokens the vector units are fast enough: reading the weights is the limit
constexpr int kTileTokens = 16;

struct Amx : Avx512Base {
  static constexpr bool kHasBf16 = true;
  static I dot_int8(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  static I dot_int4(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  static F dot_bf16(F sum, I weights, I values) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(values));
  }
};

void matrix_bf16(const TileArgs& args) {
  configure({args.tokens, 64, 16});
  zero<0>();
  zero<1>();
  const std::byte* line = args.block;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, line += 16 * 128, words += args.tokens * 16) {
    prefetch_ahead(args, group);
    load<2>(words, 64);
    load<3>(line, 128);
    load<4>(line + 64, 128);
    multiply_bf16<0, 3>();
    multiply_bf16<1, 4>();
  }
  store<0>(args.out, kBlockRows * sizeof(float));
  store<1>(args.out + kLanes, kBlockRows * sizeof(float));
  release();
}

// Expands nibbles to the unsigned bytes of an int8 group: line j becomes lines 2j and 2j + 1.
void widen_nibbles(const std::byte* lines, std::byte* target) {
  for (int j = 0; j < 4; ++j) {
    for (int half = 0; half < 2; ++half) {
      const __m512i packed = Amx::load_int(lines + j * 128 + half * 64);
      _mm512_store_si512(target + 2 * j * 128 + half * 64, Amx::low_nibbles(packed));
      _mm512_store_si512(target + (2 * j + 1) * 128 + half * 64, Amx::high_nibbles(packed));
    }
  }
}

template <Format Kind>
void matrix_integer(const TileArgs& args) {
  constexpr bool kWide = Kind == Format::kInt8;
  alignas(64) std::byte widened[8 * 128];
  alignas(64) std::int32_t dots[kTileTokens][kBlockRows];
  __m512 sums[kTileTokens][2];
  for (int token = 0; token < args.tokens; ++token) sums[token][0] = sums[token][1] = Amx::zero();
  configure({args.tokens, 32, 8});
  const std::byte* base = args.block;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += args.tokens * 10) {
    prefetch_ahead(args, group);
    const std::byte* lines = base + kScaleBytes;
    if constexpr (!kWide) {
      widen_nibbles(lines, widened);
      lines = widened;
    }
    zero<0>();
    zero<1>();
    load<2>(words + 2, 40);
    load<3>(lines, 128);
    load<4>(lines + 64, 128);
    multiply_int8<0, 3>();
    multiply_int8<1, 4>();
    store<0>(dots[0], sizeof dots[0]);
    store<1>(&dots[0][kLanes], sizeof dots[0]);
    const auto* scales = reinterpret_cast<const std::uint16_t*>(base);
    const __m512 weight_scales[2] = {Amx::load_f16(scales), Amx::load_f16(scales + kLanes)};
    for (int token = 0; token < args.tokens; ++token) {
      const __m512 scale = Amx::broadcast_float(words + token * 10);
      const __m512i correction = Amx::broadcast_int(words + token * 10 + 1);
      for (int half = 0; half < 2; ++half) {
        const __m512i dot = Amx::add_int(Amx::load_int(&dots[token][half * kLanes]), correction);
        sums[token][half] = Amx::fma(Amx::to_float(dot), Amx::mul(weight_scales[half], scale), sums[token][half]);
      }
    }
    base += kWide ? kInt8GroupBytes : kInt4GroupBytes;
  }
  release();
  for (int token = 0; token < args.tokens; ++token)
    for (int half = 0; half < 2; ++half) Amx::store(args.out + token * kBlockRows + half * kLanes, sums[token][half]);
}

template <Format Kind>
void tile_or_matrix(const TileArgs& args) {
  if (args.tokens <= kVectorTokens) return tile<Amx, Kind, kVectorTokens>(args);
  if constexpr (Kind == Format::kBFloat16Dot) matrix_bf16(args);
  else matrix_integer<Kind>(args);
}

Kernels make() {
  Kernels kernels = vector_kernels<Amx>("amx");
  kernels.tile[static_cast<int>(Format::kBFloat16Dot)] = tile_or_matrix<Format::kBFloat16Dot>;
  kernels.tile[static_cast<int>(Format::kInt8)] = tile_or_matrix<Format::kInt8>;
  kernels.tile[static_cast<int>(Format::kInt4)] = tile_or_matrix<Format::kInt4>;
  for (const Format format : {Format::kBFloat16Dot, Format::kInt8, Format::kInt4})
    kernels.max_tokens[static_cast<int>(format)] = kTileTokens;
  return kernels;
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
