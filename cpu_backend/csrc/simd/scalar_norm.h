// The oracle of the norm: plain loops. `static`, as numbers.h has it.
#pragma once

#include <cmath>
#include <cstring>

#include "core/float_conversion.h"
#include "simd/kernels.h"

namespace moegraft {

static inline float widened(ActivationType type, const std::byte* row, int index) {
  if (type == ActivationType::kFloat32) {
    float value;
    std::memcpy(&value, row + 4 * static_cast<std::ptrdiff_t>(index), sizeof value);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, row + 2 * static_cast<std::ptrdiff_t>(index), sizeof half);
  return type == ActivationType::kFloat16 ? float_from_f16(half) : float_from_bf16(half);
}

static inline float rounded_to(ActivationType type, float value) {
  if (type == ActivationType::kFloat32) return value;
  return type == ActivationType::kFloat16 ? float_from_f16(f16_from_float(value)) : float_from_bf16(bf16_from_float(value));
}

static inline void scalar_norm(const NormRowArgs& args) {
  float squares = 0.0f;
  for (int i = 0; i < args.cols; ++i) squares += widened(args.type, args.x, i) * widened(args.type, args.x, i);
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(args.cols) + args.form.epsilon);
  for (int i = 0; i < args.cols; ++i) {
    float value = widened(args.type, args.x, i) * factor;
    if (args.form.rounds_first) value = rounded_to(args.type, value);
    if (args.weight != nullptr) value *= args.form.weight_offset + widened(args.type, args.weight, i);
    scalar_kernels().narrow(args.type, &value, args.out + element_bytes(args.type) * static_cast<std::size_t>(i), 1);
  }
}

}  // namespace moegraft
