// The kernels of every vector instruction set, as templates over a traits struct that the file of an instruction set defines before
// including this.
//
// These headers are compiled several times with different flags, and the linker keeps an arbitrary copy of an inline function with
// external linkage. So everything is in an anonymous namespace and no std:: template is called.
//
// A traits struct T has: F and I, vectors of kWidth floats and of as many 32-bit integers; kVectors of them hold the 32 rows of a block
// (with more than kWholeTokens tokens a block is computed in two halves, because registers are few); and the operations used below.
#pragma once

#include <type_traits>

#include "formats/coded_formats.h"
#include "simd/elementwise.h"
#include "simd/kernels.h"
#include "simd/vector_activations.h"
#include "simd/vector_attention.h"
#include "simd/vector_grids.h"
#include "simd/vector_sparse.h"
#include "simd/vector_tiles.h"

namespace moegraft {
namespace {

template <class T, Format Kind, int V, int N>
inline void tile_part(const TileArgs& args, int first_vector) {
  if constexpr (Kind == Format::kFloat32 || Kind == Format::kFloat16) tile_columns<T, Kind, V, N>(args, first_vector);
  else if constexpr (Kind == Format::kBFloat16 || Kind == Format::kBFloat16Dot) tile_pairs<T, Kind, V, N>(args, first_vector);
  else tile_float8<T, V, N>(args, kFloat8Blocks<CodedOf<Kind>>, first_vector);
}

template <class T, Format Kind, int N>
void tile_of(const TileArgs& args) {
  constexpr int V = vectors_at_once<T, N>();
  for (int first = 0; first < T::kVectors; first += V) tile_part<T, Kind, V, N>(args, first);
}

// Calls the tile that is compiled for this number of tokens, or for one more.
template <class T, Format Kind, int N = tile_limit<T, Kind>()>
void tile(const TileArgs& args) {
  if constexpr (N == 1) {
    tile_of<T, Kind, 1>(args);
  } else {
    if (args.tokens > fewer(N)) return tile_of<T, Kind, N>(args);
    tile<T, Kind, fewer(N)>(args);
  }
}

template <class T, Format... Kinds>
void add_floats(Kernels& kernels) {
  static_assert(T::kFloatTokens % kTileStep == 0, "Tiling divides by steps");
  ((kernels.max_tokens[static_cast<int>(Kinds)] = T::kFloatTokens), ...);
  ((kernels.tile[static_cast<int>(Kinds)] = tile<T, Kinds>), ...);
}

template <class T, int... I>
void add_encodings(Kernels& kernels, std::integer_sequence<int, I...>) {
  for (auto& encode : kernels.encode) encode = encode_float;
  kernels.encode[static_cast<int>(Format::kBFloat16Dot)] = encode_bf16<T>;
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    if constexpr (has_codes(kKind)) kernels.encode[static_cast<int>(kKind)] = encode_coded<T, kKind>;
  };
  (add(std::integral_constant<int, I>()), ...);
}

// Coded formats whose products are of integers, or the others.
template <class T, bool Integers, int... I>
void add_coded(Kernels& kernels, std::integer_sequence<int, I...>) {
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    constexpr int kIndex = static_cast<int>(kKind);
    if constexpr (has_codes(kKind) == Integers) {
      static_assert(tile_limit<T, kKind>() % kTileStep == 0, "Tiling divides by steps");
      kernels.max_tokens[kIndex] = tile_limit<T, kKind>();
      // Expansion by scalar code gains nothing from wider vectors.
      if constexpr (kIsGrid<CodedOf<kKind>> && (T::kWidth == 8 || std::is_same_v<CodedOf<kKind>, Tq10>))
        kernels.tile[kIndex] = tile_grid<T, kKind>;
      else if constexpr (!kIsGrid<CodedOf<kKind>> && Integers) kernels.tile[kIndex] = tile_coded<T, kKind>;
      else if constexpr (!kIsGrid<CodedOf<kKind>>) kernels.tile[kIndex] = tile<T, kKind>;
    }
  };
  (add(std::integral_constant<int, I>()), ...);
}

// What depends on the products of integers: an instruction set that adds these takes everything else from the one before it.
template <class T>
void add_integer_products(Kernels& kernels) {
  add_coded<T, true>(kernels, CodedIndexes());
  add_row_products<T, Format::kInt8, Format::kInt4>(kernels.sparse);
}

// What depends on the products of pairs of bfloat16.
template <class T>
void add_pair_products(Kernels& kernels) {
  using K = Format;
  add_floats<T, K::kBFloat16Dot>(kernels);
  add_row_products<T, K::kBFloat16Dot>(kernels.sparse);
  add_row_sums<T, K::kBFloat16Dot, K::kInt8, K::kInt4>(kernels.sparse);
  add_pair_attention<T>(kernels.attention);
}

// The kernels of products of floats and of attention, and those on activations whose time shows beside them.
template <class T>
void add_float_products(Kernels& kernels) {
  using K = Format;
  add_floats<T, K::kFloat32, K::kFloat16, K::kBFloat16, K::kBFloat16Dot>(kernels);
  kernels.gate = gate<T>;
  add_sparse<T, K::kFloat32, K::kFloat16, K::kBFloat16, K::kBFloat16Dot>(kernels.sparse);
  kernels.accumulate = accumulate<T>;
  kernels.attention = vector_attention<T>();
  add_coded<T, false>(kernels, CodedIndexes());
  add_encodings<T>(kernels, CodedIndexes());
  kernels.widen = widen<T>;
  kernels.narrow = narrow<T>;
}

// All kernels, of the first instruction set of a machine.
template <class T>
Kernels vector_kernels(const char* isa) {
  Kernels kernels{};
  kernels.isa = isa;
  add_float_products<T>(kernels);
  add_integer_products<T>(kernels);
  kernels.act = act<T>;
  kernels.norm = norm<T>;
  kernels.elementwise = elementwise;
  return kernels;
}

}  // namespace
}  // namespace moegraft
