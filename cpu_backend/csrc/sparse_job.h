// One pass over experts in the sparse layout. Phases as in experts_job.h, but of a neuron whose |act(gate)| is below the threshold for
// every token, the rows of up and down are never read:
//   encode   a token:                 its record, once for the gate's blocks and once in lanes for the rows of up
//   neurons  a segment's 32 neurons:  gate for all tokens, then up for the active ones
//   rows     a range of columns:      the active neurons' rows of down, added up by one worker
// `Intra-expert activation sparsity`; a threshold of zero computes every neuron.
// The neurons phase may count active neurons, one atomic addition a worker, and show what act(gate) was.
#pragma once

#include <cmath>
#include <cstdint>

#include "experts_job.h"
#include "records.h"

namespace moegraft {

struct SparseArgs {
  float threshold;       // of |act(gate)|
  std::int64_t* counts;  // (2): neurons that reached the threshold, and all of them, are added to it; or null
  float* acted;          // (tokens, top_k, intermediate) takes act(gate), padded slots stay as they are; or null
  int top_k;
};

class SparseJob final : public Job {
 public:
  SparseJob(const Kernels& kernels, const PackedExperts& experts, ActivationType activations, const SparseArgs& args, int workers,
            const ExpertsPhases& phases);

  int segment_pairs() const;
  void prepare(const ExpertsBatch& batch, const ExpertsScratch& scratch);  // throws std::bad_alloc
  void run(int worker) noexcept override;

 private:
  struct Worker;
  struct Columns;  // what one unit of the last phase covers
  void encode_token(int token, Worker& mine);
  void compute_neurons(int unit, Worker& mine);
  void compute_up(const Segment& segment, int group, std::uint32_t active);
  void compute_pending(Worker& mine);
  void compute_rows(int unit, Worker& mine);
  void add_segment(const Segment& segment, int segment_index, const Columns& columns, Worker& mine) const;
  void add_bias(const Segment& segment, const Columns& columns, Worker& mine) const;
  void write_columns(const Columns& columns, const Worker& mine) const;
  void add_counts(std::int64_t active, bool all) const;
  bool is_active(float acted) const { return !(std::fabs(acted) < args_.threshold); }  // a NaN is active: it must be seen
  float* neurons_of(int pair) const { return reinterpret_cast<float*>(scratch_.neurons->data()) + static_cast<std::size_t>(pair) * layout_.neurons; }
  std::uint32_t* masks() const;  // (segments, neuron groups): which of 32 neurons are active for some token

  const Kernels& kernels_;
  const PackedExperts& experts_;
  const ExpertLayout& layout_;
  const ActivationType activations_;
  const Format format_;
  const SparseArgs args_;
  const int workers_;
  const ExpertsPhases phases_;
  const int max_tokens_;
  const int hidden_groups_;
  const int neuron_groups_;
  const int chunks_;
  const std::size_t hidden_words_;
  const std::size_t lane_words_;
  ExpertsBatch batch_{};
  ExpertsScratch scratch_{};
  std::size_t first_token_ = 0;  // of this pass, in the caller's batch
  int unit_chunks_ = 1;  // chunks in one unit of the last phase
  int parts_ = 1;        // units that a chunk is cut into, by its lines
};

}  // namespace moegraft
