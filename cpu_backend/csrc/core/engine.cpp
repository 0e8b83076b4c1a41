#include "core/engine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention/attention.h"
#include "experts/gradient.h"
#include "experts/job.h"
#include "ops/linear.h"
#include "sparse/job.h"

namespace moegraft {
namespace {

constexpr int kPassTokens = 2048;  // of a pass: limits scratch memory; this many tokens already make a pass compute-bound
constexpr int kGradientElements = 1 << 26;  // of a linear layer's output in a pass of its gradients, which are kept as records
constexpr int kSparsePassTokens = 512;  // whose sums are kept for each expert

void check_packed(const PackedExperts& experts, const std::vector<Segment>& segments) {
  for (const Segment& segment : segments)
    if (!experts.complete(segment.expert))
      throw std::invalid_argument("expert " + std::to_string(segment.expert) + " is used before its " +
                                  experts.missing_parts(segment.expert) + " was packed");
}

AdapterTerms terms_from(const AdapterTerms& terms, std::size_t slot, const ExpertsShape& shape) {
  return terms.from(slot, shape.intermediate * (shape.gated ? 2 : 1), shape.intermediate);
}

constexpr std::int64_t kSingleThreadElements = std::int64_t{1} << 15;  // a smaller norm is finished before another thread could start

}  // namespace

Engine::Engine(const Kernels& kernels, ThreadPool& pool)
    : kernels_(kernels),
      pool_(pool),
      encode_phase_(pool.threads()),
      neurons_phase_(pool.threads(), pool.nodes()),
      rows_phase_(pool.threads(), pool.nodes()),
      sums_phase_(pool.threads()),
      private_(static_cast<std::size_t>(pool.threads())) {}

template <class AnyJob>
void Engine::run_passes(AnyJob& job, const ForwardArgs& args, int pass_tokens, const OpenMp* shared) {
  const PackedExperts& experts = *args.experts;
  const std::size_t row_bytes = element_bytes(args.activations) * static_cast<std::size_t>(experts.shape().hidden);
  for (std::int64_t first = 0; first < args.tokens; first += pass_tokens) {
    const int tokens = static_cast<int>(std::min<std::int64_t>(pass_tokens, args.tokens - first));
    const std::size_t slot = static_cast<std::size_t>(first) * static_cast<std::size_t>(args.top_k);
    const RoutingView view = {args.top_k_index + slot, args.top_k_weights + slot, tokens, args.top_k};
    routing_.group(view, experts.shape().num_experts, job.segment_pairs(), static_cast<int>(first));
    check_packed(experts, routing_.segments());
    const std::size_t offset = row_bytes * static_cast<std::size_t>(first);
    const auto* const hidden = static_cast<const std::byte*>(args.hidden_states) + offset;
    if (experts.frames() != nullptr)
      experts.frames()->demand(experts.layer(), routing_,
                               {hidden, args.activations, experts.shape().hidden, tokens, args.top_k, pool_.threads()});
    job.prepare({hidden, static_cast<std::byte*>(args.out) + offset, tokens, &routing_, terms_from(args.terms, slot, experts.shape())},
                {&records_, &lanes_, &neurons_, private_.data()});
    pool_.run(job, shared);
    if (experts.frames() != nullptr) experts.frames()->check();
  }
}

void Engine::forward(const ForwardArgs& args, const OpenMp* shared) {
  const ExpertsPhases phases = {&encode_phase_, &neurons_phase_, &rows_phase_, &sums_phase_};
  if (args.experts->kind() == LayoutKind::kSparse) {
    SparseJob job(kernels_, *args.experts, args.activations, {args.threshold, args.neuron_counts, args.acted, args.top_k}, pool_.threads(),
                  phases);
    run_passes(job, args, kSparsePassTokens, shared);
  } else {
    ExpertsJob job(kernels_, *args.experts, args.activations, pool_.threads(), phases);
    run_passes(job, args, kPassTokens, shared);
  }
}

void Engine::linear(const LinearArgs& args, const OpenMp* shared) {
  if (!args.linear->packed()) throw std::invalid_argument("linear is used before its weights were packed");
  const std::size_t in_bytes = element_bytes(args.activations) * static_cast<std::size_t>(args.linear->cols());
  const std::size_t out_bytes = element_bytes(args.activations) * static_cast<std::size_t>(args.linear->rows());
  LinearJob job(kernels_, {args.linear}, args.activations, pool_.threads(), {&encode_phase_, &rows_phase_});
  for (std::int64_t first = 0; first < args.tokens; first += kPassTokens) {
    const int tokens = static_cast<int>(std::min<std::int64_t>(kPassTokens, args.tokens - first));
    std::byte* const out = static_cast<std::byte*>(args.out) + out_bytes * static_cast<std::size_t>(first);
    job.prepare({static_cast<const std::byte*>(args.input) + in_bytes * static_cast<std::size_t>(first), &out, tokens},
                {&records_, private_.data()});
    pool_.run(job, shared);
  }
}

void Engine::experts_gradient(const ExpertsGradientArgs& args, const OpenMp* shared) {
  const PackedExperts& experts = *args.experts;
  const std::size_t row_bytes = element_bytes(args.activations) * static_cast<std::size_t>(experts.shape().hidden);
  std::fill_n(args.weight_gradients, args.tokens * args.top_k, 0.0f);
  ExpertsGradientJob job(kernels_, experts, args.activations, pool_.threads(),
                         {&encode_phase_, &neurons_phase_, &rows_phase_, &sums_phase_});
  for (std::int64_t first = 0; first < args.tokens; first += kPassTokens) {
    const int tokens = static_cast<int>(std::min<std::int64_t>(kPassTokens, args.tokens - first));
    const std::size_t slot = static_cast<std::size_t>(first) * static_cast<std::size_t>(args.top_k);
    const std::size_t offset = row_bytes * static_cast<std::size_t>(first);
    routing_.group({args.top_k_index + slot, args.top_k_weights + slot, tokens, args.top_k}, experts.shape().num_experts,
                   job.segment_pairs(), static_cast<int>(first));
    check_packed(experts, routing_.segments());
    if (experts.frames() != nullptr)
      experts.frames()->demand(experts.layer(), routing_, {nullptr, args.activations, 0, tokens, args.top_k, pool_.threads()});
    job.prepare({static_cast<const std::byte*>(args.hidden_states) + offset, static_cast<const std::byte*>(args.gradient) + offset,
                 static_cast<std::byte*>(args.hidden_gradient) + offset, args.weight_gradients + slot, tokens, &routing_,
                 terms_from(args.terms, slot, experts.shape())},
                {&records_, &lanes_, &neurons_, private_.data()});
    pool_.run(job, shared);
    if (experts.frames() != nullptr) experts.frames()->check();
    job.finish();
  }
}

void Engine::linear_gradient(const LinearArgs& args, const OpenMp* shared) {
  if (!args.linear->packed()) throw std::invalid_argument("linear_gradient is used before the weights were packed");
  const std::size_t in_bytes = element_bytes(args.activations) * static_cast<std::size_t>(args.linear->rows());
  const std::size_t out_bytes = element_bytes(args.activations) * static_cast<std::size_t>(args.linear->cols());
  LinearGradientJob job(kernels_, *args.linear, args.activations, pool_.threads(), encode_phase_, rows_phase_);
  const int pass_tokens = std::clamp(kGradientElements / args.linear->rows(), 1, kPassTokens);
  for (std::int64_t first = 0; first < args.tokens; first += pass_tokens) {
    const int tokens = static_cast<int>(std::min<std::int64_t>(pass_tokens, args.tokens - first));
    job.prepare(static_cast<const std::byte*>(args.input) + in_bytes * static_cast<std::size_t>(first),
                static_cast<std::byte*>(args.out) + out_bytes * static_cast<std::size_t>(first), tokens, records_, lanes_, private_.data());
    pool_.run(job, shared);
  }
}

void Engine::attention(const AttentionArgs& args, const OpenMp* shared) {
  if (args.batch == 0 || args.queries == 0 || args.value_dim == 0) return;
  if (args.pages.table) append_to_pages(kernels_, args);
  visible_.find(args);
  const AttentionPhases phases = {&neurons_phase_, &rows_phase_};
  if (args.rows() <= kFewRows || args.keys == 0) {
    AttentionRowsJob job(kernels_, args, visible_, pool_.threads(), phases);
    job.prepare(neurons_, private_.data());
    pool_.run(job, shared);
  } else {
    AttentionTilesJob job(kernels_, args, visible_, pool_.threads(), phases);
    job.prepare(records_, lanes_, private_.data());
    pool_.run(job, shared);
  }
}

void Engine::matmul(const MatmulArgs& args, const OpenMp* shared) {
  MatmulJob job(kernels_, args, pool_.threads(), rows_phase_);
  job.prepare(records_, private_.data());
  pool_.run(job, shared);
}

void Engine::norm(const NormArgs& args, const OpenMp* shared) {
  NormJob job(kernels_, args, rows_phase_);
  if (args.rows * args.cols <= kSingleThreadElements) job.run_rows(0, args.rows);
  else pool_.run(job, shared);
}

void Engine::route(const RouterArgs& args, const OpenMp* shared) {
  RouterJob job(kernels_, args, pool_.threads(), rows_phase_);
  for (std::int64_t first = 0; first < args.tokens; first += kAttentionRows) {
    job.prepare(first, static_cast<int>(std::min<std::int64_t>(kAttentionRows, args.tokens - first)), records_);
    pool_.run(job, shared);
    job.choose(selection_);
  }
}

}  // namespace moegraft
