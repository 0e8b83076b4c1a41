#include "experts/records.h"

#include <cstring>

namespace moegraft {

void gather_segment(const Records& records, const Pair* pairs, const Tiling& tiling, std::uint32_t* target) {
  for (int index = 0; index < tiling.count(); ++index) {
    const Tile tile = tiling[index];
    if (tile.tokens == 1) continue;
    std::uint32_t* tile_start = target + static_cast<std::size_t>(tile.first) * records.words;
    const std::size_t stride = records.group_words * static_cast<std::size_t>(tile.tokens);
    for (int i = 0; i < tile.tokens; ++i) {
      const std::uint32_t* source = records.of(pairs[tile.first + i].token);
      std::uint32_t* to = tile_start + records.group_words * static_cast<std::size_t>(i);
      for (std::size_t word = 0; word < records.words; word += records.group_words, to += stride)
        std::memcpy(to, source + word, 4 * records.group_words);
    }
  }
}

void lay_in_lanes(const std::uint32_t* record, int groups, Format format, std::uint32_t* target) {
  static constexpr std::uint32_t kZeros[kGroup] = {};
  const int words = words_per_group(format);
  for (int first = 0; first < groups; first += kLanes, target += words * kLanes) {
    const std::uint32_t* sources[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) sources[lane] = first + lane < groups ? record + static_cast<std::size_t>(first + lane) * words : kZeros;
    for (int word = 0; word < words; ++word)
      for (int lane = 0; lane < kLanes; ++lane) target[word * kLanes + lane] = sources[lane][word];
  }
}

}  // namespace moegraft
