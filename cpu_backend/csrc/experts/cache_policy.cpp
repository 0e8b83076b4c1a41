#include "experts/cache_policy.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace moegraft {
namespace {

constexpr double kNegligible = 1e-12;  // a token's weight at which it no longer changes an average in double precision
constexpr int kMostGains = 1 << 16;

constexpr std::array<std::pair<const char*, PolicyKind>, 5> kPolicyNames = {{{"mrs", PolicyKind::kMrs},
                                                                             {"lru", PolicyKind::kLru},
                                                                             {"lfu", PolicyKind::kLfu},
                                                                             {"score_frequency", PolicyKind::kScoreFrequency},
                                                                             {"static", PolicyKind::kStatic}}};

std::vector<double> gains_of(double alpha) {
  if (!(alpha > 0.0 && alpha <= 1.0)) throw std::invalid_argument("the weight of a cache policy must be above 0 and at most 1");
  std::vector<double> gains;
  for (double gain = alpha, left = 1.0; left >= kNegligible && gains.size() < kMostGains; gain *= 1.0 - alpha, left *= 1.0 - alpha)
    gains.push_back(gain);
  return gains;
}

}  // namespace

PolicyKind parse_policy(const std::string& name) {
  for (const auto& [known, kind] : kPolicyNames)
    if (name == known) return kind;
  throw std::invalid_argument("unknown cache policy '" + name + "'; known are mrs, lru, lfu, score_frequency and static");
}

CachePolicy::CachePolicy(const PolicyOptions& options, int layers, int experts)
    : kind_(options.kind),
      layers_(layers),
      experts_(experts),
      top_p_(options.top_p > 0 ? std::min(options.top_p, experts) : experts),
      score_gains_(gains_of(options.alpha)),
      use_gains_(gains_of(options.frequency_alpha)),
      score_keep_(1.0 - options.alpha),
      use_keep_(1.0 - options.frequency_alpha) {
  if (layers < 1 || experts < 1) throw std::invalid_argument("a cache policy needs at least one layer and one expert");
  const std::size_t all = row_of(layers);
  ranks_.assign(all, 0.0);
  if (averages_scores()) scores_.assign(all, 0.0);
  if (kind_ == PolicyKind::kScoreFrequency || kind_ == PolicyKind::kLfu) uses_.assign(all, 0.0);
  if (kind_ == PolicyKind::kLru || kind_ == PolicyKind::kLfu) last_.assign(all, 0.0);
}

void CachePolicy::begin(int layer, int tokens) {
  first_ = row_of(layer);
  tokens_ = tokens;
  const auto decay = [&](std::vector<double>& values, double keep) {
    const double factor = std::pow(keep, tokens);
    for (std::size_t at = first_; at < first_ + static_cast<std::size_t>(experts_); ++at) values[at] *= factor;
  };
  if (averages_scores()) decay(scores_, score_keep_);
  if (kind_ == PolicyKind::kScoreFrequency) decay(uses_, use_keep_);
}

void CachePolicy::use(int expert, int token) {
  const std::size_t at = first_ + static_cast<std::size_t>(expert);
  if (kind_ == PolicyKind::kScoreFrequency) {
    const int age = tokens_ - 1 - token;
    if (age < static_cast<int>(use_gains_.size())) uses_[at] += use_gains_[static_cast<std::size_t>(age)];
    return;
  }
  if (kind_ == PolicyKind::kLfu) uses_[at] += 1.0;
  if (!last_.empty()) last_[at] = std::max(last_[at], clock_ + token + 1.0);
}

void CachePolicy::end() {
  clock_ += tokens_;
  double* const ranks = ranks_.data() + first_;
  const auto count = static_cast<std::size_t>(experts_);
  if (kind_ == PolicyKind::kMrs) std::copy_n(scores_.data() + first_, count, ranks);
  if (kind_ == PolicyKind::kLru) std::copy_n(last_.data() + first_, count, ranks);
  if (kind_ != PolicyKind::kScoreFrequency) return;
  // Each by its mean in the layer.
  const double *const scores = scores_.data() + first_, *const uses = uses_.data() + first_;
  const auto scale_of = [&](const double* values) {
    const double sum = std::accumulate(values, values + count, 0.0);
    return sum > 0.0 ? static_cast<double>(count) / sum : 0.0;
  };
  const double score_scale = scale_of(scores), use_scale = scale_of(uses);
  for (std::size_t e = 0; e < count; ++e) ranks[e] = scores[e] * score_scale + uses[e] * use_scale;
}

void CachePolicy::update(int layer, int tokens, int top_k, const float* scores, const std::int64_t* chosen) {
  begin(layer, tokens);
  for (int token = 0; token < tokens; ++token) {
    const std::int64_t* const ids = chosen + static_cast<std::ptrdiff_t>(token) * top_k;
    for (int i = 0; i < top_k; ++i)
      if (ids[i] >= 0 && ids[i] < experts_) use(static_cast<int>(ids[i]), token);
  }
  const int counted = averages_scores() ? std::min(tokens, static_cast<int>(score_gains_.size())) : 0;
  order_.resize(static_cast<std::size_t>(experts_));
  for (int token = tokens - counted; token < tokens; ++token) {
    const float* const row = scores + static_cast<std::ptrdiff_t>(token) * experts_;
    if (!std::all_of(row, row + experts_, [](float value) { return std::isfinite(value); })) continue;
    std::iota(order_.begin(), order_.end(), 0);
    if (top_p_ < experts_)
      std::nth_element(order_.begin(), order_.begin() + top_p_, order_.end(),
                       [row](int a, int b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
    for (int i = 0; i < top_p_; ++i) score(order_[static_cast<std::size_t>(i)], token, row[order_[static_cast<std::size_t>(i)]]);
  }
  end();
}

void CachePolicy::set_static(const std::int64_t* uses) { std::copy_n(uses, row_of(layers_), ranks_.data()); }

const double* CachePolicy::ranks(int layer) {
  const std::size_t first = row_of(layer);
  if (kind_ == PolicyKind::kLfu)
    for (std::size_t at = first; at < first + static_cast<std::size_t>(experts_); ++at) ranks_[at] = rank_by_uses(at);
  return ranks_.data() + first;
}

}  // namespace moegraft
