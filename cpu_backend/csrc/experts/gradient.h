// Gradients through packed weights, which stay as they are: of an input, dX = dY W, and of the weights that routed the experts' outputs.
//
// W is packed for products with its rows, so that a backward pass needs its columns as rows. They are expanded a panel at a time, by each
// worker for itself, to the type that the products use: never a whole expert. The expansion is the product of packed blocks with unit vectors
// as tokens: it takes the kernels that exist, serves each format on each instruction set, and gives the weights that the forward pass
// multiplies with, as the other terms of its sums are zero.
#pragma once

#include <vector>

#include "core/memory.h"
#include "core/thread_pool.h"
#include "experts/job.h"
#include "experts/packed_weights.h"
#include "experts/routing.h"
#include "experts/segment_product.h"
#include "simd/kernels.h"

namespace moegraft {

// The columns of packed matrices of one type as blocks of rows: bfloat16 in front of bfloat16 activations, float32 in front of others.
class TransposedWeights {
 public:
  TransposedWeights(const Kernels& kernels, WeightType source, ActivationType activations);

  WeightType type() const { return type_; }
  Format format() const { return format_; }
  int blocks_at_once() const { return step_; }  // of 32 columns of the packed matrix: those that share a block of its format
  SegmentProduct product(int rows, int tokens) const { return {kernels_, type_, format_, round_up(rows, kGroup) / kGroup, tokens}; }
  std::size_t panel_bytes(int rows) const { return block_bytes(type_, rows); }  // of 32 columns of a matrix with so many rows
  std::size_t scratch_bytes() const;  // of a worker, for expand()
  std::size_t unit_words() const { return (units_.words() + 15) / 16 * 16; }
  void write_units(std::uint32_t* words);  // the unit vectors, which must stay there
  // Writes the panels of 32 columns from `first` on, a multiple of blocks_at_once(), of a matrix of `blocks` packed blocks; a panel takes
  // panel_bytes(32 * blocks).
  void expand(const std::byte* matrix, std::size_t bytes_of_block, int blocks, int first, std::byte* panels, std::byte* scratch,
              ExpandedWeights& expanded) const;

 private:
  const Kernels& kernels_;
  const WeightType source_;
  const WeightType type_;
  const Format format_;
  const int step_;
  const SegmentProduct units_;
  std::vector<int> rows_;  // of their products
  const std::uint32_t* records_ = nullptr;  // of the unit vectors
};

// The gradient of an input: a sum over matrices of the products of some tokens' gradients with a matrix. A matrix with many rows is expanded
// and multiplied in parts of kPartGroups * 32 rows, so that a worker's panels stay in its core's cache.
class InputGradient {
 public:
  struct Term {
    const std::byte* matrix;  // packed blocks
    const std::uint32_t* records;  // of the gradients of its rows, as write() leaves them
    const Pair* pairs;  // the tokens that the records belong to; null for those from first_token on
    int first_token;
    int tokens;
  };

  // Of matrices with `rows` rows, in whole blocks, and `cols` columns; a block has `bytes_of_block` bytes.
  InputGradient(const Kernels& kernels, WeightType weights, ActivationType activations, int rows, int cols, std::size_t bytes_of_block,
                int workers, Phase& phase);

  const TransposedWeights& weights() const { return weights_; }
  std::size_t words(int tokens) const;  // of the records of a term
  // Writes the gradients of a group of 32 rows for all tokens of a term: (tokens, 32).
  void write(int group, const float* gradients, int tokens, std::uint32_t* records) const;
  // Terms of one matrix stand together. `units` takes weights().unit_words() words.
  void prepare(std::vector<Term> terms, int tokens, std::byte* out, std::uint32_t* units);
  std::size_t scratch_bytes() const;  // of a worker
  void run(int worker, std::byte* scratch, ExpandedWeights& expanded) const;

 private:
  static constexpr int kPartGroups = 64;
  int parts() const { return (groups_ + kPartGroups - 1) / kPartGroups; }
  int groups_of(int part) const { return part + 1 < parts() ? kPartGroups : groups_ - part * kPartGroups; }
  SegmentProduct product(int part, int tokens) const { return weights_.product(groups_of(part) * kGroup, tokens); }
  void compute(int unit, std::byte* scratch, ExpandedWeights& expanded) const;

  const Kernels& kernels_;
  TransposedWeights weights_;
  const ActivationType activations_;
  const int groups_;
  const int cols_;
  const std::size_t bytes_of_block_;
  const int unit_blocks_;  // of 32 columns
  Phase& phase_;
  std::vector<Term> terms_;
  int tokens_ = 0;
  int longest_ = 0;  // tokens of a term
  std::byte* out_ = nullptr;
};

struct GradientBatch {
  const std::byte* hidden_states;  // (tokens, hidden)
  const std::byte* gradient;  // of the experts' output, (tokens, hidden)
  std::byte* hidden_gradient;  // (tokens, hidden)
  float* weight_gradients;  // (tokens, top_k), zeros
  int tokens;
  const Routing* routing;
  AdapterTerms terms = {};
};

// The backward pass of the routed experts of one layer in the dense layout. It keeps nothing of the forward pass, whose gate and up
// projections it computes again. Phases, in units that any worker may take, as in job.h:
//   encode   one token:                hidden state and gradient of the output -> records
//   neurons  32 neurons of a segment, or 256 where a format's block has so many columns: gate and up rows, the gradient of their product,
//            and that of both -> records, with the activations' share of the routing weights' gradients
//   rows     some columns of the hidden states: their gradients, summed over experts by one worker, rounded once
class ExpertsGradientJob final : public Job {
 public:
  ExpertsGradientJob(const Kernels& kernels, const PackedExperts& experts, ActivationType activations, int workers,
                     const ExpertsPhases& phases);

  int segment_pairs() const { return segment_pairs_; }  // as the forward pass cuts, so that the same kernels compute gate and up
  void prepare(const GradientBatch& batch, const ExpertsScratch& scratch);  // throws std::bad_alloc
  void run(int worker) noexcept override;
  void finish() const;  // on the calling thread: sums the gradients of the routing weights

 private:
  struct Worker;
  SegmentProduct gate_up_of(const Segment& segment) const;
  SegmentProduct down_of(const Segment& segment) const { return down_.product(experts_.shape().hidden, segment.pairs); }
  void encode_token(int token, Worker& mine);
  void compute_neurons(int unit, Worker& mine);
  void differentiate(int group, std::size_t index, const std::byte* panel, float* shares, Worker& mine);

  const Kernels& kernels_;
  const PackedExperts& experts_;
  const ExpertLayout& layout_;
  const ActivationType activations_;
  const Format format_;  // of gate and up
  const ExpertsPhases phases_;
  const int hidden_groups_;
  const int neuron_groups_;
  const int segment_pairs_;
  TransposedWeights down_;
  InputGradient input_;
  TokenRecords hidden_;
  TokenRecords gradient_;
  const int workers_;
  GradientBatch batch_{};
  ExpertsScratch scratch_{};
  int chunks_ = 1;  // units of a segment
  std::vector<std::size_t> starts_;  // of each segment's records for input_, words
  std::size_t hidden_words_ = 0, gradient_words_ = 0;  // of the longest segment
  int rows_ = 0, pairs_ = 0;
  std::vector<float> shares_;  // (chunks, pairs) of the gradients of routing weights
};

// The gradient of a linear layer's input.
class LinearGradientJob final : public Job {
 public:
  LinearGradientJob(const Kernels& kernels, const PackedLinear& linear, ActivationType activations, int workers, Phase& encode,
                    Phase& rows);
  void prepare(const std::byte* gradient, std::byte* out, int tokens, AlignedMemory& records, AlignedMemory& units,
               AlignedMemory* workers);  // throws std::bad_alloc
  void run(int worker) noexcept override;

 private:
  void encode_group(int unit, float* values);

  const Kernels& kernels_;
  const PackedLinear& linear_;
  const ActivationType activations_;
  const int workers_;
  Phase& encode_;
  InputGradient input_;
  const std::byte* gradient_ = nullptr;
  AlignedMemory* scratch_ = nullptr;
  std::uint32_t* records_ = nullptr;
  Tiling segments_{1, 1};  // of the pass's tokens
  std::size_t segment_words_ = 0;
};

}  // namespace moegraft
