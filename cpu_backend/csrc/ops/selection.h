// Which experts a token takes, and with what weights, of its router's logits: the rules of the families that routers follow.
#pragma once

#include <cstdint>
#include <vector>

namespace moegraft {

enum class Score : int {
  kSoftmax,        // softmax over all experts, then the largest
  kSigmoid,        // sigmoid of each, then the largest
  kChosenSoftmax,  // the largest logits, then softmax over those
};

enum class GroupScore : int { kLargest, kTwoLargest };  // of a group: its best expert's score, or the sum of its best two

struct Selection {
  Score score = Score::kSoftmax;
  int experts = 0;
  int top_k = 0;
  const float* bias = nullptr;  // (experts), added to the scores for the choice alone; or null
  int groups = 1;               // of experts, of which `kept_groups` may be chosen from (DeepSeek-V3's group-limited routing)
  int kept_groups = 1;
  GroupScore group_score = GroupScore::kTwoLargest;
  bool normalise = false;       // weights sum to 1, before `scale`
  float scale = 1.0f;
};

// Scratch memory of one thread.
struct SelectionScratch {
  std::vector<float> scores, choice;
  std::vector<std::uint64_t> keys;
};

// One token: (experts) logits -> (top_k) ids, the best first and of equals the first, and their weights. NaN counts as the best, as in torch.topk.
void select_experts(const Selection& selection, const float* logits, SelectionScratch& scratch, std::int64_t* index, float* weights);

}  // namespace moegraft
