// Several tiles of tokens times a block whose codes are expanded to 8 bits first, once for all tiles: for formats whose codes take long to put
// together, with the result of the tiles to the last bit. Formats of grids have no other kernel. Templates over the traits of
// vector_kernels.h, whose rules apply here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

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
        reader.group(first + group);
        for (int part = 0; part < Coded::kParts; ++part) {
          T::store(&target.scale[part][row], reader.scale[part]);
          if constexpr (Coded::kMinimum) T::store(&target.minimum[part][row], reader.minimum[part]);
        }
        const auto step = [&](auto index) {
          typename T::I codes[2];
          load_codes<T, Coded, decltype(index)::value>(lines, table, codes[0], codes[1]);
          T::store_int(&target.codes[2 * index][row], codes[0]);
          T::store_int(&target.codes[2 * index + 1][row], codes[1]);
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
template <Format Kind>
struct PanelForm {
  static constexpr int kParts = CodedOf<Kind>::kParts, kWords = words_per_group(Kind);
  static constexpr bool kMinimum = CodedOf<Kind>::kMinimum, kSmall = Derived<CodedOf<Kind>>::kMostCode <= kMostSmallCode;
};

template <class T, int Parts, bool Minimum, bool Small, int V, int N>
inline void multiply_panel(const PanelGroup* group, int groups, const std::uint32_t* words, bool adds, float* out, int first_vector) {
  constexpr int kWords = 1 + Parts + kGroup / 4;
  const int row = first_vector * T::kWidth;
  typename T::F sums[N][V] = {};
  if (adds) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[n][v] = T::load(out + n * kBlockRows + row + v * T::kWidth);
  }
  for (const PanelGroup* end = group + groups; group < end; ++group, words += kWords * N) {
#pragma GCC unroll 2
    for (int part = 0; part < Parts; ++part) {
      typename T::I dots[N][V];
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) dots[n][v] = Minimum ? T::zero_int() : T::broadcast_int(words + n * kWords + 1 + part);
#pragma GCC unroll 8
      for (int four = part * (8 / Parts); four < (part + 1) * (8 / Parts); ++four) {
        typename T::I weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) weights[v] = T::load_int(&group->codes[four][row + v * T::kWidth]);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const typename T::I values = T::broadcast_int(words + n * kWords + 1 + Parts + four);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v)
            dots[n][v] = Small ? T::dot_small(dots[n][v], weights[v], values) : T::dot_int8(dots[n][v], weights[v], values);
        }
      }
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const typename T::F share = T::broadcast_float(words + n * kWords);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const int at = row + v * T::kWidth;
          if constexpr (Minimum)
            sums[n][v] = T::fma(T::load(&group->minimum[part][at]), T::broadcast_float(words + n * kWords + 1 + part), sums[n][v]);
          sums[n][v] = T::fma(T::to_float(dots[n][v]), T::mul(T::load(&group->scale[part][at]), share), sums[n][v]);
        }
      }
    }
  }
  store_tile<T, V, N>(sums, out, first_vector);
}

template <class T, int Parts, bool Minimum, bool Small, int N = T::kIntegerTokens>
void multiply_panel_of(int tokens, const PanelGroup* groups, int count, const std::uint32_t* words, bool adds, float* out) {
  if constexpr (N > 1) {
    if (tokens != N) return multiply_panel_of<T, Parts, Minimum, Small, N - 1>(tokens, groups, count, words, adds, out);
  }
  if constexpr (N <= T::kWholeTokens) {
    multiply_panel<T, Parts, Minimum, Small, T::kVectors, N>(groups, count, words, adds, out, 0);
  } else {
    multiply_panel<T, Parts, Minimum, Small, T::kVectors / 2, N>(groups, count, words, adds, out, 0);
    multiply_panel<T, Parts, Minimum, Small, T::kVectors / 2, N>(groups, count, words, adds, out, T::kVectors / 2);
  }
}

template <class T, Format Kind>
void panel_tiles(const PanelArgs& args, Panel& panel) {
  using Form = PanelForm<Kind>;
  constexpr int kGroups = Derived<CodedOf<Kind>>::kGroups, kMost = T::kIntegerTokens;
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
      multiply_panel_of<T, Form::kParts, Form::kMinimum, Form::kSmall>(
          tokens, panel.groups, groups, words + static_cast<std::size_t>(first) * static_cast<std::size_t>(tokens) * Form::kWords,
          first > 0, out);
      words += static_cast<std::size_t>(args.groups) * static_cast<std::size_t>(tokens) * Form::kWords;
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
