// Rows of down that several tokens share: widened into items once (row_kernels.h says how they lie), then added up in tiles of tokens and
// columns, whose sums stay in registers. Templates over the traits of vector_kernels.h, whose first comment holds here too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/vector_sparse.h"

namespace moegraft {
namespace {

template <class T, Format Kind>
constexpr bool in_pairs() {
  return T::kHasBf16 && (Kind == Format::kBFloat16Dot || has_codes(Kind));
}

template <class T, Format Kind>
void widen_rows(const RowWidenArgs& args) {
  using F = typename T::F;
  constexpr int kColumns = columns_per_line(Kind);
  for (int first = 0; first < kLanes; first += T::kWidth) {
    F factors[2] = {T::zero(), T::zero()};
    if constexpr (has_codes(Kind))
      for (int row = 0; row < 2; ++row) factors[row] = code_scale<T>(args.scales[row], first);
    for (int j = 0; j < row_lines(Kind); ++j) {
      const std::size_t offset = static_cast<std::size_t>(j) * row_line_bytes(Kind);
      F columns[2][kColumns];
      for (int row = 0; row < 2; ++row) unpack_line<T, Kind>(args.lines[row] + offset, first, columns[row]);
#pragma GCC unroll 8
      for (int k = 0; k < kColumns; ++k) {
        const int column = j * kColumns + k;
        std::uint32_t* tile = args.items + static_cast<std::size_t>(column / kTileColumns) * args.tile_stride;
        std::uint32_t* target = tile + column % kTileColumns * kLanes + first;
        F low = columns[0][k], high = columns[1][k];
        if constexpr (has_codes(Kind)) low = T::mul(low, factors[0]);
        if constexpr (has_codes(Kind)) high = T::mul(high, factors[1]);
        if constexpr (in_pairs<T, Kind>()) {
          T::store_pairs(target, low, high);
        } else {
          T::store(reinterpret_cast<float*>(target), low);
          T::store(reinterpret_cast<float*>(target + kTileWords), high);
        }
      }
    }
  }
}

template <class T, bool Pairs>
inline typename T::F add_product(typename T::F sum, const std::uint32_t* weights, const std::uint32_t* coefficient) {
  if constexpr (Pairs) return T::dot_bf16(sum, T::load_int(weights), T::broadcast_int(coefficient));
  else return T::fma(T::load(reinterpret_cast<const float*>(weights)), T::broadcast_float(coefficient), sum);
}

template <class T, bool Pairs, int N>
inline void add_tile(const ItemsAddArgs& args, int token) {
  using F = typename T::F;
  for (int first = 0; first < kLanes; first += T::kWidth) {
    F sums[N][kTileColumns];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int k = 0; k < kTileColumns; ++k) sums[n][k] = T::load(args.sums[token + n] + args.sums_offset + k * kLanes + first);
    const std::uint32_t* coefficients[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) coefficients[n] = args.coefficients[token + n];
    const std::uint32_t* item = args.items + first;
    for (int i = 0; i < args.item_count; ++i, item += kTileWords) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int k = 0; k < kTileColumns; ++k) sums[n][k] = add_product<T, Pairs>(sums[n][k], item + k * kLanes, coefficients[n] + i);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int k = 0; k < kTileColumns; ++k) T::store(args.sums[token + n] + args.sums_offset + k * kLanes + first, sums[n][k]);
  }
}

template <class T, bool Pairs, int N = T::kAddTokens>
inline void add_last_tokens(const ItemsAddArgs& args, int token) {
  if constexpr (N > 0) {
    if (args.tokens - token == N) return add_tile<T, Pairs, N>(args, token);
    add_last_tokens<T, Pairs, N - 1>(args, token);
  }
}

template <class T, bool Pairs>
void add_items(const ItemsAddArgs& args) {
  int token = 0;
  for (; args.tokens - token > T::kAddTokens; token += T::kAddTokens) add_tile<T, Pairs, T::kAddTokens>(args, token);
  add_last_tokens<T, Pairs>(args, token);
}

template <class T, bool Pairs>
void add_picked(const ItemsPickArgs& args) {
  using F = typename T::F;
  constexpr int kWide = 2 * kTileColumns;  // two tiles: enough chains to hide what a product takes
  for (int tile = 0; tile < kTiles; tile += 2) {
    for (int first = 0; first < kLanes; first += T::kWidth) {
      float* target = args.sums + static_cast<std::size_t>(tile) * kTileWords + first;
      const std::uint32_t* items = args.items + static_cast<std::size_t>(tile) * args.tile_stride + first;
      F sums[kWide];
#pragma GCC unroll 8
      for (int k = 0; k < kWide; ++k) sums[k] = T::load(target + k * kLanes);
      for (int i = 0; i < args.picked_count; ++i) {
        const std::uint32_t* item = items + static_cast<std::size_t>(args.picked[i]) * kTileWords;
        const std::uint32_t* coefficient = args.coefficients + args.picked[i];
#pragma GCC unroll 4
        for (int k = 0; k < kTileColumns; ++k) sums[k] = add_product<T, Pairs>(sums[k], item + k * kLanes, coefficient);
        item += args.tile_stride;
#pragma GCC unroll 4
        for (int k = 0; k < kTileColumns; ++k) sums[kTileColumns + k] = add_product<T, Pairs>(sums[kTileColumns + k], item + k * kLanes, coefficient);
      }
#pragma GCC unroll 8
      for (int k = 0; k < kWide; ++k) T::store(target + k * kLanes, sums[k]);
    }
  }
}

template <class T>
RowKernels row_kernels() {
  using K = Format;
  constexpr bool kPairs8 = in_pairs<T, K::kInt8>(), kPairs4 = in_pairs<T, K::kInt4>(), kPairs16 = in_pairs<T, K::kBFloat16Dot>();
  return {
      T::kDotRows,
      {false, false, false, kPairs16, kPairs8, kPairs4, false, false},
      {dot_rows<T, K::kFloat32>, dot_rows<T, K::kFloat16>, dot_rows<T, K::kBFloat16>, dot_rows<T, K::kBFloat16Dot>, dot_rows<T, K::kInt8>,
       dot_rows<T, K::kInt4>, nullptr, nullptr},
      {add_rows<T, K::kFloat32>, add_rows<T, K::kFloat16>, add_rows<T, K::kBFloat16>, add_rows<T, K::kBFloat16Dot>, add_rows<T, K::kInt8>,
       add_rows<T, K::kInt4>, nullptr, nullptr},
      {widen_rows<T, K::kFloat32>, widen_rows<T, K::kFloat16>, widen_rows<T, K::kBFloat16>, widen_rows<T, K::kBFloat16Dot>,
       widen_rows<T, K::kInt8>, widen_rows<T, K::kInt4>, nullptr, nullptr},
      {add_items<T, false>, add_items<T, false>, add_items<T, false>, add_items<T, kPairs16>, add_items<T, kPairs8>, add_items<T, kPairs4>,
       nullptr, nullptr},
      {add_picked<T, false>, add_picked<T, false>, add_picked<T, false>, add_picked<T, kPairs16>, add_picked<T, kPairs8>, add_picked<T, kPairs4>,
       nullptr, nullptr},
      reached_bits,
      finish_neurons,
  };
}

}  // namespace
}  // namespace moegraft
