// Root-mean-square norms (Zhang and Sennrich 2019, arXiv:1910.07467) of rows.
#pragma once

#include "core/thread_pool.h"
#include "simd/kernels.h"

namespace moegraft {

struct NormArgs {
  const std::byte* x;       // (rows, cols)
  const std::byte* weight;  // (cols), or null
  std::byte* out;           // (rows, cols)
  ActivationType type;      // of x, weight and out
  std::int64_t rows;
  int cols;
  NormForm form;
};

// The job of one call; units are runs of rows.
class NormJob final : public Job {
 public:
  NormJob(const Kernels& kernels, const NormArgs& args, Phase& rows);
  void run(int worker) noexcept override;
  void run_rows(std::int64_t first, std::int64_t end) const noexcept;

 private:
  const Kernels& kernels_;
  const NormArgs& args_;
  Phase& rows_;
};

}  // namespace moegraft
