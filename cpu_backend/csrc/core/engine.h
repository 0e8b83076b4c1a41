// Runs the operations of all folders over the function table of one instruction set: checks what is packed, cuts long batches into passes,
// and starts a job for each pass on the pool. It owns the scratch memory that jobs share; one call at a time (the Runtime sees to it).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "core/memory.h"
#include "core/thread_pool.h"
#include "experts/packed_weights.h"
#include "experts/routing.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/router.h"
#include "simd/kernels.h"

namespace moegraft {

struct ForwardArgs {
  const PackedExperts* experts;
  const void* hidden_states;          // (tokens, hidden)
  const std::int64_t* top_k_index;    // (tokens, top_k)
  const float* top_k_weights;         // (tokens, top_k)
  void* out;                          // (tokens, hidden)
  ActivationType activations;         // of hidden_states and out
  std::int64_t tokens;
  int top_k;
  float threshold;                    // of |act(gate)|, sparse layouts only
  std::int64_t* neuron_counts = nullptr;  // see SparseArgs
  float* acted = nullptr;                 // see SparseArgs
  AdapterTerms terms = {};                // dense layouts only
};

struct LinearArgs {
  const PackedLinear* linear;
  const void* input;                  // (tokens, cols)
  void* out;                          // (tokens, rows)
  ActivationType activations;
  std::int64_t tokens;
};

// The gradients of a forward pass's inputs, given that of its output.
struct ExpertsGradientArgs {
  const PackedExperts* experts;       // in the dense layout
  const void* hidden_states;          // (tokens, hidden)
  const std::int64_t* top_k_index;    // (tokens, top_k)
  const float* top_k_weights;         // (tokens, top_k)
  const void* gradient;               // (tokens, hidden)
  void* hidden_gradient;              // (tokens, hidden)
  float* weight_gradients;            // (tokens, top_k)
  ActivationType activations;         // of all (tokens, hidden)
  std::int64_t tokens;
  int top_k;
  AdapterTerms terms = {};
};

// Scratch memory is kept between calls and grows to the largest batch so far.
class Engine {
 public:
  Engine(const Kernels& kernels, ThreadPool& pool);

  // `shared`: the OpenMP library that the calling thread belongs to, or null. All throw std::invalid_argument and std::bad_alloc.
  void forward(const ForwardArgs& args, const OpenMp* shared);
  void linear(const LinearArgs& args, const OpenMp* shared);
  void experts_gradient(const ExpertsGradientArgs& args, const OpenMp* shared);
  void linear_gradient(const LinearArgs& args, const OpenMp* shared);  // of (tokens, rows) -> (tokens, cols)
  void attention(const AttentionArgs& args, const OpenMp* shared);
  void matmul(const MatmulArgs& args, const OpenMp* shared);
  void norm(const NormArgs& args, const OpenMp* shared);
  void route(const RouterArgs& args, const OpenMp* shared);

 private:
  template <class AnyJob>
  void run_passes(AnyJob& job, const ForwardArgs& args, int pass_tokens, const OpenMp* shared);

  const Kernels& kernels_;
  ThreadPool& pool_;
  Routing routing_;
  VisibleKeys visible_;
  SelectionScratch selection_;
  Phase encode_phase_;
  Phase neurons_phase_;
  Phase rows_phase_;
  Phase sums_phase_;
  AlignedMemory records_;
  AlignedMemory lanes_;
  AlignedMemory neurons_;
  std::vector<AlignedMemory> private_;  // one for each worker
};

}  // namespace moegraft
