// A router of few tokens: logits = x weight^T, then each token's choice of experts.
#pragma once

#include "core/memory.h"
#include "core/thread_pool.h"
#include "ops/selection.h"
#include "simd/kernels.h"

namespace moegraft {

struct RouterArgs {
  const std::byte* x;              // (tokens, hidden)
  const std::byte* weight;         // (experts, hidden), as the model stores it
  const float* logit_bias;         // (experts), or null
  ActivationType type;             // of x and weight
  std::int64_t tokens;
  int hidden;
  bool rounds_logits;              // to `type`, before they are scored
  Selection selection;
  std::byte* logits;               // (tokens, experts) of logits_type
  ActivationType logits_type;
  std::byte* weights;              // (tokens, top_k) of weights_type
  ActivationType weights_type;
  std::int64_t* index;             // (tokens, top_k)
};

// One call for up to kAttentionRows tokens; units are runs of experts, whose rows are read as they lie.
class RouterJob final : public Job {
 public:
  RouterJob(const Kernels& kernels, const RouterArgs& args, int workers, Phase& rows);
  // `first` is that of the tokens; `memory` takes their widened states and logits. Throws std::bad_alloc.
  void prepare(std::int64_t first, int tokens, AlignedMemory& memory);
  void run(int worker) noexcept override;
  // After the job: rounds, writes the logits and chooses.
  void choose(SelectionScratch& scratch) const;

 private:
  const Kernels& kernels_;
  const RouterArgs& args_;
  const int workers_;
  Phase& rows_;
  std::int64_t first_ = 0;
  int tokens_ = 0;
  int unit_experts_ = 1;
  float* states_ = nullptr;
  const std::uint16_t* halves_ = nullptr;
  float* logits_ = nullptr;
};

}  // namespace moegraft
