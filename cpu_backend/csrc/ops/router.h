// Routers: logits = x weight^T, then each token's choice of experts and their weights. ops/ holds the operations of a layer besides experts
// and attention: linear layers (linear.h), norms (norm.h) and routers.
//
// The caller owns all tensors, PackedLinear its weights, and the Engine the scratch memory. Each operation is one job of the pool. Workers
// compute the logits of up to kAttentionRows tokens, in runs of experts whose rows are read in place; then the calling thread chooses. A
// small norm runs on the calling thread alone (Engine::norm).
#pragma once

#include <cstdint>
#include <vector>

#include "core/memory.h"
#include "core/thread_pool.h"
#include "simd/kernels.h"

namespace moegraft {

enum class Score : int {
  kSoftmax,  // softmax over all experts, then choose the largest
  kSigmoid,  // sigmoid of each logit, then choose the largest
  kChosenSoftmax,  // choose the largest logits, then softmax over the chosen
};

enum class GroupScore : int { kLargest, kTwoLargest };  // a group's score: its largest, or the sum of its two largest

struct Selection {
  Score score = Score::kSoftmax;
  int experts = 0;
  int top_k = 0;
  const float* bias = nullptr;  // (experts), added to the scores for the choice alone; or null
  int groups = 1;  // of experts; only experts of `kept_groups` groups may be chosen (DeepSeek-V3's group-limited routing)
  int kept_groups = 1;
  GroupScore group_score = GroupScore::kTwoLargest;
  bool normalise = false;  // weights sum to 1, before `scale`
  float scale = 1.0f;
};

// Scratch memory of one thread.
struct SelectionScratch {
  std::vector<float> scores, choice;
  std::vector<std::uint64_t> keys;
};

// One token: (experts) logits -> (top_k) ids in descending order, ties by index, and their weights. NaN is the largest, as in torch.topk.
void select_experts(const Selection& selection, const float* logits, SelectionScratch& scratch, std::int64_t* index, float* weights);

struct RouterArgs {
  const std::byte* x;  // (tokens, hidden)
  const std::byte* weight;  // (experts, hidden), in the model's own layout
  const float* logit_bias;  // (experts), or null
  ActivationType type;  // of x and weight
  std::int64_t tokens;
  int hidden;
  bool rounds_logits;  // rounds the logits to `type` before they are scored
  Selection selection;
  std::byte* logits;  // (tokens, experts) of logits_type
  ActivationType logits_type;
  std::byte* weights;  // (tokens, top_k) of weights_type
  ActivationType weights_type;
  std::int64_t* index;  // (tokens, top_k)
};

// The job of one call, for up to kAttentionRows tokens; units are runs of experts.
class RouterJob final : public Job {
 public:
  RouterJob(const Kernels& kernels, const RouterArgs& args, int workers, Phase& rows);
  // Starts with token `first`; `memory` receives the widened hidden states and the logits. Throws std::bad_alloc.
  void prepare(std::int64_t first, int tokens, AlignedMemory& memory);
  void run(int worker) noexcept override;
  Upcoming first_rows(int worker) const;
  // Rounds and writes the logits, then chooses; called after the job.
  void choose(SelectionScratch& scratch) const;

 private:
  int unit_experts() const;
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
