// AVX-512 with VNNI and BF16: Zen 4 and 5, Cooper Lake, Sapphire Rapids.
#include <math.h>

#include "simd/avx512_traits.h"
#include "simd/expansion.h"
#include "simd/vector_kernels.h"

namespace moegraft {
namespace {

struct Avx512Bf16 : Avx512Base {
  static constexpr bool kHasBf16 = true;
  static I dot_int8(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  static I dot_int4(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  static F dot_bf16(F sum, I weights, I values) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(values));
  }
};

constexpr int kTileTokens = Avx512Base::kFloatTokens;
constexpr int kPanelGroups = 8;  // columns / 32 whose weights (16 KiB) and activations of a tile (6 KiB) stay in L1 together

// The same operations in the same order as tile_pairs, so that a token gets the same bits from both.
template <int N>
void multiply_panel(const std::uint32_t* words, const std::byte* weights, int groups, bool adds, float* out, SpreadPrefetch& prefetch) {
  using T = Avx512Bf16;
  T::F sums[N][2] = {};
  if (adds) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      sums[n][0] = T::load(out + n * kBlockRows);
      sums[n][1] = T::load(out + n * kBlockRows + kLanes);
    }
  }
  for (int group = 0; group < groups; ++group, words += (kTileTokens - 1) * 16) {
    prefetch.step();
    for (int pair = 0; pair < kGroup / 2; ++pair, weights += kLineStride, ++words) {
      const T::I first = T::load_int(weights), second = T::load_int(weights + 64);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const T::I values = T::broadcast_int(words + n * 16);
        sums[n][0] = T::dot_bf16(sums[n][0], first, values);
        sums[n][1] = T::dot_bf16(sums[n][1], second, values);
      }
    }
  }
  store_tile<T, 2, N>(sums, out, 0);
}

template <int N = kTileTokens>
void multiply_panel_of(int tokens, const std::uint32_t* words, const std::byte* weights, int groups, bool adds, float* out,
                       SpreadPrefetch& prefetch) {
  if constexpr (N == 1) {
    multiply_panel<1>(words, weights, groups, adds, out, prefetch);
  } else {
    if (tokens == N) return multiply_panel<N>(words, weights, groups, adds, out, prefetch);
    multiply_panel_of<N - 1>(tokens, words, weights, groups, adds, out, prefetch);
  }
}

template <Format Kind>
void multiply(const MatrixArgs& args) {
  constexpr bool kExpands = Kind != Format::kBFloat16Dot;
  const int tiles = (args.tokens + kTileTokens - 1) / kTileTokens, base = args.tokens / tiles, longer = args.tokens % tiles;
  SpreadPrefetch prefetch(args.ahead, args.ahead_lines, tiles * args.groups);
  for (int first = 0; first < args.groups; first += kPanelGroups) {
    const int groups = args.groups - first < kPanelGroups ? args.groups - first : kPanelGroups;
    const std::byte* weights = args.block + static_cast<std::size_t>(first) * kExpandedGroupBytes;
    if constexpr (kExpands) {
      Expander<Kind> expander;
      for (int group = 0; group < groups; ++group)
        expand_group(expander, args.block, first + group, args.expanded->memory + static_cast<std::size_t>(group) * kExpandedGroupBytes);
      weights = args.expanded->memory;
    }
    const std::uint32_t* words = args.records + static_cast<std::size_t>(first) * kTileTokens * 16;
    float* out = args.out;
    for (int tile = 0; tile < tiles; ++tile, words += args.tile_words, out += kTileTokens * kBlockRows)
      multiply_panel_of(base + (tile < longer ? 1 : 0), words, weights, groups, args.adds || first > 0, out, prefetch);
  }
}

void nothing() {}

// Tokens from which the matrix kernel is faster than the tiles. Integer weights have half of a tile's peak there, so that only what is slow
// to unpack can gain.
Kernels make() {
  Kernels kernels = vector_kernels<Avx512Bf16>("avx512_bf16");
  kernels.matrix = {
      Format::kBFloat16Dot,
      kTileTokens,
      std::size_t{384} << 10,  // the weights of a unit need the remainder of the 1 MiB L2 (EPYC Zen 5)
      {kNeverMatrix, kNeverMatrix, kNeverMatrix, kTileTokens + 1, kNeverMatrix, kNeverMatrix, kNeverMatrix, kNeverMatrix},
      {nullptr, nullptr, nullptr, multiply<Format::kBFloat16Dot>, multiply<Format::kInt8>, multiply<Format::kInt4>, multiply<Format::kQ4K>,
       multiply<Format::kQ6K>},
      nothing,
      nothing,
  };
  return kernels;
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
