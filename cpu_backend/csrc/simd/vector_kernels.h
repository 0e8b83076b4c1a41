// The kernels of every vector instruction set, as templates over a traits struct that the file of an instruction set defines before
// including this.
//
// These headers are compiled several times with different flags, and the linker keeps an arbitrary copy of an inline function with
// external linkage. So everything is in an anonymous namespace and no std:: template is called.
//
// A traits struct T has: F and I, vectors of kWidth floats and of as many 32-bit integers; kVectors of them hold the 32 rows of a block
// (with more than kWholeTokens tokens a block is computed in two halves, because registers are few); and the operations used below.
#pragma once

#include "simd/elementwise.h"
#include "simd/kernels.h"
#include "simd/vector_activations.h"
#include "simd/vector_attention.h"
#include "simd/vector_sparse.h"
#include "simd/vector_tiles.h"

namespace moegraft {
namespace {

template <class T, Format Kind, int V, int N>
inline void tile_part(const TileArgs& args, int first_vector) {
  if constexpr (Kind == Format::kFloat32 || Kind == Format::kFloat16) tile_columns<T, Kind, V, N>(args, first_vector);
  else if constexpr (Kind == Format::kBFloat16 || Kind == Format::kBFloat16Dot) tile_pairs<T, Kind, V, N>(args, first_vector);
  else if constexpr (Kind == Format::kQ4K) tile_q4_k<T, V, N>(args, first_vector);
  else if constexpr (Kind == Format::kQ6K) tile_q6_k<T, V, N>(args, first_vector);
  else tile_groups<T, Kind, V, N>(args, first_vector);
}

template <class T, Format Kind, int N>
void tile_of(const TileArgs& args) {
  if constexpr (N <= T::kWholeTokens) {
    tile_part<T, Kind, T::kVectors, N>(args, 0);
  } else {
    tile_part<T, Kind, T::kVectors / 2, N>(args, 0);
    tile_part<T, Kind, T::kVectors / 2, N>(args, T::kVectors / 2);
  }
}

constexpr bool is_integer(Format kind) {
  return kind == Format::kInt8 || kind == Format::kInt4 || kind == Format::kQ4K || kind == Format::kQ6K;
}

template <class T, Format Kind>
constexpr int tile_limit() {
  return is_integer(Kind) ? T::kIntegerTokens : T::kFloatTokens;
}

// Calls the tile that is compiled for exactly this number of tokens.
template <class T, Format Kind, int N = tile_limit<T, Kind>()>
void tile(const TileArgs& args) {
  if constexpr (N == 1) {
    tile_of<T, Kind, 1>(args);
  } else {
    if (args.tokens == N) return tile_of<T, Kind, N>(args);
    tile<T, Kind, N - 1>(args);
  }
}

template <class T>
Kernels vector_kernels(const char* isa) {
  constexpr int kFloats = T::kFloatTokens;
  constexpr int kIntegers = T::kIntegerTokens;
  return {
      isa,
      {kFloats, kFloats, kFloats, kFloats, kIntegers, kIntegers, kIntegers, kIntegers},
      {tile<T, Format::kFloat32>, tile<T, Format::kFloat16>, tile<T, Format::kBFloat16>, tile<T, Format::kBFloat16Dot>,
       tile<T, Format::kInt8>, tile<T, Format::kInt4>, tile<T, Format::kQ4K>, tile<T, Format::kQ6K>},
      {encode_float, encode_float, encode_float, encode_bf16<T>, encode_integer<T, Format::kInt8>, encode_integer<T, Format::kInt4>,
       encode_integer<T, Format::kQ4K>, encode_integer<T, Format::kQ6K>},
      gate<T>,
      act<T>,
      sparse_kernels<T>(),
      accumulate<T>,
      widen<T>,
      narrow<T>,
      norm<T>,
      elementwise,
      vector_attention<T>(),
      {},
  };
}

}  // namespace
}  // namespace moegraft
