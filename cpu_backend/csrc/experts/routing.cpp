#include "experts/routing.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace moegraft {

void Routing::group(const RoutingView& view, int num_experts, int segment_pairs, int first_token) {
  starts_.assign(static_cast<std::size_t>(num_experts) + 1, 0);
  const std::size_t slots = static_cast<std::size_t>(view.tokens) * view.top_k;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const std::int64_t id = view.ids[slot];
    if (id == -1 || id == num_experts) continue;
    if (id < 0 || id > num_experts) {
      throw std::invalid_argument("top_k_index[" + std::to_string(first_token + slot / view.top_k) + ", " +
                                  std::to_string(slot % view.top_k) + "] is " + std::to_string(id) + ": expert ids are 0 to " +
                                  std::to_string(num_experts - 1) + ", and -1 or " + std::to_string(num_experts) + " for a padded slot");
    }
    ++starts_[static_cast<std::size_t>(id) + 1];
  }
  segments_.clear();
  order_.clear();
  for (int expert = 0; expert < num_experts; ++expert) {
    const int first = starts_[expert];
    const int count = starts_[expert + 1];
    starts_[expert + 1] = first + count;
    if (count == 0) continue;
    const Tiling segments(count, segment_pairs);
    for (int index = 0; index < segments.count(); ++index)
      segments_.push_back({expert, first + segments[index].first, segments[index].tokens});
  }
  pairs_.resize(static_cast<std::size_t>(starts_[num_experts]));
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const std::int64_t id = view.ids[slot];
    if (id < 0 || id >= num_experts) continue;
    pairs_[static_cast<std::size_t>(starts_[id]++)] = {static_cast<int>(slot / view.top_k), view.weights[slot], static_cast<int>(slot)};
  }
}

void gather_segment(const Records& records, const Pair* pairs, const Tiling& tiling, std::uint32_t* target, int tile_rows) {
  for (int index = 0; index < tiling.count(); ++index) {
    const Tile tile = tiling[index];
    const int first_row = tile_rows > 0 ? index * tile_rows : tile.first, rows = tile_rows > 0 ? tile_rows : tile.tokens;
    std::uint32_t* tile_start = target + static_cast<std::size_t>(first_row) * records.words;
    const std::size_t stride = records.group_words * static_cast<std::size_t>(rows);
    for (int i = 0; i < tile.tokens; ++i) {
      const std::uint32_t* source = records.of(pairs[tile.first + i].token);
      std::uint32_t* to = tile_start + records.group_words * static_cast<std::size_t>(i);
      for (std::size_t word = 0; word < records.words; word += records.group_words, to += stride)
        std::memcpy(to, source + word, 4 * records.group_words);
    }
  }
}

void transpose_to_lanes(const std::uint32_t* record, int groups, Format format, std::uint32_t* target) {
  static constexpr std::uint32_t kZeros[kGroup] = {};
  const int words = group_words(format);
  for (int first = 0; first < groups; first += kLanes, target += words * kLanes) {
    const std::uint32_t* sources[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      sources[lane] = first + lane < groups ? record + static_cast<std::size_t>(first + lane) * words : kZeros;
    for (int word = 0; word < words; ++word)
      for (int lane = 0; lane < kLanes; ++lane) target[word * kLanes + lane] = sources[lane][word];
  }
}

int bytes_ahead(WeightType type, [[maybe_unused]] int tokens) {
#if defined(__x86_64__)
  // EPYC Zen 4, 2 cores, one token: in a linear, the formats that read a group from several places (Q2_K, Q3_K, Q5_K, Q6_K) take 0.87 to
  // 0.9 of the time with 8 KiB that they take with 4 KiB, IQ4_XS 0.91, MXFP4 0.84 to 1.01; bfloat16 takes 1.02 of it in a layer of experts.
  // Without prefetches the first take 1.5 to 2.2 times as long. Zen 3 is of the same family and was not measured.
  // Of int8 with 2 tokens, 2 KiB take 0.74 of the time of 4 KiB in a linear and 0.79 in experts; with 8 tokens, 8 KiB take 0.91 of it in both.
  static const bool family_19h = __builtin_cpu_is("amdfam19h");
  if (family_19h && type == WeightType::kInt8 && tokens > 1) return tokens == 2 ? 2048 : 8192;
  if (family_19h && is_coded(type)) return coded_format(type).zen4_ahead;
#endif
  return 4096;  // tuned on EPYC Zen 5
}

}  // namespace moegraft
