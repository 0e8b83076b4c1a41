// The product of blocks with the tokens of a segment: by the vector tiles of a format, or by the matrix kernel where it is faster. Jobs use
// it without knowing which: it determines how the tokens' records are stored and where each token's result is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/routing.h"
#include "simd/kernels.h"

namespace moegraft {

// Bytes of a segment's activations in front of tiles; a unit's weights need the remainder of the 1 MiB L2 (EPYC Zen 5).
constexpr std::size_t kSegmentBytes = std::size_t{384} << 10;

class SegmentProduct {
 public:
  // `groups` of 32 columns, `tokens` of at least 1.
  SegmentProduct(const Kernels& kernels, WeightType weights, Format format, int groups, int tokens)
      : kernels_(kernels),
        weights_(weights),
        format_(format),
        groups_(groups),
        tokens_(tokens),
        by_matrix_(kernels.matrix.serves(format, tokens)),
        tiling_(tokens, by_matrix_ ? kernels.matrix.tile_tokens : kernels.max_tokens[static_cast<int>(format)]) {}

  bool by_matrix() const { return by_matrix_; }
  Format records() const { return by_matrix_ ? kernels_.matrix.records_of(format_) : format_; }
  const Tiling& tiling() const { return tiling_; }

  // Of all tokens' records; tiles of the matrix kernel have rows without a token.
  std::size_t words() const { return static_cast<std::size_t>(rows()) * record_words(); }
  std::size_t record_words() const { return static_cast<std::size_t>(groups_) * group_words(); }
  std::size_t group_words() const { return static_cast<std::size_t>(moegraft::group_words(records())); }

  // Of a tile: where its first token's record begins, and the words from a group to the next. Tokens are group_words() apart.
  std::size_t tile_start(int tile) const { return static_cast<std::size_t>(first_row(tile)) * record_words(); }
  std::size_t group_stride(int tile) const { return group_words() * static_cast<std::size_t>(rows_of(tile)); }

  // Rows of the result: those of a tile's tokens begin at first_row.
  int rows() const { return by_matrix_ ? tiling_.count() * kernels_.matrix.tile_tokens : tokens_; }
  int first_row(int tile) const { return by_matrix_ ? tile * kernels_.matrix.tile_tokens : tiling_[tile].first; }

  // From the records of all tokens of a pass, in the form of records().
  void gather(const Records& all, const Pair* pairs, std::uint32_t* target) const {
    gather_segment(all, pairs, tiling_, target, by_matrix_ ? kernels_.matrix.tile_tokens : 0);
  }

  // Some groups of a block: all of them, or, for the matrix kernel alone, a part that begins with a multiple of 256 columns and adds to
  // `out`.
  struct Part {
    int first = 0;
    int count;
  };

  // out (rows(), 32) = block times records. Meanwhile `next` is prefetched, the block that is multiplied next, with the same tokens where
  // `same_tokens`: by default (null) the one that follows; nothing where it is the block itself.
  void multiply(const std::byte* block, const std::byte* next, bool same_tokens, const std::uint32_t* records, float* out,
                ExpandedWeights& expanded) const {
    if (by_matrix_) return multiply_part(block, next, same_tokens, records, {0, groups_}, out, expanded);
    for (int index = 0; index < tiling_.count(); ++index) {
      const Tile tile = tiling_[index];
      TileArgs args = tile_args(block, weights_, groups_, tile, index, tiling_.count(), next);
      args.records = records + tile_start(index);
      args.out = out + static_cast<std::size_t>(tile.first) * kBlockRows;
      kernels_.tile[static_cast<int>(format_)](args);
    }
  }
  void multiply_part(const std::byte* block, const std::byte* next, bool same_tokens, const std::uint32_t* records, Part part, float* out,
                     ExpandedWeights& expanded) const {
    MatrixArgs args{};
    const std::size_t offset = block_bytes(weights_, part.first * kGroup);
    args.block = block + offset;
    args.next = same_tokens && next != nullptr ? next + offset : nullptr;
    args.records = records + group_words() * static_cast<std::size_t>(kernels_.matrix.tile_tokens) * static_cast<std::size_t>(part.first);
    args.tile_words = record_words() * static_cast<std::size_t>(kernels_.matrix.tile_tokens);
    args.groups = part.count;
    args.tokens = tokens_;
    args.adds = part.first > 0;
    args.out = out;
    const std::size_t bytes = block_bytes(weights_, part.count * kGroup);
    args.ahead = next != nullptr ? next + offset : block + offset + bytes;
    args.ahead_lines = next == block ? 0 : static_cast<int>(bytes / 64);
    args.expanded = &expanded;
    kernels_.matrix.multiply[static_cast<int>(format_)](args);
  }

 private:
  int rows_of(int tile) const { return by_matrix_ ? kernels_.matrix.tile_tokens : tiling_[tile].tokens; }

  const Kernels& kernels_;
  const WeightType weights_;
  const Format format_;
  const int groups_;
  const int tokens_;
  const bool by_matrix_;
  const Tiling tiling_;
};

// Prepares a thread for the products of a job, where any of them is the matrix kernel's.
class MatrixUse {
 public:
  MatrixUse(const Kernels& kernels, bool used) : end_(used ? kernels.matrix.end : nullptr) {
    if (used) kernels.matrix.begin();
  }
  ~MatrixUse() {
    if (end_ != nullptr) end_();
  }
  MatrixUse(const MatrixUse&) = delete;
  MatrixUse& operator=(const MatrixUse&) = delete;

 private:
  void (*const end_)();
};

}  // namespace moegraft
