// How tokens' records are laid side by side for a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/routing.h"
#include "simd/kernels.h"

namespace moegraft {

constexpr int kMostTileTokens = 16;  // no kernel's tile is wider

// The records of all tokens of a pass, (tokens, words), group by group.
struct Records {
  const std::uint32_t* data;
  std::size_t words;
  std::size_t group_words;
  const std::uint32_t* of(int token) const { return data + static_cast<std::size_t>(token) * words; }
};

// Tile by tile; a lone record is left out, it is read where it is.
void gather_segment(const Records& records, const Pair* pairs, const Tiling& tiling, std::uint32_t* target);

inline const std::uint32_t* tile_records(const Records& records, const Pair* pairs, Tile tile, const std::uint32_t* gathered) {
  return tile.tokens == 1 ? records.of(pairs[tile.first].token) : gathered + static_cast<std::size_t>(tile.first) * records.words;
}

// A token's record with 16 groups of columns side by side, as the rows of the sparse layout lie; missing groups are zero.
void lay_in_lanes(const std::uint32_t* record, int groups, Format format, std::uint32_t* target);

}  // namespace moegraft
