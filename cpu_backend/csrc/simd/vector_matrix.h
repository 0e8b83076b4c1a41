// The matrix kernel of instruction sets without products of bfloat16: weights are expanded to float32, exactly, and activations are not
// rounded. Templates over the traits of vector_kernels.h, whose rules apply here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/kernels.h"
#include "simd/vector_tiles.h"

namespace moegraft {
namespace {

constexpr int kFloatPanelGroups = 4;  // columns / 32 whose weights (16 KiB) and activations of a tile stay in L1 together

// Writes a group of a block as (32 columns, 32 rows) floats.
template <class T, Format Kind>
inline void expand_to_floats(const std::byte* block, int group, float* out) {
  using F = typename T::F;
  using I = typename T::I;
  constexpr int V = T::kVectors;
  constexpr int kStep = T::kWidth * 4;  // bytes of a vector in a line
  const auto store = [out](int column, int v, F value) { T::store(out + column * kBlockRows + v * T::kWidth, value); };
  if constexpr (Kind == Format::kBFloat16 || Kind == Format::kBFloat16Dot) {
    const std::byte* line = block + static_cast<std::size_t>(group) * kGroup * kBlockRows * 2;
    for (int column = 0; column < kGroup; column += 2, line += kWordsBytes) {
      for (int v = 0; v < V; ++v) {
        const I pair = T::load_int(line + v * kStep);
        store(column, v, T::low_bf16(pair));
        store(column + 1, v, T::high_bf16(pair));
      }
    }
  } else {
    // value = scale * code + shift, of 16 columns at a time
    F scale[2][V], shift[2][V];
    const std::byte* line;
    const std::byte* upper = nullptr;
    const auto fill = [&](int part, int v, F factor, float offset) {
      scale[part][v] = factor;
      shift[part][v] = T::mul(factor, T::set(offset));
    };
    const int index = group % kSuperGroups;
    if constexpr (Kind == Format::kInt8 || Kind == Format::kInt4) {
      const std::byte* base = block + static_cast<std::size_t>(group) * (Kind == Format::kInt8 ? kInt8GroupBytes : kInt4GroupBytes);
      line = base + kScaleBytes;
      for (int part = 0; part < 2; ++part)
        for (int v = 0; v < V; ++v)
          fill(part, v, T::load_f16(reinterpret_cast<const std::uint16_t*>(base) + v * T::kWidth), Kind == Format::kInt8 ? -128.0f : -8.0f);
    } else if constexpr (Kind == Format::kQ4K) {
      const std::byte* super = block + static_cast<std::size_t>(group / kSuperGroups) * kQ4KBytes;
      const std::byte* words = super + 2 * kScaleBytes;
      line = words + kQ4KScaleWords * kWordsBytes + index * kQ4KGroupBytes;
      for (int v = 0; v < V; ++v) {
        const std::byte* at = words + v * kStep;
        const I first = T::load_int(at), second = T::load_int(at + kWordsBytes), lower = T::load_int(at + 2 * kWordsBytes);
        I codes = index < 4 ? T::six_bits(first) : T::template with_bits<3>(T::low_nibbles(lower), first);
        I minima = index < 4 ? T::six_bits(second) : T::template with_bits<3>(T::high_nibbles(lower), second);
        for (int i = 0; i < index % 4; ++i) {
          codes = T::next_bytes(codes);
          minima = T::next_bytes(minima);
        }
        const auto* halves = reinterpret_cast<const std::uint16_t*>(super) + v * T::kWidth;
        for (int part = 0; part < 2; ++part) {
          scale[part][v] = T::mul(T::load_f16(halves), T::to_float(T::low_bytes(codes)));
          shift[part][v] = T::sub(T::zero(), T::mul(T::load_f16(halves + kBlockRows), T::to_float(T::low_bytes(minima))));
        }
      }
    } else {
      const std::byte* super = block + static_cast<std::size_t>(group / kSuperGroups) * kQ6KBytes;
      const std::byte* words = super + kScaleBytes;
      line = words + kQ6KScaleWords * kWordsBytes + index * kQ6KGroupBytes;
      upper = line + kNibbleBytes;
      for (int v = 0; v < V; ++v) {
        I codes = T::load_int(words + index / 2 * kWordsBytes + v * kStep);
        if (index % 2 == 1) codes = T::next_bytes(T::next_bytes(codes));
        for (int part = 0; part < 2; ++part, codes = T::next_bytes(codes)) {
          const F d = T::load_f16(reinterpret_cast<const std::uint16_t*>(super) + v * T::kWidth);
          fill(part, v, T::mul(d, T::to_float(T::signed_low_bytes(codes))), -32.0f);
        }
      }
    }
    const auto store_four = [&](int column, int v, I codes) {
      for (int i = 0; i < 4; ++i, codes = T::next_bytes(codes))
        store(column + i, v, T::fma(T::to_float(T::low_bytes(codes)), scale[column / 16][v], shift[column / 16][v]));
    };
    if constexpr (Kind == Format::kInt8) {
      for (int column = 0; column < kGroup; column += 4, line += kWordsBytes)
        for (int v = 0; v < V; ++v) store_four(column, v, T::load_int(line + v * kStep));
    } else {
      for (int column = 0; column < kGroup; column += 8, line += kWordsBytes) {
        for (int v = 0; v < V; ++v) {
          const I pairs = T::load_int(line + v * kStep);
          I low = T::low_nibbles(pairs), high = T::high_nibbles(pairs);
          if constexpr (Kind == Format::kQ6K) {
            const I bits = T::load_int(upper + column / 16 * kWordsBytes + v * kStep);
            low = column % 16 == 0 ? T::template with_bits<0>(low, bits) : T::template with_bits<2>(low, bits);
            high = column % 16 == 0 ? T::template with_bits<1>(high, bits) : T::template with_bits<3>(high, bits);
          }
          store_four(column, v, low);
          store_four(column + 4, v, high);
        }
      }
    }
  }
}

// Some vectors of a panel times N tokens.
template <class T, int V, int N>
inline void multiply_floats(const std::uint32_t* words, const float* weights, int groups, bool adds, float* out, int first_vector) {
  typename T::F sums[N][V] = {};
  if (adds) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[n][v] = T::load(out + n * kBlockRows + (first_vector + v) * T::kWidth);
  }
  weights += first_vector * T::kWidth;
  for (int group = 0; group < groups; ++group, words += (T::kFloatTokens - 1) * kGroup) {
    for (int column = 0; column < kGroup; ++column, ++words, weights += kBlockRows) {
      typename T::F factors[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) factors[v] = T::load(weights + v * T::kWidth);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const typename T::F value = T::broadcast_float(words + n * kGroup);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[n][v] = T::fma(factors[v], value, sums[n][v]);
      }
    }
  }
  store_tile<T, V, N>(sums, out, first_vector);
}

template <class T, int N = T::kFloatTokens>
inline void multiply_floats_of(int tokens, const std::uint32_t* words, const float* weights, int groups, bool adds, float* out) {
  if constexpr (N > 1) {
    if (tokens != N) return multiply_floats_of<T, N - 1>(tokens, words, weights, groups, adds, out);
  }
  if constexpr (N <= T::kWholeTokens) {
    multiply_floats<T, T::kVectors, N>(words, weights, groups, adds, out, 0);
  } else {
    multiply_floats<T, T::kVectors / 2, N>(words, weights, groups, adds, out, 0);
    multiply_floats<T, T::kVectors / 2, N>(words, weights, groups, adds, out, T::kVectors / 2);
  }
}

template <class T, Format Kind>
void matrix_floats(const MatrixArgs& args) {
  constexpr int kRows = T::kFloatTokens;
  const int tiles = (args.tokens + kRows - 1) / kRows, base = args.tokens / tiles, longer = args.tokens % tiles;
  auto* panel = reinterpret_cast<float*>(args.expanded->memory);
  const std::byte* ahead = args.ahead;
  for (int first = 0; first < args.groups; first += kFloatPanelGroups) {
    const int groups = args.groups - first < kFloatPanelGroups ? args.groups - first : kFloatPanelGroups;
    for (int group = 0; group < groups; ++group) expand_to_floats<T, Kind>(args.block, first + group, panel + group * kGroup * kBlockRows);
    const std::uint32_t* words = args.records + static_cast<std::size_t>(first) * kRows * kGroup;
    float* out = args.out;
    const int parts = (args.groups + kFloatPanelGroups - 1) / kFloatPanelGroups * tiles;
    for (int tile = 0; tile < tiles; ++tile, words += args.tile_words, out += kRows * kBlockRows) {
      for (int line = 0; line < (args.ahead_lines + parts - 1) / parts; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      multiply_floats_of<T>(base + (tile < longer ? 1 : 0), words, panel, groups, args.adds || first > 0, out);
    }
  }
}

inline void no_preparation() {}

template <class T>
MatrixKernels float_matrix_kernels(const int (&least_tokens)[kFormats]) {
  MatrixKernels kernels = {
      Format::kFloat32,
      T::kFloatTokens,
      std::size_t{384} << 10,
      {},
      {nullptr, nullptr, matrix_floats<T, Format::kBFloat16>, matrix_floats<T, Format::kBFloat16Dot>, matrix_floats<T, Format::kInt8>,
       matrix_floats<T, Format::kInt4>, matrix_floats<T, Format::kQ4K>, matrix_floats<T, Format::kQ6K>},
      no_preparation,
      no_preparation,
  };
  for (int format = 0; format < kFormats; ++format) kernels.least_tokens[format] = least_tokens[format];
  return kernels;
}

}  // namespace
}  // namespace moegraft
