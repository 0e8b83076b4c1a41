// The assignment of tokens to experts: (token, expert) pairs sorted by expert and split into segments and tiles, and the input of one tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "simd/kernels.h"

namespace moegraft {

// One token of an expert, with the expert's weight.
struct Pair {
  int token;
  float weight;
  int slot;  // index into the (tokens, top_k) ids
};

// Consecutive pairs of one expert. An expert with many tokens has several segments, each of whose activations fit the cache.
struct Segment {
  int expert;
  int first_pair;
  int pairs;
};

struct Tile {
  int first;  // within the segment
  int tokens;
};

// The division of a segment's pairs into even tiles of at most `max_tokens`, a multiple of `step`: one of 8 and one of 6 are faster than one
// of 12 and one of 2. All tiles but the last have multiples of `step` pairs.
class Tiling {
 public:
  Tiling(int pairs, int max_tokens, int step = 1) : pairs_(pairs), step_(step), count_((pairs + max_tokens - 1) / max_tokens) {
    const int steps = (pairs + step - 1) / step;
    base_ = count_ > 0 ? steps / count_ : 0;
    longer_ = steps - base_ * count_;
  }
  int count() const { return count_; }
  Tile operator[](int index) const {
    const int first = (index * base_ + (index < longer_ ? index : longer_)) * step_, tokens = (base_ + (index < longer_ ? 1 : 0)) * step_;
    return {first, tokens < pairs_ - first ? tokens : pairs_ - first};
  }
  int index_of(int pair) const {  // of the tile that holds it
    const int place = pair / step_, boundary = longer_ * (base_ + 1);
    return place < boundary ? place / (base_ + 1) : longer_ + (place - boundary) / base_;
  }

 private:
  int pairs_;
  int step_;
  int count_;
  int base_;
  int longer_;
};

// What low-rank adapters of the experts add to a pass, and what they need of it: rows by slot, null where there is none. Padded slots are
// neither read nor written.
struct AdapterTerms {
  const float* gate_up = nullptr;  // (slots, gate and up rows): added before the activation; all rows of the gate first
  const float* activation_gradients = nullptr;  // (slots, intermediate): added to those of the activations, without the routing weight
  float* activations = nullptr;  // (slots, intermediate): receives what the down projection multiplies
  float* gate_up_gradients = nullptr;  // (slots, gate and up rows): receives those of gate and up

  AdapterTerms from(std::size_t slot, int gate_up_rows, int intermediate) const {
    const auto moved = [=](auto* array, int rows) { return array == nullptr ? nullptr : array + slot * static_cast<std::size_t>(rows); };
    return {moved(gate_up, gate_up_rows), moved(activation_gradients, intermediate), moved(activations, intermediate),
            moved(gate_up_gradients, gate_up_rows)};
  }
};

struct RoutingView {
  const std::int64_t* ids;  // (tokens, top_k)
  const float* weights;  // (tokens, top_k)
  int tokens;
  int top_k;
};

class Routing {
 public:
  // Sorts the pairs by expert, then by token; an expert's segments are of equal length. Ids -1 and num_experts are padded slots.
  // `first_token` is the position of the view in the caller's batch, for messages. Throws std::invalid_argument on any other id out of
  // range.
  void group(const RoutingView& view, int num_experts, int segment_pairs, int first_token);

  const std::vector<Pair>& pairs() const { return pairs_; }
  const std::vector<Segment>& segments() const { return segments_; }
  // The segments in the order in which their neurons are computed; sums are always added in that of segments().
  void set_order(std::vector<int> order) { order_ = std::move(order); }
  int in_order(int place) const { return order_.empty() ? place : order_[static_cast<std::size_t>(place)]; }

 private:
  std::vector<int> starts_;
  std::vector<Pair> pairs_;
  std::vector<Segment> segments_;
  std::vector<int> order_;  // empty: that of the segments
};

constexpr int kMaxTileTokens = 32;  // the largest tile of any kernel

// The records of all tokens of a pass, (tokens, words), group by group.
struct Records {
  const std::uint32_t* data;
  std::size_t words;
  std::size_t group_words;
  const std::uint32_t* of(int token) const { return data + static_cast<std::size_t>(token) * words; }
};

// Copies the records of a segment, tile by tile. A tile has as many rows as tokens, or, for the matrix kernel, `tile_rows`.
void gather_segment(const Records& records, const Pair* pairs, const Tiling& tiling, std::uint32_t* target, int tile_rows = 0);

// Transposes a token's record to lanes of 16 groups of columns, the order of rows in the sparse layout; missing groups are zero.
void transpose_to_lanes(const std::uint32_t* record, int groups, Format format, std::uint32_t* target);

// How far in front of its reads a single tile of some tokens prefetches, in bytes.
int bytes_ahead(WeightType type, int tokens);

// The arguments of a tile, with the lines that it prefetches. A single tile reads its block once and prefetches further along the same
// stream, which continues in the next block. Where several tiles share a block, the later ones find it in cache, and each prefetches a part
// of the next block, by default the one that follows; nothing where `next` is the block itself.
inline TileArgs tile_args(const std::byte* block, WeightType type, int groups, Tile tile, int tile_index, int tiles,
                          const std::byte* next = nullptr) {
  const std::size_t bytes = block_bytes(type, groups * kGroup);
  TileArgs args{};
  args.block = block;
  args.groups = groups;
  args.tokens = tile.tokens;
  args.ahead = block;
  if (next == block) return args;
  if (tiles == 1) {
    args.ahead = block + bytes_ahead(type, tile.tokens);
    args.ahead_stride = bytes / static_cast<std::size_t>(groups);  // with Q6_K not a whole number of lines: 105 for 8 groups
    args.ahead_lines = static_cast<int>((args.ahead_stride + 63) / 64);
  } else {
    const std::size_t bursts = static_cast<std::size_t>(groups) * static_cast<std::size_t>(tiles);
    args.ahead_lines = static_cast<int>((bytes / 64 + bursts - 1) / bursts);
    args.ahead_stride = static_cast<std::size_t>(args.ahead_lines) * 64;
    args.ahead = (next != nullptr ? next : block + bytes) +
                 args.ahead_stride * static_cast<std::size_t>(groups) * static_cast<std::size_t>(tile_index);
  }
  return args;
}

}  // namespace moegraft
