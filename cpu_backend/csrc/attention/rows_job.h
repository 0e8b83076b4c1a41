// Attention of few queries: the cache is read as it lies, once for all query heads that share it.
//
// Units: a part of the keys of one KV head, whose rows' sums are kept apart; then, for each KV head, the parts are joined. A unit's result
// does not depend on who computes it.
#pragma once

#include "attention/attention.h"
#include "core/memory.h"
#include "core/thread_pool.h"
#include "simd/kernels.h"

namespace moegraft {

struct AttentionPhases {
  Phase* first;
  Phase* second;
};

class AttentionRowsJob final : public Job {
 public:
  AttentionRowsJob(const Kernels& kernels, const AttentionArgs& args, const VisibleKeys& visible, int workers, const AttentionPhases& phases);

  void prepare(AlignedMemory& parts, AlignedMemory* workers);  // throws std::bad_alloc
  void run(int worker) noexcept override;

 private:
  struct Sums;  // of one part's rows
  Sums sums_of(int unit) const;
  void attend(int unit, std::byte* scratch);
  void join(int unit, std::byte* scratch);

  const Kernels& kernels_;
  const AttentionArgs& args_;
  const VisibleKeys& visible_;
  const int workers_;
  const AttentionPhases phases_;
  int splits_ = 1;
  std::size_t part_floats_ = 0;
  std::byte* parts_ = nullptr;
  AlignedMemory* scratch_ = nullptr;
};

}  // namespace moegraft
