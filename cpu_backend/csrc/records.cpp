#include "records.h"

#include <algorithm>

namespace moegraft {

void interleave(const std::uint32_t* const* sources, int count, std::size_t words, std::uint32_t* target) {
  for (std::size_t word = 0; word < words; ++word)
    for (int i = 0; i < count; ++i) *target++ = sources[i][word];
}

void gather_segment(const Records& records, const Pair* pairs, const Tiling& tiling, std::uint32_t* target) {
  for (int index = 0; index < tiling.count(); ++index) {
    const Tile tile = tiling[index];
    if (tile.tokens == 1) continue;
    const std::uint32_t* sources[kMostTileTokens];
    for (int i = 0; i < tile.tokens; ++i) sources[i] = records.of(pairs[tile.first + i].token);
    interleave(sources, tile.tokens, records.words, target + static_cast<std::size_t>(tile.first) * records.words);
  }
}

void lay_in_lanes(const std::uint32_t* record, int groups, Format format, std::uint32_t* target) {
  static constexpr std::uint32_t kZeros[kGroup] = {};
  const int words = words_per_group(format);
  for (int first = 0; first < groups; first += kLanes, target += words * kLanes) {
    const std::uint32_t* sources[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) sources[lane] = first + lane < groups ? record + static_cast<std::size_t>(first + lane) * words : kZeros;
    interleave(sources, kLanes, static_cast<std::size_t>(words), target);
  }
}

}  // namespace moegraft
