// The kernels on activations: encoding into records, gates, weighted sums, conversions and norms. Templates over the traits of
// vector_kernels.h, whose rules apply here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/float_conversion.h"
#include "formats/coded_formats.h"
#include "simd/kernels.h"

namespace moegraft {
namespace {

inline void encode_float(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) std::memcpy(words, values, sizeof(float) * kGroup);
}

template <class T>
void encode_bf16(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride)
    for (int i = 0; i < kGroup; i += T::kWidth) T::store_bf16(reinterpret_cast<std::uint16_t*>(words) + i, T::load(values + i));
}

// Encodes a group as int8 codes and its scale, with the scalar version's rounding to the nearest even. A group that is not finite gets a
// scale of NaN.
template <class T, int Parts, bool Minimum>
__attribute__((noinline)) void encode_codes(const float* values, int groups, std::uint32_t* words, std::size_t stride, int offset) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) {
    typename T::F most = T::zero();
    bool finite = true;
    for (int i = 0; i < kGroup; i += T::kWidth) {
      const typename T::F magnitude = T::abs(T::load(values + i));
      finite = finite && T::all_finite(magnitude);
      most = T::max(most, magnitude);
    }
    const float largest = T::reduce_max(most);
    const bool codable = finite && largest > 1e-30f;
    const float scale = codable ? largest / 127.0f : finite ? 0.0f : __builtin_nanf("");
    const typename T::F inverse = T::set(codable ? 127.0f / largest : 0.0f);
    typename T::I sums[2] = {T::zero_int(), T::zero_int()};  // of the first 16 codes and of the last 16
    for (int i = 0; i < kGroup; i += T::kWidth) {
      const typename T::F value = codable ? T::load(values + i) : T::zero();
      const typename T::I code = T::round_to_int(T::mul(value, inverse));
      sums[i / 16] = T::add_int(sums[i / 16], code);
      T::store_int8(reinterpret_cast<std::int8_t*>(words + 1 + Parts) + i, code);
    }
    std::memcpy(words, &scale, 4);
    for (int part = 0; part < Parts; ++part) {
      const int sum = T::reduce_add(Parts == 2 ? sums[part] : T::add_int(sums[0], sums[1]));
      if constexpr (Minimum) {
        const float total = scale * static_cast<float>(sum);
        std::memcpy(words + 1 + part, &total, 4);
      } else {
        const std::int32_t correction = -offset * sum;
        std::memcpy(words + 1 + part, &correction, 4);
      }
    }
  }
}

template <class T, Format Kind>
void encode_coded(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  using Coded = CodedOf<Kind>;
  encode_codes<T, Coded::kParts, Coded::kMinimum>(values, groups, words, stride, Coded::kOffset);
}

// e^x as 2^n times a polynomial on [-ln2/2, ln2/2]; the relative error is about 1e-7. Overflows to infinity, underflows to 0, keeps NaN.
template <class T>
inline typename T::F exp(typename T::F x) {
  x = T::min(T::set(89.0f), T::max(T::set(-104.0f), x));
  const typename T::F n = T::round(T::mul(x, T::set(1.44269504088896341f)));
  typename T::F r = T::fma(n, T::set(-0.693359375f), x);
  r = T::fma(n, T::set(2.12194440e-4f), r);
  typename T::F p = T::set(1.0f / 5040.0f);
  p = T::fma(p, r, T::set(1.0f / 720.0f));
  p = T::fma(p, r, T::set(1.0f / 120.0f));
  p = T::fma(p, r, T::set(1.0f / 24.0f));
  p = T::fma(p, r, T::set(1.0f / 6.0f));
  p = T::fma(p, r, T::set(0.5f));
  p = T::fma(p, r, T::set(1.0f));
  p = T::fma(p, r, T::set(1.0f));
  return T::scale_by_power(p, n);
}

template <class T>
inline typename T::F sigmoid(typename T::F x) {
  return T::div(T::set(1.0f), T::add(T::set(1.0f), exp<T>(T::sub(T::zero(), x))));
}

template <class T, class Function>
inline typename T::F by_element(typename T::F x, Function function) {
  alignas(64) float values[T::kWidth];
  T::store(values, x);
  for (float& value : values) value = function(value);
  return T::load(values);
}

template <class T>
inline typename T::F activate(Activation activation, float alpha, typename T::F x) {
  switch (activation) {
    // A quotient instead of x * sigmoid saves one rounding; the scalar version does the same.
    case Activation::kSilu: return T::div(x, T::add(T::set(1.0f), exp<T>(T::mul(T::set(-alpha), x))));
    case Activation::kGelu: return by_element<T>(x, [](float v) { return 0.5f * v * (1.0f + __builtin_erff(v * 0.70710678118654752f)); });
    case Activation::kGeluTanh: {  // (1 + tanh(y)) / 2 is sigmoid(2y)
      const typename T::F cubic = T::fma(T::mul(T::mul(x, x), x), T::set(0.044715f), x);
      return T::mul(x, sigmoid<T>(T::mul(cubic, T::set(2.0f * 0.79788456080286536f))));
    }
    case Activation::kRelu: return T::max(T::zero(), x);
    case Activation::kRelu2: {
      const typename T::F positive = T::max(T::zero(), x);
      return T::mul(positive, positive);
    }
    case Activation::kIdentity: return x;
    case Activation::kSigmoid: return sigmoid<T>(x);
    case Activation::kTanh: return by_element<T>(x, [](float v) { return __builtin_tanhf(v); });
  }
  return x;
}

// out = min(act(min(gate, gate_limit)), act_limit) * (clamp(up) + up_offset), or act(up) without a gate. min and max return their second
// argument when either is NaN, so a NaN passes every limit.
template <class T>
void gate(const GateArgs& args) {
  using F = typename T::F;
  const GateSpec& spec = *args.spec;
  const float alpha = static_cast<float>(spec.alpha);
  const F gate_limit = T::set(static_cast<float>(spec.gate_limit)), act_limit = T::set(static_cast<float>(spec.act_limit));
  const F up_limit = T::set(static_cast<float>(spec.up_limit)), up_offset = T::set(static_cast<float>(spec.up_offset));
  for (int token = 0; token < args.tokens; ++token) {
    const float* rows = args.rows + token * kBlockRows;
    float* out = args.out + token * kBlockRows;
    for (int i = 0; i < (args.gated ? kLanes : kBlockRows); i += T::kWidth) {
      F up = T::load(rows + (args.gated ? kLanes : 0) + i);
      if (args.up_bias) up = T::add(up, T::load(args.up_bias + i));
      if (!args.gated) {
        T::store(out + i, activate<T>(spec.activation, alpha, up));
        continue;
      }
      F gate = T::load(rows + i);
      if (args.gate_bias) gate = T::add(gate, T::load(args.gate_bias + i));
      const F acted = T::min(act_limit, activate<T>(spec.activation, alpha, T::min(gate_limit, gate)));
      up = T::max(T::sub(T::zero(), up_limit), T::min(up_limit, up));
      T::store(out + i, T::mul(acted, T::add(up, up_offset)));
    }
  }
}

template <class T>
void act(const GateArgs& args) {
  using F = typename T::F;
  const GateSpec& spec = *args.spec;
  const F gate_limit = T::set(static_cast<float>(spec.gate_limit)), act_limit = T::set(static_cast<float>(spec.act_limit));
  for (int i = 0; i < args.tokens * kBlockRows; i += T::kWidth) {
    F gate = T::load(args.rows + i);
    if (args.gate_bias) gate = T::add(gate, T::load(args.gate_bias + i % kBlockRows));
    T::store(args.out + i, T::min(act_limit, activate<T>(spec.activation, static_cast<float>(spec.alpha), T::min(gate_limit, gate))));
  }
}

template <class T>
void accumulate(float* sum, const float* rows, const float* bias, float weight) {
  const typename T::F share = T::set(weight);
  for (int i = 0; i < kBlockRows; i += T::kWidth) {
    typename T::F value = T::load(rows + i);
    if (bias) value = T::add(value, T::load(bias + i));
    T::store(sum + i, T::fma(share, value, T::load(sum + i)));
  }
}

template <class T>
void widen(ActivationType type, const void* source, float* target, int count) {
  const auto* halves = static_cast<const std::uint16_t*>(source);
  int i = 0;
  if (type == ActivationType::kFloat32) {
    std::memcpy(target, source, sizeof(float) * static_cast<std::size_t>(count));
  } else if (type == ActivationType::kFloat16) {
    for (; i + T::kWidth <= count; i += T::kWidth) T::store(target + i, T::load_f16(halves + i));
    for (; i < count; ++i) target[i] = float_from_f16(halves[i]);
  } else {
    for (; i + T::kWidth <= count; i += T::kWidth) T::store(target + i, T::load_bf16(halves + i));
    for (; i < count; ++i) target[i] = float_from_bf16(halves[i]);
  }
}

template <class T>
void narrow(ActivationType type, const float* source, void* target, int count) {
  auto* halves = static_cast<std::uint16_t*>(target);
  int i = 0;
  if (type == ActivationType::kFloat32) {
    std::memcpy(target, source, sizeof(float) * static_cast<std::size_t>(count));
  } else if (type == ActivationType::kFloat16) {
    for (; i + T::kWidth <= count; i += T::kWidth) T::store_f16(halves + i, T::load(source + i));
    for (; i < count; ++i) halves[i] = f16_from_float(source[i]);
  } else {
    for (; i + T::kWidth <= count; i += T::kWidth) T::store_bf16(halves + i, T::load(source + i));
    for (; i < count; ++i) halves[i] = bf16_from_float(source[i]);
  }
}

// The root-mean-square norm of one row.
template <class T>
void norm(const NormRowArgs& args) {
  using F = typename T::F;
  constexpr int kPiece = 256;  // columns converted to floats at a time; the row itself stays in L1
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
