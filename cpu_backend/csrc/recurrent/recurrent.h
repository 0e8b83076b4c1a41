// Layers with a state of fixed size in place of a cache: the gated delta rule (Yang et al. 2024, arXiv:2412.06464; with a decay for each
// channel Kimi Delta Attention, arXiv:2510.26692), the selective scan (Mamba, arXiv:2312.00752; Mamba-2, arXiv:2405.21060) and the short
// causal convolution in front of them.
//
// All compute token by token, also in prompts: a part of a state that stays in the first-level cache is taken through all tokens, which
// needs fewer products than the forms in chunks that GPUs prefer. The results of a token do not depend on how many others are in its call.
// Where a token may be taken back, its state is written to memory of its own in place of that of the last one: `past` has such a state for
// each token but the last, or is empty.
//
// recurrent/ holds the loops (loops.h), which the files of instruction sets compile for themselves, and what is shared (jobs.h, jobs.cpp).
// A unit of work is a part of a state; units are independent of each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "simd/kernels.h"

namespace moegraft {

// A tensor of up to 4 dimensions, or none where `data` is null; strides in elements.
struct StridedView {
  std::byte* data = nullptr;
  ActivationType type = ActivationType::kFloat32;
  int dims = 0;
  std::array<std::int64_t, 4> sizes{};
  std::array<std::int64_t, 4> strides{};

  explicit operator bool() const { return data != nullptr; }
  std::byte* at(std::int64_t i, std::int64_t j = 0, std::int64_t k = 0, std::int64_t l = 0) const {
    return data + static_cast<std::int64_t>(element_bytes(type)) * (i * strides[0] + j * strides[1] + k * strides[2] + l * strides[3]);
  }
};

constexpr int kMostKeyColumns = 512;  // of a head of the delta rule: a worker holds a token's on its stack
constexpr int kMostStateColumns = 512;  // of a channel of the selective scan
constexpr int kMostTaps = 8;  // of a convolution
constexpr int kDeltaColumns = 64;  // of values, of a unit: with 128 key columns, 32 KiB of the state
constexpr int kConvChannels = 64;  // of a unit
constexpr int kScanHeads = 16;  // of a unit, where heads have one channel

// S <- decay S; S <- S + k beta (v - k S); out = scale q S, for each token.
struct DeltaRuleArgs {
  StridedView out;  // (batch, tokens, heads, value columns)
  StridedView state;  // (batch, heads, key columns, value columns) float32, contiguous: written
  StridedView query, key;  // (batch, tokens, key heads, key columns), each for heads / key heads consecutive heads
  StridedView value;  // (batch, tokens, heads, value columns)
  StridedView decay;  // its logarithm: (batch, tokens, heads), or (batch, tokens, heads, key columns)
  StridedView beta;  // (batch, tokens, heads)
  StridedView before;  // as `state`, perhaps the same: the state before the first token; none: zeros
  std::vector<StridedView> past;  // as `state`: written
  float scale;
  float epsilon;  // added to the squared norm by whose root queries and keys are divided; below 0 for no division

  std::int64_t blocks() const { return (value.sizes[3] + kDeltaColumns - 1) / kDeltaColumns; }
  std::int64_t units() const { return value.sizes[0] * value.sizes[2] * blocks(); }
  void check() const;
};

// out[t] = act(bias + sum of weight[w] * x[t - taps + 1 + w]) for each channel, where the state's columns precede x.
struct ShortConvArgs {
  StridedView out;  // (batch, channels, tokens)
  StridedView state;  // (batch, channels, columns): the last columns before and, written, after x; none: zeros before, and nothing written
  StridedView x;  // (batch, channels, tokens)
  StridedView weight;  // (channels, taps)
  StridedView bias;  // (channels) or none
  std::vector<StridedView> past;  // as `state`: written with the columns up to each of x's last tokens but one, as many as there are
  bool silu;

  std::int64_t units() const { return x.sizes[0] * ((x.sizes[1] + kConvChannels - 1) / kConvChannels); }
  void check() const;
};

// d = softplus(dt + bias) or dt + bias, clamped; S <- exp(d A) S + d x B; out = S C + D x, times silu(z); for each token.
struct SelectiveScanArgs {
  StridedView out;  // (batch, tokens, heads, channels)
  StridedView state;  // (batch, heads, channels, columns) float32, contiguous: written
  StridedView x;  // (batch, tokens, heads, channels)
  StridedView dt;  // (batch, tokens, heads)
  StridedView a;  // (heads), or (heads, columns)
  StridedView b, c;  // (batch, tokens, groups, columns), each for heads / groups consecutive heads
  StridedView d;  // (heads) or none
  StridedView dt_bias;  // (heads) or none
  StridedView z;  // as x, or none
  StridedView before;  // as `state`, perhaps the same: the state before the first token; none: zeros
  std::vector<StridedView> past;  // as `state`: written
  bool softplus;
  float least, most;  // of d

  std::int64_t heads_of_unit() const { return x.sizes[3] == 1 ? kScanHeads : 1; }
  std::int64_t blocks() const { return (x.sizes[2] + heads_of_unit() - 1) / heads_of_unit(); }
  std::int64_t units() const { return x.sizes[0] * blocks(); }
  void check() const;
};

// By instruction set; `kernels` converts rows. The convolution's leave its states to jobs.cpp, where moving them is compiled once.
struct RecurrentKernels {
  void (*delta_rule)(const Kernels& kernels, const DeltaRuleArgs& args, std::int64_t unit);
  void (*short_conv)(const Kernels& kernels, const ShortConvArgs& args, std::int64_t unit);
  void (*selective_scan)(const Kernels& kernels, const SelectiveScanArgs& args, std::int64_t unit);
};
const RecurrentKernels& recurrent_kernels(const Kernels& kernels);  // for the instruction set of `kernels`
#if defined(__x86_64__) && !defined(MOEGRAFT_SCALAR_ONLY)
const RecurrentKernels& avx2_recurrent();
const RecurrentKernels& avx512_recurrent();
#endif

}  // namespace moegraft
