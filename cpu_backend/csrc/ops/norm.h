// Root-mean-square norms (Zhang and Sennrich 2019, arXiv:1910.07467) of rows.
#pragma once

#include "core/thread_pool.h"
#include "formats/format_list.h"
#include "simd/kernels.h"

namespace moegraft {

// Norms of recurrent layers, which have a gate beside each row: what they compute in float32.
struct NormGate {
  GateSpec spec;  // the function of the gate
  int group = 0;  // columns that are normed together; 0: a norm without a gate
  bool first = false;  // norms the product of row and gate, whose quotient is rounded before that with the weight; else norms the row
  bool wide = false;  // does not round the norm before the product with the gate
};
constexpr int kMostGroupCols = 8192;

struct NormArgs {
  const std::byte* x;       // (rows, cols)
  const std::byte* weight;  // (cols), or null where there is no gate
  std::byte* out;           // (rows, cols)
  ActivationType type;      // of x, weight, gate and out
  std::int64_t rows;
  int cols;
  NormForm form;
  const std::byte* gate = nullptr;  // (rows, cols), with gating
  NormGate gating = {};
};

void norm_row(const Kernels& kernels, const NormArgs& args, std::int64_t row) noexcept;

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
