// The product of blocks with the tokens of a segment: by the vector tiles of a format, or by the matrix kernel where it is faster. Jobs use
// it without knowing which: it determines how the tokens' records are stored and where each token's result is.
#pragma once

#include <algorithm>
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
        tiling_(by_matrix_ ? Tiling(tokens, kernels.matrix.tile_tokens)
                           : Tiling(tokens, kernels.max_tokens[static_cast<int>(format)], kTileStep)) {}

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
  int row_of(int token) const {
    const int tile = tiling_.index_of(token);
    return first_row(tile) + token - tiling_[tile].first;
  }

  // Writes a group of all tokens' records from values (tokens, 32).
  void encode(const float* values, int group, std::uint32_t* records) const {
    const auto encode_group = kernels_.encode[static_cast<int>(this->records())];
    for (int index = 0; index < tiling_.count(); ++index) {
      const Tile tile = tiling_[index];
      std::uint32_t* words = records + tile_start(index) + group_stride(index) * static_cast<std::size_t>(group);
      for (int i = 0; i < tile.tokens; ++i, words += group_words())
        encode_group(values + static_cast<std::size_t>(tile.first + i) * kBlockRows, 1, words, 0);
    }
  }

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

// The most pairs of a segment, whose activations stay in a core's cache.
inline int segment_pairs(const Kernels& kernels, Format format, int groups) {
  const bool by_matrix = kernels.matrix.serves(format, kNeverMatrix - 1);
  const auto words =
      static_cast<std::size_t>(groups) * static_cast<std::size_t>(group_words(by_matrix ? kernels.matrix.records_of(format) : format));
  const int tile = by_matrix ? kernels.matrix.tile_tokens : kernels.max_tokens[static_cast<int>(format)];
  return std::max(1, static_cast<int>((by_matrix ? kernels.matrix.segment_bytes : kSegmentBytes) / (words * 4)) / tile) * tile;
}

// The tokens of a pass as records for the products of its segments with one matrix: in the format of the tiles, and in that of the matrix
// kernel, as far as any segment needs them.
class TokenRecords {
 public:
  TokenRecords(const Kernels& kernels, Format format, int groups) : kernels_(kernels), format_(format), groups_(groups) {}

  void begin(int tokens) { tokens_ = tokens, by_tiles_ = by_matrix_ = false; }
  void serve(const SegmentProduct& product) { (product.records() == format_ ? by_tiles_ : by_matrix_) = true; }
  void serve_tiles() { by_tiles_ = true; }  // where a caller reads tile_record() itself
  std::size_t words() const { return tile_words() + (by_matrix_ ? record_words(matrix_format()) * static_cast<std::size_t>(tokens_) : 0); }
  void place(std::uint32_t* words) { words_ = words; }
  void encode(int token, const float* values) const {
    const auto encode_as = [&](Format format, std::uint32_t* records) {
      kernels_.encode[static_cast<int>(format)](values, groups_, records + record_words(format) * static_cast<std::size_t>(token),
                                                static_cast<std::size_t>(group_words(format)));
    };
    if (by_tiles_) encode_as(format_, words_);
    if (by_matrix_) encode_as(matrix_format(), words_ + tile_words());
  }
  const std::uint32_t* tile_record(int token) const { return words_ + record_words(format_) * static_cast<std::size_t>(token); }
  Records of(const SegmentProduct& product) const {
    return {words_ + (product.records() == format_ ? 0 : tile_words()), product.record_words(), product.group_words()};
  }

 private:
  Format matrix_format() const { return kernels_.matrix.records_of(format_); }
  std::size_t record_words(Format format) const {
    return static_cast<std::size_t>(groups_) * static_cast<std::size_t>(group_words(format));
  }
  std::size_t tile_words() const {
    return by_tiles_ ? (record_words(format_) * static_cast<std::size_t>(tokens_) + 15) / 16 * 16 : 0;  // in whole lines
  }

  const Kernels& kernels_;
  const Format format_;
  const int groups_;
  int tokens_ = 0;
  bool by_tiles_ = false, by_matrix_ = false;
  std::uint32_t* words_ = nullptr;
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
