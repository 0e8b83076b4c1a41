// The tiles of a block, 32 rows times the records of up to max_tokens tokens, as templates over the traits of vector_kernels.h, whose
// rules apply here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "formats/coded_formats.h"
#include "simd/kernels.h"

namespace moegraft {
namespace {

// Prefetches a burst of lines per group: hardware prefetchers stop at 4 KiB and start late, and a tile of several tokens computes longer
// than it reads.
inline void prefetch_ahead(const TileArgs& args, int group) {
  const std::byte* line = args.ahead + static_cast<std::size_t>(group) * args.ahead_stride;
  for (int i = 0; i < args.ahead_lines; ++i, line += 64) __builtin_prefetch(line, 0, 2);
}

// Vectors of rows that are computed together: a loop over parts of a block compiles its code once.
template <class T, int N>
constexpr int vectors_at_once() {
  return N <= T::kWholeTokens ? T::kVectors : T::kVectors / 2;
}

template <class T, int V, int N>
inline void store_tile(const typename T::F (&sums)[N][V], float* out, int first_vector, int tokens = N) {
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) T::store(out + (n < N - 1 ? n : tokens - 1) * kBlockRows + (first_vector + v) * T::kWidth, sums[n][v]);
}

// The words from the first of N tokens' records to another one's, of which the last may be missing.
template <int N>
constexpr int token_words(int n, int tokens, int words) {
  return (n < N - 1 ? n : tokens - 1) * words;
}

// float32 and float16 weights, one column per step.
template <class T, Format Kind, int V, int N>
inline void tile_columns(const TileArgs& args, int first_vector) {
  typename T::F sums[N][V] = {};
  constexpr int kBytes = Kind == Format::kFloat32 ? 4 : 2;
  const std::byte* line = args.block + first_vector * T::kWidth * kBytes;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += (args.tokens - 1) * kGroup) {
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
        const typename T::F value = T::broadcast_float(words + token_words<N>(n, args.tokens, kGroup));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[n][v] = T::fma(weights[v], value, sums[n][v]);
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector, args.tokens);
}

// bfloat16 weights, a pair of columns per step: bfloat16 products where the activations are bfloat16 and the CPU supports them, else float.
template <class T, Format Kind, int V, int N>
inline void tile_pairs(const TileArgs& args, int first_vector) {
  typename T::F sums[N][V] = {};
  constexpr int kWords = words_per_group(Kind);
  constexpr int kPairWords = kWords / 16;
  const std::byte* line = args.block + first_vector * T::kWidth * 4;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += (args.tokens - 1) * kWords) {
    prefetch_ahead(args, group);
    for (int pair = 0; pair < kGroup / 2; ++pair, line += 128, words += kPairWords) {
      typename T::I weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weights[v] = T::load_int(line + v * T::kWidth * 4);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const std::uint32_t* const record = words + token_words<N>(n, args.tokens, kWords);
        if constexpr (Kind == Format::kBFloat16Dot && T::kHasBf16) {
          const typename T::I values = T::broadcast_int(record);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[n][v] = T::dot_bf16(sums[n][v], weights[v], values);
        } else {
          typename T::F low, high;
          if constexpr (Kind == Format::kBFloat16Dot) {
            const typename T::I values = T::broadcast_int(record);
            low = T::low_bf16(values);
            high = T::high_bf16(values);
          } else {
            low = T::broadcast_float(record);
            high = T::broadcast_float(record + 1);
          }
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[n][v] = T::fma(T::high_bf16(weights[v]), high, T::fma(T::low_bf16(weights[v]), low, sums[n][v]));
        }
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector, args.tokens);
}

// Sums of a token and vector: a single one would wait for its additions, where a block has only two vectors.
template <class T>
constexpr int kFloat8Sums = T::kVectors == 2 ? 2 : 1;
constexpr float kFloat8Enlarged = 0x1p40f;

// The four columns of a line of FP8, as floats that are 2^120 times as small.
template <class T>
MOEGRAFT_INLINE void small_columns(typename T::I codes, typename T::F (&columns)[4]) {
  constexpr int kMask = static_cast<int>(0x87f087f0u);
  const typename T::I even = T::and_words(T::shift_shorts(T::template shifted<8>(codes)), kMask);
  const typename T::I odd = T::and_words(T::shift_shorts(codes), kMask);
  columns[0] = T::low_bf16(even);
  columns[1] = T::low_bf16(odd);
  columns[2] = T::high_bf16(even);
  columns[3] = T::high_bf16(odd);
}

// How the blocks of FP8's formats differ.
struct Float8Blocks {
  int groups, bytes, lines_offset;
  bool shares_scales;  // each byte of the header is a quarter of four rows' scale; otherwise a row has its own
};
template <class Coded>
constexpr Float8Blocks kFloat8Blocks = {Derived<Coded>::kGroups, Derived<Coded>::kBytes, Derived<Coded>::kLinesOffset,
                                        kRowsOfScale<Coded> == 4};
constexpr int kMostFloat8Groups = 8;

// FP8 weights, whose products are in float: 2^120 times too small, of activations that are 2^40 times too large, so that a product is exact
// unless it is below 2^-45. The scale makes up for both. GCC would compile a clone for each format.
template <class T, int V, int N>
__attribute__((noinline, noclone)) void tile_float8(const TileArgs& args, const Float8Blocks& form, int first_vector) {
  using F = typename T::F;
  constexpr int kSums = kFloat8Sums<T>;
  F sums[N][V] = {};
  const std::byte* block = args.block;
  const std::uint32_t* words = args.records;
  for (int first = 0; first < args.groups; first += form.groups, block += form.bytes, words += form.groups * args.tokens * kGroup) {
    alignas(64) float enlarged[kMostFloat8Groups * N * kGroup];
    for (int i = 0; i < form.groups * args.tokens * kGroup; i += T::kWidth)
      T::store(enlarged + i, T::mul(T::load(reinterpret_cast<const float*>(words + i)), T::set(kFloat8Enlarged)));
    const auto* values = reinterpret_cast<const std::uint32_t*>(enlarged);
    const std::byte* line = block + form.lines_offset + first_vector * T::kWidth * 4;
    F parts[kSums][N][V] = {};
    for (int group = 0; group < form.groups; ++group, values += (args.tokens - 1) * kGroup) {
      prefetch_ahead(args, first + group);
      for (int four = 0; four < kGroup / 4; ++four, line += kWordsBytes, values += 4) {
        F weights[V][4];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) small_columns<T>(T::load_int(line + v * T::kWidth * 4), weights[v]);
#pragma GCC unroll 4
        for (int column = 0; column < 4; ++column)
#pragma GCC unroll 16
          for (int n = 0; n < N; ++n) {
            const F value = T::broadcast_float(values + token_words<N>(n, args.tokens, kGroup) + column);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) parts[column % kSums][n][v] = T::fma(weights[v][column], value, parts[column % kSums][n][v]);
          }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int row = (first_vector + v) * T::kWidth;
      const F read = form.shares_scales ? T::load_quarters(block + row) : T::load(reinterpret_cast<const float*>(block + row * 4));
      const F scale = T::mul(read, T::set(0x1p120f / kFloat8Enlarged));
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        F sum = parts[0][n][v];
        if constexpr (kSums == 2) sum = T::add(sum, parts[1][n][v]);
        sums[n][v] = T::fma(sum, scale, sums[n][v]);
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector, args.tokens);
}

constexpr int kCodedTokens = 32;  // of a tile, whose records should stay in the second-level cache beside the weights
constexpr int kMostSmallCode = 129;  // of dot_small: the sum of two products with codes of at most 127 fits 16 bits

template <class T, class Coded>
MOEGRAFT_INLINE typename T::I table_of() {
  if constexpr (kHasTable<Coded>) return T::table(Coded::kTable);
  else return T::zero_int();
}

// Coded weights times one token, or 2, 4, 6 or 8, whose sums stay in registers (tile_coded chooses).

// Adds the products of four columns, whose unsigned codes are the bytes of `weights`.
template <class T, class Coded, int V, int N>
MOEGRAFT_INLINE void dot_columns(typename T::I (&dots)[N][V], const typename T::I (&weights)[V], const std::uint32_t* codes, int stride) {
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    const typename T::I four = T::broadcast_int(codes + n * stride);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if constexpr (Derived<Coded>::kMostCode <= kMostSmallCode) dots[n][v] = T::dot_small(dots[n][v], weights[v], four);
      else dots[n][v] = T::dot_int8(dots[n][v], weights[v], four);
    }
  }
}

// Adds the products of 8 columns of a group.
template <class T, class Coded, int Step, int V, int N>
MOEGRAFT_INLINE void dot_step(typename T::I (&dots)[N][V], const std::byte* lines, typename T::I table, const std::uint32_t* codes,
                              int stride) {
  typename T::I first[V], second[V];
  if constexpr (Coded::kLowBits == 8) {  // lines are read in order
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) first[v] = T::load_int(lines + 2 * Step * kWordsBytes + v * T::kWidth * 4);
    dot_columns<T, Coded, V, N>(dots, first, codes + 2 * Step, stride);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) second[v] = T::load_int(lines + (2 * Step + 1) * kWordsBytes + v * T::kWidth * 4);
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) load_codes<T, CodeFormOf<Coded>, Step>(lines + v * T::kWidth * 4, table, first[v], second[v]);
    dot_columns<T, Coded, V, N>(dots, first, codes + 2 * Step, stride);
  }
  dot_columns<T, Coded, V, N>(dots, second, codes + 2 * Step + 1, stride);
}

// Whether the columns of a group, which are then unpacked alike, 8 at a time, are multiplied in a loop: it is compiled in a quarter of the
// time, and on AVX2 it takes 0.7 to 0.9 of the time as well. With 6 tokens, Q4_K's scales need its registers (1.16; EPYC Zen 4).
template <class T, class Coded, int N>
constexpr bool loops_over_steps() {
  if (Coded::kLowBits < 4 || Coded::kHighBits > 0 || (std::is_same_v<Coded, Q4K> && N > 4)) return false;
  return N > (Coded::kLowBits == 8 ? T::kUnrolledByteTokens : T::kUnrolledTokens);
}

// Sums the products of the columns of a part of a group, unsigned codes times the activations' signed codes, in integers.
template <class T, Format Kind, int Part, int V, int N>
MOEGRAFT_INLINE void dot_part(typename T::I (&dots)[N][V], const std::byte* lines, typename T::I table, const std::uint32_t* words) {
  using Coded = CodedOf<Kind>;
  constexpr int kWords = words_per_group(Kind);
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) dots[n][v] = Coded::kMinimum ? T::zero_int() : T::broadcast_int(words + n * kWords + 1 + Part);
  const std::uint32_t* codes = words + first_code_word(Kind);
  constexpr int kFirst = Part * 2, kSteps = 4 / Coded::kParts;
  if constexpr (loops_over_steps<T, Coded, N>()) {
    lines += kFirst * Coded::kLowBits / 4 * kWordsBytes;
    codes += 2 * kFirst;
#pragma GCC unroll 1
    for (int step = 0; step < kSteps; ++step, lines += Coded::kLowBits / 4 * kWordsBytes, codes += 2)
      dot_step<T, Coded, 0, V, N>(dots, lines, table, codes, kWords);
  } else {
    dot_step<T, Coded, kFirst, V, N>(dots, lines, table, codes, kWords);
    dot_step<T, Coded, kFirst + 1, V, N>(dots, lines, table, codes, kWords);
    if constexpr (kSteps == 4) {
      dot_step<T, Coded, 2, V, N>(dots, lines, table, codes, kWords);
      dot_step<T, Coded, 3, V, N>(dots, lines, table, codes, kWords);
    }
  }
}

// Adds the products of the columns of a group with one scale.
template <class T, Format Kind, int V, int N>
MOEGRAFT_INLINE void add_whole(typename T::F (&sums)[N][V], const typename CodedOf<Kind>::template Reader<T> (&scales)[V],
                               const std::byte* lines, typename T::I table, const std::uint32_t* words) {
  using F = typename T::F;
  using Coded = CodedOf<Kind>;
  constexpr int kWords = words_per_group(Kind);
  typename T::I dots[N][V];
  dot_part<T, Kind, 0, V, N>(dots, lines, table, words);
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    const F share = T::broadcast_float(words + n * kWords);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if constexpr (Coded::kMinimum) sums[n][v] = T::fma(scales[v].minimum[0], T::broadcast_float(words + n * kWords + 1), sums[n][v]);
      sums[n][v] = T::fma(T::to_float(dots[n][v]), T::mul(scales[v].scale[0], share), sums[n][v]);
    }
  }
}

// The same with two scales.
template <class T, Format Kind, int V, int N>
MOEGRAFT_INLINE void add_parts(typename T::F (&sums)[N][V], const typename CodedOf<Kind>::template Reader<T> (&scales)[V],
                               const std::byte* lines, typename T::I table, const std::uint32_t* words) {
  using F = typename T::F;
  constexpr bool kFactors = kHasFactors<CodedOf<Kind>>;
  static_assert(CodedOf<Kind>::kMinimum == kFactors, "no format has other combinations");
  constexpr int kWords = words_per_group(Kind);
  typename T::I dots[N][V];
  [[maybe_unused]] typename T::I whole[N][V];
  [[maybe_unused]] F partial[N][V];
  dot_part<T, Kind, 0, V, N>(dots, lines, table, words);
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if constexpr (kFactors) whole[n][v] = T::mul_int(dots[n][v], scales[v].factor[0]);
      else partial[n][v] = T::mul(T::to_float(dots[n][v]), scales[v].scale[0]);
    }
  dot_part<T, Kind, 1, V, N>(dots, lines, table, words);
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    const std::uint32_t* record = words + n * kWords;
    const F share = T::broadcast_float(record);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if constexpr (kFactors) {
        const typename T::I both = T::add_int(whole[n][v], T::mul_int(dots[n][v], scales[v].factor[1]));
        sums[n][v] = T::fma(scales[v].minimum[0], T::broadcast_float(record + 1), sums[n][v]);
        sums[n][v] = T::fma(scales[v].minimum[1], T::broadcast_float(record + 2), sums[n][v]);
        sums[n][v] = T::fma(T::to_float(both), T::mul(scales[v].of_scales, share), sums[n][v]);
      } else {
        sums[n][v] = T::fma(T::fma(T::to_float(dots[n][v]), scales[v].scale[1], partial[n][v]), share, sums[n][v]);
      }
    }
  }
}

template <class T, Format Kind, int V, int N>
inline void tile_few(const TileArgs& args, int first_vector) {
  using Coded = CodedOf<Kind>;
  constexpr int kGroups = Derived<Coded>::kGroups;
  typename T::F sums[N][V] = {};
  const typename T::I table = table_of<T, Coded>();
  const std::byte* block = args.block;
  const std::uint32_t* words = args.records;
  for (int first = 0; first < args.groups; first += kGroups, block += Derived<Coded>::kBytes) {
    typename Coded::template Reader<T> scales[V];
    const std::byte* lines = block + Derived<Coded>::kLinesOffset + first_vector * T::kWidth * 4;
    if (kGroups == 1) prefetch_ahead(args, first);  // in front of what is read from memory
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) scales[v].block(block, (first_vector + v) * T::kWidth);
    for (int group = 0; group < kGroups; ++group, lines += Derived<Coded>::kLinesBytes, words += words_per_group(Kind) * N) {
      if (kGroups > 1) prefetch_ahead(args, first + group);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        if constexpr (kHasFactors<Coded>) scales[v].factors(group);
        else scales[v].group(group);
      }
      if constexpr (Coded::kParts == 2) add_parts<T, Kind, V, N>(sums, scales, lines, table, words);
      else add_whole<T, Kind, V, N>(sums, scales, lines, table, words);
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

// Coded weights times any number of tokens. The codes of a group, 32 columns, of some rows are put into registers once and multiplied with
// one token after the other, whose sums stay in memory: the number is no parameter, and codes that take long to put together cost no more
// with many.

// How codes are multiplied: by their values, unsigned and at most kMostSmallCode, unsigned, or less their offset where T::kSignedBytes.
enum class Products { kSmall, kUnsigned, kSigned };

// What the products of a group depend on: the parts of a record, the scales of a group, whether there are minima, how codes are multiplied,
// and how many products of a pair of columns fit 16 bits together.
template <int Parts, int Scales, bool Minimum, Products Of, int InShorts>
struct ProductForm {
  static_assert(Scales == 1 || (Parts == 2 && !Minimum), "no format has other combinations");
  static constexpr int kParts = Parts, kScales = Scales, kInShorts = InShorts;
  static constexpr bool kMinimum = Minimum;
  static constexpr Products kProducts = Of;
};
template <class Coded>
constexpr int most_product_code() {
  if constexpr (kHasFactors<Coded>) return Derived<Coded>::kMostCode * Coded::kMostFactor;
  else return Derived<Coded>::kMostCode;
}
template <class T, class Coded>
constexpr Products products_of() {
  if (most_product_code<Coded>() <= kMostSmallCode) return Products::kSmall;
  return T::kSignedBytes ? Products::kSigned : Products::kUnsigned;
}
template <class T, class Coded>
constexpr int in_shorts() {
  constexpr int kMost = 32767 / (2 * 127 * most_product_code<Coded>()), kScales = kHasFactors<Coded> ? 1 : Coded::kParts;
  return kMost >= 8 && kScales == 1 ? 8 : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
}
template <class T, class Coded>
using ProductFormOf =
    ProductForm<Coded::kParts, kHasFactors<Coded> ? 1 : Coded::kParts, Coded::kMinimum, products_of<T, Coded>(), in_shorts<T, Coded>()>;

// Vectors of rows whose codes of a group are in registers together: half of these.
template <class T>
constexpr int kGroupVectors = T::kWidth == 16 ? 2 : 1;

template <class T>
struct GroupOperands {
  static constexpr int kVectors = kGroupVectors<T>;
  typename T::I codes[kGroup / 4][kVectors];  // four columns of a row in a word
  typename T::F scale[2][kVectors];  // [part]
  typename T::F minimum[2][kVectors];
};

// sums (N, 32) += the products of a group's columns with N tokens.
template <class T, class Form, int N>
MOEGRAFT_INLINE void add_tokens(const GroupOperands<T>& group, const typename T::I (&magnitudes)[kGroup / 4][kGroupVectors<T>],
                                const std::uint32_t* words, float* sums) {
  using F = typename T::F;
  using I = typename T::I;
  constexpr int V = kGroupVectors<T>, kFours = kGroup / 4, kParts = Form::kParts, kScales = Form::kScales, kWords = 1 + kParts + kFours;
  constexpr bool kCorrected = !Form::kMinimum && Form::kProducts != Products::kSigned;
  I dots[N][kScales][V];
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 2
    for (int part = 0; part < kScales; ++part)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) dots[n][part][v] = kCorrected ? T::broadcast_int(words + n * kWords + 1 + part) : T::zero_int();
  [[maybe_unused]] I shorts[N][V];
#pragma GCC unroll 8
  for (int four = 0; four < kFours; ++four)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const I values = T::broadcast_int(words + n * kWords + 1 + kParts + four);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        I& dot = dots[n][four / (kFours / kScales)][v];
        if constexpr (T::kAddsShorts && Form::kInShorts > 1) {
          const I products = T::mul_bytes(group.codes[four][v], values);
          shorts[n][v] = four % Form::kInShorts == 0 ? products : T::add_shorts(shorts[n][v], products);
          if (four % Form::kInShorts == Form::kInShorts - 1) dot = T::add_pairs(dot, shorts[n][v]);
          continue;
        }
        if constexpr (Form::kProducts == Products::kSmall) dot = T::dot_small(dot, group.codes[four][v], values);
        else if constexpr (Form::kProducts == Products::kUnsigned) dot = T::dot_int8(dot, group.codes[four][v], values);
        else dot = T::dot_signed(dot, magnitudes[four][v], group.codes[four][v], values);
      }
    }
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    const std::uint32_t* const record = words + n * kWords;
    const F share = T::broadcast_float(record);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float* const target = sums + n * kBlockRows + v * T::kWidth;
      F sum = T::load(target);
      if constexpr (Form::kMinimum) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) sum = T::fma(group.minimum[part][v], T::broadcast_float(record + 1 + part), sum);
      }
      if constexpr (kScales == 2) {
        const F first = T::mul(T::to_float(dots[n][0][v]), group.scale[0][v]);
        sum = T::fma(T::fma(T::to_float(dots[n][1][v]), group.scale[1][v], first), share, sum);
      } else {
        sum = T::fma(T::to_float(dots[n][0][v]), T::mul(group.scale[0][v], share), sum);
      }
      T::store(target, sum);
    }
  }
}

// The same with any number of tokens.
template <class T, class Form>
MOEGRAFT_INLINE void add_products(const GroupOperands<T>& group, const std::uint32_t* words, int tokens, float* sums) {
  constexpr int kWords = 1 + Form::kParts + kGroup / 4;
  typename T::I magnitudes[kGroup / 4][kGroupVectors<T>];
  if constexpr (Form::kProducts == Products::kSigned) {
#pragma GCC unroll 8
    for (int four = 0; four < kGroup / 4; ++four)
      for (int v = 0; v < kGroupVectors<T>; ++v) magnitudes[four][v] = T::abs_bytes(group.codes[four][v]);
  }
  int n = 0;
  if (tokens % 2 == 1) add_tokens<T, Form, 1>(group, magnitudes, words, sums), n = 1;
#pragma GCC unroll 1
  for (; n < tokens; n += 2) add_tokens<T, Form, 2>(group, magnitudes, words + n * kWords, sums + n * kBlockRows);
}

inline void clear_sums(const TileArgs& args) {
  std::memset(args.out, 0, sizeof(float) * kBlockRows * static_cast<std::size_t>(args.tokens));
}

// Fills in a group's codes of columns 8 * Step and on, of the vector of rows that begins at `lines`.
template <class T, class Coded, int Step>
MOEGRAFT_INLINE void load_operands(const std::byte* lines, typename T::I table, const typename Coded::template Reader<T>& reader, int v,
                                   GroupOperands<T>& group) {
  load_codes<T, CodeFormOf<Coded>, Step>(lines, table, group.codes[2 * Step][v], group.codes[2 * Step + 1][v]);
#pragma GCC unroll 2
  for (int i = 2 * Step; i < 2 * Step + 2; ++i) {
    typename T::I& codes = group.codes[i][v];
    if constexpr (kHasFactors<Coded>) {
      const typename T::I factor = reader.factor[Step / 2];
      codes = T::mul_shorts(codes, T::or_int(factor, T::template shifted<16>(factor)));
    }
    if constexpr (products_of<T, Coded>() == Products::kSigned) codes = T::minus_bytes(codes, Coded::kOffset);
  }
}

template <class T, Format Kind>
void tile_many(const TileArgs& args) {
  using Coded = CodedOf<Kind>;
  constexpr int kGroups = Derived<Coded>::kGroups, V = kGroupVectors<T>;
  const typename T::I table = table_of<T, Coded>();
  const std::byte* block = args.block;
  const std::uint32_t* words = args.records;
  clear_sums(args);
  for (int first = 0; first < args.groups; first += kGroups, block += Derived<Coded>::kBytes) {
    typename Coded::template Reader<T> readers[T::kVectors];
    if (kGroups == 1) prefetch_ahead(args, first);  // in front of what is read from memory
#pragma GCC unroll 4
    for (int v = 0; v < T::kVectors; ++v) readers[v].block(block, v * T::kWidth);
    const std::byte* lines = block + Derived<Coded>::kLinesOffset;
    for (int index = 0; index < kGroups; ++index, lines += Derived<Coded>::kLinesBytes, words += words_per_group(Kind) * args.tokens) {
      if (kGroups > 1) prefetch_ahead(args, first + index);
#pragma GCC unroll 1
      for (int vector = 0; vector < T::kVectors; vector += V) {
        GroupOperands<T> group;
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          auto& reader = readers[vector + v];
          const std::byte* const of_rows = lines + (vector + v) * T::kWidth * 4;
          if constexpr (kHasFactors<Coded>) {
            reader.factors(index);
            group.scale[0][v] = reader.of_scales;
          } else {
            reader.group(index);
            for (int part = 0; part < Coded::kParts; ++part) group.scale[part][v] = reader.scale[part];
          }
          if constexpr (Coded::kMinimum)
            for (int part = 0; part < Coded::kParts; ++part) group.minimum[part][v] = reader.minimum[part];
          load_operands<T, Coded, 0>(of_rows, table, reader, v, group);
          load_operands<T, Coded, 1>(of_rows, table, reader, v, group);
          load_operands<T, Coded, 2>(of_rows, table, reader, v, group);
          load_operands<T, Coded, 3>(of_rows, table, reader, v, group);
        }
        add_products<T, ProductFormOf<T, Coded>>(group, words, args.tokens, args.out + vector * T::kWidth);
      }
    }
  }
}

template <class T, Format Kind, int N>
void tile_few(const TileArgs& args) {
  constexpr int V = vectors_at_once<T, N>();
  for (int first = 0; first < T::kVectors; first += V) tile_few<T, Kind, V, N>(args, first);
}

template <class T, Format Kind>
void tile_coded(const TileArgs& args) {
  if (args.tokens == 1) return tile_few<T, Kind, 1>(args);
  if constexpr (T::kFewTokens >= 2)
    if (args.tokens == 2) return tile_few<T, Kind, 2>(args);
  // Only where the gain is worth the time to compile: nibbles have no tile of 6 tokens, and other codes below 8 bits none of 4 either.
  if constexpr (T::kFewTokens >= 4) {
    constexpr bool kBytes = CodedOf<Kind>::kLowBits == 8;
    if constexpr (kBytes || loops_over_steps<T, CodedOf<Kind>, 4>())
      if (args.tokens == 4) return tile_few<T, Kind, 4>(args);
    if constexpr (kBytes) {
      if (args.tokens == 6) return tile_few<T, Kind, 6>(args);
      if (args.tokens == 8) return tile_few<T, Kind, 8>(args);
    }
  }
  tile_many<T, Kind>(args);
}

// Tokens of the largest tile. Of floats each number of tokens is a function of its own, so that a larger one costs time to compile.
template <class T, Format Kind>
constexpr int tile_limit() {
  if constexpr (has_codes(Kind)) return kCodedTokens;
  else if constexpr (is_coded(Kind)) return T::kFloatTokens / kFloat8Sums<T>;
  else return T::kFloatTokens;
}

}  // namespace

}  // namespace moegraft
