// The function table that every instruction set fills: the engine above it knows no vector width.
//
// Activations travel as records of 32-bit words, a group of 32 columns at a time; the records of the n tokens of a tile are interleaved
// group by group (group g of token t begins at (g * n + t) * words), so that a kernel reads one stream at constant offsets.
//   float formats     32 words a group, one float each
//   kBFloat16Dot      16 words a group, two bfloat16 each
//   kInt8, kInt4      10 words a group: scale (float), correction (int32: -128 or -8 times the sum of the codes, which undoes the
//                     unsigned offset of the weights), then 32 int8 codes
//   kQ4K              10 words a group: scale, scale times the sum of the codes (float, what the weights' minimum is to be multiplied
//                     with), then 32 int8 codes
//   kQ6K              11 words a group: scale, correction of the first and of the last 16 columns (int32: -32 times the sum of their codes),
//                     then 32 int8 codes
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "experts/block_layout.h"
#include "simd/attention_kernels.h"
#include "simd/sparse_kernels.h"

namespace moegraft {

// A weight type together with the arithmetic that is used on it.
enum class Format : int { kFloat32, kFloat16, kBFloat16, kBFloat16Dot, kInt8, kInt4, kQ4K, kQ6K };

constexpr int words_per_group(Format format) {
  switch (format) {
    case Format::kBFloat16Dot: return 16;
    case Format::kInt8:
    case Format::kInt4:
    case Format::kQ4K: return 10;
    case Format::kQ6K: return 11;
    default: return 32;
  }
}
constexpr int first_code_word(Format format) { return format == Format::kQ6K ? 3 : 2; }

// bfloat16 weights meet bfloat16 activations in bfloat16 products, all else in the weights' widened or integer form.
constexpr Format format_of(WeightType weights, ActivationType activations) {
  switch (weights) {
    case WeightType::kFloat32: return Format::kFloat32;
    case WeightType::kFloat16: return Format::kFloat16;
    case WeightType::kBFloat16: return activations == ActivationType::kBFloat16 ? Format::kBFloat16Dot : Format::kBFloat16;
    case WeightType::kInt8: return Format::kInt8;
    case WeightType::kQ4K: return Format::kQ4K;
    case WeightType::kQ6K: return Format::kQ6K;
    default: return Format::kInt4;
  }
}

struct TileArgs {
  const std::byte* block;        // one block of 32 rows
  const std::uint32_t* records;  // `tokens` records, interleaved
  int groups;                    // columns / 32
  int tokens;                    // 1 to Kernels::max_tokens
  float* out;                    // (tokens, 32)
  const std::byte* ahead;        // what will be read next: `ahead_lines` lines of it are prefetched with each group
  int ahead_lines;
  std::size_t ahead_stride;      // bytes from one group's burst to the next one's
};

struct GateArgs {
  const GateSpec* spec;
  const float* rows;       // (tokens, 32): 16 gate rows then 16 up rows; 32 up rows when ungated
  const float* gate_bias;  // 16, or null
  const float* up_bias;    // 16 (32 when ungated), or null
  int tokens;
  bool gated;
  float* out;              // (tokens, 32): 16 values are written at `out` when gated, 32 when not
};

// A root-mean-square norm as families have it: x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight).
struct NormForm {
  float epsilon;
  float weight_offset;  // 1 where weights are stored around 0
  bool rounds_first;    // the quotient is rounded to the row's type before it meets the weight
};

struct NormRowArgs {
  const std::byte* x;       // (cols)
  const std::byte* weight;  // (cols), or null
  std::byte* out;           // (cols)
  ActivationType type;      // of all three
  int cols;
  NormForm form;
};

struct Kernels {
  const char* isa;
  int max_tokens[kFormats];
  // out = block times records, accumulated in float32; the result for a token does not depend on the other tokens of the tile.
  void (*tile[kFormats])(const TileArgs& args);
  // Writes the record of `groups` * 32 floats; group g begins at words[g * stride].
  void (*encode[kFormats])(const float* values, int groups, std::uint32_t* words, std::size_t stride);
  void (*gate)(const GateArgs& args);
  // out = min(act(min(rows + gate_bias, gate_limit)), act_limit) for 32 gate rows a token: what a sparse layout compares with its threshold.
  void (*act)(const GateArgs& args);
  RowKernels rows;
  // sum[r] += weight * (rows[r] + bias[r]) for 32 rows; bias may be null.
  void (*accumulate)(float* sum, const float* rows, const float* bias, float weight);
  void (*widen)(ActivationType type, const void* source, float* target, int count);
  void (*narrow)(ActivationType type, const float* source, void* target, int count);
  void (*norm)(const NormRowArgs& args);
  AttentionKernels attention;
};

// The oracle: plain loops, built everywhere.
const Kernels& scalar_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_vnni_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
#endif

}  // namespace moegraft
