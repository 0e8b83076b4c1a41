// Cache policies: they learn from the routing of every token and rank the experts of a layer by how much a cache should keep them. The slots
// of a GPU and the frames of host memory rank by this code.
//
// `mrs` is HybriMoE's Minus Recent Score (section IV-D, eq. 3), applied for each token: S = alpha * TopP(s) + (1 - alpha) * S. All tokens of
// a step are applied at once, each with the weight that it has at the end of the step.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moegraft {

enum class PolicyKind : std::uint8_t { kMrs, kLru, kLfu, kScoreFrequency, kStatic };

struct PolicyOptions {
  PolicyKind kind = PolicyKind::kScoreFrequency;
  double alpha = 0.1;  // the newest token's weight in the average of scores
  double frequency_alpha = 0.01;  // and in the average of uses
  int top_p = 0;  // how many of a token's largest scores count; 0: all
};

PolicyKind parse_policy(const std::string& name);  // throws std::invalid_argument

// Not thread-safe.
class CachePolicy {
 public:
  // Layers with fewer experts have ranks that are not used. Throws std::invalid_argument.
  CachePolicy(const PolicyOptions& options, int layers, int experts);

  int layers() const { return layers_; }
  int experts() const { return experts_; }

  // One step of a layer: begin(), then what each token scored and used, in any order, then end().
  void begin(int layer, int tokens);
  void score(int expert, int token, double value) {  // one that is not finite would stay in the average for ever
    const int age = tokens_ - 1 - token;
    if (averages_scores() && age < static_cast<int>(score_gains_.size()) && std::isfinite(value))
      scores_[first_ + static_cast<std::size_t>(expert)] += score_gains_[static_cast<std::size_t>(age)] * value;
  }
  void use(int expert, int token);
  void end();
  // A step of `tokens` tokens with scores (tokens, experts) and choices (tokens, top_k); ids that are no expert's are padding.
  void update(int layer, int tokens, int top_k, const float* scores, const std::int64_t* chosen);
  void set_static(const std::int64_t* uses);  // (layers, experts): the ranks of kStatic

  // Larger: keep; comparable among layers.
  double rank(int layer, int expert) const {
    const std::size_t at = row_of(layer) + static_cast<std::size_t>(expert);
    return kind_ == PolicyKind::kLfu ? rank_by_uses(at) : ranks_[at];
  }
  const double* ranks(int layer);  // (experts), valid until the next update of any layer
  const double* ranks() const { return ranks_.data(); }  // (layers, experts), those of rows that were asked for

 private:
  std::size_t row_of(int layer) const { return static_cast<std::size_t>(layer) * static_cast<std::size_t>(experts_); }
  double rank_by_uses(std::size_t at) const { return uses_[at] + last_[at] / (2.0 * (clock_ + 1.0)); }  // of equals, what was used last
  bool averages_scores() const { return kind_ == PolicyKind::kMrs || kind_ == PolicyKind::kScoreFrequency; }

  const PolicyKind kind_;
  const int layers_, experts_, top_p_;
  std::vector<double> score_gains_, use_gains_;  // of a token by its age, while they are not negligible
  std::vector<double> ranks_, scores_, uses_, last_;
  std::vector<int> order_;
  double score_keep_, use_keep_;
  double clock_ = 0;  // tokens of all layers
  std::size_t first_ = 0;  // of the step's row
  int tokens_ = 0;
};

}  // namespace moegraft
