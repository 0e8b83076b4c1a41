#include "sparse/job.h"

#include <algorithm>
#include <cstring>

#include "sparse/worker.h"

namespace moegraft {
namespace {

constexpr std::size_t kSegmentBytes = std::size_t{384} << 10;  // as for the dense layout
constexpr int kUnitsPerWorker = 4;  // of the rows phase: enough to even out; rows are read whole where there are as many segments

}  // namespace

SparseJob::SparseJob(const Kernels& kernels, const PackedExperts& experts, ActivationType activations, const SparseArgs& args, int workers,
                     const ExpertsPhases& phases)
    : kernels_(kernels),
      experts_(experts),
      layout_(experts.layout()),
      activations_(activations),
      type_(experts.types().gate_up),
      format_(format_of(type_, activations)),
      args_(args),
      workers_(workers),
      phases_(phases),
      max_tokens_(kernels.max_tokens[static_cast<int>(format_)]),
      hidden_groups_(round_up(experts.shape().hidden, kGroup) / kGroup),
      neuron_groups_(layout_.neurons / kGroup),
      chunks_(chunks_of(experts.shape().hidden)),
      hidden_words_(static_cast<std::size_t>(hidden_groups_) * words_per_group(format_)),
      lane_words_(static_cast<std::size_t>(chunks_) * kLanes * words_per_group(format_)),
      scale_bytes_(row_scale_bytes(type_, experts.shape().hidden)),
      chunk_bytes_(static_cast<std::size_t>(lines_per_chunk(type_)) * static_cast<std::size_t>(line_bytes(type_))) {}

int SparseJob::segment_pairs() const {
  const int fitting = static_cast<int>(kSegmentBytes / (hidden_words_ * 4));
  return std::max(1, fitting / max_tokens_) * max_tokens_;
}

void SparseJob::prepare(const ExpertsBatch& batch, const ExpertsScratch& scratch) {
  first_token_ += static_cast<std::size_t>(batch_.tokens);  // those of the passes before
  batch_ = batch;
  scratch_ = scratch;
  const std::size_t tokens = static_cast<std::size_t>(batch.tokens);
  const int segments = static_cast<int>(batch.routing->segments().size());
  parts_ = 1;
  while (parts_ < chunks_ && segments * parts_ < workers_ * kUnitsPerWorker) parts_ *= 2;
  unit_chunks_ = (chunks_ + parts_ - 1) / parts_;
  parts_ = (chunks_ + unit_chunks_ - 1) / unit_chunks_;
  scratch.records->reserve(tokens * hidden_words_ * 4);
  scratch.lanes->reserve(tokens * lane_words_ * 4);
  scratch.neurons->reserve(lay_out(nullptr));
  lay_out(scratch.neurons->data());
  const Worker needed(nullptr, sizes());
  for (int worker = 0; worker < workers_; ++worker) scratch.workers[worker].reserve(needed.bytes);
  std::fill_n(pairs_of_slots_, tokens * static_cast<std::size_t>(args_.top_k), -1);
  int pair = 0;
  for (const Pair& found : batch.routing->pairs()) pairs_of_slots_[found.slot] = pair++;
  phases_.encode->reset(batch.tokens);
  phases_.neurons->reset(segments * neuron_groups_);
  phases_.rows->reset(segments * parts_);
  phases_.sums->reset(batch.tokens * chunks_);
}

// What all workers share, in `memory`; without memory only its bytes are counted.
std::size_t SparseJob::lay_out(std::byte* memory) {
  const std::size_t pairs = batch_.routing->pairs().size();
  Arrays arrays(memory);
  neurons_ = arrays.take<float>(pairs * static_cast<std::size_t>(layout_.neurons));
  masks_ = arrays.take<std::uint32_t>(batch_.routing->segments().size() * static_cast<std::size_t>(neuron_groups_));
  pairs_of_slots_ = arrays.take<int>(static_cast<std::size_t>(batch_.tokens) * static_cast<std::size_t>(args_.top_k));
  sums_ = arrays.take<float>(pairs * static_cast<std::size_t>(chunks_ * kChunk));
  return arrays.bytes();
}

SparseSizes SparseJob::sizes() const {
  int pairs = 1;
  for (const Segment& segment : batch_.routing->segments()) pairs = std::max(pairs, segment.pairs);
  return {static_cast<std::size_t>(pairs), static_cast<std::size_t>(layout_.neurons), hidden_words_, static_cast<std::size_t>(hidden_groups_ * kGroup)};
}

void SparseJob::run(int worker) noexcept {
  Worker mine(scratch_.workers[worker].data(), sizes());
  const auto work = [&](Phase& phase, void (SparseJob::*compute)(int, Worker&)) {
    int count = 0;
    for (int unit = phase.take(worker); unit >= 0; unit = phase.take(worker), ++count) (this->*compute)(unit, mine);
    compute_pending(mine);
    phase.finish(count);
    phase.wait();
  };
  work(*phases_.encode, &SparseJob::encode_token);
  work(*phases_.neurons, &SparseJob::compute_neurons);
  if (args_.counts != nullptr) add_counts(mine.active_neurons, worker == 0);
  work(*phases_.rows, &SparseJob::compute_rows);
  work(*phases_.sums, &SparseJob::write_chunk);
}

void SparseJob::add_counts(std::int64_t active, bool all) const {
  __atomic_fetch_add(&args_.counts[0], active, __ATOMIC_RELAXED);
  if (!all) return;
  const std::int64_t neurons = static_cast<std::int64_t>(batch_.routing->pairs().size()) * experts_.shape().intermediate;
  __atomic_fetch_add(&args_.counts[1], neurons, __ATOMIC_RELAXED);
}

void SparseJob::encode_token(int token, Worker& mine) {
  const int hidden = experts_.shape().hidden;
  kernels_.widen(activations_, batch_.hidden_states + element_bytes(activations_) * static_cast<std::size_t>(token) * hidden, mine.hidden, hidden);
  std::memset(mine.hidden + hidden, 0, sizeof(float) * static_cast<std::size_t>(hidden_groups_ * kGroup - hidden));
  auto* record = reinterpret_cast<std::uint32_t*>(scratch_.records->data()) + static_cast<std::size_t>(token) * hidden_words_;
  kernels_.encode[static_cast<int>(format_)](mine.hidden, hidden_groups_, record, static_cast<std::size_t>(words_per_group(format_)));
  lay_in_lanes(record, hidden_groups_, format_, lanes_of(token));
}

}  // namespace moegraft
