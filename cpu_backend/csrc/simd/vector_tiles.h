// The tiles of a block, 32 rows times the records of up to max_tokens tokens, as templates over the traits of vector_kernels.h, whose
// rules apply here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/kernels.h"

namespace moegraft {
namespace {

// Prefetches a burst of lines per group: hardware prefetchers stop at 4 KiB and start late, and a tile of several tokens computes longer
// than it reads.
inline void prefetch_ahead(const TileArgs& args, int group) {
  const std::byte* line = args.ahead + static_cast<std::size_t>(group) * args.ahead_stride;
  for (int i = 0; i < args.ahead_lines; ++i, line += 64) __builtin_prefetch(line, 0, 2);
}

template <class T, int V, int N>
inline void store_tile(const typename T::F (&sums)[N][V], float* out, int first_vector) {
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) T::store(out + n * kBlockRows + (first_vector + v) * T::kWidth, sums[n][v]);
}

// float32 and float16 weights, one column per step.
template <class T, Format Kind, int V, int N>
inline void tile_columns(const TileArgs& args, int first_vector) {
  typename T::F sums[N][V] = {};
  constexpr int kBytes = Kind == Format::kFloat32 ? 4 : 2;
  const std::byte* line = args.block + first_vector * T::kWidth * kBytes;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += (N - 1) * kGroup) {
    prefetch_ahead(args, group);
    for (int col = 0; col < kGroup; ++col, line += kBlockRows * kBytes, ++words) {
      typename T::F weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const std::byte* source = line + v * T::kWidth * kBytes;
        if constexpr (Kind == Format::kFloat32) weights[v] = T::load(reinterpret_cast<const float*>(source));
        else weights[v] = T::load_f16(reinterpret_cast<const std::uint16_t*>(source));
      }
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const typename T::F value = T::broadcast_float(words + n * kGroup);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[n][v] = T::fma(weights[v], value, sums[n][v]);
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

// bfloat16 weights, a pair of columns per step: bfloat16 products where the activations are bfloat16 and the CPU supports them, else float.
template <class T, Format Kind, int V, int N>
inline void tile_pairs(const TileArgs& args, int first_vector) {
  typename T::F sums[N][V] = {};
  constexpr int kWords = words_per_group(Kind);
  constexpr int kPairWords = kWords / 16;
  const std::byte* line = args.block + first_vector * T::kWidth * 4;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += (N - 1) * kWords) {
    prefetch_ahead(args, group);
    for (int pair = 0; pair < kGroup / 2; ++pair, line += 128, words += kPairWords) {
      typename T::I weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weights[v] = T::load_int(line + v * T::kWidth * 4);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        if constexpr (Kind == Format::kBFloat16Dot && T::kHasBf16) {
          const typename T::I values = T::broadcast_int(words + n * kWords);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[n][v] = T::dot_bf16(sums[n][v], weights[v], values);
        } else {
          typename T::F low, high;
          if constexpr (Kind == Format::kBFloat16Dot) {
            const typename T::I values = T::broadcast_int(words + n * kWords);
            low = T::low_bf16(values);
            high = T::high_bf16(values);
          } else {
            low = T::broadcast_float(words + n * kWords);
            high = T::broadcast_float(words + n * kWords + 1);
          }
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[n][v] = T::fma(T::high_bf16(weights[v]), high, T::fma(T::low_bf16(weights[v]), low, sums[n][v]));
        }
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

// int8 and int4 weights: unsigned codes times the activations' signed codes are summed in integers over a group of 32 columns, then scaled.
template <class T, Format Kind, int V, int N>
inline void tile_groups(const TileArgs& args, int first_vector) {
  using F = typename T::F;
  using I = typename T::I;
  F sums[N][V] = {};
  constexpr bool kWide = Kind == Format::kInt8;
  const std::byte* base = args.block;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += 10 * N) {
    prefetch_ahead(args, group);
    I dots[N][V];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[n][v] = T::broadcast_int(words + n * 10 + 1);
    F scales[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) scales[v] = T::load_f16(reinterpret_cast<const std::uint16_t*>(base) + (first_vector + v) * T::kWidth);
    const std::byte* line = base + kScaleBytes + first_vector * T::kWidth * 4;
#pragma GCC unroll 8
    for (int step = 0; step < (kWide ? 8 : 4); ++step, line += 128) {
      I weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weights[v] = T::load_int(line + v * T::kWidth * 4);
      if constexpr (kWide) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const I codes = T::broadcast_int(words + n * 10 + 2 + step);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) dots[n][v] = T::dot_int8(dots[n][v], weights[v], codes);
        }
      } else {
        I high[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          high[v] = T::high_nibbles(weights[v]);
          weights[v] = T::low_nibbles(weights[v]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const I first = T::broadcast_int(words + n * 10 + 2 + 2 * step);
          const I second = T::broadcast_int(words + n * 10 + 3 + 2 * step);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) dots[n][v] = T::dot_int4(T::dot_int4(dots[n][v], weights[v], first), high[v], second);
        }
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const F scale = T::broadcast_float(words + n * 10);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[n][v] = T::fma(T::to_float(dots[n][v]), T::mul(scales[v], scale), sums[n][v]);
    }
    base += kWide ? kInt8GroupBytes : kInt4GroupBytes;
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

// The tiles of Q4_K and Q6_K sum unsigned codes times the activations' signed codes in integers over the columns that share a scale.
// block_layout.h has the order of the weights.

template <class T, int V>
inline void load_halves(typename T::F (&target)[V], const std::byte* halves, int first_vector) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) target[v] = T::load_f16(reinterpret_cast<const std::uint16_t*>(halves) + (first_vector + v) * T::kWidth);
}

// Multiplies lines of nibbles, each for 8 columns, with `codes`, whose tokens are `stride` words apart. With `Upper`, bits 4 and 5 of each
// weight code come from `upper`.
template <class T, int V, int N, int Lines, bool Upper>
inline void dot_nibbles(typename T::I (&dots)[N][V], const std::byte* line, const std::uint32_t* codes, int stride,
                        const typename T::I (&upper)[V]) {
  using I = typename T::I;
#pragma GCC unroll 4
  for (int step = 0; step < Lines; ++step, line += kWordsBytes) {
    I low[V], high[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const I pairs = T::load_int(line + v * T::kWidth * 4);
      low[v] = T::low_nibbles(pairs);
      high[v] = T::high_nibbles(pairs);
      if constexpr (Upper) {
        low[v] = step == 0 ? T::template with_bits<0>(low[v], upper[v]) : T::template with_bits<2>(low[v], upper[v]);
        high[v] = step == 0 ? T::template with_bits<1>(high[v], upper[v]) : T::template with_bits<3>(high[v], upper[v]);
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const I first = T::broadcast_int(codes + n * stride + 2 * step);
      const I second = T::broadcast_int(codes + n * stride + 2 * step + 1);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[n][v] = T::dot_int4(T::dot_int4(dots[n][v], low[v], first), high[v], second);
    }
  }
}

template <class T, int V, int N>
inline void tile_q4_k(const TileArgs& args, int first_vector) {
  using F = typename T::F;
  using I = typename T::I;
  constexpr int kWords = words_per_group(Format::kQ4K);
  F sums[N][V] = {};
  const int start = first_vector * T::kWidth * 4;  // offset of this tile's rows in a line
  const std::byte* block = args.block;
  const std::uint32_t* words = args.records;
  for (int first = 0; first < args.groups; first += kSuperGroups, block += kQ4KBytes) {
    F scale_of_scales[V], scale_of_minima[V];
    load_halves<T, V>(scale_of_scales, block, first_vector);
    load_halves<T, V>(scale_of_minima, block + kScaleBytes, first_vector);
    const std::byte* packed = block + 2 * kScaleBytes + start;
    const std::byte* line = packed + kQ4KScaleWords * kWordsBytes;
    for (int half = 0; half < 2; ++half) {
      I scales[V], minima[V];  // of four groups, in the bytes of a word
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const std::byte* at = packed + v * T::kWidth * 4;
        const I first_four = T::load_int(at), second_four = T::load_int(at + kWordsBytes), lower = T::load_int(at + 2 * kWordsBytes);
        scales[v] = half == 0 ? T::six_bits(first_four) : T::template with_bits<3>(T::low_nibbles(lower), first_four);
        minima[v] = half == 0 ? T::six_bits(second_four) : T::template with_bits<3>(T::high_nibbles(lower), second_four);
      }
      for (int j = 0; j < kSuperGroups / 2; ++j, line += kQ4KGroupBytes, words += kWords * N) {
        prefetch_ahead(args, first + half * kSuperGroups / 2 + j);
        I dots[N][V] = {};
        dot_nibbles<T, V, N, 4, false>(dots, line, words + first_code_word(Format::kQ4K), kWords, scales);
        F scale[V], minimum[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          scale[v] = T::mul(scale_of_scales[v], T::to_float(T::low_bytes(scales[v])));
          minimum[v] = T::sub(T::zero(), T::mul(scale_of_minima[v], T::to_float(T::low_bytes(minima[v]))));
          scales[v] = T::next_bytes(scales[v]);
          minima[v] = T::next_bytes(minima[v]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const F share = T::broadcast_float(words + n * kWords), total = T::broadcast_float(words + n * kWords + 1);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v)
            sums[n][v] = T::fma(T::to_float(dots[n][v]), T::mul(scale[v], share), T::fma(minimum[v], total, sums[n][v]));
        }
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

template <class T, int V, int N>
inline void tile_q6_k(const TileArgs& args, int first_vector) {
  using F = typename T::F;
  using I = typename T::I;
  constexpr int kWords = words_per_group(Format::kQ6K);
  F sums[N][V] = {};
  const int start = first_vector * T::kWidth * 4;
  const std::byte* block = args.block;
  const std::uint32_t* words = args.records;
  for (int first = 0; first < args.groups; first += kSuperGroups, block += kQ6KBytes) {
    F scale_of_scales[V];
    load_halves<T, V>(scale_of_scales, block, first_vector);
    const std::byte* packed = block + kScaleBytes + start;
    const std::byte* line = packed + kQ6KScaleWords * kWordsBytes;
    for (int group = 0; group < kSuperGroups; ++group, line += kQ6KGroupBytes, words += kWords * N) {
      prefetch_ahead(args, first + group);
      I scales[V];  // of two groups, in the bytes of a word
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        scales[v] = T::load_int(packed + group / 2 * kWordsBytes + v * T::kWidth * 4);
        if (group % 2 == 1) scales[v] = T::next_bytes(T::next_bytes(scales[v]));
      }
      for (int part = 0; part < 2; ++part) {  // 16 columns with a scale of their own
        I upper[V], dots[N][V];
        F scale[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          upper[v] = T::load_int(line + kNibbleBytes + part * kWordsBytes + v * T::kWidth * 4);
          scale[v] = T::mul(scale_of_scales[v], T::to_float(T::signed_low_bytes(scales[v])));
          scales[v] = T::next_bytes(scales[v]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) dots[n][v] = T::broadcast_int(words + n * kWords + 1 + part);
        dot_nibbles<T, V, N, 2, true>(dots, line + part * 2 * kWordsBytes, words + first_code_word(Format::kQ6K) + part * 4, kWords, upper);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const F share = T::broadcast_float(words + n * kWords);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[n][v] = T::fma(T::to_float(dots[n][v]), T::mul(scale[v], share), sums[n][v]);
        }
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

}  // namespace

}  // namespace moegraft
