// One pass of packed linear layers over the same input: tokens are encoded tile by tile, then blocks of output rows of all layers are
// computed for all tokens. The matrix kernel computes a prompt in segments of tokens, and many columns in parts, so that the activations of
// a segment's part stay in a core's cache while all blocks of a unit are multiplied with them.
#pragma once

#include <vector>

#include "core/memory.h"
#include "core/thread_pool.h"
#include "experts/packed_weights.h"
#include "experts/segment_product.h"
#include "simd/kernels.h"

namespace moegraft {

class LinearJob final : public Job {
 public:
  struct Phases {
    Phase* encode;
    Phase* rows;
  };
  struct Batch {
    const std::byte* input;
    std::byte* const* outs;  // one for each layer
    int tokens;
  };
  struct Scratch {
    AlignedMemory* records;
    AlignedMemory* workers;  // one per worker
  };

  // `linears` have one weight type and one number of columns.
  LinearJob(const Kernels& kernels, std::vector<const PackedLinear*> linears, ActivationType activations, int workers,
            const Phases& phases);
  void prepare(const Batch& batch, const Scratch& scratch);  // throws std::bad_alloc
  void run(int worker) noexcept override;
  // As a step of a program: while it waits, a worker prefetches its first rows, and then what it reads after the job.
  void run(int worker, Upcoming& rows, Upcoming& after) noexcept;
  Upcoming first_rows(int worker) const;

 private:
  struct Rows {  // of a unit: blocks [first, end) of a layer
    std::size_t linear;
    int first, end;
  };
  Rows rows_of(int unit) const;
  SegmentProduct product_of(const Tile& segment) const;
  void encode_token(int token, float* widened);
  void compute_rows(int unit, float* floats, ExpandedWeights& expanded);
  void write(const PackedLinear& linear, int block, const SegmentProduct& product, const float* out, std::byte* target,
             int first_token) const;

  const Kernels& kernels_;
  const std::vector<const PackedLinear*> linears_;
  const ActivationType activations_;
  const Format format_;
  const int workers_;
  const Phases phases_;
  const int groups_;
  const int part_groups_;  // of the matrix kernel
  Batch batch_{};
  Scratch scratch_{};
  int unit_blocks_ = 1;
  int units_ = 0;
  Tiling segments_{1, 1};  // of the pass
  std::size_t segment_words_ = 0;  // of the longest one's records
  std::size_t block_floats_ = 0;  // of its result
  std::vector<int> unit_ends_;  // of each layer
};

}  // namespace moegraft
