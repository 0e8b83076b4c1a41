// The oracle of the attention kernels: plain loops.
#include <cmath>
#include <cstring>
#include <limits>

#include "core/float_conversion.h"
#include "core/types.h"
#include "simd/attention_kernels.h"

namespace moegraft {
namespace {

template <ActivationType Type>
float element(const std::byte* row, int index) {
  if constexpr (Type == ActivationType::kFloat32) {
    float value;
    std::memcpy(&value, row + 4 * static_cast<std::ptrdiff_t>(index), sizeof value);
    return value;
  } else {
    std::uint16_t half;
    std::memcpy(&half, row + 2 * static_cast<std::ptrdiff_t>(index), sizeof half);
    return Type == ActivationType::kFloat16 ? float_from_f16(half) : float_from_bf16(half);
  }
}

template <ActivationType Type>
void score(const ScoreArgs& args) {
  for (int r = 0; r < args.rows; ++r)
    for (int j = 0; j < args.count; ++j) {
      const std::byte* key = args.keys + j * args.key_bytes;
      float sum = 0.0f;
      for (int d = 0; d < args.dim; ++d) sum += args.query[r * args.query_stride + d] * element<Type>(key, d);
      args.scores[r * args.score_stride + j] = sum;
    }
}

template <ActivationType Type>
void mix(const MixArgs& args) {
  for (int r = 0; r < args.rows; ++r)
    for (int j = 0; j < args.count; ++j) {
      const float share = args.shares[r * args.share_stride + j];
      for (int d = 0; d < args.dim; ++d) args.sums[r * args.sum_stride + d] += share * element<Type>(args.values + j * args.value_bytes, d);
    }
}

float softmax(SoftmaxArgs& args) {
  float largest = args.largest;
  for (int i = 0; i < args.count; ++i) {
    args.scores[i] *= args.scale;
    if (args.softcap > 0.0f) args.scores[i] = args.softcap * std::tanh(args.scores[i] / args.softcap);
    if (args.scores[i] > largest) largest = args.scores[i];  // a NaN is met again below
  }
  if (largest == -std::numeric_limits<float>::infinity()) return nothing_seen(args);
  const float factor = std::exp(args.largest - largest);
  float sum = 0.0f;
  for (int i = 0; i < args.count; ++i) sum += args.scores[i] = std::exp(args.scores[i] - largest);
  args.sum = args.sum * factor + sum;
  args.largest = largest;
  return factor;
}

}  // namespace

const AttentionKernels& scalar_attention() {
  static const AttentionKernels kernels = {
      {score<ActivationType::kFloat32>, score<ActivationType::kFloat16>, score<ActivationType::kBFloat16>},
      {mix<ActivationType::kFloat32>, mix<ActivationType::kFloat16>, mix<ActivationType::kBFloat16>},
      softmax,
  };
  return kernels;
}

}  // namespace moegraft
