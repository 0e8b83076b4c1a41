// The loops of recurrent layers, in the vectors of the file's instruction set.
//
// A sum's terms are added in one order, whatever the number of tokens, and the same code computes a token of a prompt and one alone: their
// results are equal bit for bit.
#pragma once

#include <cstring>

#include "core/float_conversion.h"
#include "recurrent/recurrent.h"

namespace moegraft {
namespace {

// As wide as a register: compilers keep wider ones in memory.
#if defined(__AVX512F__)
#define MOEGRAFT_VECTOR_BYTES 64
#elif defined(__AVX__)
#define MOEGRAFT_VECTOR_BYTES 32
#else
#define MOEGRAFT_VECTOR_BYTES 16
#endif
constexpr int kFloats = MOEGRAFT_VECTOR_BYTES / 4;
using Vector = float __attribute__((vector_size(MOEGRAFT_VECTOR_BYTES)));
using Integers = std::int32_t __attribute__((vector_size(MOEGRAFT_VECTOR_BYTES)));
using Unaligned = float __attribute__((vector_size(MOEGRAFT_VECTOR_BYTES), aligned(4), may_alias));
#define MOEGRAFT_VECTOR(address) (*reinterpret_cast<Unaligned*>(address))
#define MOEGRAFT_CONST_VECTOR(address) (*reinterpret_cast<const Unaligned*>(address))

// e^x within 2 units in the last place; 0 below -87, so that no subnormal appears.
inline void exponential(const Vector& x, Vector& out) {
  const Vector bounded = x > 88.0f ? Vector{} + 88.0f : x;
  const Vector shifted = bounded * 1.44269504f + 12582912.0f;  // the nearest whole number, in the last bits
  const Vector whole = shifted - 12582912.0f;
  const Vector rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vector sum = Vector{} + 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  Integers exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent + (127 - 0x4b400000)) << 23;
  Vector power;
  std::memcpy(&power, &exponent, sizeof power);
  out = x < -87.0f ? Vector{} : sum * power;
}

inline void silu(Vector& x) {
  Vector denominator;
  exponential(-x, denominator);
  x = x / (denominator + 1.0f);
}

inline float sum_of(const Vector& x) {
  float parts[kFloats];
  std::memcpy(parts, &x, sizeof parts);
  for (int width = kFloats / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return parts[0];
}

inline float one(ActivationType type, const std::byte* source) {
  float value;
  std::uint16_t half;
  if (type == ActivationType::kFloat32) {
    std::memcpy(&value, source, sizeof value);
    return value;
  }
  std::memcpy(&half, source, sizeof half);
  return type == ActivationType::kBFloat16 ? float_from_bf16(half) : float_from_f16(half);
}

inline void put(ActivationType type, float value, std::byte* target) {
  if (type == ActivationType::kFloat32) {
    std::memcpy(target, &value, sizeof value);
    return;
  }
  const std::uint16_t half = type == ActivationType::kBFloat16 ? bf16_from_float(value) : f16_from_float(value);
  std::memcpy(target, &half, sizeof half);
}

// `count` floats and zeros up to the next multiple of the lanes.
inline void widened(const Kernels& kernels, ActivationType type, const std::byte* source, float* target, int count) {
  kernels.widen(type, source, target, count);
  for (int i = count; i % kFloats != 0; ++i) target[i] = 0.0f;
}

// Where the state after a token goes.
template <class Args>
const StridedView& state_after(const Args& args, std::int64_t token) {
  return token < static_cast<std::int64_t>(args.past.size()) ? args.past[static_cast<std::size_t>(token)] : args.state;
}

// ---- the gated delta rule

// What a token's columns of values are computed with: key columns of each.
struct DeltaToken {
  alignas(64) float query[kMostKeyColumns];
  alignas(64) float key[kMostKeyColumns];
  alignas(64) float decayed_key[kMostKeyColumns];
  alignas(64) float decay[kMostKeyColumns];
  float beta;
  int keys;
};

// For `Count` vectors of columns, whose rows of the state are `stride` apart.
template <int Count>
__attribute__((noinline)) void delta_columns(const DeltaToken& token, const float* before, float* state, std::ptrdiff_t stride,
                                             const float* value, float* out) {
  Vector delta[Count] = {}, sum[Count] = {};
  for (int i = 0; i < token.keys; ++i)
    for (int j = 0; j < Count; ++j) delta[j] += token.decayed_key[i] * MOEGRAFT_CONST_VECTOR(before + i * stride + j * kFloats);
  for (int j = 0; j < Count; ++j) delta[j] = (MOEGRAFT_CONST_VECTOR(value + j * kFloats) - delta[j]) * token.beta;
  for (int i = 0; i < token.keys; ++i)
    for (int j = 0; j < Count; ++j) {
      const Vector row = token.decay[i] * MOEGRAFT_CONST_VECTOR(before + i * stride + j * kFloats) + token.key[i] * delta[j];
      MOEGRAFT_VECTOR(state + i * stride + j * kFloats) = row;
      sum[j] += token.query[i] * row;
    }
  for (int j = 0; j < Count; ++j) MOEGRAFT_VECTOR(out + j * kFloats) = sum[j];
}

__attribute__((noinline)) void delta_column(const DeltaToken& token, const float* before, float* state, std::ptrdiff_t stride,
                                            const float* value, float* out) {
  float delta = 0.0f, sum = 0.0f;
  for (int i = 0; i < token.keys; ++i) delta += token.decayed_key[i] * before[i * stride];
  delta = (*value - delta) * token.beta;
  for (int i = 0; i < token.keys; ++i) {
    const float row = token.decay[i] * before[i * stride] + token.key[i] * delta;
    state[i * stride] = row;
    sum += token.query[i] * row;
  }
  *out = sum;
}

inline void normalise(float* row, int count, float epsilon, float scale) {
  if (epsilon >= 0.0f) {
    Vector squares = {};
    for (int i = 0; i < count; i += kFloats) squares += MOEGRAFT_CONST_VECTOR(row + i) * MOEGRAFT_CONST_VECTOR(row + i);
    scale /= __builtin_sqrtf(sum_of(squares) + epsilon);
  }
  for (int i = 0; i < count; i += kFloats) MOEGRAFT_VECTOR(row + i) *= scale;
}

void delta_rule(const Kernels& kernels, const DeltaRuleArgs& args, std::int64_t unit) {
  const std::int64_t blocks = args.blocks(), heads = args.value.sizes[2], tokens = args.value.sizes[1];
  const std::int64_t block = unit % blocks, head = unit / blocks % heads, sequence = unit / blocks / heads;
  const std::int64_t key_head = head / (heads / args.key.sizes[2]), first = block * kDeltaColumns;
  const std::int64_t stride = args.value.sizes[3], left = stride - first;
  const int columns = static_cast<int>(left < kDeltaColumns ? left : kDeltaColumns);
  const bool by_channel = args.decay.dims == 4;
  alignas(64) float value[kDeltaColumns], out[kDeltaColumns];
  DeltaToken token;
  token.keys = static_cast<int>(args.key.sizes[3]);
  float* state = reinterpret_cast<float*>(state_after(args, 0).at(sequence, head)) + first;
  const float* before = args.before ? reinterpret_cast<const float*>(args.before.at(sequence, head)) + first : state;
  for (int i = 0; !args.before && i < token.keys; ++i)
    for (int j = 0; j < columns; ++j) state[i * stride + j] = 0.0f;
  for (std::int64_t t = 0; t < tokens; ++t, before = state) {
    state = reinterpret_cast<float*>(state_after(args, t).at(sequence, head)) + first;
    widened(kernels, args.query.type, args.query.at(sequence, t, key_head), token.query, token.keys);
    widened(kernels, args.key.type, args.key.at(sequence, t, key_head), token.key, token.keys);
    normalise(token.query, token.keys, args.epsilon, args.scale);
    normalise(token.key, token.keys, args.epsilon, 1.0f);
    if (by_channel) {
      widened(kernels, args.decay.type, args.decay.at(sequence, t, head), token.decay, token.keys);
      for (int i = 0; i < token.keys; i += kFloats) {
        Vector factor;
        exponential(MOEGRAFT_CONST_VECTOR(token.decay + i), factor);
        MOEGRAFT_VECTOR(token.decay + i) = factor;
      }
    } else {
      const float factor = __builtin_expf(one(args.decay.type, args.decay.at(sequence, t, head)));
      for (int i = 0; i < token.keys; i += kFloats) MOEGRAFT_VECTOR(token.decay + i) = Vector{} + factor;
    }
    for (int i = 0; i < token.keys; i += kFloats)
      MOEGRAFT_VECTOR(token.decayed_key + i) = MOEGRAFT_CONST_VECTOR(token.key + i) * MOEGRAFT_CONST_VECTOR(token.decay + i);
    token.beta = one(args.beta.type, args.beta.at(sequence, t, head));
    kernels.widen(args.value.type, args.value.at(sequence, t, head, first), value, columns);
    int j = 0;
    for (; j + 4 * kFloats <= columns; j += 4 * kFloats) delta_columns<4>(token, before + j, state + j, stride, value + j, out + j);
    for (; j + kFloats <= columns; j += kFloats) delta_columns<1>(token, before + j, state + j, stride, value + j, out + j);
    for (; j < columns; ++j) delta_column(token, before + j, state + j, stride, value + j, out + j);
    kernels.narrow(args.out.type, out, args.out.at(sequence, t, head, first), columns);
  }
}

// ---- the short convolution

constexpr int kConvTokens = 16;  // a cache line of a channel's tokens in float32

// Rows of tokens by channels, from tensors in which either are adjacent.
__attribute__((noinline)) void load_rows(const Kernels& kernels, const StridedView& x, std::int64_t sequence, std::int64_t channel,
                                         int channels, std::int64_t token, int tokens, float (*rows)[kConvChannels]) {
  if (x.strides[1] == 1) {
    for (int t = 0; t < tokens; ++t) kernels.widen(x.type, x.at(sequence, channel, token + t), rows[t], channels);
    return;
  }
  for (int c = 0; c < channels; ++c) {
    const std::byte* source = x.at(sequence, channel + c, token);
    const std::int64_t step = x.strides[2] * static_cast<std::int64_t>(element_bytes(x.type));
    for (int t = 0; t < tokens; ++t) rows[t][c] = one(x.type, source + t * step);
  }
}

void short_conv(const Kernels& kernels, const ShortConvArgs& args, std::int64_t unit) {
  const std::int64_t all = args.x.sizes[1], tokens = args.x.sizes[2], blocks = (all + kConvChannels - 1) / kConvChannels;
  const std::int64_t sequence = unit / blocks, channel = unit % blocks * kConvChannels;
  const int channels = static_cast<int>(all - channel < kConvChannels ? all - channel : kConvChannels);
  const int taps = static_cast<int>(args.weight.sizes[1]), kept = taps - 1;
  alignas(64) float weights[kMostTaps][kConvChannels] = {}, bias[kConvChannels] = {}, sums[kConvChannels];
  alignas(64) float rows[kMostTaps - 1 + kConvTokens][kConvChannels] = {};  // of the tokens before a piece, and the piece
  for (int c = 0; c < channels; ++c) {
    for (int w = 0; w < taps; ++w) weights[w][c] = one(args.weight.type, args.weight.at(channel + c, w));
    if (args.bias) bias[c] = one(args.bias.type, args.bias.at(channel + c));
  }
  const std::int64_t columns = args.state ? args.state.sizes[2] : 0;
  const int known = static_cast<int>(columns < kept ? columns : kept);
  if (known > 0) load_rows(kernels, args.state, sequence, channel, channels, columns - known, known, rows + kept - known);
  for (std::int64_t first = 0; first < tokens; first += kConvTokens) {
    const int count = static_cast<int>(tokens - first < kConvTokens ? tokens - first : kConvTokens);
    load_rows(kernels, args.x, sequence, channel, channels, first, count, rows + kept);
    for (int t = 0; t < count; ++t) {
      for (int c = 0; c < kConvChannels; c += kFloats) {
        Vector sum = MOEGRAFT_CONST_VECTOR(bias + c);
        for (int w = 0; w < taps; ++w) sum += MOEGRAFT_CONST_VECTOR(weights[w] + c) * MOEGRAFT_CONST_VECTOR(rows[t + w] + c);
        if (args.silu) silu(sum);
        MOEGRAFT_VECTOR(sums + c) = sum;
      }
      if (args.out.strides[1] == 1) kernels.narrow(args.out.type, sums, args.out.at(sequence, channel, first + t), channels);
      else
        for (int c = 0; c < channels; ++c) put(args.out.type, sums[c], args.out.at(sequence, channel + c, first + t));
    }
    std::memmove(rows, rows + count, sizeof rows[0] * static_cast<std::size_t>(kept));
  }
}

// ---- the selective scan

struct ScanToken {
  alignas(64) float b[kMostStateColumns];
  alignas(64) float c[kMostStateColumns];
  alignas(64) float decay[kMostStateColumns];  // exp(d A), of one head
  int columns;
};

__attribute__((noinline)) float scan_channel(const ScanToken& token, float x, const float* before, float* state) {
  Vector sum = {};
  int n = 0;
  for (; n + kFloats <= token.columns; n += kFloats) {
    const Vector row = MOEGRAFT_CONST_VECTOR(token.decay + n) * MOEGRAFT_CONST_VECTOR(before + n) + x * MOEGRAFT_CONST_VECTOR(token.b + n);
    MOEGRAFT_VECTOR(state + n) = row;
    sum += row * MOEGRAFT_CONST_VECTOR(token.c + n);
  }
  float total = sum_of(sum);
  for (; n < token.columns; ++n) {
    state[n] = token.decay[n] * before[n] + x * token.b[n];
    total += state[n] * token.c[n];
  }
  return total;
}

void selective_scan(const Kernels& kernels, const SelectiveScanArgs& args, std::int64_t unit) {
  const std::int64_t heads = args.x.sizes[2], tokens = args.x.sizes[1], channels = args.x.sizes[3], columns = args.b.sizes[3];
  const std::int64_t at_once = args.heads_of_unit(), sequence = unit / args.blocks(), first = unit % args.blocks() * at_once;
  const std::int64_t end = first + at_once < heads ? first + at_once : heads, heads_of_group = heads / args.b.sizes[2];
  const bool by_column = args.a.dims == 2;
  ScanToken token;
  token.columns = static_cast<int>(columns);
  alignas(64) float a[kMostStateColumns];
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int64_t group = -1;
    for (std::int64_t head = first; head < end; ++head) {
      if (head / heads_of_group != group) {
        group = head / heads_of_group;
        widened(kernels, args.b.type, args.b.at(sequence, t, group), token.b, token.columns);
        widened(kernels, args.c.type, args.c.at(sequence, t, group), token.c, token.columns);
      }
      float dt = one(args.dt.type, args.dt.at(sequence, t, head));
      if (args.dt_bias) dt += one(args.dt_bias.type, args.dt_bias.at(head));
      if (args.softplus && dt <= 20.0f) dt = __builtin_log1pf(__builtin_expf(dt));
      dt = dt < args.least ? args.least : dt > args.most ? args.most : dt;
      if (by_column) {
        widened(kernels, args.a.type, args.a.at(head), a, token.columns);
        for (int n = 0; n < token.columns; n += kFloats) {
          Vector factor;
          exponential(MOEGRAFT_CONST_VECTOR(a + n) * dt, factor);
          MOEGRAFT_VECTOR(token.decay + n) = factor;
        }
      } else {
        const float factor = __builtin_expf(dt * one(args.a.type, args.a.at(head)));
        for (int n = 0; n < token.columns; n += kFloats) MOEGRAFT_VECTOR(token.decay + n) = Vector{} + factor;
      }
      const float skip = args.d ? one(args.d.type, args.d.at(head)) : 0.0f;
      const StridedView& source = t > 0 ? state_after(args, t - 1) : args.before;
      const auto* before = source ? reinterpret_cast<const float*>(source.at(sequence, head)) : nullptr;
      auto* state = reinterpret_cast<float*>(state_after(args, t).at(sequence, head));
      if (before == nullptr) std::memset(state, 0, sizeof(float) * static_cast<std::size_t>(channels * columns));
      if (before == nullptr) before = state;
      for (std::int64_t p = 0; p < channels; ++p, before += columns, state += columns) {
        const float x = one(args.x.type, args.x.at(sequence, t, head, p));
        float out = scan_channel(token, dt * x, before, state) + skip * x;
        if (args.z) {
          const float z = one(args.z.type, args.z.at(sequence, t, head, p));
          out *= z / (1.0f + __builtin_expf(-z));
        }
        put(args.out.type, out, args.out.at(sequence, t, head, p));
      }
    }
  }
}

constexpr RecurrentKernels kLoops = {delta_rule, short_conv, selective_scan};

}  // namespace
}  // namespace moegraft
