// Several tiles of tokens times a block whose codes are expanded to 8 bits first, once for all tiles: for formats whose codes take long to
// put together, with the result of the tiles to the last bit. Formats of grids have no other kernel. Templates over the traits of
// vector_kernels.h, whose rules apply here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "formats/coded_formats.h"
#include "simd/kernels.h"
#include "simd/vector_tiles.h"

namespace moegraft {
namespace {

struct PanelGroup {
  alignas(64) std::uint32_t codes[kGroup / 4][kBlockRows];  // unsigned
  float scale[2][kBlockRows];  // [part]
  float minimum[2][kBlockRows];
};
constexpr int kPanelGroups = 8;  // columns / 32 that stay in L1 with the activations of a tile
struct Panel {
  PanelGroup groups[kPanelGroups];
};
static_assert(sizeof(Panel) <= sizeof ExpandedWeights::memory);

// Expands some groups of a packed block of a grid's format, for all instruction sets without a better way.
template <class T, class Coded, class = void>
struct GridExpansion {
  static void expand(const std::byte* block, int first, int count, PanelGroup* out) {
    for (int row = 0; row < kBlockRows; ++row) {
      const PackedRow<Coded> packed(block, row);
      for (int group = 0; group < count; ++group) {
        GroupCodes codes;
        const GroupScales scales = packed.group(first + group, codes);
        for (int four = 0; four < kGroup / 4; ++four) std::memcpy(&out[group].codes[four][row], codes + 4 * four, 4);
        for (int part = 0; part < Coded::kParts; ++part) out[group].scale[part][row] = scales.scale[part];
      }
    }
  }
};

// A byte of TQ1_0 has digits in base 3 of five columns, which are 32 or 16 apart, or of four columns that are 4 apart.
template <class T>
struct GridExpansion<T, Tq10> {
  static_assert(Derived<Tq10>::kGroups == kPanelGroups, "a panel is one block");
  static void expand(const std::byte* block, int, int, PanelGroup* out) {
    for (int row = 0; row < kBlockRows; row += T::kWidth) {
      for (int group = 0; group < kPanelGroups; ++group) T::store(&out[group].scale[0][row], halves_of<T>(block, 0, row));
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

// Expands some groups of one packed block.
template <class T, Format Kind>
inline void expand_to_bytes(const std::byte* block, int first, int count, PanelGroup* out) {
  using Coded = CodedOf<Kind>;
  if constexpr (kIsGrid<Coded>) {
    GridExpansion<T, Coded>::expand(block, first, count, out);
  } else {
    const typename T::I table = table_of<T, Coded>();
    for (int v = 0; v < T::kVectors; ++v) {
      const int row = v * T::kWidth;
      typename Coded::template Reader<T> reader;
      reader.block(block, row);
      const std::byte* lines = block + Derived<Coded>::kLinesOffset + first * Derived<Coded>::kLinesBytes + row * 4;
      for (int group = 0; group < count; ++group, lines += Derived<Coded>::kLinesBytes) {
        PanelGroup& target = out[group];
        if constexpr (kHasFactors<Coded>) {
          static_assert(Derived<Coded>::kGroups == kPanelGroups, "a panel is one block");
          reader.factors(first + group);
          T::store(target.scale[0] + row, reader.of_scales);
        } else {
          reader.group(first + group);
          for (int part = 0; part < Coded::kParts; ++part) T::store(&target.scale[part][row], reader.scale[part]);
        }
        if constexpr (Coded::kMinimum)
          for (int part = 0; part < Coded::kParts; ++part) T::store(&target.minimum[part][row], reader.minimum[part]);
        const auto step = [&](auto index) {
          constexpr int kStep = decltype(index)::value;
          typename T::I codes[2];
          load_codes<T, CodeFormOf<Coded>, kStep>(lines, table, codes[0], codes[1]);
          if constexpr (kHasFactors<Coded>) {
            const typename T::I factor = reader.factor[kStep / 2];
            for (auto& four : codes) four = T::mul_shorts(four, T::or_int(factor, T::template shifted<16>(factor)));
          }
          T::store_int(&target.codes[2 * kStep][row], codes[0]);
          T::store_int(&target.codes[2 * kStep + 1][row], codes[1]);
        };
        step(std::integral_constant<int, 0>());
        step(std::integral_constant<int, 1>());
        step(std::integral_constant<int, 2>());
        step(std::integral_constant<int, 3>());
      }
    }
  }
}

// What the product of a panel depends on.
template <int Parts, int Scales, bool Minimum, bool Small>
struct PanelForm {
  static_assert(Scales == 1 || (Parts == 2 && !Minimum), "no format has other combinations");
  static constexpr int kParts = Parts, kScales = Scales;
  static constexpr bool kMinimum = Minimum, kSmall = Small;
};
template <class Coded>
constexpr int most_panel_code() {
  if constexpr (kHasFactors<Coded>) return Derived<Coded>::kMostCode * Coded::kMostFactor;
  else return Derived<Coded>::kMostCode;
}
template <class Coded>
using PanelFormOf =
    PanelForm<Coded::kParts, kHasFactors<Coded> ? 1 : Coded::kParts, Coded::kMinimum, most_panel_code<Coded>() <= kMostSmallCode>;

template <class T, class Form, int V, int N>
inline void multiply_panel(const PanelGroup* group, int groups, const std::uint32_t* words, bool adds, float* out, int first_vector) {
  constexpr int kParts = Form::kParts, kScales = Form::kScales, kWords = 1 + kParts + kGroup / 4, kFours = kGroup / 4 / kScales;
  const int row = first_vector * T::kWidth;
  constexpr bool kFactors = kParts > kScales;  // of a scale for all groups, which are one block
  typename T::F sums[N][V] = {};
  [[maybe_unused]] typename T::F of_block[N][V] = {};
  if (adds) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[n][v] = T::load(out + n * kBlockRows + row + v * T::kWidth);
  }
  [[maybe_unused]] const PanelGroup* of_scales = group;
  for (const PanelGroup* end = group + groups; group < end; ++group, words += kWords * N) {
    [[maybe_unused]] typename T::F partial[N][V];  // of the first of two parts
#pragma GCC unroll 2
    for (int part = 0; part < kScales; ++part) {
      typename T::I dots[N][V];
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) dots[n][v] = Form::kMinimum ? T::zero_int() : T::broadcast_int(words + n * kWords + 1 + part);
#pragma GCC unroll 8
      for (int four = part * kFours; four < (part + 1) * kFours; ++four) {
        typename T::I weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) weights[v] = T::load_int(&group->codes[four][row + v * T::kWidth]);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const typename T::I values = T::broadcast_int(words + n * kWords + 1 + kParts + four);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v)
            dots[n][v] = Form::kSmall ? T::dot_small(dots[n][v], weights[v], values) : T::dot_int8(dots[n][v], weights[v], values);
        }
      }
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const std::uint32_t* record = words + n * kWords;
        const typename T::F share = T::broadcast_float(record);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const int at = row + v * T::kWidth;
          const typename T::F sum = T::to_float(dots[n][v]);
          [[maybe_unused]] const typename T::F scale = T::load(&group->scale[part][at]);
          if constexpr (kScales == 2) {
            if (part == 0) partial[n][v] = T::mul(sum, scale);
            else sums[n][v] = T::fma(T::fma(sum, scale, partial[n][v]), share, sums[n][v]);
          } else {
            if constexpr (Form::kMinimum) {
#pragma GCC unroll 2
              for (int i = 0; i < kParts; ++i)
                sums[n][v] = T::fma(T::load(&group->minimum[i][at]), T::broadcast_float(record + 1 + i), sums[n][v]);
            }
            if constexpr (kFactors) of_block[n][v] = T::fma(sum, share, of_block[n][v]);
            else sums[n][v] = T::fma(sum, T::mul(scale, share), sums[n][v]);
          }
        }
      }
    }
  }
  if constexpr (kFactors) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[n][v] = T::fma(of_block[n][v], T::load(&of_scales->scale[0][row + v * T::kWidth]), sums[n][v]);
  }
  store_tile<T, V, N>(sums, out, first_vector);
}

template <class T, class Form, int N = T::kIntegerTokens>
void multiply_panel_of(int tokens, const PanelGroup* groups, int count, const std::uint32_t* words, bool adds, float* out) {
  if constexpr (N > 1) {
    if (tokens != N) return multiply_panel_of<T, Form, N - 1>(tokens, groups, count, words, adds, out);
  }
  constexpr int V = vectors_at_once<T, N>();
  for (int first = 0; first < T::kVectors; first += V) multiply_panel<T, Form, V, N>(groups, count, words, adds, out, first);
}

template <class T, Format Kind>
void panel_tiles(const PanelArgs& args, Panel& panel) {
  using Form = PanelFormOf<CodedOf<Kind>>;
  constexpr int kGroups = Derived<CodedOf<Kind>>::kGroups, kMost = tile_limit<T, Kind>();
  const int tiles = (args.tokens + kMost - 1) / kMost, base = args.tokens / tiles, longer = args.tokens % tiles;
  const int parts = (args.groups + kPanelGroups - 1) / kPanelGroups * tiles, lines = (args.ahead_lines + parts - 1) / parts;
  const std::byte* ahead = args.ahead;
  for (int first = 0; first < args.groups; first += kPanelGroups) {
    const int groups = args.groups - first < kPanelGroups ? args.groups - first : kPanelGroups;
    for (int done = 0; done < groups;) {
      const int index = (first + done) % kGroups, left = groups - done, count = kGroups - index < left ? kGroups - index : left;
      const std::byte* block = args.block + static_cast<std::size_t>((first + done) / kGroups) * Derived<CodedOf<Kind>>::kBytes;
      expand_to_bytes<T, Kind>(block, index, count, panel.groups + done);
      done += count;
    }
    const std::uint32_t* words = args.records;
    float* out = args.out;
    for (int tile = 0; tile < tiles; ++tile) {
      const int tokens = base + (tile < longer ? 1 : 0);
      for (int line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
      multiply_panel_of<T, Form>(tokens, panel.groups, groups,
                                 words + static_cast<std::size_t>(first) * static_cast<std::size_t>(tokens) * words_per_group(Kind),
                                 first > 0, out);
      words += static_cast<std::size_t>(args.groups) * static_cast<std::size_t>(tokens) * words_per_group(Kind);
      out += tokens * kBlockRows;
    }
  }
}

template <class T, Format Kind>
void panel(const PanelArgs& args) {
  args.expanded->block = nullptr;  // of the matrix kernel
  panel_tiles<T, Kind>(args, *reinterpret_cast<Panel*>(args.expanded->memory));
}

// A single tile of a format without another kernel.
template <class T, Format Kind>
void panel_tile(const TileArgs& args) {
  Panel memory;
  const int lines = static_cast<int>((args.ahead_stride * static_cast<std::size_t>(args.groups) + 63) / 64);
  panel_tiles<T, Kind>({args.block, args.records, args.groups, args.tokens, args.out, args.ahead, lines, nullptr}, memory);
}

// Whether codes take long to put together.
template <Format Kind>
constexpr bool needs_panel() {
  using Coded = CodedOf<Kind>;
  return kIsGrid<Coded> || (!kIsFloat8<Coded> && (Coded::kHighBits > 0 || Coded::kParts > 1));
}

}  // namespace
}  // namespace moegraft
