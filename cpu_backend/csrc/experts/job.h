// The routed experts of one layer in the dense layout. experts/ holds the layouts of packed weights (block_layout.h, packed_weights.h), the
// grouping of tokens by expert (routing.h) and this job; sparse/ has the job of the sparse layout.
//
// PackedExperts own the weights and are read-only while a job runs; the Engine owns routing and scratch memory, which the job uses.
// Each segment's products run by vector tiles or, with enough tokens, by the matrix kernel (segment_product.h); a pass may have both.
// Every worker (thread_pool.h) runs the same three phases, and waits for the others after each. Any worker may take any unit of a phase:
//   encode   one token:                   hidden state -> record
//   neurons  32 neurons of a segment:     gate and up rows for all its tokens, activation, record of 32 columns for the down projection
//   rows     some blocks of output rows:  down rows of every segment, summed over experts by one worker, rounded once
// A unit's result does not depend on the worker, so the output is the same bit by bit for every thread count and timing.
#pragma once

#include <vector>

#include "core/memory.h"
#include "core/thread_pool.h"
#include "experts/packed_weights.h"
#include "experts/routing.h"
#include "experts/segment_product.h"
#include "simd/kernels.h"

namespace moegraft {

struct ExpertsPhases {
  Phase* encode;
  Phase* neurons;
  Phase* rows;
  Phase* sums;  // sparse layouts only
};

struct ExpertsBatch {
  const std::byte* hidden_states;
  std::byte* out;
  int tokens;
  const Routing* routing;
  AdapterTerms terms = {};
};

struct ExpertsScratch {
  AlignedMemory* records;
  AlignedMemory* lanes;  // sparse layouts only
  AlignedMemory* neurons;
  AlignedMemory* workers;  // one per worker
};

// Adds what adapters add to gate and up of `count` pairs to their product with a block, (rows, 32).
void add_terms(const float* terms, const ExpertsShape& shape, const SegmentProduct& product, const Pair* pairs, int count, int block,
               float* out);

class ExpertsJob final : public Job {
 public:
  ExpertsJob(const Kernels& kernels, const PackedExperts& experts, ActivationType activations, int workers, const ExpertsPhases& phases);

  int segment_pairs() const;  // the longest segment whose activations stay in a core's cache
  void prepare(const ExpertsBatch& batch, const ExpertsScratch& scratch);  // throws std::bad_alloc
  void run(int worker) noexcept override;
  // As a step of a program: while it waits, a worker prefetches its next weights, and then what it reads after the job.
  void run(int worker, Upcoming& after) noexcept;

 private:
  Upcoming first_neurons(int worker) const;
  Upcoming first_rows(int worker) const;
  struct Start {  // what a worker reads first in each of the last two phases
    Upcoming neurons, rows;
  };
  struct Worker;  // one worker's view of its private scratch
  SegmentProduct gate_up_of(const Segment& segment) const;
  SegmentProduct down_of(const Segment& segment) const;
  void encode_token(int token, Worker& mine);
  void compute_neurons(int unit, Worker& mine);
  void compute_rows(int unit, Worker& mine);

  const Kernels& kernels_;
  const PackedExperts& experts_;
  const ExpertLayout& layout_;
  const ActivationType activations_;
  const Format format_;  // of gate and up
  const Format down_format_;  // of down, whose records the neurons are
  const int workers_;
  const ExpertsPhases phases_;
  const int hidden_groups_;
  const int neuron_groups_;
  TokenRecords hidden_;
  ExpertsBatch batch_{};
  ExpertsScratch scratch_{};
  bool uses_matrix_ = false;  // in either phase
  std::vector<std::size_t> neuron_starts_;  // of each segment, words
  std::size_t gathered_words_ = 0;  // of the longest segment
  std::size_t rows_ = 0;  // of its result
  int unit_blocks_ = 1;  // blocks of output rows in one unit of the last phase
  std::vector<Start> starts_;  // of each worker: one that comes late may find the routing of a later job
};

}  // namespace moegraft
