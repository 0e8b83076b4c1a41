// One pass of a packed linear layer: encode the tokens tile by tile, then compute blocks of output rows for all of them.
#pragma once

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
    std::byte* out;
    int tokens;
  };
  struct Scratch {
    AlignedMemory* records;
    AlignedMemory* workers;  // one per worker
  };

  LinearJob(const Kernels& kernels, const PackedLinear& linear, ActivationType activations, int workers, const Phases& phases);
  void prepare(const Batch& batch, const Scratch& scratch);  // throws std::bad_alloc
  void run(int worker) noexcept override;

 private:
  void encode_token(int token, float* widened);
  void compute_rows(int unit);

  const Kernels& kernels_;
  const PackedLinear& linear_;
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
};

}  // namespace moegraft
