// The routed experts of one layer in the sparse layout. Where a neuron's |act(gate)| is below the threshold for every token, its rows of up
// and down are not read. A threshold of zero computes every neuron.
//
// Ownership and threads are those of experts/job.h; every worker runs four phases:
//   encode   one token:                  the record, in order for the gate's blocks and in lanes for the rows of up
//   neurons  32 neurons of a segment:    gate for all tokens, then up for the active neurons
//   rows     a segment, or a range of its columns: the active neurons' rows of down, for each token
//   sums     512 columns of one token:   the sum over its experts
// With few tokens per expert, memory is the limit: each row is read once and multiplied with the tokens that need it. With many tokens,
// nearly every neuron is active for some token: unless few of the products are needed, rows become blocks of the dense layout, which are
// multiplied with all tokens as in experts/job.h, and the neurons that a token does not need are zero in its input of down.
// The neurons phase can count active neurons, with one atomic addition per worker, and export act(gate).
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/job.h"
#include "experts/routing.h"
#include "experts/segment_product.h"

namespace moegraft {

struct SparseArgs {
  float threshold;  // of |act(gate)|
  std::int64_t* counts;  // (2): incremented by the neurons that reached the threshold, and by all neurons; or null
  float* acted;  // (tokens, top_k, intermediate) receives act(gate), except for padded slots; or null
  int top_k;
};

// Of a worker's memory.
struct SparseSizes {
  std::size_t pairs;  // of the longest segment
  std::size_t neurons;
  std::size_t values;  // of one token: columns or neurons
  std::size_t gathered_words;  // of the longest segment's records
  std::size_t rows;  // of its products
  std::size_t block_bytes;  // of the blocks of the dense layout, 0 where no segment may need them
  std::size_t neuron_words;  // of the records that are multiplied with them
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
  struct Columns;
  struct Run;
  class RowPrefetch;
  std::size_t place_arrays(std::byte* memory);
  SparseSizes needed_sizes();
  void encode_token(int token, Worker& mine);
  void add_count(int which, std::int64_t neurons) const;

  SegmentProduct gate_of(const Segment& segment) const;  // and up
  SegmentProduct down_of(const Segment& segment) const;
  bool may_be_dense(const Segment& segment) const;
  bool mostly_needed(const Segment& segment, int wanted, int neurons) const;

  // neurons phase
  void compute_neurons(int unit, Worker& mine);
  void compute_gate(const Segment& segment, int group, Worker& mine);
  void compute_pending(Worker& mine);
  void compute_up(const Segment& segment, int group, std::uint32_t active, int wanted, Worker& mine);
  void dot_block(const Segment& segment, const std::byte* rows, Worker& mine) const;
  void dot_all_tokens(const Segment& segment, const std::byte* rows, std::uint32_t active, Worker& mine) const;
  void dot_active_tokens(const Segment& segment, const std::byte* rows, int group, std::uint32_t active, Worker& mine) const;

  // rows and sums phases
  Columns columns_of(int part) const;
  RowPrefetch prefetch_of(const Run& run, const Columns& columns) const;
  int active_neurons(int segment_index, int* neurons) const;
  void compute_rows(int unit, Worker& mine);
  void add_few(const Segment& segment, int count, const Columns& columns, Worker& mine) const;
  void add_many(const Segment& segment, int count, const Columns& columns, Worker& mine) const;
  void add_blocks(const Segment& segment, int segment_index, const Columns& columns, Worker& mine) const;
  void take_coefficients(const Segment& segment, const int* neurons, int count, Worker& mine) const;
  std::size_t tile_stride() const;
  void widen_chunk(const Run& run, const Columns& columns, int chunk, RowPrefetch& ahead, int lines_ahead, Worker& mine) const;
  void add_chunk(const Segment& segment, int neurons, int chunk, RowPrefetch& ahead, int lines_ahead, Worker& mine) const;
  void add_bias(const Segment& segment, const Columns& columns) const;
  void write_chunk(int unit, Worker& mine);

  float* neurons_of(int pair) const { return neurons_ + static_cast<std::size_t>(pair) * static_cast<std::size_t>(layout_.neurons); }
  float* sums_of(int pair) const { return sums_ + static_cast<std::size_t>(pair) * static_cast<std::size_t>(chunks_ * kChunk); }
  std::uint32_t* lanes_of(int token) const {
    return reinterpret_cast<std::uint32_t*>(scratch_.lanes->data()) + static_cast<std::size_t>(token) * lane_words_;
  }

  const Kernels& kernels_;
  const PackedExperts& experts_;
  const ExpertLayout& layout_;
  const ActivationType activations_;
  const WeightType type_;
  const Format format_;
  const SparseArgs args_;
  const int workers_;
  const ExpertsPhases phases_;
  const Format down_format_;  // of blocks of down
  const int hidden_groups_;
  const int neuron_groups_;
  const int chunks_;
  const std::size_t lane_words_;
  const std::size_t scale_bytes_;  // in front of a row's lines
  const std::size_t chunk_bytes_;
  TokenRecords hidden_;
  ExpertsBatch batch_{};
  ExpertsScratch scratch_{};
  SparseSizes sizes_{};
  bool uses_matrix_ = false;
  std::size_t first_token_ = 0;  // the pass's first token in the caller's batch
  int unit_chunks_ = 1;  // chunks in one unit of the rows phase
  int parts_ = 1;  // units of a segment
  float* neurons_ = nullptr;  // (pairs, neurons)
  float* sums_ = nullptr;  // (pairs, chunks, 32, 16): each expert's output for a token
  std::uint32_t* masks_ = nullptr;  // (segments, neuron groups): which of 32 neurons are active for any token
  int* wanted_ = nullptr;  // (segments, neuron groups): the products that tokens need
  int* pairs_of_slots_ = nullptr;  // (tokens, top_k): -1 where padded
};

}  // namespace moegraft
