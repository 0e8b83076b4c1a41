#include "ops/router.h"

#include <algorithm>

namespace moegraft {
namespace {

constexpr int kUnitsPerWorker = 4;

}  // namespace

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
  unit_experts_ = std::max(1, experts / (workers_ * kUnitsPerWorker));
  rows_.reset((experts + unit_experts_ - 1) / unit_experts_);
}

void RouterJob::run(int worker) noexcept {
  const std::size_t row_bytes = element_bytes(args_.type) * static_cast<std::size_t>(args_.hidden);
  const int experts = args_.selection.experts;
  int count = 0;
  for (int unit = rows_.take(worker); unit >= 0; unit = rows_.take(worker), ++count) {
    const int first = unit * unit_experts_;
    kernels_.attention.score[static_cast<int>(args_.type)]({states_, halves_, args_.hidden, tokens_, args_.weight + row_bytes * static_cast<std::size_t>(first),
                                                            static_cast<std::ptrdiff_t>(row_bytes), std::min(unit_experts_, experts - first), args_.hidden,
                                                            logits_ + first, experts});
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
