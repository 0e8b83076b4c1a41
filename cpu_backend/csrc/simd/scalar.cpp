// The scalar kernels: the oracle that the vector versions are tested against, and what other architectures run.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float_conversion.h"
#include "experts/super_blocks.h"
#include "simd/kernels.h"
#include "simd/scalar_norm.h"
#include "simd/scalar_sparse.h"

namespace moegraft {
namespace {

constexpr int kMaxTokens = 8;

const std::uint32_t* group_words(const TileArgs& args, Format format, int group, int token) {
  return args.records + (static_cast<std::size_t>(group) * args.tokens + token) * words_per_group(format);
}

// One weight of a float block; which load it is depends on the format alone.
template <Format F>
float weight_at(const std::byte* block, int col, int row) {
  if constexpr (F == Format::kFloat32) return reinterpret_cast<const float*>(block)[col * kBlockRows + row];
  const auto* halves = reinterpret_cast<const std::uint16_t*>(block);
  if constexpr (F == Format::kFloat16) return float_from_f16(halves[col * kBlockRows + row]);
  return float_from_bf16(halves[(col / 2) * 64 + row * 2 + col % 2]);
}

template <Format F>
void tile_float(const TileArgs& args) {
  for (int token = 0; token < args.tokens; ++token) {
    float sums[kBlockRows] = {};
    for (int col = 0; col < args.groups * kGroup; ++col) {
      const std::uint32_t* words = group_words(args, F, col / kGroup, token);
      float value;
      if constexpr (F == Format::kBFloat16Dot) {
        const std::uint32_t pair = words[col % kGroup / 2];
        value = float_from_bf16(static_cast<std::uint16_t>(col % 2 ? pair >> 16 : pair & 0xffffu));
      } else {
        value = float_from_bits(words[col % kGroup]);
      }
      for (int row = 0; row < kBlockRows; ++row) sums[row] += weight_at<F>(args.block, col, row) * value;
    }
    std::memcpy(args.out + token * kBlockRows, sums, sizeof sums);
  }
}

template <Format F>
int code_at(const std::uint8_t* lines, int k, int row) {
  if constexpr (F == Format::kInt8) return lines[(k / 4) * 128 + row * 4 + k % 4] - 128;
  return ((lines[(k / 8) * 128 + row * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4)) & 15) - 8;
}

template <Format F>
void tile_integer(const TileArgs& args) {
  constexpr int kGroupBytes = F == Format::kInt8 ? kInt8GroupBytes : kInt4GroupBytes;
  for (int token = 0; token < args.tokens; ++token) {
    float sums[kBlockRows] = {};
    for (int group = 0; group < args.groups; ++group) {
      const std::byte* base = args.block + static_cast<std::size_t>(group) * kGroupBytes;
      const auto* scales = reinterpret_cast<const std::uint16_t*>(base);
      const auto* lines = reinterpret_cast<const std::uint8_t*>(base + kScaleBytes);
      const std::uint32_t* words = group_words(args, F, group, token);
      const float scale = float_from_bits(words[0]);
      std::int8_t codes[kGroup];
      std::memcpy(codes, words + 2, kGroup);
      for (int row = 0; row < kBlockRows; ++row) {
        int dot = 0;
        for (int k = 0; k < kGroup; ++k) dot += code_at<F>(lines, k, row) * codes[k];
        sums[row] += static_cast<float>(dot) * (float_from_f16(scales[row]) * scale);
      }
    }
    std::memcpy(args.out + token * kBlockRows, sums, sizeof sums);
  }
}

void tile_q4_k(const TileArgs& args) {
  for (int token = 0; token < args.tokens; ++token) {
    float sums[kBlockRows] = {};
    for (int group = 0; group < args.groups; ++group) {
      const std::byte* block = args.block + static_cast<std::size_t>(group / kSuperGroups) * kQ4KBytes;
      const auto* halves = reinterpret_cast<const std::uint16_t*>(block);
      const std::byte* scales = block + 2 * kScaleBytes;
      const std::byte* lines = scales + kQ4KScaleWords * kWordsBytes + group % kSuperGroups * kQ4KGroupBytes;
      const std::uint32_t* words = group_words(args, Format::kQ4K, group, token);
      std::int8_t codes[kGroup];
      std::memcpy(codes, words + first_code_word(Format::kQ4K), kGroup);
      for (int row = 0; row < kBlockRows; ++row) {
        const ScaleAndMinimum found = scale_of_q4_k(scales, row, group % kSuperGroups);
        int dot = 0;
        for (int k = 0; k < kGroup; ++k) dot += nibble_at(lines, row, k) * codes[k];
        const float scale = float_from_f16(halves[row]) * static_cast<float>(found.scale);
        const float minimum = float_from_f16(halves[kBlockRows + row]) * static_cast<float>(found.minimum);
        sums[row] -= minimum * float_from_bits(words[1]);
        sums[row] += static_cast<float>(dot) * (scale * float_from_bits(words[0]));
      }
    }
    std::memcpy(args.out + token * kBlockRows, sums, sizeof sums);
  }
}

void tile_q6_k(const TileArgs& args) {
  for (int token = 0; token < args.tokens; ++token) {
    float sums[kBlockRows] = {};
    for (int group = 0; group < args.groups; ++group) {
      const std::byte* block = args.block + static_cast<std::size_t>(group / kSuperGroups) * kQ6KBytes;
      const std::byte* scales = block + kScaleBytes;
      const std::byte* lines = scales + kQ6KScaleWords * kWordsBytes + group % kSuperGroups * kQ6KGroupBytes;
      const std::uint32_t* words = group_words(args, Format::kQ6K, group, token);
      std::int8_t codes[kGroup];
      std::memcpy(codes, words + first_code_word(Format::kQ6K), kGroup);
      for (int row = 0; row < kBlockRows; ++row) {
        for (int part = 0; part < 2; ++part) {
          int dot = 0;
          for (int k = 16 * part; k < 16 * part + 16; ++k) dot += (code_of_q6_k(lines, row, k) - 32) * codes[k];
          const float scale = float_from_f16(reinterpret_cast<const std::uint16_t*>(block)[row]) *
                              static_cast<float>(scale_of_q6_k(scales, row, group % kSuperGroups * 2 + part));
          sums[row] += static_cast<float>(dot) * (scale * float_from_bits(words[0]));
        }
      }
    }
    std::memcpy(args.out + token * kBlockRows, sums, sizeof sums);
  }
}

void encode_float(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) std::memcpy(words, values, sizeof(float) * kGroup);
}

void encode_bf16(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) {
    for (int i = 0; i < kGroup / 2; ++i) {
      const std::uint32_t high = bf16_from_float(values[2 * i + 1]);
      words[i] = (high << 16) | bf16_from_float(values[2 * i]);
    }
  }
}

template <Format F>
void encode_integer(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) {
    float largest = 0.0f;
    bool finite = true;
    for (int k = 0; k < kGroup; ++k) {
      largest = std::max(largest, std::fabs(values[k]));
      finite = finite && std::isfinite(values[k]);
    }
    // Below this the inverse would overflow; such a group is zero beside any other. NaN and Inf travel in the scale.
    const bool codable = finite && largest > 1e-30f;
    const float inverse = codable ? 127.0f / largest : 0.0f;
    const float scale = codable ? largest / 127.0f : finite ? 0.0f : NAN;
    std::int8_t codes[kGroup];
    int sums[2] = {};  // of the first 16 codes and of the last
    for (int k = 0; k < kGroup; ++k) {
      codes[k] = codable ? static_cast<std::int8_t>(std::nearbyintf(values[k] * inverse)) : std::int8_t{0};
      sums[k / 16] += codes[k];
    }
    words[0] = bits_from_float(scale);
    if constexpr (F == Format::kQ6K) {
      for (int part = 0; part < 2; ++part) words[1 + part] = static_cast<std::uint32_t>(-32 * sums[part]);
    } else if constexpr (F == Format::kQ4K) {
      words[1] = bits_from_float(scale * static_cast<float>(sums[0] + sums[1]));
    } else {
      words[1] = static_cast<std::uint32_t>(-(F == Format::kInt8 ? 128 : 8) * (sums[0] + sums[1]));
    }
    std::memcpy(words + first_code_word(F), codes, kGroup);
  }
}

float activate(Activation activation, float alpha, float x) {
  switch (activation) {
    case Activation::kSilu: return x / (1.0f + std::exp(-alpha * x));
    case Activation::kGelu: return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f));
    case Activation::kGeluTanh: return 0.5f * x * (1.0f + std::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case Activation::kRelu: return x < 0.0f ? 0.0f : x;
    case Activation::kRelu2: return x < 0.0f ? 0.0f : x * x;
    case Activation::kIdentity: return x;
    case Activation::kSigmoid: return 1.0f / (1.0f + std::exp(-x));
    case Activation::kTanh: return std::tanh(x);
  }
  return x;
}

// The order of the comparisons lets a NaN through.
float at_most(float x, float limit) { return x > limit ? limit : x; }
float at_least(float x, float limit) { return x < limit ? limit : x; }

void gate(const GateArgs& args) {
  const GateSpec& spec = *args.spec;
  const int width = args.gated ? kLanes : kBlockRows;
  for (int token = 0; token < args.tokens; ++token) {
    const float* rows = args.rows + token * kBlockRows;
    for (int i = 0; i < width; ++i) {
      const float up = rows[args.gated ? kLanes + i : i] + (args.up_bias ? args.up_bias[i] : 0.0f);
      float& out = args.out[token * kBlockRows + i];
      if (!args.gated) {
        out = activate(spec.activation, spec.alpha, up);
        continue;
      }
      const float gate = at_most(rows[i] + (args.gate_bias ? args.gate_bias[i] : 0.0f), spec.gate_limit);
      const float acted = at_most(activate(spec.activation, spec.alpha, gate), spec.act_limit);
      out = acted * (at_least(at_most(up, spec.up_limit), -spec.up_limit) + spec.up_offset);
    }
  }
}

void act(const GateArgs& args) {
  const GateSpec& spec = *args.spec;
  for (int i = 0; i < args.tokens * kBlockRows; ++i) {
    const float gate = at_most(args.rows[i] + (args.gate_bias ? args.gate_bias[i % kBlockRows] : 0.0f), spec.gate_limit);
    args.out[i] = at_most(activate(spec.activation, spec.alpha, gate), spec.act_limit);
  }
}

void accumulate(float* sum, const float* rows, const float* bias, float weight) {
  for (int r = 0; r < kBlockRows; ++r) sum[r] += weight * (bias ? rows[r] + bias[r] : rows[r]);
}

void widen(ActivationType type, const void* source, float* target, int count) {
  const auto* halves = static_cast<const std::uint16_t*>(source);
  switch (type) {
    case ActivationType::kFloat32: std::memcpy(target, source, sizeof(float) * count); break;
    case ActivationType::kFloat16:
      for (int i = 0; i < count; ++i) target[i] = float_from_f16(halves[i]);
      break;
    case ActivationType::kBFloat16:
      for (int i = 0; i < count; ++i) target[i] = float_from_bf16(halves[i]);
      break;
  }
}

void narrow(ActivationType type, const float* source, void* target, int count) {
  auto* halves = static_cast<std::uint16_t*>(target);
  switch (type) {
    case ActivationType::kFloat32: std::memcpy(target, source, sizeof(float) * count); break;
    case ActivationType::kFloat16:
      for (int i = 0; i < count; ++i) halves[i] = f16_from_float(source[i]);
      break;
    case ActivationType::kBFloat16:
      for (int i = 0; i < count; ++i) halves[i] = bf16_from_float(source[i]);
      break;
  }
}

}  // namespace

const Kernels& scalar_kernels() {
  static const Kernels kernels = {
      "scalar",
      {kMaxTokens, kMaxTokens, kMaxTokens, kMaxTokens, kMaxTokens, kMaxTokens, kMaxTokens, kMaxTokens},
      {tile_float<Format::kFloat32>, tile_float<Format::kFloat16>, tile_float<Format::kBFloat16>, tile_float<Format::kBFloat16Dot>,
       tile_integer<Format::kInt8>, tile_integer<Format::kInt4>, tile_q4_k, tile_q6_k},
      {encode_float, encode_float, encode_float, encode_bf16, encode_integer<Format::kInt8>, encode_integer<Format::kInt4>,
       encode_integer<Format::kQ4K>, encode_integer<Format::kQ6K>},
      gate,
      act,
      scalar_rows(),
      accumulate,
      widen,
      narrow,
      scalar_norm,
      scalar_attention(),
  };
  return kernels;
}

}  // namespace moegraft
