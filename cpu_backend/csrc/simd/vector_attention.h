// The attention kernels of every vector instruction set, as templates over the traits of vector_kernels.h, whose rules apply here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/float_conversion.h"
#include "core/types.h"
#include "simd/kernels.h"
#include "simd/vector_activations.h"

namespace moegraft {
namespace {

template <class T, ActivationType Type>
inline typename T::F load_as_float(const std::byte* p) {
  if constexpr (Type == ActivationType::kFloat32) return T::load(reinterpret_cast<const float*>(p));
  else if constexpr (Type == ActivationType::kFloat16) return T::load_f16(reinterpret_cast<const std::uint16_t*>(p));
  else return T::load_bf16(reinterpret_cast<const std::uint16_t*>(p));
}

template <ActivationType Type>
constexpr int kElementBytes = Type == ActivationType::kFloat32 ? 4 : 2;

// The first `count` elements, and zeros behind them, where nothing may be read.
template <class T, ActivationType Type>
inline typename T::F load_first(const std::byte* p, int count) {
  alignas(64) std::byte some[64];
  if constexpr (T::kWidth == 16) {
    T::copy_first(some, p, kElementBytes<Type> * count);
  } else {
    std::memset(some, 0, sizeof some);
    std::memcpy(some, p, static_cast<std::size_t>(kElementBytes<Type> * count));
  }
  return load_as_float<T, Type>(some);
}

template <class T>
inline typename T::F load_first(const float* p, int count) {
  return load_first<T, ActivationType::kFloat32>(reinterpret_cast<const std::byte*>(p), count);
}

// The rows of a function for N, of which the last may be missing.
template <int N>
struct RowIndexes {
  int of[N];
  explicit RowIndexes(int rows) {
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) of[r] = r < rows ? r : rows - 1;
  }
};

// `last` has the queries' columns that are no whole vector, with zeros behind them.
template <class T, ActivationType Type, int N>
inline void score_key(const ScoreArgs& args, const RowIndexes<N>& rows, const std::byte* key, const float (&last)[N][T::kWidth],
                      float* scores) {
  using F = typename T::F;
  constexpr int kBytes = kElementBytes<Type>;
  constexpr int kPadded = (N + 3) / 4 * 4;
  F sums[kPadded];
#pragma GCC unroll 8
  for (int r = 0; r < kPadded; ++r) sums[r] = T::zero();
  int d = 0;
  if constexpr (Type == ActivationType::kBFloat16 && T::kHasBf16) {
    for (; d + 2 * T::kWidth <= args.dim; d += 2 * T::kWidth) {
      const typename T::I pairs = T::load_int(key + kBytes * d);
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) sums[r] = T::dot_bf16(sums[r], pairs, T::load_int(args.halves + rows.of[r] * args.query_stride + d));
    }
  }
  for (; d + T::kWidth <= args.dim; d += T::kWidth) {
    const F columns = load_as_float<T, Type>(key + kBytes * d);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) sums[r] = T::fma(columns, T::load(args.query + rows.of[r] * args.query_stride + d), sums[r]);
  }
  if (d < args.dim) {
    const F columns = load_first<T, Type>(key + kBytes * d, args.dim - d);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) sums[r] = T::fma(columns, T::load(last[r]), sums[r]);
  }
#pragma GCC unroll 2
  for (int r = 0; r < kPadded; r += 4) T::store_four_sums(scores + r, sums[r], sums[r + 1], sums[r + 2], sums[r + 3]);
}

template <class T, ActivationType Type, int N = kAttentionRows>
void score(const ScoreArgs& args) {
  if constexpr (N > 1) {
    if (args.rows <= fewer(N)) return score<T, Type, fewer(N)>(args);
  }
  const RowIndexes<N> rows(args.rows);
  alignas(64) float scores[kAttentionRows];
  alignas(64) float last[N][T::kWidth] = {};
  if (const int columns = args.dim % T::kWidth)
    for (int r = 0; r < N; ++r) T::store(last[r], load_first<T>(args.query + rows.of[r] * args.query_stride + args.dim - columns, columns));
  const std::byte *key = args.keys, *ahead = args.ahead;
  for (int j = 0; j < args.count; ++j, key += args.key_bytes, ahead += args.key_bytes) {
    // 16 keys ahead covers the latency of memory. The rows of one head may be too far apart for the hardware prefetcher.
    const int line = 64 / kElementBytes<Type>;
    for (int d = 0; d < args.dim; d += line) __builtin_prefetch(ahead + d * (64 / line), 0, 3);
    score_key<T, Type, N>(args, rows, key, last, scores);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) args.scores[rows.of[r] * args.score_stride + j] = scores[r];
  }
}

// Adds the weighted values to V vectors of columns from d on; the sums of all rows stay in registers while the values are read. With
// Last they are the `columns` last columns, which are no whole vector.
template <class T, ActivationType Type, int N, int V, bool Last = false>
inline void mix_columns(const MixArgs& args, const RowIndexes<N>& rows, int d, int columns = T::kWidth) {
  using F = typename T::F;
  F sums[N][V];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const float* p = args.sums + rows.of[r] * args.sum_stride + d + v * T::kWidth;
      sums[r][v] = Last ? load_first<T>(p, columns) : T::load(p);
    }
  const std::byte* value = args.values + kElementBytes<Type> * d;
  for (int j = 0; j < args.count; ++j, value += args.value_bytes) {
    F factors[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const std::byte* p = value + kElementBytes<Type> * v * T::kWidth;
      factors[v] = Last ? load_first<T, Type>(p, columns) : load_as_float<T, Type>(p);
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const F share = T::set(args.shares[rows.of[r] * args.share_stride + j]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] = T::fma(factors[v], share, sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float* p = args.sums + rows.of[r] * args.sum_stride + d + v * T::kWidth;
      if (!Last) {
        T::store(p, sums[r][v]);
        continue;
      }
      alignas(64) float some[T::kWidth];
      T::store(some, sums[r][v]);
      std::memcpy(p, some, sizeof(float) * static_cast<std::size_t>(columns));
    }
}

// Two rows at a time: few heads have such columns, and the code of a form for each number of rows would be much.
template <class T, ActivationType Type>
__attribute__((noinline)) void mix_last(const MixArgs& args, int d) {
  MixArgs part = args;
  for (; part.rows > 0; part.rows -= 2, part.shares += 2 * args.share_stride, part.sums += 2 * args.sum_stride)
    mix_columns<T, Type, 2, 1, true>(part, RowIndexes<2>(part.rows), d, args.dim - d);
}

template <class T, ActivationType Type, int N = kAttentionRows>
void mix(const MixArgs& args) {
  if constexpr (N > 1) {
    if (args.rows <= fewer(N)) return mix<T, Type, fewer(N)>(args);
  }
  constexpr int V = T::kWidth == 16 ? 2 : 1;  // 16 sums in 32 registers, 8 in 16
  const RowIndexes<N> rows(args.rows);
  int d = 0;
  for (; d + V * T::kWidth <= args.dim; d += V * T::kWidth) mix_columns<T, Type, N, V>(args, rows, d);
  if (V > 1 && d + T::kWidth <= args.dim) {
    mix_columns<T, Type, N, 1>(args, rows, d);
    d += T::kWidth;
  }
  if (d < args.dim) mix_last<T, Type>(args, d);
}

template <class T>
inline typename T::I broadcast_pair(const std::uint16_t* p) {
  std::uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return T::broadcast_int(&word);
}

// Scores of 16 keys at a time, whose words are transposed in registers: each vector then has two columns of all keys, and a row's scores
// are the lanes of one sum.
template <class T, int N = kAttentionRows>
void score_pairs(const ScoreArgs& args) {
  if constexpr (N > 1) {
    if (args.rows <= fewer(N)) return score_pairs<T, fewer(N)>(args);
  }
  using F = typename T::F;
  using I = typename T::I;
  constexpr int W = T::kWidth;
  const RowIndexes<N> rows(args.rows);
  for (int j = 0; j < args.count; j += W) {
    const int keys = args.count - j < W ? args.count - j : W;
    const std::byte* const key = args.keys + j * args.key_bytes;
    const std::ptrdiff_t ahead_bytes = args.values ? args.value_bytes : args.key_bytes;
    const std::byte* const ahead = (args.values ? args.values : args.ahead) + j * ahead_bytes;
    F sums[N];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) sums[r] = T::zero();
    for (int d = 0; d < args.dim; d += 2 * W) {
      I words[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; ++k) {
        words[k] = T::load_int(key + (k < keys ? k : 0) * args.key_bytes + 2 * d);
        __builtin_prefetch(ahead + k * ahead_bytes + 2 * d, 0, 2);
      }
      T::transpose(words);
      const std::uint16_t* query = args.halves + d;
#pragma GCC unroll 16
      for (int k = 0; k < W; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r)
          sums[r] = T::dot_bf16(sums[r], words[k], broadcast_pair<T>(query + rows.of[r] * args.query_stride + 2 * k));
    }
    for (int r = 0; r < N; ++r) {
      float* const scores = args.scores + rows.of[r] * args.score_stride + j;
      if (keys == W) {
        T::store(scores, sums[r]);
        continue;
      }
      alignas(64) float some[W];
      T::store(some, sums[r]);
      std::memcpy(scores, some, sizeof(float) * static_cast<std::size_t>(keys));
    }
  }
}

// Adds the values of two keys at a time.
template <class T, int N = kAttentionRows>
void mix_pairs(const MixArgs& args) {
  if constexpr (N > 1) {
    if (args.rows <= fewer(N)) return mix_pairs<T, fewer(N)>(args);
  }
  using F = typename T::F;
  using I = typename T::I;
  constexpr int W = T::kWidth;
  const RowIndexes<N> rows(args.rows);
  alignas(64) std::uint16_t shares[N][kPairKeys];
  for (int r = 0; r < N; ++r) {
    const float* row = args.shares + rows.of[r] * args.share_stride;
    int j = 0;
    for (; j + W <= args.count; j += W) T::store_bf16(shares[r] + j, T::load(row + j));
    if (j == args.count) continue;
    alignas(64) float some[W] = {};
    std::memcpy(some, row + j, sizeof(float) * static_cast<std::size_t>(args.count - j));
    T::store_bf16(shares[r] + j, T::load(some));
  }
  for (int d = 0; d < args.dim; d += 2 * W) {
    F first[N], second[N];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const float* sums = args.sums + rows.of[r] * args.sum_stride + d;
      first[r] = T::load(sums);
      second[r] = T::load(sums + W);
      T::split(first[r], second[r]);
    }
    const std::byte* value = args.values + 2 * d;
    for (int j = 0; j < args.count; j += 2, value += 2 * args.value_bytes) {
      if (args.keys) {
        __builtin_prefetch(args.keys + j * args.key_bytes + 2 * d, 0, 2);
        __builtin_prefetch(args.keys + (j + 1) * args.key_bytes + 2 * d, 0, 2);
      }
      I low, high;
      T::pair_shorts(T::load_int(value), j + 1 < args.count ? T::load_int(value + args.value_bytes) : T::zero_int(), low, high);
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) {
        const I pair = broadcast_pair<T>(shares[r] + j);
        first[r] = T::dot_bf16(first[r], low, pair);
        second[r] = T::dot_bf16(second[r], high, pair);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      float* sums = args.sums + rows.of[r] * args.sum_stride + d;
      T::join(first[r], second[r]);
      T::store(sums, first[r]);
      T::store(sums + W, second[r]);
    }
  }
}

template <class T>
float softmax(SoftmaxArgs& args) {
  using F = typename T::F;
  const F scale = T::set(args.scale);
  F most = T::set(args.largest);
  for (int i = 0; i < args.count; i += T::kWidth) {
    F score = T::mul(T::load(args.scores + i), scale);
    if (args.softcap > 0.0f) {
      const float cap = args.softcap;
      score = by_element<T>(score, [cap](float x) { return cap * __builtin_tanhf(x / cap); });
    }
    T::store(args.scores + i, score);
    most = T::max(score, most);  // a NaN score leaves `most` unchanged; NaN is handled below
  }
  const float largest = T::reduce_max(most);
  if (largest == -__builtin_inff()) return no_visible_key(args);
  const F shift = T::set(largest);
  F sums = T::zero();
  for (int i = 0; i < args.count; i += T::kWidth) {
    const F share = exp<T>(T::sub(T::load(args.scores + i), shift));
    sums = T::add(sums, share);
    T::store(args.scores + i, share);
  }
  const float factor = largest == args.largest ? 1.0f : __builtin_expf(args.largest - largest);
  args.sum = args.sum * factor + T::reduce_add_float(sums);
  args.largest = largest;
  return factor;
}

// With products of pairs of bfloat16.
template <class T>
void add_pair_attention(AttentionKernels& kernels) {
  kernels.score[static_cast<int>(ActivationType::kBFloat16)] = score<T, ActivationType::kBFloat16>;
  if constexpr (T::kWidth == 16) {
    kernels.score_pairs = score_pairs<T>;
    kernels.mix_pairs = mix_pairs<T>;
  }
}

template <class T>
constexpr AttentionKernels vector_attention() {
  return {
      {score<T, ActivationType::kFloat32>, score<T, ActivationType::kFloat16>, score<T, ActivationType::kBFloat16>},
      {mix<T, ActivationType::kFloat32>, mix<T, ActivationType::kFloat16>, mix<T, ActivationType::kBFloat16>},
      softmax<T>,
  };
}

}  // namespace
}  // namespace moegraft
