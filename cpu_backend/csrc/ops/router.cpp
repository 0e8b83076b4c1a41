#include "ops/router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace moegraft {
namespace {

constexpr int kRouterUnitsPerWorker = 4;
constexpr float kSmallestSum = 1e-20f;  // added to the sum of weights before the division, as in the models' own code

// A key whose order is that of the floats, with NaN as the largest; in descending order, equal floats are sorted by index.
std::uint64_t sortable(float value, int index) {
  std::uint32_t bits;
  if (value != value) value = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(&bits, &value, sizeof bits);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return std::uint64_t{bits} << 32 | static_cast<std::uint32_t>(~index);
}

int index_of(std::uint64_t key) { return static_cast<int>(~static_cast<std::uint32_t>(key)); }

// Writes the keys of the `count` largest of values[0 .. size) to the front of `keys`, in descending order.
void find_largest(const float* values, int size, int count, std::vector<std::uint64_t>& keys) {
  keys.resize(static_cast<std::size_t>(size));
  for (int i = 0; i < size; ++i) keys[static_cast<std::size_t>(i)] = sortable(values[i], i);
  std::partial_sort(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
}

void softmax(const float* logits, int count, float* out) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += out[i] = std::exp(logits[i] - largest);
  for (int i = 0; i < count; ++i) out[i] /= sum;
}

// Sets the scores of experts in groups that are not kept to -infinity.
void mask_groups(const Selection& selection, SelectionScratch& scratch) {
  const int size = selection.experts / selection.groups;
  std::vector<float> scores(static_cast<std::size_t>(selection.groups));
  for (int group = 0; group < selection.groups; ++group) {
    float best = -std::numeric_limits<float>::infinity(), second = best;
    for (int i = 0; i < size; ++i) {
      const float value = scratch.choice[static_cast<std::size_t>(group * size + i)];
      second = std::max(second, std::min(best, value));
      best = std::max(best, value);
    }
    scores[static_cast<std::size_t>(group)] = selection.group_score == GroupScore::kLargest || size < 2 ? best : best + second;
  }
  find_largest(scores.data(), selection.groups, selection.kept_groups, scratch.keys);
  for (int i = 0; i < selection.kept_groups; ++i)
    scores[static_cast<std::size_t>(index_of(scratch.keys[static_cast<std::size_t>(i)]))] = std::numeric_limits<float>::quiet_NaN();
  for (int group = 0; group < selection.groups; ++group)
    if (scores[static_cast<std::size_t>(group)] == scores[static_cast<std::size_t>(group)])
      std::fill_n(scratch.choice.begin() + group * size, size, -std::numeric_limits<float>::infinity());
}

}  // namespace

void select_experts(const Selection& selection, const float* logits, SelectionScratch& scratch, std::int64_t* index, float* weights) {
  const int experts = selection.experts;
  scratch.scores.resize(static_cast<std::size_t>(experts));
  float* scores = scratch.scores.data();
  switch (selection.score) {
    case Score::kSoftmax: softmax(logits, experts, scores); break;
    case Score::kSigmoid:
      for (int i = 0; i < experts; ++i) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
      break;
    case Score::kChosenSoftmax: std::copy_n(logits, experts, scores); break;
  }
  scratch.choice.assign(scores, scores + experts);
  if (selection.bias != nullptr)
    for (int i = 0; i < experts; ++i) scratch.choice[static_cast<std::size_t>(i)] += selection.bias[i];
  if (selection.kept_groups < selection.groups) mask_groups(selection, scratch);
  find_largest(scratch.choice.data(), experts, selection.top_k, scratch.keys);
  float sum = 0.0f;
  for (int k = 0; k < selection.top_k; ++k) {
    index[k] = index_of(scratch.keys[static_cast<std::size_t>(k)]);
    sum += weights[k] = scores[index[k]];
  }
  if (selection.score == Score::kChosenSoftmax) softmax(weights, selection.top_k, weights);
  else if (selection.normalise)
    for (int k = 0; k < selection.top_k; ++k) weights[k] /= sum + kSmallestSum;
  for (int k = 0; k < selection.top_k; ++k) weights[k] *= selection.scale;
}

RouterJob::RouterJob(const Kernels& kernels, const RouterArgs& args, int workers, Phase& rows)
    : kernels_(kernels), args_(args), workers_(workers), rows_(rows) {}

void RouterJob::prepare(std::int64_t first, int tokens, AlignedMemory& memory) {
  const int experts = args_.selection.experts;
  const std::size_t states = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(args_.hidden);
  memory.reserve((states + static_cast<std::size_t>(tokens) * static_cast<std::size_t>(experts)) * sizeof(float));
  first_ = first;
  tokens_ = tokens;
  states_ = reinterpret_cast<float*>(memory.data());
  logits_ = states_ + states;
  const std::byte* x = args_.x + element_bytes(args_.type) * static_cast<std::size_t>(first) * static_cast<std::size_t>(args_.hidden);
  kernels_.widen(args_.type, x, states_, static_cast<int>(states));
  halves_ = reinterpret_cast<const std::uint16_t*>(x);
  unit_experts_ = unit_experts();
  rows_.reset((experts + unit_experts_ - 1) / unit_experts_);
}

int RouterJob::unit_experts() const { return std::max(1, args_.selection.experts / (workers_ * kRouterUnitsPerWorker)); }

Upcoming RouterJob::first_rows(int worker) const {
  const int experts = args_.selection.experts, unit = unit_experts();
  const int first = std::min(experts, unit * Phase::first_unit((experts + unit - 1) / unit, worker, workers_));
  const std::size_t row_bytes = element_bytes(args_.type) * static_cast<std::size_t>(args_.hidden);
  return {args_.weight + row_bytes * static_cast<std::size_t>(first), row_bytes * static_cast<std::size_t>(experts - first)};
}

void RouterJob::run(int worker) noexcept {
  const std::size_t row_bytes = element_bytes(args_.type) * static_cast<std::size_t>(args_.hidden);
  const int experts = args_.selection.experts;
  int count = 0;
  for (int unit = rows_.take(worker); unit >= 0; unit = rows_.take(worker), ++count) {
    const int first = unit * unit_experts_;
    const std::byte* rows = args_.weight + row_bytes * static_cast<std::size_t>(first);
    kernels_.attention.score[static_cast<int>(args_.type)](
        {states_, halves_, args_.hidden, tokens_, rows, rows + 16 * row_bytes, static_cast<std::ptrdiff_t>(row_bytes),
         std::min(unit_experts_, experts - first), args_.hidden, logits_ + first, experts});
  }
  rows_.finish(count);
  rows_.wait();
}

void RouterJob::choose(SelectionScratch& scratch) const {
  const Selection& selection = args_.selection;
  const std::size_t experts = static_cast<std::size_t>(selection.experts);
  std::vector<float> weights(static_cast<std::size_t>(selection.top_k));
  for (int token = 0; token < tokens_; ++token) {
    const std::size_t row = static_cast<std::size_t>(first_ + token);
    float* logits = logits_ + static_cast<std::size_t>(token) * experts;
    if (args_.logit_bias != nullptr)
      for (std::size_t i = 0; i < experts; ++i) logits[i] += args_.logit_bias[i];
    std::byte* out = args_.logits + element_bytes(args_.logits_type) * row * experts;
    if (args_.rounds_logits && args_.type != ActivationType::kFloat32) {
      std::vector<std::uint16_t> rounded(experts);
      kernels_.narrow(args_.type, logits, rounded.data(), selection.experts);
      kernels_.widen(args_.type, rounded.data(), logits, selection.experts);
    }
    kernels_.narrow(args_.logits_type, logits, out, selection.experts);
    const std::size_t slot = row * static_cast<std::size_t>(selection.top_k);
    select_experts(selection, logits, scratch, args_.index + slot, weights.data());
    kernels_.narrow(args_.weights_type, weights.data(), args_.weights + element_bytes(args_.weights_type) * slot, selection.top_k);
  }
}

}  // namespace moegraft
