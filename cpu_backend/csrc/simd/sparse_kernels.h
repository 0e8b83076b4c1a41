// The kernels of the sparse layout: a part of the function table of kernels.h, by format. Weights are finite: a row may be multiplied with a
// coefficient of zero.
//
// Where several tokens share rows of down, two rows at a time are widened into items of 32-bit words, which every token then adds up:
//   floats   an item is one row, a word is one weight
//   pairs    an item is two rows, a word is a weight of each in bfloat16, and a coefficient is two bfloat16 as well (in_pairs)
// A tile of items holds 4 columns of each of 16 groups: (items, 4, 16) words.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace moegraft {

constexpr int kFormats = 8;
constexpr int kMostRows = 4;       // in one call of dot_rows and add_rows: rows that lie apart are read faster together (EPYC Zen 5)
constexpr int kTileColumns = 4;    // of each group, in a tile of items
constexpr int kTileWords = kTileColumns * 16;
constexpr int kTiles = 8;          // of a chunk

// Rows times tokens, whose records are in lanes: word w of group 16 * chunk + lane at (chunk * words + w) * 16 + lane.
struct RowDotsArgs {
  const std::byte* rows[kMostRows];  // each begins with its scales
  int places[kMostRows];             // where a row's products go in each token's `out`
  int row_count;
  int tokens;
  const std::uint32_t* const* lanes;    // one a token
  float* const* out;                    // one a token
  std::size_t line_offset;              // from a row's start to its lines
  int chunks;
  const std::byte* const* ahead;        // (row_count) rows that come next, fetched line by line while these are read; or null
};

// sums += coefficients * rows, for one chunk. Column k of a line's groups goes to sums[k * 16 + lane].
struct RowAddArgs {
  const std::byte* scales[kMostRows];
  const std::byte* lines[kMostRows];
  float coefficients[kMostRows];
  float* sums;
  const std::byte* ahead[kMostRows];  // the chunk's lines of rows that come next, fetched while these are read; or null
};

// One chunk of two rows, as one item (pairs) or two.
struct RowWidenArgs {
  const std::byte* scales[2];
  const std::byte* lines[2];
  std::uint32_t* items;      // in the first tile
  std::size_t tile_stride;   // words
};

// sums += coefficients * items, for some tokens and one tile; the columns' sums lie as in RowAddArgs.
struct ItemsAddArgs {
  const std::uint32_t* items;
  int item_count;
  int tokens;
  const std::uint32_t* const* coefficients;  // one a token: (items)
  float* const* sums;                        // one a token, the tile's (4, 16) beginning at sums_offset
  std::size_t sums_offset;
};

// The same for one token, some of the items and all tiles.
struct ItemsPickArgs {
  const std::uint32_t* items;
  std::size_t tile_stride;
  const int* picked;  // items, ascending
  int picked_count;
  const std::uint32_t* coefficients;  // (items)
  float* sums;                        // (32, 16)
};

struct NeuronsArgs {
  const GateSpec* spec;
  float threshold;
  float weight;     // the token's share
  const float* up;  // 32, those of inactive neurons are not looked at; or null: ungated
  const float* up_bias;  // 32, or null
  float* neurons;   // 32: act(gate)
};

struct RowKernels {
  int dot_rows_at_once;
  bool in_pairs[kFormats];
  // All null for formats that have no sparse layout. Products and sums for a token do not depend on the other tokens of the call.
  void (*dot_rows[kFormats])(const RowDotsArgs& args);
  void (*add_rows[kFormats])(const RowAddArgs& args);
  void (*widen_rows[kFormats])(const RowWidenArgs& args);
  void (*add_items[kFormats])(const ItemsAddArgs& args);
  void (*add_picked[kFormats])(const ItemsPickArgs& args);
  // Bit i: whether |acted[i]| reaches the threshold, for 32; a NaN does, it must be seen.
  std::uint32_t (*reached)(const float* acted, float threshold);
  // neurons = weight * neurons * (clamp(up + bias) + offset), or weight * neurons when ungated; zero where the threshold is not reached.
  void (*finish)(const NeuronsArgs& args);
};

// Plain loops, which each instruction set's file compiles for itself.
namespace {

inline std::uint32_t reached_bits(const float* acted, float threshold) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<std::uint32_t>(!(__builtin_fabsf(acted[i]) < threshold)) << i;
  return bits;
}

inline void finish_neurons(const NeuronsArgs& args) {
  static constexpr float kNone[32] = {};
  const float limit = static_cast<float>(args.spec->up_limit), offset = static_cast<float>(args.spec->up_offset);
  const float* bias = args.up_bias ? args.up_bias : kNone;
  for (int i = 0; i < 32; ++i) {
    float factor = args.weight;
    if (args.up) {
      const float up = args.up[i] + bias[i];
      factor *= (up > limit ? limit : up < -limit ? -limit : up) + offset;
    }
    const float product = args.neurons[i] * factor;
    args.neurons[i] = __builtin_fabsf(args.neurons[i]) < args.threshold ? 0.0f : product;
  }
}

}  // namespace
}  // namespace moegraft
