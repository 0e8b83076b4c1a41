// The matrix kernels of instruction sets without AMX, templates over the traits of vector_kernels.h, whose rules apply here.
//
// In float32, for weights whose tiles are slow without the instruction for their products: these are expanded exactly, and activations are
// not rounded. FP8 is multiplied in bfloat16 where the CPU has that product: its codes are exact in bfloat16, sums of a scale's columns are
// multiplied with it, and activations are rounded to bfloat16. A group of 32 columns then takes 16 products, where int8 takes 8 and 2 for
// its scales: as long as both products are equally fast, as on EPYC Zen 4, FP8 needs at least 1.6 times int8's time.
//
// With VNNI the tiles of integers are 1.3 to 2.2 times as fast as an expansion to bfloat16 or float32, and with BF16 those of bfloat16 are
// as fast (EPYC Zen 5, 2026-11, 8 to 64 tokens of an expert): such instruction sets have no matrix kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "formats/coded_formats.h"
#include "simd/kernels.h"
#include "simd/vector_tiles.h"

namespace moegraft {
namespace {

constexpr int kFloatPanelGroups = 4;  // columns / 32 whose weights (16 KiB) and activations of a tile stay in L1 together

// Writes 8 columns of a vector of rows.
template <class T, class Coded, int Step>
MOEGRAFT_INLINE void expand_columns(const typename Coded::template Reader<T>& reader, const std::byte* lines, float* column) {
  constexpr int kPart = Step / (4 / Coded::kParts);
  const typename T::F scale = reader.scale[kPart];
  typename T::F shift;
  if constexpr (Coded::kMinimum) shift = reader.minimum[kPart];
  else shift = T::mul(scale, T::set(static_cast<float>(-Coded::kOffset)));
  typename T::I codes[2];
  load_codes<T, CodeFormOf<Coded>, Step>(lines, table_of<T, Coded>(), codes[0], codes[1]);
  for (int i = 0; i < 8; ++i, column += kBlockRows) {
    T::store(column, T::fma(T::to_float(T::low_bytes(codes[i / 4])), scale, shift));
    codes[i / 4] = T::next_bytes(codes[i / 4]);
  }
}

// Writes 4 columns of FP8.
template <class T>
MOEGRAFT_INLINE void expand_float8(typename T::I codes, typename T::F scale, float* column) {
  T::store(column, T::mul(T::template small_float8<0>(codes), scale));
  T::store(column + kBlockRows, T::mul(T::template small_float8<1>(codes), scale));
  T::store(column + 2 * kBlockRows, T::mul(T::template small_float8<2>(codes), scale));
  T::store(column + 3 * kBlockRows, T::mul(T::template small_float8<3>(codes), scale));
}

// Writes a group of a block as (32 columns, 32 rows) floats. Inlined, as g++ 12 takes a call of it for one without effects.
template <class T, Format Kind>
MOEGRAFT_INLINE void expand_to_floats(const std::byte* block, int group, float* out) {
  constexpr int kStep = T::kWidth * 4;  // bytes of a vector in a line
  for (int v = 0; v < T::kVectors; ++v, out += T::kWidth) {
    float* column = out;
    if constexpr (Kind == Format::kBFloat16Dot) {
      const std::byte* line = block + static_cast<std::size_t>(group) * kGroup * kBlockRows * 2 + v * kStep;
      for (int pair = 0; pair < kGroup / 2; ++pair, line += kWordsBytes, column += 2 * kBlockRows) {
        T::store(column, T::low_bf16(T::load_int(line)));
        T::store(column + kBlockRows, T::high_bf16(T::load_int(line)));
      }
    } else {
      using Coded = CodedOf<Kind>;
      const std::byte* base = block + static_cast<std::size_t>(group / Derived<Coded>::kGroups) * Derived<Coded>::kBytes;
      const int index = group % Derived<Coded>::kGroups;
      typename Coded::template Reader<T> reader;
      reader.block(base, v * T::kWidth);
      reader.group(index);
      const std::byte* lines = base + Derived<Coded>::kLinesOffset + index * Derived<Coded>::kLinesBytes + v * kStep;
      if constexpr (kIsFloat8<Coded>) {
        const typename T::F scale = T::mul(reader.scale[0], T::set(0x1p120f));
        for (int four = 0; four < kGroup / 4; ++four, lines += kWordsBytes, column += 4 * kBlockRows)
          expand_float8<T>(T::load_int(lines), scale, column);
      } else {
        expand_columns<T, Coded, 0>(reader, lines, column);
        expand_columns<T, Coded, 1>(reader, lines, column + 8 * kBlockRows);
        expand_columns<T, Coded, 2>(reader, lines, column + 16 * kBlockRows);
        expand_columns<T, Coded, 3>(reader, lines, column + 24 * kBlockRows);
      }
    }
  }
}

// Some vectors of a panel times N tokens, of which the last may be missing.
template <class T, int V, int N>
inline void multiply_floats(int tokens, const std::uint32_t* words, const float* weights, int groups, bool adds, float* out,
                            int first_vector) {
  typename T::F sums[N][V] = {};
  if (adds) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[n][v] = T::load(out + token_words<N>(n, tokens, kBlockRows) + (first_vector + v) * T::kWidth);
  }
  weights += first_vector * T::kWidth;
  for (int group = 0; group < groups; ++group, words += (T::kFloatTokens - 1) * kGroup) {
    for (int column = 0; column < kGroup; ++column, ++words, weights += kBlockRows) {
      typename T::F factors[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) factors[v] = T::load(weights + v * T::kWidth);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const typename T::F value = T::broadcast_float(words + token_words<N>(n, tokens, kGroup));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[n][v] = T::fma(factors[v], value, sums[n][v]);
      }
    }
  }
  store_tile<T, V, N>(sums, out, first_vector, tokens);
}

template <class T, int N = T::kFloatTokens>
__attribute__((noinline)) void multiply_floats_of(int tokens, const std::uint32_t* words, const float* weights, int groups, bool adds,
                                                  float* out) {
  if constexpr (N > 1) {
    if (tokens <= fewer(N)) return multiply_floats_of<T, fewer(N)>(tokens, words, weights, groups, adds, out);
  }
  constexpr int V = vectors_at_once<T, N>();
  for (int first = 0; first < T::kVectors; first += V) multiply_floats<T, V, N>(tokens, words, weights, groups, adds, out, first);
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

// The panel of FP8 in bfloat16, in pairs of columns, and the scales of its rows.
struct PairPanel {
  alignas(64) std::uint32_t pairs[kFloatPanelGroups * kGroup / 2][kBlockRows];
  float scale[kBlockRows];
};
static_assert(sizeof(PairPanel) <= sizeof ExpandedWeights::memory);

// Where the lines of a panel's columns begin; its scales are written. All formats of FP8 have the same lines.
template <class T, Format Kind>
inline const std::byte* begin_panel(const std::byte* block, int group, PairPanel& out) {
  using Coded = CodedOf<Kind>;
  static_assert(Derived<Coded>::kGroups % kFloatPanelGroups == 0, "a panel has one scale of each row");
  static_assert(Derived<Coded>::kLinesBytes == kGroup / 4 * kWordsBytes, "a line has four columns");
  const std::byte* base = block + static_cast<std::size_t>(group / Derived<Coded>::kGroups) * Derived<Coded>::kBytes;
  for (int row = 0; row < kBlockRows; row += T::kWidth) {
    typename Coded::template Reader<T> reader;
    reader.block(base, row);
    T::store(out.scale + row, reader.scale[0]);
  }
  return base + Derived<Coded>::kLinesOffset + group % Derived<Coded>::kGroups * Derived<Coded>::kLinesBytes;
}

// Fills four columns of the panel; `pair` is even.
template <class T>
MOEGRAFT_INLINE void expand_pairs(const std::byte* lines, int pair, PairPanel& out) {
#pragma GCC unroll 4
  for (int row = 0; row < kBlockRows; row += T::kWidth) {
    typename T::I first, second;
    T::float8_pairs(T::load_int(lines + pair / 2 * kWordsBytes + row * 4), first, second);
    T::store_int(&out.pairs[pair][row], first);
    T::store_int(&out.pairs[pair + 1][row], second);
  }
}

// The first tile fills the panel meanwhile, in units that its products do not use, so many pairs ahead that these do not wait for it: 0.93
// of the time of filling it before, with 32 tokens, and 0.83 with 12 (EPYC Zen 4).
constexpr int kPairsAhead = 4;

// N tokens, of which the last may be missing: a tile has its rows, and products of pairs take no longer with numbers of any kind.
template <class T, bool First, int N>
inline void multiply_pairs(PairPanel& panel, [[maybe_unused]] const std::byte* lines, const std::uint32_t* words, bool adds, float* out) {
  constexpr int V = T::kVectors, kWords = words_per_group(Format::kBFloat16Dot), kPairs = kFloatPanelGroups * kWords;
  if constexpr (First)
    for (int pair = 0; pair < kPairsAhead; pair += 2) expand_pairs<T>(lines, pair, panel);
  typename T::F sums[N][V] = {};
  const auto* weights = &panel.pairs[0][0];
  for (int group = 0; group < kPairs; group += kWords, words += (T::kFloatTokens - 1) * kWords) {
    for (int pair = group; pair < group + kWords; ++pair, ++words, weights += kBlockRows) {
      if constexpr (First)
        if (pair % 2 == 0 && pair + kPairsAhead < kPairs) expand_pairs<T>(lines, pair + kPairsAhead, panel);
      typename T::I factors[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) factors[v] = T::load_int(weights + v * T::kWidth);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const typename T::I values = T::broadcast_int(words + n * kWords);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[n][v] = T::dot_bf16(sums[n][v], factors[v], values);
      }
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* target = out + n * kBlockRows + v * T::kWidth;
      const typename T::F scale = T::load(panel.scale + v * T::kWidth);
      T::store(target, adds ? T::fma(sums[n][v], scale, T::load(target)) : T::mul(sums[n][v], scale));
    }
}

template <class T, bool First, int N = T::kFloatTokens>
inline void multiply_pairs_of(int tokens, PairPanel& panel, const std::byte* lines, const std::uint32_t* words, bool adds, float* out) {
  if constexpr (N > 1) {
    if (tokens <= fewer(N)) return multiply_pairs_of<T, First, fewer(N)>(tokens, panel, lines, words, adds, out);
  }
  multiply_pairs<T, First, N>(panel, lines, words, adds, out);
}

template <class T, Format Kind>
void matrix_pairs(const MatrixArgs& args) {
  constexpr int kRows = T::kFloatTokens;
  const int tiles = (args.tokens + kRows - 1) / kRows, base = args.tokens / tiles, longer = args.tokens % tiles;
  const int parts = args.groups / kFloatPanelGroups * tiles, lines = (args.ahead_lines + parts - 1) / parts;
  auto& panel = *reinterpret_cast<PairPanel*>(args.expanded->memory);
  const std::byte* ahead = args.ahead;
  for (int first = 0; first < args.groups; first += kFloatPanelGroups) {
    const std::uint32_t* words = args.records + static_cast<std::size_t>(first) * kRows * words_per_group(Format::kBFloat16Dot);
    const std::byte* codes = begin_panel<T, Kind>(args.block, first, panel);
    const bool adds = args.adds || first > 0;
    float* out = args.out;
    for (int tile = 0; tile < tiles; ++tile, words += args.tile_words, out += kRows * kBlockRows) {
      for (int line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      const int tokens = base + (tile < longer ? 1 : 0);
      if (tile == 0) multiply_pairs_of<T, true>(tokens, panel, codes, words, adds, out);
      else multiply_pairs_of<T, false>(tokens, panel, codes, words, adds, out);
    }
  }
}

template <class T>
MatrixKernels no_matrix_kernels(Format records) {
  MatrixKernels matrix{};
  matrix.records = records;
  matrix.tile_tokens = T::kFloatTokens;
  matrix.segment_bytes = std::size_t{384} << 10;  // the weights of a unit need the remainder of L2
  for (int& least : matrix.least_tokens) least = kNeverMatrix;
  matrix.begin = no_preparation;
  matrix.end = no_preparation;
  return matrix;
}

enum class Codes { kBytes, kFloat8, kSmall };
template <Format Kind>
constexpr Codes codes_of() {
  if (kIsFloat8<CodedOf<Kind>>) return Codes::kFloat8;
  return Derived<CodedOf<Kind>>::kMostCode > kMostSmallCode ? Codes::kBytes : Codes::kSmall;
}

template <class T, Codes Wanted, int... I>
void add_floats_of(MatrixKernels& matrix, int least, std::integer_sequence<int, I...>) {
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    if constexpr (codes_of<kKind>() == Wanted) {
      matrix.least_tokens[static_cast<int>(kKind)] = least;
      matrix.multiply[static_cast<int>(kKind)] = matrix_floats<T, kKind>;
    }
  };
  (add(std::integral_constant<int, I>()), ...);
}

// From these numbers of tokens on: of bfloat16 and of codes of 8 bits measured against the tiles, of FP8 estimated.
template <class T, int BFloat16Tokens, int ByteTokens, int Float8Tokens>
MatrixKernels float_matrix_kernels() {
  MatrixKernels matrix = no_matrix_kernels<T>(Format::kFloat32);
  if constexpr (BFloat16Tokens != kNeverMatrix) {
    matrix.least_tokens[static_cast<int>(Format::kBFloat16Dot)] = BFloat16Tokens;
    matrix.multiply[static_cast<int>(Format::kBFloat16Dot)] = matrix_floats<T, Format::kBFloat16Dot>;
  }
  if constexpr (ByteTokens != kNeverMatrix) add_floats_of<T, Codes::kBytes>(matrix, ByteTokens, CodedIndexes());
  add_floats_of<T, Codes::kFloat8>(matrix, Float8Tokens, CodedIndexes());
  return matrix;
}

template <class T, int... I>
void add_pairs(MatrixKernels& matrix, int least, std::integer_sequence<int, I...>) {
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    if constexpr (codes_of<kKind>() == Codes::kFloat8) {
      matrix.least_tokens[static_cast<int>(kKind)] = least;
      matrix.multiply[static_cast<int>(kKind)] = matrix_pairs<T, kKind>;
    }
  };
  (add(std::integral_constant<int, I>()), ...);
}

constexpr int kLeastFloat8Tokens = 4;

template <class T>
MatrixKernels pair_matrix_kernels() {
  MatrixKernels matrix = no_matrix_kernels<T>(Format::kBFloat16Dot);
  add_pairs<T>(matrix, kLeastFloat8Tokens, CodedIndexes());
  return matrix;
}

}  // namespace
}  // namespace moegraft
