// Tiles of formats whose codes are indexes into a grid, or numbers of several columns: they are expanded to codes of 8 bits, a block at a
// time. See vector_kernels.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/coded_formats.h"
#include "simd/vector_tiles.h"

namespace moegraft {
namespace {

struct ExpandedGroup {
  alignas(64) std::uint32_t codes[kGroup / 4][kBlockRows];  // unsigned
  float scale[2][kBlockRows];  // [part]
};
constexpr int kGridGroups = 8;  // of every block

// Calls `use` with the index of each word of a group, the points of its four columns, and bytes of ones where the bits of columns are set.
template <class T, class Coded, class Use>
MOEGRAFT_INLINE void each_word_of_points(const PackedGroup<T, Coded>& packed, const Use& use) {
  using I = typename T::I;
  const I signs = Coded::template signs<T>(packed);
#pragma GCC unroll 4
  for (int eight = 0; eight < 4; ++eight) {
    I first, second;
    if constexpr (Coded::kPointColumns == 8) {
      T::load_points(Coded::kBytes.bytes, Coded::template index<T>(packed, eight), first, second);
    } else {
      first = T::load_half_points(Coded::kBytes.bytes, Coded::template index<T>(packed, 2 * eight));
      second = T::load_half_points(Coded::kBytes.bytes, Coded::template index<T>(packed, 2 * eight + 1));
    }
    use(2 * eight, first, T::spread_bits(signs, 2 * eight));
    use(2 * eight + 1, second, T::spread_bits(signs, 2 * eight + 1));
  }
}
template <class T>
MOEGRAFT_INLINE typename T::I shifted_points(typename T::I points, typename T::I down) {
  return T::minus_bytes(T::add_bytes(points, T::and_bytes(down, 254)), -2);
}

// For all instruction sets without a better way: points are loaded one by one, and signed for a vector of rows.
template <class T, class Coded, class = void>
struct GridExpansion {
  using I = typename T::I;
  static void expand(const std::byte* block, ExpandedGroup* out) {
    for (int row = 0; row < kBlockRows; row += T::kWidth)
      for (int group = 0; group < kGridGroups; ++group) {
        const PackedGroup<T, Coded> packed{block, group, row};
        typename T::F scales[2];
        Coded::template scales<T>(packed, scales);
        for (int part = 0; part < Coded::kParts; ++part) T::store(&out[group].scale[part][row], scales[part]);
        each_word_of_points<T>(packed, [&](int word, I points, I negative) {
          if constexpr (kIsShifted<Coded>) points = shifted_points<T>(points, negative);
          else points = T::minus_bytes(T::negated(points, negative), -Coded::kOffset);
          T::store_int(&out[group].codes[word][row], points);
        });
      }
  }
};

// A tile of one token multiplies points where they are loaded, and with the signs of activations changed instead of theirs.
template <class T, Format Kind>
void tile_points(const TileArgs& args) {
  using Coded = CodedOf<Kind>;
  using F = typename T::F;
  using I = typename T::I;
  F sums[1][T::kVectors];
  for (F& sum : sums[0]) sum = T::zero();
  const std::byte* block = args.block;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += words_per_group(Kind)) {
    prefetch_ahead(args, group);
    const F share = T::broadcast_float(words);
#pragma GCC unroll 1
    for (int v = 0; v < T::kVectors; ++v) {
      const PackedGroup<T, Coded> packed{block, group % kGridGroups, v * T::kWidth};
      F scales[2];
      Coded::template scales<T>(packed, scales);
      I dots[Coded::kParts];
      for (int part = 0; part < Coded::kParts; ++part) dots[part] = kIsShifted<Coded> ? T::broadcast_int(words + 1 + part) : T::zero_int();
      each_word_of_points<T>(packed, [&](int word, I points, I negative) {
        I four = T::broadcast_int(words + first_code_word(Kind) + word), &sum = dots[word / (kGroup / 4 / Coded::kParts)];
        if constexpr (kIsShifted<Coded>) points = shifted_points<T>(points, negative);
        else four = T::negated(four, negative);
        sum = T::dot_small(sum, points, four);
      });
      const F first = T::to_float(dots[0]);
      if constexpr (Coded::kParts == 1) {
        sums[0][v] = T::fma(first, T::mul(scales[0], share), sums[0][v]);
      } else {
        sums[0][v] = T::fma(T::fma(T::to_float(dots[1]), scales[1], T::mul(first, scales[0])), share, sums[0][v]);
      }
    }
    if (group % kGridGroups == kGridGroups - 1) block += Derived<Coded>::kBytes;
  }
  store_tile<T, T::kVectors, 1>(sums, args.out, 0);
}

// A byte of TQ1_0 has digits in base 3 of five columns, which are 32 or 16 apart, or of four columns that are 4 apart.
template <class T>
struct GridExpansion<T, Tq10> {
  static void expand(const std::byte* block, ExpandedGroup* out) {
    for (int row = 0; row < kBlockRows; row += T::kWidth) {
      for (int group = 0; group < kGridGroups; ++group) T::store(&out[group].scale[0][row], halves_of<T>(block, 0, row));
      const auto digits = [&](int before, int column, int count, int apart) {
        typename T::I rest = T::load_int(field_at<4>(block, before, row));
        for (int end = column + count * apart; column < end; column += apart) {
          T::store_int(&out[column / kGroup].codes[column % kGroup / 4][row], T::first_digits(rest));
          rest = T::add_bytes(rest, T::add_bytes(rest, rest));
        }
      };
      for (int byte = 0; byte < 32; byte += 4) digits(6 + byte, byte, 5, 32);
      for (int byte = 0; byte < 16; byte += 4) digits(38 + byte, 160 + byte, 5, 16);
      digits(2, 240, 4, 4);
    }
  }
};

// sums (tokens, 32) += the products of the groups of a block.
template <class T, class Form>
void add_expanded(const TileArgs& args, const ExpandedGroup* expanded, int first) {
  constexpr int V = kGroupVectors<T>, kWords = 1 + Form::kParts + kGroup / 4;
  const std::uint32_t* words = args.records + static_cast<std::size_t>(first) * kWords * static_cast<std::size_t>(args.tokens);
  for (int index = 0; index < kGridGroups; ++index, words += kWords * args.tokens) {
    prefetch_ahead(args, first + index);
    for (int vector = 0; vector < T::kVectors; vector += V) {
      GroupOperands<T> group;
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const int row = (vector + v) * T::kWidth;
#pragma GCC unroll 8
        for (int four = 0; four < kGroup / 4; ++four) group.codes[four][v] = T::load_int(&expanded[index].codes[four][row]);
#pragma GCC unroll 2
        for (int part = 0; part < Form::kParts; ++part) group.scale[part][v] = T::load(&expanded[index].scale[part][row]);
      }
      add_products<T, Form>(group, words, args.tokens, args.out + vector * T::kWidth);
    }
  }
}

template <class T, Format Kind>
void tile_grid(const TileArgs& args) {
  using Coded = CodedOf<Kind>;
  static_assert(Derived<Coded>::kGroups == kGridGroups && products_of<T, Coded>() != Products::kSigned, "no format has others");
  if constexpr (kHasPoints<Coded> && T::kWidth == 8)
    if (args.tokens == 1) return tile_points<T, Kind>(args);
  ExpandedGroup groups[kGridGroups];
  const std::byte* block = args.block;
  clear_sums(args);
  for (int first = 0; first < args.groups; first += kGridGroups, block += Derived<Coded>::kBytes) {
    GridExpansion<T, Coded>::expand(block, groups);
    add_expanded<T, ProductFormOf<T, Coded>>(args, groups, first);
  }
}

}  // namespace
}  // namespace moegraft
