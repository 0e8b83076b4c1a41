// Which tokens go to which expert: the (token, expert) pairs sorted by expert, cut into segments and tiles.
#pragma once

#include <cstdint>
#include <vector>

namespace moegraft {

// One token that an expert computes, with the weight of its share.
struct Pair {
  int token;
  float weight;
  int slot;  // its place in the (tokens, top_k) ids
};

// Consecutive pairs of one expert. An expert with very many tokens has several segments, so that a segment's activations stay in cache.
struct Segment {
  int expert;
  int first_pair;
  int pairs;
};

struct Tile {
  int first;  // within the segment
  int tokens;
};

// A segment's pairs in tiles of at most `max_tokens`, as even as possible: two tiles of 7 run faster than one of 12 and one of 2.
class Tiling {
 public:
  Tiling(int pairs, int max_tokens) : count_((pairs + max_tokens - 1) / max_tokens), base_(pairs / count_), longer_(pairs % count_) {}
  int count() const { return count_; }
  Tile operator[](int index) const {
    const int first = index * base_ + (index < longer_ ? index : longer_);
    return {first, base_ + (index < longer_ ? 1 : 0)};
  }
  Tile holding(int pair) const {
    const int boundary = longer_ * (base_ + 1);
    return (*this)[pair < boundary ? pair / (base_ + 1) : longer_ + (pair - boundary) / base_];
  }

 private:
  int count_;
  int base_;
  int longer_;
};

struct RoutingView {
  const std::int64_t* ids;  // (tokens, top_k)
  const float* weights;     // (tokens, top_k)
  int tokens;
  int top_k;
};

class Routing {
 public:
  // Groups by expert, in ascending order of expert and, within one, of token. Ids -1 and num_experts are padded slots. `first_token` is
  // the position of the view in the caller's batch, for messages. Throws std::invalid_argument on any other id out of range.
  void group(const RoutingView& view, int num_experts, int segment_pairs, int first_token);

  const std::vector<Pair>& pairs() const { return pairs_; }
  const std::vector<Segment>& segments() const { return segments_; }

 private:
  std::vector<int> starts_;
  std::vector<Pair> pairs_;
  std::vector<Segment> segments_;
};

}  // namespace moegraft
