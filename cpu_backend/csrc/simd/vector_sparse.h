// The kernels over rows of the sparse layout, as templates over the traits of vector_kernels.h, whose rules apply here.
// Lanes are groups of columns, 16 per chunk. Where vectors are shorter than 16 lanes, parts of the lanes are computed one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "formats/coded_formats.h"
#include "simd/kernels.h"

namespace moegraft {
namespace {

constexpr int row_line_bytes(Format kind) { return kind == Format::kFloat16 ? 32 : 64; }
constexpr int row_lines(Format kind) {  // of a chunk
  return kind == Format::kInt8 ? 8 : kind == Format::kInt4 ? 4 : kind == Format::kBFloat16 || kind == Format::kBFloat16Dot ? 16 : 32;
}

// Adds the products of one chunk of R rows and N tokens to `sums`, for the vector of lanes from `first` on.
template <class T, Format Kind, int R, int N>
inline void dot_chunk(const std::byte* const (&rows)[R], const std::byte* const (&scales)[R], const std::uint32_t* const (&words)[N],
                      int first, typename T::F (&sums)[R][N]) {
  using F = typename T::F;
  using I = typename T::I;
  if constexpr (Kind == Format::kInt8 || Kind == Format::kInt4) {
    I dots[R][N];
    for (int n = 0; n < N; ++n)
      for (int r = 0; r < R; ++r) dots[r][n] = T::load_int(words[n] + kLanes + first);
    for (int j = 0; j < row_lines(Kind); ++j) {
      I weights[R], high[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        weights[r] = T::load_int(rows[r] + j * 64 + first * 4);
        if constexpr (Kind == Format::kInt4) high[r] = T::high_nibbles(weights[r]);
        if constexpr (Kind == Format::kInt4) weights[r] = T::low_nibbles(weights[r]);
      }
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        if constexpr (Kind == Format::kInt8) {
          const I codes = T::load_int(words[n] + (2 + j) * kLanes + first);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) dots[r][n] = T::dot_int8(dots[r][n], weights[r], codes);
        } else {
          const I low = T::load_int(words[n] + (2 + 2 * j) * kLanes + first), upper = T::load_int(words[n] + (3 + 2 * j) * kLanes + first);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) dots[r][n] = T::dot_small(T::dot_small(dots[r][n], weights[r], low), high[r], upper);
        }
      }
    }
    F factors[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) factors[r] = T::load_f16(reinterpret_cast<const std::uint16_t*>(scales[r]) + first);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const F scale = T::load(reinterpret_cast<const float*>(words[n] + first));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][n] = T::fma(T::to_float(dots[r][n]), T::mul(factors[r], scale), sums[r][n]);
    }
  } else if constexpr (Kind == Format::kBFloat16 || Kind == Format::kBFloat16Dot) {
    for (int j = 0; j < kGroup / 2; ++j) {
      I weights[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) weights[r] = T::load_int(rows[r] + j * 64 + first * 4);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        if constexpr (Kind == Format::kBFloat16Dot && T::kHasBf16) {
          const I values = T::load_int(words[n] + j * kLanes + first);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sums[r][n] = T::dot_bf16(sums[r][n], weights[r], values);
        } else {
          F low, high;
          if constexpr (Kind == Format::kBFloat16Dot) {
            const I values = T::load_int(words[n] + j * kLanes + first);
            low = T::low_bf16(values);
            high = T::high_bf16(values);
          } else {
            low = T::load(reinterpret_cast<const float*>(words[n] + 2 * j * kLanes + first));
            high = T::load(reinterpret_cast<const float*>(words[n] + (2 * j + 1) * kLanes + first));
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sums[r][n] = T::fma(T::high_bf16(weights[r]), high, T::fma(T::low_bf16(weights[r]), low, sums[r][n]));
        }
      }
    }
  } else {
    for (int j = 0; j < kGroup; ++j) {
      F weights[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const std::byte* line = rows[r] + j * row_line_bytes(Kind);
        if constexpr (Kind == Format::kFloat32) weights[r] = T::load(reinterpret_cast<const float*>(line) + first);
        else weights[r] = T::load_f16(reinterpret_cast<const std::uint16_t*>(line) + first);
      }
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const F values = T::load(reinterpret_cast<const float*>(words[n] + j * kLanes + first));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][n] = T::fma(weights[r], values, sums[r][n]);
      }
    }
  }
}

// Prefetches the lines of one chunk of each of the next rows, so that all chunks together prefetch whole rows.
template <Format Kind, int R>
inline void prefetch_rows(const RowDotsArgs& args, const int (&rows)[R], int chunk) {
  constexpr std::size_t kBytes = static_cast<std::size_t>(row_lines(Kind)) * row_line_bytes(Kind);
  for (std::size_t at = 0; at < kBytes; at += 64)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      __builtin_prefetch(args.ahead[rows[r]] + args.line_offset + static_cast<std::size_t>(chunk) * kBytes + at, 0, 3);
}

// R rows and N tokens, of which the last ones may be missing: the last row or token is then computed in their place, and stored again.
template <class T, Format Kind, int R, int N>
void dot_tile(const RowDotsArgs& args, int first_row, int first_token) {
  typename T::F sums[R][N] = {};
  int row_of[R], token_of[N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) row_of[r] = first_row + r < args.row_count ? first_row + r : args.row_count - 1;
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) token_of[n] = first_token + n < args.tokens ? first_token + n : args.tokens - 1;
  for (int first = 0; first < kLanes; first += T::kWidth) {
    const std::byte *rows[R], *scales[R];
    const std::uint32_t* words[N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) scales[r] = args.rows[row_of[r]];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = scales[r] + args.line_offset;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) words[n] = args.lanes[token_of[n]];
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      if (first_token == 0 && first == 0 && args.ahead) prefetch_rows<Kind, R>(args, row_of, chunk);
      dot_chunk<T, Kind, R, N>(rows, scales, words, first, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) rows[r] += row_lines(Kind) * row_line_bytes(Kind);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) scales[r] += kLanes * 2;
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) words[n] += words_per_group(Kind) * kLanes;
    }
  }
  // Four sums are always reduced together, so that a product does not depend on the tile that computes it.
  static_assert(R * N % 4 == 0 || N == 1);
  float products[(R * N + 3) / 4 * 4];
  const auto sum = [&](int at) { return at < R * N ? sums[at / N][at % N] : T::zero(); };
#pragma GCC unroll 8
  for (int at = 0; at < R * N; at += 4) T::store_four_sums(products + at, sum(at), sum(at + 1), sum(at + 2), sum(at + 3));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) args.out[token_of[n]][args.places[row_of[r]]] = products[r * N + n];
}

template <class T, Format Kind>
void dot_rows(const RowDotsArgs& args) {
  constexpr int R = T::kDotRows, N = T::kDotTokens;
  for (int row = 0; row < args.row_count; row += R)
    for (int token = 0; token < args.tokens; token += N) {
      const int left = args.tokens - token;
      if (left == 1) dot_tile<T, Kind, R, 1>(args, row, token);
      else if (left == 2) dot_tile<T, Kind, R, 2>(args, row, token);
      else dot_tile<T, Kind, R, N>(args, row, token);
    }
}

constexpr int columns_per_line(Format kind) { return kGroup / row_lines(kind); }

// The factor of a quantised row's unpacked numbers, which are codes times 2^24.
template <class T>
inline typename T::F code_scale(const std::byte* scales, int first) {
  return T::mul(T::load_f16(reinterpret_cast<const std::uint16_t*>(scales) + first), T::set(1.0f / 16777216.0f));
}

// Unpacks a line to vectors of one column of each group: weights, or codes times 2^24 where the row is quantised.
template <class T, Format Kind>
inline void unpack_line(const std::byte* line, int first, typename T::F (&columns)[columns_per_line(Kind)]) {
  using I = typename T::I;
  const auto bytes = [&](I codes, int at) {
    columns[at] = T::to_float(T::template top_byte<0>(codes));
    columns[at + 1] = T::to_float(T::template top_byte<1>(codes));
    columns[at + 2] = T::to_float(T::template top_byte<2>(codes));
    columns[at + 3] = T::to_float(T::template top_byte<3>(codes));
  };
  if constexpr (Kind == Format::kFloat32) {
    columns[0] = T::load(reinterpret_cast<const float*>(line) + first);
  } else if constexpr (Kind == Format::kFloat16) {
    columns[0] = T::load_f16(reinterpret_cast<const std::uint16_t*>(line) + first);
  } else {
    const I words = T::load_int(line + first * 4);
    if constexpr (Kind == Format::kInt8) {
      bytes(T::minus_bytes(words, 128), 0);
    } else if constexpr (Kind == Format::kInt4) {
      bytes(T::minus_bytes(T::low_nibbles(words), 8), 0);
      bytes(T::minus_bytes(T::high_nibbles(words), 8), 4);
    } else {
      columns[0] = T::low_bf16(words);
      columns[1] = T::high_bf16(words);
    }
  }
}

template <class T, Format Kind>
void add_rows(const RowAddArgs& args) {
  using F = typename T::F;
  constexpr int kColumns = columns_per_line(Kind);
  for (int first = 0; first < kLanes; first += T::kWidth) {
    F factors[kMaxRows];
#pragma GCC unroll 4
    for (int row = 0; row < kMaxRows; ++row) {
      factors[row] = T::set(args.coefficients[row]);
      if constexpr (is_coded(Kind)) factors[row] = T::mul(factors[row], code_scale<T>(args.scales[row], first));
    }
    float* target = args.sums + first;
    for (int j = 0; j < row_lines(Kind); ++j, target += kColumns * kLanes) {
      if (first == 0)
        for (const std::byte* ahead : args.ahead)
          if (ahead) __builtin_prefetch(ahead + j * row_line_bytes(Kind), 0, 3);
      F sums[kColumns];
#pragma GCC unroll 8
      for (int k = 0; k < kColumns; ++k) sums[k] = T::load(target + k * kLanes);
#pragma GCC unroll 4
      for (int row = 0; row < kMaxRows; ++row) {
        F columns[kColumns];
        unpack_line<T, Kind>(args.lines[row] + j * row_line_bytes(Kind), first, columns);
#pragma GCC unroll 8
        for (int k = 0; k < kColumns; ++k) sums[k] = T::fma(factors[row], columns[k], sums[k]);
      }
#pragma GCC unroll 8
      for (int k = 0; k < kColumns; ++k) T::store(target + k * kLanes, sums[k]);
    }
  }
}

// Rows of down that several tokens share are converted to items once (kernels.h has their layout) and then added in tiles of tokens and
// columns, whose sums stay in registers.

template <class T, Format Kind>
constexpr bool in_pairs() {
  return T::kHasBf16 && (Kind == Format::kBFloat16Dot || is_coded(Kind));
}

template <class T, Format Kind>
void widen_rows(const RowWidenArgs& args) {
  using F = typename T::F;
  constexpr int kColumns = columns_per_line(Kind);
  for (int first = 0; first < kLanes; first += T::kWidth) {
    F factors[2] = {T::zero(), T::zero()};
    if constexpr (is_coded(Kind))
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
        if constexpr (is_coded(Kind)) low = T::mul(low, factors[0]);
        if constexpr (is_coded(Kind)) high = T::mul(high, factors[1]);
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
  constexpr int kWide = 2 * kTileColumns;  // two tiles: enough independent chains to hide the latency of a product
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
        for (int k = 0; k < kTileColumns; ++k)
          sums[kTileColumns + k] = add_product<T, Pairs>(sums[kTileColumns + k], item + k * kLanes, coefficient);
      }
#pragma GCC unroll 8
      for (int k = 0; k < kWide; ++k) T::store(target + k * kLanes, sums[k]);
    }
  }
}

// Blocks of the dense layout, for segments in which few neurons can be left out.

// Transposes a square of words.
template <class T>
MOEGRAFT_INLINE void transpose_words(typename T::I (&rows)[T::kWidth]) {
  const auto exchange = [&](auto step) __attribute__((always_inline)) {
    constexpr int kStep = decltype(step)::value;
#pragma GCC unroll 16
    for (int row = 0; row < T::kWidth; ++row)
      if ((row & kStep) == 0) T::template exchange_lanes<kStep>(rows[row], rows[row + kStep]);
  };
  exchange(std::integral_constant<int, 1>());
  exchange(std::integral_constant<int, 2>());
  exchange(std::integral_constant<int, 4>());
  if constexpr (T::kWidth == 16) exchange(std::integral_constant<int, 8>());
}

template <class T, Format Kind>
void up_block(const UpBlockArgs& args) {
  using I = typename T::I;
  constexpr int kScales = is_coded(Kind) ? kScaleBytes : 0, kLines = row_lines(Kind), kBytes = kScales + 2 * 64 * kLines;
  for (int first = 0; first < args.groups; first += T::kWidth) {
    const int groups = args.groups - first < T::kWidth ? args.groups - first : T::kWidth;
    std::byte* const target = args.block + static_cast<std::size_t>(first) * kBytes;
    I square[T::kWidth];
    if constexpr (is_coded(Kind)) {
      for (int pair = 0; pair < kBlockRows / 2; pair += T::kWidth) {  // the scales of two rows in a word
#pragma GCC unroll 16
        for (int i = 0; i < T::kWidth; ++i) {
          const std::byte* scales = args.rows + args.row_bytes * static_cast<std::size_t>(2 * (pair + i)) + 2 * first;
          square[i] = T::or_int(T::load_shorts(scales), T::template shifted<16>(T::load_shorts(scales + args.row_bytes)));
        }
        transpose_words<T>(square);
        for (int group = 0; group < groups; ++group) T::store_int(target + group * kBytes + pair * 4, square[group]);
      }
    }
    const std::size_t lines = args.line_offset + static_cast<std::size_t>(first / kLanes * kLines * 64 + first % kLanes * 4);
    for (int row = 0; row < kBlockRows; row += T::kWidth) {
      const std::byte* source = args.rows + args.row_bytes * static_cast<std::size_t>(row) + lines;
      for (int line = 0; line < kLines; ++line) {
#pragma GCC unroll 16
        for (int i = 0; i < T::kWidth; ++i) square[i] = T::load_int(source + args.row_bytes * static_cast<std::size_t>(i) + line * 64);
        transpose_words<T>(square);
        for (int group = 0; group < groups; ++group) T::store_int(target + group * kBytes + kScales + line * 128 + row * 4, square[group]);
      }
    }
  }
}

constexpr int kRowsAhead = 32;  // prefetched in front of the row that is read

// Both halves of a word.
template <class T>
MOEGRAFT_INLINE typename T::I halves(typename T::I low, typename T::I high) {
  return T::or_int(T::and_words(low, 0xffff), T::template shifted<16>(high));
}
template <class T>
MOEGRAFT_INLINE typename T::I same_halves(typename T::F value) {
  return halves<T>(T::round_to_int(value), T::round_to_int(value));
}
template <class T>
MOEGRAFT_INLINE typename T::I upper_halves(typename T::I low, typename T::I high) {
  return T::or_int(T::template shifted<-16>(low), T::and_words(high, static_cast<int>(0xffff0000u)));
}

// The largest scale of 32 neurons in each lane; a NaN stays one. Each neuron's scale becomes a share of it, in units of 2^-15.
template <class T>
inline typename T::F common_scale(const std::byte* scales, std::size_t row_bytes, typename T::I (&shares)[kGroup]) {
  using F = typename T::F;
  F all[kGroup], largest = T::zero(), not_finite = T::zero();
  for (int neuron = 0; neuron < kGroup; ++neuron) {
    all[neuron] = T::load_f16(reinterpret_cast<const std::uint16_t*>(scales + row_bytes * static_cast<std::size_t>(neuron)));
    largest = T::max(T::abs(all[neuron]), largest);
    not_finite = T::fma(all[neuron], T::zero(), not_finite);
  }
  const F factor = T::div(T::set(32767.0f), T::max(largest, T::set(1e-30f)));
  for (int neuron = 0; neuron < kGroup; ++neuron) shares[neuron] = same_halves<T>(T::mul(all[neuron], factor));
  return T::add(largest, not_finite);
}

// Writes four columns of 32 neurons, whose products of share and code, times 256, are in `first` (columns 0 and 2) and `second` (1 and 3),
// with one scale of each column that makes use of 8 bits, but for the columns that are less than half of the largest.
template <class T>
inline void store_columns(const typename T::I (&first)[kGroup], const typename T::I (&second)[kGroup], typename T::F scale,
                          std::byte* blocks, std::size_t block_bytes, int lane) {
  using F = typename T::F;
  using I = typename T::I;
  const auto store = [&](const I(&products)[kGroup], int column) __attribute__((always_inline)) {
    I largest = T::zero_int();
    for (const I& product : products) largest = T::max_shorts(largest, T::abs_shorts(product));
    const auto gain = [](I most) { return T::div(T::set(127.0f * 32768.0f), T::max(T::to_float(most), T::set(16384.0f))); };
    const I low = T::round_to_int(gain(T::and_words(largest, 0xffff))), high = T::round_to_int(gain(T::template shifted<-16>(largest)));
    const I gains = halves<T>(low, high);
    std::byte* const lower = blocks + column % 2 * 64;
    std::byte* const upper = lower + block_bytes;
    const auto store_scale = [&](std::byte* block, I of) {
      const F value = T::div(T::mul(scale, T::set(128.0f * 32768.0f / 32767.0f)), T::to_float(of));
      T::store_f16(reinterpret_cast<std::uint16_t*>(block + column % 2 * kLanes * 2 + lane * 2), value);
    };
    store_scale(blocks, low);
    store_scale(blocks + block_bytes, high);
    for (int four = 0; four < kGroup; four += 4) {
      const auto codes = [&](int i) {
        const I even = T::scale_shorts(products[four + i], gains), odd = T::scale_shorts(products[four + i + 1], gains);
        return T::or_int(T::and_words(even, 0x00ff00ff), T::mul_shorts(odd, T::all_shorts(256)));
      };
      const I two = codes(0), next = codes(2);
      const std::size_t at = static_cast<std::size_t>(kScaleBytes + four / 4 * 128 + lane * 4);
      T::store_int(lower + at, T::minus_bytes(halves<T>(two, next), -128));
      T::store_int(upper + at, T::minus_bytes(upper_halves<T>(two, next), -128));
    }
  };
  store(first, 0);
  store(second, 1);
}

template <class T, Format Kind>
void down_blocks(const DownBlocksArgs& args) {
  using I = typename T::I;
  constexpr int kBlocks = down_blocks_at_once(Kind), kLines = 2 * kBlocks / columns_per_line(Kind);
  for (int lane = 0; lane < kLanes; lane += T::kWidth) {
    const auto load = [&](int neuron, int line) {
      const std::byte* const words = args.rows + args.row_bytes * static_cast<std::size_t>(neuron) + args.lines + line * 64;
      if (lane == 0) __builtin_prefetch(words + args.row_bytes * kRowsAhead, 0, 2);
      return T::load_int(words + lane * 4);
    };
    if constexpr (is_coded(Kind)) {
      for (int group = 0; group < args.groups; ++group) {
        I shares[kGroup], first[kGroup], second[kGroup];
        const std::byte* const scales = args.rows + args.row_bytes * static_cast<std::size_t>(group * kGroup) + args.scales + lane * 2;
        const typename T::F scale = common_scale<T>(scales, args.row_bytes, shares);
        std::byte* target = args.blocks + static_cast<std::size_t>(group * (kScaleBytes + kGroup * kBlockRows));
        for (int line = 0; line < kLines; ++line) {
          const auto columns = [&](auto codes_of) __attribute__((always_inline)) {  // four, from signed bytes that use the upper bits
#pragma GCC unroll 4
            for (int neuron = 0; neuron < kGroup; ++neuron) {
              const I codes = codes_of(load(group * kGroup + neuron, line));
              first[neuron] = T::scale_shorts(T::mul_shorts(codes, T::all_shorts(256)), shares[neuron]);
              second[neuron] = T::scale_shorts(T::and_words(codes, static_cast<int>(0xff00ff00u)), shares[neuron]);
            }
            store_columns<T>(first, second, scale, target, args.block_bytes, lane);
            target += 2 * args.block_bytes;
          };
          if constexpr (Kind == Format::kInt8) {
            columns([](I words) { return T::minus_bytes(words, 128); });
          } else {
            columns([](I words) { return T::minus_bytes(T::and_bytes(T::template shifted<4>(words), 0xf0), 128); });
            columns([](I words) { return T::minus_bytes(T::and_bytes(words, 0xf0), 128); });
          }
        }
      }
    } else if constexpr (Kind == Format::kFloat32) {
      for (int neuron = 0; neuron < args.groups * kGroup; ++neuron)
        for (int line = 0; line < kLines; ++line)
          T::store_int(args.blocks + args.block_bytes * static_cast<std::size_t>(line / 2) + (neuron * 2 + line % 2) * 64 + lane * 4,
                       load(neuron, line));
    } else {
      for (int neuron = 0; neuron < args.groups * kGroup; neuron += 2)
        for (int line = 0; line < kLines; ++line) {
          std::byte* const target = args.blocks + args.block_bytes * static_cast<std::size_t>(line) + neuron * 64 + lane * 4;
          const I even = load(neuron, line), odd = load(neuron + 1, line);
          T::store_int(target, halves<T>(even, odd));
          T::store_int(target + 64, upper_halves<T>(even, odd));
        }
    }
  }
}

template <class T, Format Kind>
constexpr float dense_share() {
  if (Kind == Format::kFloat16) return kNeverDense;  // its lines have halves of words
  return is_coded(Kind) || (Kind == Format::kBFloat16Dot && T::kHasBf16) ? T::kDenseDots : T::kDenseFloats;
}

template <class T, Format Kind>
void add_blocks(SparseKernels& kernels) {
  kernels.dense_share[static_cast<int>(Kind)] = dense_share<T, Kind>();
  if constexpr (dense_share<T, Kind>() < 1.0f) {
    kernels.up_block[static_cast<int>(Kind)] = up_block<T, Kind>;
    kernels.down_blocks[static_cast<int>(Kind)] = down_blocks<T, Kind>;
  }
}

template <class T, Format... Kinds>
void add_row_products(SparseKernels& kernels) {
  (add_blocks<T, Kinds>(kernels), ...);
  ((kernels.dot_rows[static_cast<int>(Kinds)] = dot_rows<T, Kinds>), ...);
}

template <class T, Format... Kinds>
void add_row_sums(SparseKernels& kernels) {
  ((kernels.in_pairs[static_cast<int>(Kinds)] = in_pairs<T, Kinds>()), ...);
  ((kernels.add_rows[static_cast<int>(Kinds)] = add_rows<T, Kinds>), ...);
  ((kernels.widen_rows[static_cast<int>(Kinds)] = widen_rows<T, Kinds>), ...);
  ((kernels.add_items[static_cast<int>(Kinds)] = add_items<T, in_pairs<T, Kinds>()>), ...);
  ((kernels.add_picked[static_cast<int>(Kinds)] = add_picked<T, in_pairs<T, Kinds>()>), ...);
}

template <class T, Format... Kinds>
void add_sparse(SparseKernels& kernels) {
  kernels.dot_rows_at_once = T::kDotRows;
  add_row_products<T, Kinds...>(kernels);
  add_row_sums<T, Kinds..., Format::kInt8, Format::kInt4>(kernels);
  kernels.reached = reached_bits;
  kernels.finish = finish_neurons;
}

}  // namespace

}  // namespace moegraft
