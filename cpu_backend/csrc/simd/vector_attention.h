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
inline float element_as_float(const std::byte* p) {
  if constexpr (Type == ActivationType::kFloat32) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return value;
  } else {
    std::uint16_t half;
    std::memcpy(&half, p, sizeof half);
    return Type == ActivationType::kFloat16 ? float_from_f16(half) : float_from_bf16(half);
  }
}

template <class T, ActivationType Type, int N>
inline void score_key(const ScoreArgs& args, const std::byte* key, float* scores) {
  using F = typename T::F;
  constexpr int kBytes = Type == ActivationType::kFloat32 ? 4 : 2;
  constexpr int kPadded = (N + 3) / 4 * 4;
  F sums[kPadded];
#pragma GCC unroll 8
  for (int r = 0; r < kPadded; ++r) sums[r] = T::zero();
  int d = 0;
  if constexpr (Type == ActivationType::kBFloat16 && T::kHasBf16) {
    for (; d + 2 * T::kWidth <= args.dim; d += 2 * T::kWidth) {
      const typename T::I pairs = T::load_int(key + kBytes * d);
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) sums[r] = T::dot_bf16(sums[r], pairs, T::load_int(args.halves + r * args.query_stride + d));
    }
  }
  for (; d + T::kWidth <= args.dim; d += T::kWidth) {
    const F columns = load_as_float<T, Type>(key + kBytes * d);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) sums[r] = T::fma(columns, T::load(args.query + r * args.query_stride + d), sums[r]);
  }
#pragma GCC unroll 2
  for (int r = 0; r < kPadded; r += 4) T::store_four_sums(scores + r, sums[r], sums[r + 1], sums[r + 2], sums[r + 3]);
  for (; d < args.dim; ++d) {
    const float column = element_as_float<Type>(key + kBytes * d);
    for (int r = 0; r < N; ++r) scores[r] += column * args.query[r * args.query_stride + d];
  }
}

template <class T, ActivationType Type, int N = kAttentionRows>
void score(const ScoreArgs& args) {
  if constexpr (N > 1) {
    if (args.rows < N) return score<T, Type, N - 1>(args);
  }
  alignas(64) float scores[kAttentionRows];
  const std::byte *key = args.keys, *ahead = args.ahead;
  for (int j = 0; j < args.count; ++j, key += args.key_bytes, ahead += args.key_bytes) {
    // 16 keys ahead covers the latency of memory. The rows of one head may be too far apart for the hardware prefetcher.
    const int line = 64 / (Type == ActivationType::kFloat32 ? 4 : 2);
    for (int d = 0; d < args.dim; d += line) __builtin_prefetch(ahead + d * (64 / line), 0, 3);
    score_key<T, Type, N>(args, key, scores);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) args.scores[r * args.score_stride + j] = scores[r];
  }
}

// Adds the weighted values to V vectors of columns from d on; the sums of all rows stay in registers while the values are read.
template <class T, ActivationType Type, int N, int V>
inline void mix_columns(const MixArgs& args, int d) {
  using F = typename T::F;
  constexpr int kBytes = Type == ActivationType::kFloat32 ? 4 : 2;
  F sums[N][V];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[r][v] = T::load(args.sums + r * args.sum_stride + d + v * T::kWidth);
  const std::byte* value = args.values + kBytes * d;
  for (int j = 0; j < args.count; ++j, value += args.value_bytes) {
    F columns[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) columns[v] = load_as_float<T, Type>(value + kBytes * v * T::kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const F share = T::set(args.shares[r * args.share_stride + j]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] = T::fma(columns[v], share, sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) T::store(args.sums + r * args.sum_stride + d + v * T::kWidth, sums[r][v]);
}

template <class T, ActivationType Type, int N = kAttentionRows>
void mix(const MixArgs& args) {
  if constexpr (N > 1) {
    if (args.rows < N) return mix<T, Type, N - 1>(args);
  }
  constexpr int V = T::kWidth == 16 ? 2 : 1;  // 16 sums in 32 registers, 8 in 16
  int d = 0;
  for (; d + V * T::kWidth <= args.dim; d += V * T::kWidth) mix_columns<T, Type, N, V>(args, d);
  for (; d + T::kWidth <= args.dim; d += T::kWidth) mix_columns<T, Type, N, 1>(args, d);
  constexpr int kBytes = Type == ActivationType::kFloat32 ? 4 : 2;
  for (; d < args.dim; ++d)
    for (int j = 0; j < args.count; ++j) {
      const float column = element_as_float<Type>(args.values + j * args.value_bytes + kBytes * d);
      for (int r = 0; r < N; ++r) args.sums[r * args.sum_stride + d] += args.shares[r * args.share_stride + j] * column;
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
      score = by_element<T>(score, [cap](float x) { return cap * ::tanhf(x / cap); });
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
  const float factor = largest == args.largest ? 1.0f : ::expf(args.largest - largest);
  args.sum = args.sum * factor + T::reduce_add_float(sums);
  args.largest = largest;
  return factor;
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
