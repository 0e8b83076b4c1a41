// What a tile prefetches while it computes.
#pragma once

#include <cstddef>

#include "kernels.h"
#include "routing.h"

namespace moegraft {

// A lone tile reads its block once, so it runs ahead in its own stream (which goes on in the next block). Where several tiles share a
// block, the later ones find it in cache and fetch the next block meanwhile, each a share of it.
inline TileArgs tile_args(const std::byte* block, WeightType type, int groups, Tile tile, int tile_index, int tiles) {
  constexpr int kAheadBytes = 4096;  // tuned on EPYC Zen 5
  const int lines = lines_per_group(type);
  TileArgs args{};
  args.block = block;
  args.groups = groups;
  args.tokens = tile.tokens;
  if (tiles == 1) {
    args.ahead = block + kAheadBytes;
    args.ahead_lines = lines;
  } else {
    args.ahead_lines = (lines + tiles - 1) / tiles;
    const std::size_t share = static_cast<std::size_t>(args.ahead_lines) * static_cast<std::size_t>(groups) * 64;
    args.ahead = block + static_cast<std::size_t>(lines) * static_cast<std::size_t>(groups) * 64 + share * static_cast<std::size_t>(tile_index);
  }
  return args;
}

}  // namespace moegraft
