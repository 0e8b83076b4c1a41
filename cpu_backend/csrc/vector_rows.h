// The kernels of the sparse layout's rows, as templates over the traits of vector_kernels.h (whose first comment holds here too).
// Lanes are groups of columns, 16 to a chunk: L vectors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace moegraft {
namespace {

template <class T, Format Kind>
float dot_row(const RowDotArgs& args) {
  using F = typename T::F;
  using I = typename T::I;
  constexpr int L = kLanes / T::kWidth;
  F sums[L];
  for (int v = 0; v < L; ++v) sums[v] = T::zero();
  const std::byte* line = args.lines;
  const std::uint32_t* words = args.lanes;
  const auto* scales = reinterpret_cast<const std::uint16_t*>(args.scales);
  for (int chunk = 0; chunk < args.chunks; ++chunk, words += words_per_group(Kind) * kLanes, scales += kLanes) {
    if constexpr (Kind == Format::kFloat32 || Kind == Format::kFloat16) {
      constexpr int kBytes = Kind == Format::kFloat32 ? 4 : 2;
      for (int k = 0; k < kGroup; ++k, line += kLanes * kBytes) {
        for (int v = 0; v < L; ++v) {
          F weights;
          if constexpr (Kind == Format::kFloat32) weights = T::load(reinterpret_cast<const float*>(line) + v * T::kWidth);
          else weights = T::load_f16(reinterpret_cast<const std::uint16_t*>(line) + v * T::kWidth);
          sums[v] = T::fma(weights, T::load(reinterpret_cast<const float*>(words + k * kLanes + v * T::kWidth)), sums[v]);
        }
      }
    } else if constexpr (Kind == Format::kBFloat16 || Kind == Format::kBFloat16Dot) {
      for (int pair = 0; pair < kGroup / 2; ++pair, line += 64) {
        for (int v = 0; v < L; ++v) {
          const I weights = T::load_int(line + v * T::kWidth * 4);
          if constexpr (Kind == Format::kBFloat16Dot) {
            const I values = T::load_int(words + pair * kLanes + v * T::kWidth);
            sums[v] = T::fma(T::low_bf16(weights), T::low_bf16(values), sums[v]);
            sums[v] = T::fma(T::high_bf16(weights), T::high_bf16(values), sums[v]);
          } else {
            const auto* values = reinterpret_cast<const float*>(words + 2 * pair * kLanes + v * T::kWidth);
            sums[v] = T::fma(T::low_bf16(weights), T::load(values), sums[v]);
            sums[v] = T::fma(T::high_bf16(weights), T::load(values + kLanes), sums[v]);
          }
        }
      }
    } else {
      I dots[L], others[L];  // two chains: one would wait for its own latency
      for (int v = 0; v < L; ++v) dots[v] = T::load_int(words + kLanes + v * T::kWidth);
      for (int v = 0; v < L; ++v) others[v] = T::zero_int();
      const std::uint32_t* codes = words + 2 * kLanes;
#pragma GCC unroll 8
      for (int j = 0; j < (Kind == Format::kInt8 ? 8 : 4); ++j, line += 64) {
        for (int v = 0; v < L; ++v) {
          const I weights = T::load_int(line + v * T::kWidth * 4);
          if constexpr (Kind == Format::kInt8) {
            I& sum = j % 2 ? others[v] : dots[v];
            sum = T::dot_int8(sum, weights, T::load_int(codes + j * kLanes + v * T::kWidth));
          } else {
            dots[v] = T::dot_int4(dots[v], T::low_nibbles(weights), T::load_int(codes + 2 * j * kLanes + v * T::kWidth));
            others[v] = T::dot_int4(others[v], T::high_nibbles(weights), T::load_int(codes + (2 * j + 1) * kLanes + v * T::kWidth));
          }
        }
      }
      for (int v = 0; v < L; ++v) {
        const F scale = T::mul(T::load_f16(scales + v * T::kWidth), T::load(reinterpret_cast<const float*>(words + v * T::kWidth)));
        sums[v] = T::fma(T::to_float(T::add_int(dots[v], others[v])), scale, sums[v]);
      }
    }
  }
  for (int v = 1; v < L; ++v) sums[0] = T::add(sums[0], sums[v]);
  return T::reduce_add_float(sums[0]);
}

// Two rows' coefficients, and the two products they add.
template <class T>
struct RowPair {
  typename T::F coefficients[2];
  inline void add(float* sums, typename T::F first, typename T::F second) const {
    T::store(sums, T::fma(coefficients[1], second, T::fma(coefficients[0], first, T::load(sums))));
  }
  inline void add_bytes(float* sums, typename T::I first, typename T::I second) const {
    add(sums, T::to_float(T::template byte_of<0>(first)), T::to_float(T::template byte_of<0>(second)));
    add(sums + kLanes, T::to_float(T::template byte_of<1>(first)), T::to_float(T::template byte_of<1>(second)));
    add(sums + 2 * kLanes, T::to_float(T::template byte_of<2>(first)), T::to_float(T::template byte_of<2>(second)));
    add(sums + 3 * kLanes, T::to_float(T::template byte_of<3>(first)), T::to_float(T::template byte_of<3>(second)));
  }
};

template <class T, Format Kind>
void add_row(const RowAddArgs& args) {
  using F = typename T::F;
  using I = typename T::I;
  for (int v = 0; v < kLanes; v += T::kWidth) {
    RowPair<T> rows = {{T::set(args.coefficients[0]), T::set(args.coefficients[1])}};
    if constexpr (Kind == Format::kInt8 || Kind == Format::kInt4) {
      F correction = T::load(args.corrections + v);
      for (int row = 0; row < 2; ++row) {
        rows.coefficients[row] = T::mul(rows.coefficients[row], T::load_f16(reinterpret_cast<const std::uint16_t*>(args.scales[row]) + v));
        correction = T::add(correction, rows.coefficients[row]);
      }
      T::store(args.corrections + v, correction);
    }
    float* sums = args.sums + v;
    for (int j = 0; j < args.line_count; ++j) {
      if constexpr (Kind == Format::kFloat32) {
        const int at = j * kLanes + v;
        rows.add(sums, T::load(reinterpret_cast<const float*>(args.lines[0]) + at), T::load(reinterpret_cast<const float*>(args.lines[1]) + at));
        sums += kLanes;
      } else if constexpr (Kind == Format::kFloat16) {
        const int at = j * kLanes + v;
        rows.add(sums, T::load_f16(reinterpret_cast<const std::uint16_t*>(args.lines[0]) + at),
                 T::load_f16(reinterpret_cast<const std::uint16_t*>(args.lines[1]) + at));
        sums += kLanes;
      } else {
        const I first = T::load_int(args.lines[0] + j * 64 + v * 4);
        const I second = T::load_int(args.lines[1] + j * 64 + v * 4);
        if constexpr (Kind == Format::kInt8) {
          rows.add_bytes(sums, first, second);
          sums += 4 * kLanes;
        } else if constexpr (Kind == Format::kInt4) {
          rows.add_bytes(sums, T::low_nibbles(first), T::low_nibbles(second));
          rows.add_bytes(sums + 4 * kLanes, T::high_nibbles(first), T::high_nibbles(second));
          sums += 8 * kLanes;
        } else {
          rows.add(sums, T::low_bf16(first), T::low_bf16(second));
          rows.add(sums + kLanes, T::high_bf16(first), T::high_bf16(second));
          sums += 2 * kLanes;
        }
      }
    }
  }
}

}  // namespace
}  // namespace moegraft
