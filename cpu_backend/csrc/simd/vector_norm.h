// Root-mean-square norm of a row, as a template over the traits of vector_kernels.h (whose first comment holds here too).
#pragma once

#include "simd/kernels.h"
#include "simd/vector_activations.h"

namespace moegraft {
namespace {

template <class T>
void norm(const NormRowArgs& args) {
  using F = typename T::F;
  constexpr int kPiece = 256;  // columns that are held as floats; the row itself stays in the first cache
  alignas(64) float values[kPiece];
  alignas(64) float weights[kPiece];
  const auto bytes = element_bytes(args.type);
  F squares[2] = {T::zero(), T::zero()};
  for (int first = 0; first < args.cols; first += kPiece) {
    const int count = args.cols - first < kPiece ? args.cols - first : kPiece;
    widen<T>(args.type, args.x + bytes * first, values, count);
    for (int i = count; i % (2 * T::kWidth) != 0; ++i) values[i] = 0.0f;
    for (int i = 0; i < count; i += 2 * T::kWidth) {
      const F low = T::load(values + i), high = T::load(values + i + T::kWidth);
      squares[0] = T::fma(low, low, squares[0]);
      squares[1] = T::fma(high, high, squares[1]);
    }
  }
  const float mean = T::reduce_add_float(T::add(squares[0], squares[1])) / static_cast<float>(args.cols);
  const F factor = T::set(1.0f / __builtin_sqrtf(mean + args.form.epsilon));
  const F offset = T::set(args.form.weight_offset);
  for (int first = 0; first < args.cols; first += kPiece) {
    const int count = args.cols - first < kPiece ? args.cols - first : kPiece;
    widen<T>(args.type, args.x + bytes * first, values, count);
    for (int i = 0; i < count; i += T::kWidth) T::store(values + i, T::mul(T::load(values + i), factor));
    if (args.form.rounds_first && args.type != ActivationType::kFloat32) {
      alignas(64) std::uint16_t halves[kPiece];
      narrow<T>(args.type, values, halves, count);
      widen<T>(args.type, halves, values, count);
    }
    if (args.weight != nullptr) {
      widen<T>(args.type, args.weight + bytes * first, weights, count);
      for (int i = 0; i < count; i += T::kWidth) T::store(values + i, T::mul(T::load(values + i), T::add(offset, T::load(weights + i))));
    }
    narrow<T>(args.type, values, args.out + bytes * first, count);
  }
}

}  // namespace
}  // namespace moegraft
