// What the matrix kernels of NEON share: products of 2x2 blocks (SMMLA, BFMMLA), two rows of weights with two tokens.
//
// Weights of some groups (a panel) are arranged once as operands, two rows to 16 bytes, and then multiplied with all tiles of 8 tokens,
// whose codes are arranged as well, two tokens to 16 bytes. A sum is a vector of (row 0, token 0), (row 0, token 1), (row 1, token 0), (row
// 1, token 1). Where a tile has an odd number of tokens, the last one is multiplied beside a row that may hold anything.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "formats/coded_formats.h"
#include "simd/kernels.h"
#include "simd/neon_traits.h"

namespace moegraft {
namespace {

constexpr int kMatrixTokens = 8;
constexpr int kMatrixPairs = kMatrixTokens / 2;
constexpr int kRowPairs = kBlockRows / 2;
constexpr int kMatrixPanelGroups = 8;  // whose operands, 10 to 16 KiB of weights and 4 KiB of a tile, stay in L1 together

// Sums of four rows and two tokens, to and from (token, 32 rows).
inline void load_sums(const float* out, float32x4_t& first, float32x4_t& second) {
  const float32x4_t token0 = vld1q_f32(out), token1 = vld1q_f32(out + kBlockRows);
  first = vzip1q_f32(token0, token1);
  second = vzip2q_f32(token0, token1);
}
inline void store_sums(float* out, float32x4_t first, float32x4_t second) {
  vst1q_f32(out, vuzp1q_f32(first, second));
  vst1q_f32(out + kBlockRows, vuzp2q_f32(first, second));
}

// Multiplies a block with the tiles of a segment. A Product has
//   Weights, Tokens               the operands of a group, and of a tile's group
//   expand(block, group, weights)
//   arrange(records, pairs, tokens)  the records of a tile's group, 8 rows
//   multiply<Pairs>(weights, tokens, groups, adds, out)
template <class Product, Format Records>
void matrix_pairs(const MatrixArgs& args) {
  using Weights = typename Product::Weights;
  static_assert(sizeof(Weights) * kMatrixPanelGroups <= sizeof ExpandedWeights::memory);
  auto* weights = reinterpret_cast<Weights*>(args.expanded->memory);
  typename Product::Tokens tokens[kMatrixPanelGroups];
  const int tiles = (args.tokens + kMatrixTokens - 1) / kMatrixTokens, base = args.tokens / tiles, longer = args.tokens % tiles;
  const int parts = (args.groups + kMatrixPanelGroups - 1) / kMatrixPanelGroups * tiles;
  const std::byte* ahead = args.ahead;
  int left = args.ahead_lines;
  for (int first = 0; first < args.groups; first += kMatrixPanelGroups) {
    const int groups = args.groups - first < kMatrixPanelGroups ? args.groups - first : kMatrixPanelGroups;
    for (int group = 0; group < groups; ++group) Product::expand(args.block, first + group, weights[group]);
    constexpr int kGroupWords = kMatrixTokens * words_per_group(Records);
    const std::uint32_t* words = args.records + static_cast<std::size_t>(first) * kGroupWords;
    float* out = args.out;
    for (int tile = 0; tile < tiles; ++tile, words += args.tile_words, out += kMatrixTokens * kBlockRows) {
      for (int line = 0; line < (args.ahead_lines + parts - 1) / parts && left > 0; ++line, --left, ahead += 64)
        __builtin_prefetch(ahead, 0, 2);
      const int pairs = (base + (tile < longer ? 1 : 0) + 1) / 2;
      for (int group = 0; group < groups; ++group) Product::arrange(words + group * kGroupWords, pairs, tokens[group]);
      const bool adds = args.adds || first > 0;
      if (pairs == 1) Product::template multiply<1>(weights, tokens, groups, adds, out);
      else if (pairs == 2) Product::template multiply<2>(weights, tokens, groups, adds, out);
      else if (pairs == 3) Product::template multiply<3>(weights, tokens, groups, adds, out);
      else Product::template multiply<4>(weights, tokens, groups, adds, out);
    }
  }
}

// A matrix kernel without formats, whose activations are records of the tiles.
inline MatrixKernels pair_kernels() {
  MatrixKernels matrix{};
  matrix.own_records = true;
  matrix.tile_tokens = kMatrixTokens;
  matrix.segment_bytes = std::size_t{384} << 10;  // the weights of a unit need the remainder of a 1 MiB L2
  for (int& least : matrix.least_tokens) least = kNeverMatrix;
  matrix.begin = matrix.end = [] {};
  return matrix;
}

}  // namespace
}  // namespace moegraft
