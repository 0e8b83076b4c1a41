// Products with weights that are not packed: small gates, and the projections of latent attention, read in place from a model's tensors.
#pragma once

#include "core/memory.h"
#include "core/thread_pool.h"
#include "simd/kernels.h"

namespace moegraft {

// A (batch, rows, columns) tensor; strides in elements.
struct MatrixView {
  std::byte* data;
  std::int64_t batch_stride;
  std::int64_t row_stride;
  std::int64_t col_stride;
};

// out = a b [+ bias], rounded once.
struct MatmulArgs {
  ActivationType type;  // of all
  MatrixView a;         // (batch, rows, inner): few rows, contiguous
  MatrixView b;         // (batch, inner, cols): rows or columns contiguous
  MatrixView out;       // (batch, rows, cols): rows contiguous
  std::int64_t batch, rows, inner, cols;
  const std::byte* bias = nullptr;  // (cols), or null
  std::int64_t bias_stride = 0;

  void check() const;  // throws std::invalid_argument where a stride is not as above
};

// One call; units are runs of columns of one matrix of the batch.
class MatmulJob final : public Job {
 public:
  MatmulJob(const Kernels& kernels, const MatmulArgs& args, int workers, Phase& columns);
  // `memory` takes the widened rows of `a`. Throws std::bad_alloc.
  void prepare(AlignedMemory& memory, AlignedMemory* workers);
  void run(int worker) noexcept override;

 private:
  void compute(int unit, float* sums) const;

  const Kernels& kernels_;
  const MatmulArgs& args_;
  const int workers_;
  Phase& columns_;
  AlignedMemory* scratch_ = nullptr;
  std::int64_t unit_cols_ = 1, units_per_matrix_ = 1;
  int padded_ = 0;
  const float* widened_ = nullptr;         // (batch, rows, padded)
  const std::uint16_t* halves_ = nullptr;  // the same in 16 bits; not of float32
};

}  // namespace moegraft
