// One pass of packed linear layers over the same input: tokens are encoded tile by tile, then blocks of output rows of all layers are
// computed for all tokens.
#pragma once

#include <vector>

#include "core/memory.h"
#include "core/thread_pool.h"
#include "experts/packed_weights.h"
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

 private:
  void encode_token(int token, float* widened);
  void compute_rows(int unit);
  void compute_rows_of(const PackedLinear& linear, std::byte* out, int unit);

  const Kernels& kernels_;
  const std::vector<const PackedLinear*> linears_;
  const ActivationType activations_;
  const Format format_;
  const int workers_;
  const Phases phases_;
  const int max_tokens_;
  const int groups_;
  const std::size_t words_;
  Batch batch_{};
  Scratch scratch_{};
  int unit_blocks_ = 1;
  std::vector<int> unit_ends_;  // of each layer
};

}  // namespace moegraft
