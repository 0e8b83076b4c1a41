// The kernels of every vector instruction set, as templates over a traits struct that an isa_*.cpp file defines before including this.
//
// One trap shapes this file: it is compiled several times with different flags, and the linker keeps one copy of any inline function
// with external linkage, whichever was compiled first. So everything is in an anonymous namespace and no std:: template is called.
//
// A traits struct T has: F and I, vectors of kWidth floats and of as many 32-bit integers; kVectors of them hold the 32 rows of a block
// (kSplit: with more than kWholeTokens tokens a block is computed in two halves, because registers are few); and the operations below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "numbers.h"
#include "vector_rows.h"

namespace moegraft {
namespace {

// A burst a group: hardware prefetchers stop at 4 KiB and start late, and a tile of several tokens computes longer than it reads.
inline void prefetch_ahead(const TileArgs& args, int group) {
  const std::byte* line = args.ahead + static_cast<std::size_t>(group) * static_cast<std::size_t>(args.ahead_lines) * 64;
  for (int i = 0; i < args.ahead_lines; ++i, line += 64) __builtin_prefetch(line, 0, 2);
}

template <class T, int V, int N>
inline void store_tile(const typename T::F (&sums)[N][V], float* out, int first_vector) {
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) T::store(out + n * kBlockRows + (first_vector + v) * T::kWidth, sums[n][v]);
}

// float32 and float16 weights: one column a step.
template <class T, Format Kind, int V, int N>
inline void tile_columns(const TileArgs& args, int first_vector) {
  typename T::F sums[N][V] = {};
  constexpr int kBytes = Kind == Format::kFloat32 ? 4 : 2;
  const std::byte* line = args.block + first_vector * T::kWidth * kBytes;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += (N - 1) * kGroup) {
    prefetch_ahead(args, group);
    for (int col = 0; col < kGroup; ++col, line += kBlockRows * kBytes, ++words) {
      typename T::F weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const std::byte* source = line + v * T::kWidth * kBytes;
        if constexpr (Kind == Format::kFloat32) weights[v] = T::load(reinterpret_cast<const float*>(source));
        else weights[v] = T::load_f16(reinterpret_cast<const std::uint16_t*>(source));
      }
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        const typename T::F value = T::broadcast_float(words + n * kGroup);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[n][v] = T::fma(weights[v], value, sums[n][v]);
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

// bfloat16 weights: a pair of columns a step, by bfloat16 products where both sides and the CPU have them, else widened.
template <class T, Format Kind, int V, int N>
inline void tile_pairs(const TileArgs& args, int first_vector) {
  typename T::F sums[N][V] = {};
  constexpr int kWords = words_per_group(Kind);
  constexpr int kPairWords = kWords / 16;
  const std::byte* line = args.block + first_vector * T::kWidth * 4;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += (N - 1) * kWords) {
    prefetch_ahead(args, group);
    for (int pair = 0; pair < kGroup / 2; ++pair, line += 128, words += kPairWords) {
      typename T::I weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weights[v] = T::load_int(line + v * T::kWidth * 4);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        if constexpr (Kind == Format::kBFloat16Dot && T::kHasBf16) {
          const typename T::I values = T::broadcast_int(words + n * kWords);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[n][v] = T::dot_bf16(sums[n][v], weights[v], values);
        } else {
          typename T::F low, high;
          if constexpr (Kind == Format::kBFloat16Dot) {
            const typename T::I values = T::broadcast_int(words + n * kWords);
            low = T::low_bf16(values);
            high = T::high_bf16(values);
          } else {
            low = T::broadcast_float(words + n * kWords);
            high = T::broadcast_float(words + n * kWords + 1);
          }
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[n][v] = T::fma(T::high_bf16(weights[v]), high, T::fma(T::low_bf16(weights[v]), low, sums[n][v]));
        }
      }
    }
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

// int8 and int4 weights: unsigned codes times signed codes of the activations, a group of 32 columns in integers, then scaled once.
template <class T, Format Kind, int V, int N>
inline void tile_groups(const TileArgs& args, int first_vector) {
  using F = typename T::F;
  using I = typename T::I;
  F sums[N][V] = {};
  constexpr bool kWide = Kind == Format::kInt8;
  const std::byte* base = args.block;
  const std::uint32_t* words = args.records;
  for (int group = 0; group < args.groups; ++group, words += 10 * N) {
    prefetch_ahead(args, group);
    I dots[N][V];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) dots[n][v] = T::broadcast_int(words + n * 10 + 1);
    F scales[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) scales[v] = T::load_f16(reinterpret_cast<const std::uint16_t*>(base) + (first_vector + v) * T::kWidth);
    const std::byte* line = base + kScaleBytes + first_vector * T::kWidth * 4;
#pragma GCC unroll 8
    for (int step = 0; step < (kWide ? 8 : 4); ++step, line += 128) {
      I weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) weights[v] = T::load_int(line + v * T::kWidth * 4);
      if constexpr (kWide) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const I codes = T::broadcast_int(words + n * 10 + 2 + step);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) dots[n][v] = T::dot_int8(dots[n][v], weights[v], codes);
        }
      } else {
        I high[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          high[v] = T::high_nibbles(weights[v]);
          weights[v] = T::low_nibbles(weights[v]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          const I first = T::broadcast_int(words + n * 10 + 2 + 2 * step);
          const I second = T::broadcast_int(words + n * 10 + 3 + 2 * step);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) dots[n][v] = T::dot_int4(T::dot_int4(dots[n][v], weights[v], first), high[v], second);
        }
      }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const F scale = T::broadcast_float(words + n * 10);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[n][v] = T::fma(T::to_float(dots[n][v]), T::mul(scales[v], scale), sums[n][v]);
    }
    base += kWide ? kInt8GroupBytes : kInt4GroupBytes;
  }
  store_tile<T, V, N>(sums, args.out, first_vector);
}

template <class T, Format Kind, int V, int N>
inline void tile_part(const TileArgs& args, int first_vector) {
  if constexpr (Kind == Format::kFloat32 || Kind == Format::kFloat16) tile_columns<T, Kind, V, N>(args, first_vector);
  else if constexpr (Kind == Format::kBFloat16 || Kind == Format::kBFloat16Dot) tile_pairs<T, Kind, V, N>(args, first_vector);
  else tile_groups<T, Kind, V, N>(args, first_vector);
}

template <class T, Format Kind, int N>
void tile_of(const TileArgs& args) {
  if constexpr (N <= T::kWholeTokens) {
    tile_part<T, Kind, T::kVectors, N>(args, 0);
  } else {
    tile_part<T, Kind, T::kVectors / 2, N>(args, 0);
    tile_part<T, Kind, T::kVectors / 2, N>(args, T::kVectors / 2);
  }
}

constexpr bool is_integer(Format kind) { return kind == Format::kInt8 || kind == Format::kInt4; }

template <class T, Format Kind>
constexpr int tile_limit() {
  return is_integer(Kind) ? T::kIntegerTokens : T::kFloatTokens;
}

// Calls the tile compiled for exactly this number of tokens.
template <class T, Format Kind, int N = tile_limit<T, Kind>()>
void tile(const TileArgs& args) {
  if constexpr (N == 1) {
    tile_of<T, Kind, 1>(args);
  } else {
    if (args.tokens == N) return tile_of<T, Kind, N>(args);
    tile<T, Kind, N - 1>(args);
  }
}

inline void encode_float(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) std::memcpy(words, values, sizeof(float) * kGroup);
}

template <class T>
void encode_bf16(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride)
    for (int i = 0; i < kGroup; i += T::kWidth) T::store_bf16(reinterpret_cast<std::uint16_t*>(words) + i, T::load(values + i));
}

// As the scalar version: codes to the nearest even, a scale of NaN for a group that is not finite.
template <class T, int Offset>
void encode_integer(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
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
    typename T::I sum = T::zero_int();
    for (int i = 0; i < kGroup; i += T::kWidth) {
      const typename T::F value = codable ? T::load(values + i) : T::zero();
      const typename T::I code = T::round_to_int(T::mul(value, inverse));
      sum = T::add_int(sum, code);
      T::store_int8(reinterpret_cast<std::int8_t*>(words + 2) + i, code);
    }
    const std::int32_t correction = -Offset * T::reduce_add(sum);
    std::memcpy(words, &scale, 4);
    std::memcpy(words + 1, &correction, 4);
  }
}

// e^x by 2^n times a polynomial on [-ln2/2, ln2/2]; relative error about 1e-7; overflows to infinity, underflows to 0, keeps NaN.
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
    // A quotient, not x * sigmoid: one rounding less, and the scalar version does the same.
    case Activation::kSilu: return T::div(x, T::add(T::set(1.0f), exp<T>(T::mul(T::set(-alpha), x))));
    case Activation::kGelu: return by_element<T>(x, [](float v) { return 0.5f * v * (1.0f + ::erff(v * 0.70710678118654752f)); });
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
    case Activation::kTanh: return by_element<T>(x, [](float v) { return ::tanhf(v); });
  }
  return x;
}

// min and max return their second argument when either is NaN, so a NaN in x passes every limit.
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

template <class T>
Kernels vector_kernels(const char* isa) {
  constexpr int kFloats = T::kFloatTokens;
  constexpr int kIntegers = T::kIntegerTokens;
  return {
      isa,
      {kFloats, kFloats, kFloats, kFloats, kIntegers, kIntegers},
      {tile<T, Format::kFloat32>, tile<T, Format::kFloat16>, tile<T, Format::kBFloat16>, tile<T, Format::kBFloat16Dot>,
       tile<T, Format::kInt8>, tile<T, Format::kInt4>},
      {encode_float, encode_float, encode_float, encode_bf16<T>, encode_integer<T, 128>, encode_integer<T, 8>},
      gate<T>,
      act<T>,
      {dot_row<T, Format::kFloat32>, dot_row<T, Format::kFloat16>, dot_row<T, Format::kBFloat16>, dot_row<T, Format::kBFloat16Dot>,
       dot_row<T, Format::kInt8>, dot_row<T, Format::kInt4>},
      {add_row<T, Format::kFloat32>, add_row<T, Format::kFloat16>, add_row<T, Format::kBFloat16>, add_row<T, Format::kBFloat16Dot>,
       add_row<T, Format::kInt8>, add_row<T, Format::kInt4>},
      accumulate<T>,
      widen<T>,
      narrow<T>,
  };
}

}  // namespace
}  // namespace moegraft
