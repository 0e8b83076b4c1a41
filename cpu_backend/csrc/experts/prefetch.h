// What a tile prefetches while it computes.
#pragma once

#include <cstddef>

#include "experts/routing.h"
#include "simd/kernels.h"

namespace moegraft {

// A lone tile reads its block once, so it runs ahead in its own stream (which goes on in the next block). Where several tiles share a
// block, the later ones find it in cache and fetch the next block meanwhile, each a share of it.
inline TileArgs tile_args(const std::byte* block, WeightType type, int groups, Tile tile, int tile_index, int tiles) {
  constexpr int kAheadBytes = 4096;  // tuned on EPYC Zen 5
  const std::size_t bytes = block_bytes(type, groups * kGroup);
  TileArgs args{};
  args.block = block;
  args.groups = groups;
  args.tokens = tile.tokens;
  if (tiles == 1) {
    args.ahead = block + kAheadBytes;
    args.ahead_stride = bytes / static_cast<std::size_t>(groups);  // no whole lines with Q6_K: 105 for 8 groups
    args.ahead_lines = static_cast<int>((args.ahead_stride + 63) / 64);
  } else {
    const std::size_t bursts = static_cast<std::size_t>(groups) * static_cast<std::size_t>(tiles);
    args.ahead_lines = static_cast<int>((bytes / 64 + bursts - 1) / bursts);
    args.ahead_stride = static_cast<std::size_t>(args.ahead_lines) * 64;
    args.ahead = block + bytes + args.ahead_stride * static_cast<std::size_t>(groups) * static_cast<std::size_t>(tile_index);
  }
  return args;
}

}  // namespace moegraft
