// The scalar kernels of the sparse layout's rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "numbers.h"

namespace moegraft {
namespace {

// A code of a sparse row, its offset undone: line k / step of the chunk, as in a block of 16 lanes.
template <Format F>
float sparse_weight(const std::byte* lines, int k, int lane) {
  if constexpr (F == Format::kFloat32) return reinterpret_cast<const float*>(lines)[k * kLanes + lane];
  const auto* halves = reinterpret_cast<const std::uint16_t*>(lines);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(lines);
  if constexpr (F == Format::kFloat16) return float_from_f16(halves[k * kLanes + lane]);
  if constexpr (F == Format::kBFloat16 || F == Format::kBFloat16Dot) return float_from_bf16(halves[(k / 2) * 32 + lane * 2 + k % 2]);
  if constexpr (F == Format::kInt8) return static_cast<float>(bytes[(k / 4) * 64 + lane * 4 + k % 4]);
  return static_cast<float>((bytes[(k / 8) * 64 + lane * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4)) & 15);
}

constexpr WeightType weights_of(Format format) {
  switch (format) {
    case Format::kFloat32: return WeightType::kFloat32;
    case Format::kFloat16: return WeightType::kFloat16;
    case Format::kInt8: return WeightType::kInt8;
    case Format::kInt4: return WeightType::kInt4;
    default: return WeightType::kBFloat16;
  }
}

template <Format F>
float dot_row(const RowDotArgs& args) {
  constexpr bool kInteger = F == Format::kInt8 || F == Format::kInt4;
  constexpr int kWords = words_per_group(F);
  float sum = 0.0f;
  for (int chunk = 0; chunk < args.chunks; ++chunk) {
    const std::byte* lines = args.lines + chunk * lines_per_chunk(weights_of(F)) * line_bytes(weights_of(F));
    const std::uint32_t* lanes = args.lanes + static_cast<std::size_t>(chunk) * kWords * kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      if constexpr (kInteger) {
        int dot = static_cast<std::int32_t>(lanes[kLanes + lane]);
        for (int k = 0; k < kGroup; ++k) {
          const auto code = static_cast<std::int8_t>(lanes[(2 + k / 4) * kLanes + lane] >> (8 * (k % 4)));
          dot += static_cast<int>(sparse_weight<F>(lines, k, lane)) * code;
        }
        const float scale = float_from_f16(reinterpret_cast<const std::uint16_t*>(args.scales)[chunk * kLanes + lane]);
        sum += static_cast<float>(dot) * (scale * float_from_bits(lanes[lane]));
      } else {
        for (int k = 0; k < kGroup; ++k) {
          float value;
          if constexpr (F == Format::kBFloat16Dot) {
            const std::uint32_t pair = lanes[(k / 2) * kLanes + lane];
            value = float_from_bf16(static_cast<std::uint16_t>(k % 2 ? pair >> 16 : pair & 0xffffu));
          } else {
            value = float_from_bits(lanes[k * kLanes + lane]);
          }
          sum += sparse_weight<F>(lines, k, lane) * value;
        }
      }
    }
  }
  return sum;
}

template <Format F>
void add_row(const RowAddArgs& args) {
  constexpr int kColumns = kGroup / lines_per_chunk(weights_of(F));
  for (int row = 0; row < 2; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) {
      float coefficient = args.coefficients[row];
      if constexpr (F == Format::kInt8 || F == Format::kInt4) {
        coefficient *= float_from_f16(reinterpret_cast<const std::uint16_t*>(args.scales[row])[lane]);
        args.corrections[lane] += coefficient;
      }
      for (int k = 0; k < args.line_count * kColumns; ++k)
        args.sums[k * kLanes + lane] += coefficient * sparse_weight<F>(args.lines[row], k, lane);
    }
  }
}

}  // namespace
}  // namespace moegraft
