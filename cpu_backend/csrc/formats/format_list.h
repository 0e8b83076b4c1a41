// The list of the formats whose weights are codes, and what other files than kernels need of one. The structs that describe them
// (coded_formats.h) are not included, so that a change of one compiles this folder and the kernels again and nothing else.
//
// The files of several instruction sets include this, so that everything that generates code is in an anonymous namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace moegraft {

constexpr int kLanes = 16;  // output rows in a 64-byte line
constexpr int kBlockRows = 2 * kLanes;  // two lines per step: two accumulators per token
constexpr int kGroup = 32;
constexpr int kWordsBytes = kBlockRows * 4;  // one 32-bit word of every row

// How ops/grid_search.h quantises to a grid's format.
struct GridForm {
  int group;  // columns with one scale: 32 or 16
  int columns;  // of a point of the grid: 4 or 8
  bool even_signs;  // the number of negative ones among eight columns is even
  bool has_signs;  // points are magnitudes
};

// The grid of a format whose codes are indexes into one.
struct GridTable {
  int count;
  const std::uint64_t* bytes;  // (count): the codes of each index's columns, the first in the lowest
  const GridForm* search;  // null where numbers are not quantised to it, and then the others are too
  const std::uint16_t* points;  // (count): the digits of each column, which are indexes into `levels`
  const std::uint8_t* levels;
  int level_count;
};

// A format without its type.
struct CodedFormat {
  const char* name;
  int columns;
  int file_bytes;
  int zen4_ahead;
  GridTable grid;  // zeros where there is none
};
const CodedFormat& coded_format(WeightType type);  // of a coded one

using GroupCodes = std::uint8_t[kGroup];
struct GroupScales {
  float scale[2];
  float minimum[2];
};
// Of a packed block, the unsigned codes of each of a row's groups, as many as the format's block has, and their scales.
constexpr int kMostBlockGroups = 8;
void decode_row(WeightType type, const std::byte* block, int row, GroupCodes* codes, GroupScales* scales);

namespace {

template <class... Formats>
struct FormatList {};
template <class... Formats>
constexpr int count_of(FormatList<Formats...>) {
  return sizeof...(Formats);
}

// The order is that of WeightType, from kInt8 on.
using CodedFormats =
    FormatList<struct Int8, struct Int4, struct Q4K, struct Q6K, struct Mxfp4, struct Iq4Nl, struct Iq4Xs, struct Q41, struct Q50,
               struct Q51, struct Q5K, struct Q3K, struct Q2K, struct Int4Of32, struct Int4Of64, struct Int4Of128, struct Int4Of256,
               struct Int8Of128, struct Fp8, struct Fp8Rows, struct Nvfp4, struct Iq3S, struct Iq3Xxs, struct Iq2S, struct Iq2Xs,
               struct Iq2Xxs, struct Iq1S, struct Iq1M, struct Tq20, struct Tq10>;
constexpr int kCodedFormats = count_of(CodedFormats());
constexpr int kFirstCoded = static_cast<int>(WeightType::kInt8);
constexpr int kWeightTypes = kFirstCoded + kCodedFormats;

constexpr bool is_coded(WeightType type) { return static_cast<int>(type) >= kFirstCoded; }
// Whether weights come in blocks of a file alone: the kernels do not quantise to such a type.
constexpr bool is_stored(WeightType type) { return static_cast<int>(type) > static_cast<int>(WeightType::kInt4); }

}  // namespace

// A weight type together with the arithmetic of its products: the weight types, and bfloat16 with products of bfloat16.
enum class Format : int { kFloat32, kFloat16, kBFloat16, kInt8, kInt4, kBFloat16Dot = kWeightTypes };
constexpr int kFormats = kWeightTypes + 1;

// Words of a group of activations (simd/kernels.h). Kernels know them at compile time, as words_per_group.
int group_words(Format format);

namespace {

constexpr bool is_coded(Format format) { return format != Format::kBFloat16Dot && is_coded(static_cast<WeightType>(format)); }
constexpr WeightType weights_of(Format format) {
  return format == Format::kBFloat16Dot ? WeightType::kBFloat16 : static_cast<WeightType>(format);
}

// bfloat16 weights and activations multiply in bfloat16; all other pairs multiply in float or, with coded weights, in integers.
constexpr Format format_of(WeightType weights, ActivationType activations) {
  const bool both = weights == WeightType::kBFloat16 && activations == ActivationType::kBFloat16;
  return both ? Format::kBFloat16Dot : static_cast<Format>(weights);
}

}  // namespace

}  // namespace moegraft
