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

template <class T, CacheType Type>
inline typename T::F load_as_float(const std::byte* p) {
  if constexpr (Type == CacheType::kFloat32) return T::load(reinterpret_cast<const float*>(p));
  else if constexpr (Type == CacheType::kFloat16) return T::load_f16(reinterpret_cast<const std::uint16_t*>(p));
  else if constexpr (Type == CacheType::kInt8) return T::to_float(T::load_signed_bytes(p));
  else return T::load_bf16(reinterpret_cast<const std::uint16_t*>(p));
}

template <CacheType Type>
constexpr int kElementBytes = Type == CacheType::kFloat32 ? 4
                              : Type == CacheType::kInt8  ? 1
                                                          : 2;

// The first `count` elements, and zeros behind them, where nothing may be read.
template <class T, CacheType Type>
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
  return load_first<T, CacheType::kFloat32>(reinterpret_cast<const std::byte*>(p), count);
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
template <class T, CacheType Type, int N>
inline void score_key(const ScoreArgs& args, const RowIndexes<N>& rows, const std::byte* key, const float (&last)[N][T::kWidth],
                      float* scores) {
  using F = typename T::F;
  constexpr int kBytes = kElementBytes<Type>;
  constexpr int kPadded = (N + 3) / 4 * 4;
  F sums[kPadded];
#pragma GCC unroll 8
  for (int r = 0; r < kPadded; ++r) sums[r] = T::zero();
  int d = 0;
  if constexpr (Type == CacheType::kBFloat16 && T::kHasBf16) {
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

template <class T, CacheType Type, int N = kAttentionRows>
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
    for (int r = 0; r < N; ++r)
      args.scores[rows.of[r] * args.score_stride + j] = Type == CacheType::kInt8 ? scores[r] * args.scales[j] : scores[r];
  }
}

// Adds the weighted values to V vectors of columns from d on; the sums of all rows stay in registers while the values are read. With
// Last they are the `columns` last columns, which are no whole vector.
template <class T, CacheType Type, int N, int V, bool Last = false>
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
      const float given = args.shares[rows.of[r] * args.share_stride + j];
      const F share = T::set(Type == CacheType::kInt8 ? given * args.scales[j] : given);
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
template <class T, CacheType Type>
__attribute__((noinline)) void mix_last(const MixArgs& args, int d) {
  MixArgs part = args;
  for (; part.rows > 0; part.rows -= 2, part.shares += 2 * args.share_stride, part.sums += 2 * args.sum_stride)
    mix_columns<T, Type, 2, 1, true>(part, RowIndexes<2>(part.rows), d, args.dim - d);
}

template <class T, CacheType Type, int N = kAttentionRows>
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
inline typename T::I broadcast_word(const std::byte* p) {
  std::uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return T::broadcast_int(&word);
}

template <class T>
inline typename T::I broadcast_pair(const std::uint16_t* p) {
  return broadcast_word<T>(reinterpret_cast<const std::byte*>(p));
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

// The bytes of codes plus 128, from `columns` columns on of which some may be missing.
template <class T>
inline typename T::I load_codes(const std::byte* p, int columns) {
  return T::flip_signs(columns < 4 * T::kWidth ? T::load_half(p) : T::load_int(p));
}

// As score_pairs, by products of bytes, for three rows or more.
template <class T, int N = kAttentionRows>
void score_bytes(const ScoreArgs& args) {
  if constexpr (N > 4) {
    if (args.rows <= fewer(N)) return score_bytes<T, fewer(N)>(args);
  }
  using F = typename T::F;
  using I = typename T::I;
  constexpr int W = T::kWidth;
  const RowIndexes<N> rows(args.rows);
  const CodedQueries& query = args.codes;
  const std::ptrdiff_t ahead_bytes = args.values ? args.value_bytes : args.key_bytes;
  for (int j = 0; j < args.count; j += W) {
    const int keys = args.count - j < W ? args.count - j : W;
    const std::byte* const key = args.keys + j * args.key_bytes;
    const std::byte* const ahead = (args.values ? args.values : args.ahead) + j * ahead_bytes;
    typename T::Sums sums[N], rests[N];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      sums[r] = T::to_sums(T::set_int(-128 * query.rows[2 * rows.of[r]].sum));
      rests[r] = T::to_sums(T::set_int(-128 * query.rows[2 * rows.of[r] + 1].sum));
    }
    for (int d = 0; d < args.dim; d += 4 * W) {
      I words[W];
      const std::byte *from = key + d, *soon = ahead + d;
#pragma GCC unroll 16
      for (int k = 0; k < W; ++k) {
        words[k] = load_codes<T>(from, args.dim - d);
        __builtin_prefetch(soon, 0, 2);
        if (k + 1 < keys) from += args.key_bytes;
        soon += ahead_bytes;
      }
      T::transpose(words);
#pragma GCC unroll 16
      for (int k = 0; k < W; ++k)
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
          const std::byte* codes = query.codes + static_cast<std::ptrdiff_t>(d / 4 + k) * kAttentionRows * 8 + r * 8;
          sums[r] = T::add_bytes(sums[r], words[k], broadcast_word<T>(codes));
          rests[r] = T::add_bytes(rests[r], words[k], broadcast_word<T>(codes + 4));
        }
    }
    const F scales = load_first<T>(args.scales + j, keys);
    for (int r = 0; r < args.rows; ++r) {
      float* const scores = args.scores + r * args.score_stride + j;
      const CodedRow* const row = query.rows + 2 * r;
      const F found =
          T::mul(scales, T::fma(T::to_float(sums[r]), T::set(row[0].scale), T::mul(T::to_float(rests[r]), T::set(row[1].scale))));
      if (keys == W) {
        T::store(scores, found);
        continue;
      }
      alignas(64) float some[W];
      T::store(some, found);
      std::memcpy(scores, some, sizeof(float) * static_cast<std::size_t>(keys));
    }
  }
}

// Scores of one key after the other, for one row or two, which are too few for a transposition.
template <class T>
void score_few_codes(const ScoreArgs& args) {
  using I = typename T::I;
  const CodedQueries& query = args.codes;
  const RowIndexes<2> rows(args.rows);
  alignas(64) float scores[4];
  const std::byte* const ahead = args.values ? args.values : args.ahead;
  const std::ptrdiff_t ahead_bytes = args.values ? args.value_bytes : args.key_bytes;
  for (int j = 0; j < args.count; ++j) {
    const std::byte* const key = args.keys + j * args.key_bytes;
    typename T::Sums sums[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) sums[r] = T::to_sums(T::zero_int());
    for (int d = 0; d < args.dim; d += 4 * T::kWidth) {
      __builtin_prefetch(ahead + j * ahead_bytes + d, 0, 2);
      const I columns = load_codes<T>(key + d, args.dim - d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const std::byte* codes = query.codes + (2 * rows.of[i / 2] + i % 2) * query.part_bytes + d;
        sums[i] = T::add_bytes(sums[i], columns, T::load_int(codes));
      }
    }
    T::store_four_sums(scores, T::to_float(sums[0]), T::to_float(sums[1]), T::to_float(sums[2]), T::to_float(sums[3]));
    for (int r = 0; r < args.rows; ++r) {
      const CodedRow *const row = query.rows + 2 * r, *const rest = row + 1;
      const float whole = (scores[2 * r] - static_cast<float>(128 * row->sum)) * row->scale;
      args.scores[r * args.score_stride + j] =
          (whole + (scores[2 * r + 1] - static_cast<float>(128 * rest->sum)) * rest->scale) * args.scales[j];
    }
  }
}

template <class T>
void score_codes(const ScoreArgs& args) {
  if (args.rows <= kFewCodedRows) score_few_codes<T>(args);
  else score_bytes<T>(args);
}

// Of mix_pairs: products of bfloat16, or of integers of 16 bits, to which codes are widened.
template <class T>
struct BFloat16Pairs {
  using Sum = typename T::F;
  static constexpr int kBytes = 2;  // of an element in the cache
  static typename T::I load(const std::byte* p) { return T::load_int(p); }
  static Sum dot(Sum sum, typename T::I a, typename T::I b) { return T::dot_bf16(sum, a, b); }
};

template <class T>
struct CodePairs {
  using Sum = typename T::Sums;
  static constexpr int kBytes = 1;
  static typename T::I load(const std::byte* p) { return T::load_bytes_as_shorts(p); }
  static Sum dot(Sum sum, typename T::I a, typename T::I b) { return T::add_shorts(sum, a, b); }
};

// Rounds a row's shares times the scales of their values to integers of 16 bits, with zeros behind them, and returns the scale of these. In
// line, it would be compiled for each row of each number of them.
template <class T>
__attribute__((noinline)) float narrow_to_shorts(const float* shares, const float* scales, int count, std::uint16_t* shorts) {
  using F = typename T::F;
  constexpr int W = T::kWidth;
  const int vectors = count / W + 1;
  F products[kPairKeys / W + 1];
  F most = T::zero();
  bool finite = true;
  for (int v = 0; v < vectors; ++v) {
    const int left = count - v * W;
    const auto part = [&](const float* values) {
      return left >= W ? T::load(values + v * W) : left > 0 ? load_first<T>(values + v * W, left) : T::zero();
    };
    products[v] = T::mul(part(shares), part(scales));
    most = T::max(most, products[v]);
    finite = finite && T::all_finite(products[v]);
  }
  const float bound = finite ? T::reduce_max(most) : __builtin_nanf("");
  const F inverse = T::set(bound > 1e-33f ? 32767.0f / bound : 0.0f);  // finite
  for (int v = 0; v < vectors; ++v) T::store_shorts(shorts + v * W, T::round_to_int(T::mul(products[v], inverse)));
  return bound * (1.0f / 32767.0f);
}

template <class T>
inline void narrow_to_bf16(const float* shares, int count, std::uint16_t* halves) {
  constexpr int W = T::kWidth;
  int j = 0;
  for (; j + W <= count; j += W) T::store_bf16(halves + j, T::load(shares + j));
  if (j < count) T::store_bf16(halves + j, load_first<T>(shares + j, count - j));
}

// Adds the values of two keys at a time.
template <class T, template <class> class Pairs, int N = kAttentionRows>
void mix_pairs(const MixArgs& args) {
  if constexpr (N > 1) {
    if (args.rows <= fewer(N)) return mix_pairs<T, Pairs, fewer(N)>(args);
  }
  using F = typename T::F;
  using I = typename T::I;
  constexpr int W = T::kWidth, kBytes = Pairs<T>::kBytes;
  const RowIndexes<N> rows(args.rows);
  alignas(64) std::uint16_t shares[N][kPairKeys + W];
  float share_scales[N];
  for (int r = 0; r < N; ++r) {
    const float* const row = args.shares + (r < args.rows ? r : args.rows - 1) * args.share_stride;
    if constexpr (kBytes == 1) share_scales[r] = narrow_to_shorts<T>(row, args.scales, args.count, shares[r]);
    else narrow_to_bf16<T>(row, args.count, shares[r]);
  }
  for (int d = 0; d < args.dim; d += 2 * W) {
    typename Pairs<T>::Sum first[N], second[N];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      if constexpr (kBytes == 1) {
        first[r] = second[r] = T::to_sums(T::zero_int());
      } else {
        const float* sums = args.sums + rows.of[r] * args.sum_stride + d;
        first[r] = T::load(sums);
        second[r] = T::load(sums + W);
        T::split(first[r], second[r]);
      }
    }
    const std::byte* value = args.values + kBytes * d;
    for (int j = 0; j < args.count; j += 2, value += 2 * args.value_bytes) {
      if (args.keys && kBytes * d % 64 == 0) {
        __builtin_prefetch(args.keys + j * args.key_bytes + kBytes * d, 0, 2);
        __builtin_prefetch(args.keys + (j + 1) * args.key_bytes + kBytes * d, 0, 2);
      }
      I low, high;
      T::pair_shorts(Pairs<T>::load(value), j + 1 < args.count ? Pairs<T>::load(value + args.value_bytes) : T::zero_int(), low, high);
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) {
        const I pair = broadcast_pair<T>(shares[r] + j);
        first[r] = Pairs<T>::dot(first[r], low, pair);
        second[r] = Pairs<T>::dot(second[r], high, pair);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      float* sums = args.sums + rows.of[r] * args.sum_stride + d;
      F low, high;
      if constexpr (kBytes == 1) {
        const F scale = T::set(share_scales[r]);
        low = T::mul(T::to_float(first[r]), scale);
        high = T::mul(T::to_float(second[r]), scale);
        T::join(low, high);
        if (r >= args.rows) continue;  // a row that is computed twice is added once
        low = T::add(T::load(sums), low);
        high = T::add(T::load(sums + W), high);
      } else {
        low = first[r];
        high = second[r];
        T::join(low, high);
      }
      T::store(sums, low);
      T::store(sums + W, high);
    }
  }
}

template <class T>
CodedRow encode_row(float* values, int count, std::int8_t* codes) {
  using F = typename T::F;
  using I = typename T::I;
  constexpr int W = T::kWidth;
  F most = T::zero();
  bool finite = true;
  const auto at = [=](int i) { return i + W <= count ? T::load(values + i) : load_first<T>(values + i, count - i); };
  for (int i = 0; i < count; i += W) {
    const F magnitude = T::abs(at(i));
    most = T::max(magnitude, most);
    finite = finite && T::all_finite(magnitude);
  }
  const float scale = finite ? T::reduce_max(most) / kMostCode : __builtin_nanf("");
  const F inverse = T::set(scale > 0.0f ? 1.0f / scale : 0.0f);
  I sum = T::zero_int();
  for (int i = 0; i < count; i += W) {
    const F value = at(i);
    const I rounded = finite ? T::round_to_int(T::mul(value, inverse)) : T::zero_int();
    const F rest = T::sub(value, T::mul(T::to_float(rounded), T::set(scale)));
    sum = T::add_int(sum, rounded);
    if (i + W <= count) {
      T::store_int8(codes + i, rounded);
      T::store(values + i, rest);
      continue;
    }
    std::int8_t some[W];
    float rests[W];
    T::store_int8(some, rounded);
    T::store(rests, rest);
    std::memcpy(codes + i, some, static_cast<std::size_t>(count - i));
    std::memcpy(values + i, rests, sizeof(float) * static_cast<std::size_t>(count - i));
  }
  return {scale, T::reduce_add(sum)};
}

// 2^x for x of at most about 0, exact at 0: a polynomial on [-0.5, 0.5], fitted so that the largest relative error, 1e-7, is smallest.
// Underflows to 0, keeps NaN.
template <class T>
MOEGRAFT_INLINE typename T::F power_of_two(typename T::F x) {
  x = T::max(T::set(-150.0f), x);
  const typename T::F n = T::round(x), r = T::sub(x, n);
  typename T::F p = T::set(0.00132647273f);
  p = T::fma(p, r, T::set(0.00967151299f));
  p = T::fma(p, r, T::set(0.0555073358f));
  p = T::fma(p, r, T::set(0.240222424f));
  p = T::fma(p, r, T::set(0.693147004f));
  p = T::fma(p, r, T::set(1.0f));
  return T::scale_by_power(p, n);
}

template <class T>
float softmax(SoftmaxArgs& args) {
  using F = typename T::F;
  constexpr int kVectors = kGroup / T::kWidth;
  float scale = args.scale;
  if (const float cap = args.softcap; cap > 0.0f) {
    for (int i = 0; i < args.count; i += T::kWidth) {
      const F scaled = T::mul(T::load(args.at(i)), T::set(scale));
      T::store(args.at(i), by_element<T>(scaled, [cap](float x) { return cap * __builtin_tanhf(x / cap); }));
    }
    scale = 1.0f;
  }
  F most[kVectors], sums[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) most[v] = T::set(-__builtin_inff()), sums[v] = T::zero();
  const float* raw = args.raw;
  for (int i = 0; i < args.count; i += kGroup, raw += args.group_stride)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) most[v] = T::max(T::load(raw + v * T::kWidth), most[v]);  // which a NaN leaves as it is; see below
#pragma GCC unroll 8
  for (int v = 1; v < kVectors; ++v) most[0] = T::max(most[v], most[0]);
  const float step = scale * T::reduce_max(most[0]), largest = step > args.largest ? step : args.largest;
  if (largest == -__builtin_inff()) return no_visible_key(args);
  constexpr float kLog2 = 1.44269504088896341f;  // of e
  const F factors = T::set(scale * kLog2), shift = T::set(-largest * kLog2);
  raw = args.raw;
  for (int i = 0; i < args.count; i += kGroup, raw += args.group_stride)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const F share = power_of_two<T>(T::fma(T::load(raw + v * T::kWidth), factors, shift));
      sums[v] = T::add(sums[v], share);
      T::store(args.shares + i + v * T::kWidth, share);
    }
#pragma GCC unroll 8
  for (int v = 1; v < kVectors; ++v) sums[0] = T::add(sums[0], sums[v]);
  const float factor = largest == args.largest ? 1.0f : __builtin_expf(args.largest - largest);
  args.sum = args.sum * factor + T::reduce_add_float(sums[0]);
  args.largest = largest;
  return factor;
}

template <class T>
void fold(float* sums, std::ptrdiff_t stride, const float* rows, const float* factors, int count) {
  for (int row = 0; row < count; ++row, sums += stride, rows += kBlockRows)
    for (int i = 0; i < kBlockRows; i += T::kWidth) T::store(sums + i, T::fma(T::set(factors[row]), T::load(sums + i), T::load(rows + i)));
}

// With products of pairs of bfloat16.
template <class T>
void add_pair_attention(AttentionKernels& kernels) {
  kernels.score[static_cast<int>(CacheType::kBFloat16)] = score<T, CacheType::kBFloat16>;
  if constexpr (T::kWidth == 16) {
    kernels.score_pairs = score_pairs<T>;
    kernels.mix_pairs = mix_pairs<T, BFloat16Pairs>;
  }
}

// With products of pairs of integers of 16 bits.
template <class T>
void add_code_attention(AttentionKernels& kernels) {
  kernels.score_codes = score_codes<T>;
  kernels.mix_codes = mix_pairs<T, CodePairs>;
}

template <class T>
constexpr AttentionKernels vector_attention() {
  return {
      {score<T, CacheType::kFloat32>, score<T, CacheType::kFloat16>, score<T, CacheType::kBFloat16>, score<T, CacheType::kInt8>},
      {mix<T, CacheType::kFloat32>, mix<T, CacheType::kFloat16>, mix<T, CacheType::kBFloat16>, mix<T, CacheType::kInt8>},
      softmax<T>,
      fold<T>,
      encode_row<T>,
  };
}

}  // namespace
}  // namespace moegraft
