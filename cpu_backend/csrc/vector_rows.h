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
      I dots[L];
      for (int v = 0; v < L; ++v) dots[v] = T::load_int(words + kLanes + v * T::kWidth);
      const std::uint32_t* codes = words + 2 * kLanes;
      for (int j = 0; j < (Kind == Format::kInt8 ? 8 : 4); ++j, line += 64) {
        for (int v = 0; v < L; ++v) {
          const I weights = T::load_int(line + v * T::kWidth * 4);
          if constexpr (Kind == Format::kInt8) {
            dots[v] = T::dot_int8(dots[v], weights, T::load_int(codes + j * kLanes + v * T::kWidth));
          } else {
            dots[v] = T::dot_int4(dots[v], T::low_nibbles(weights), T::load_int(codes + 2 * j * kLanes + v * T::kWidth));
            dots[v] = T::dot_int4(dots[v], T::high_nibbles(weights), T::load_int(codes + (2 * j + 1) * kLanes + v * T::kWidth));
          }
        }
      }
      for (int v = 0; v < L; ++v) {
        const F scale = T::mul(T::load_f16(scales + v * T::kWidth), T::load(reinterpret_cast<const float*>(words + v * T::kWidth)));
        sums[v] = T::fma(T::to_float(dots[v]), scale, sums[v]);
      }
    }
  }
  for (int v = 1; v < L; ++v) sums[0] = T::add(sums[0], sums[v]);
  return T::reduce_add_float(sums[0]);
}

template <class T>
inline void add_to(float* sums, typename T::F coefficient, typename T::F values) {
  T::store(sums, T::fma(coefficient, values, T::load(sums)));
}

template <class T>
inline void add_bytes(float* sums, typename T::F coefficient, typename T::I codes) {
  add_to<T>(sums, coefficient, T::to_float(T::template byte_of<0>(codes)));
  add_to<T>(sums + kLanes, coefficient, T::to_float(T::template byte_of<1>(codes)));
  add_to<T>(sums + 2 * kLanes, coefficient, T::to_float(T::template byte_of<2>(codes)));
  add_to<T>(sums + 3 * kLanes, coefficient, T::to_float(T::template byte_of<3>(codes)));
}

template <class T, Format Kind>
void add_row(const RowAddArgs& args) {
  using F = typename T::F;
  using I = typename T::I;
  for (int v = 0; v < kLanes; v += T::kWidth) {
    F coefficient = T::set(args.coefficient);
    if constexpr (Kind == Format::kInt8 || Kind == Format::kInt4) {
      coefficient = T::mul(coefficient, T::load_f16(reinterpret_cast<const std::uint16_t*>(args.scales) + v));
      T::store(args.corrections + v, T::add(T::load(args.corrections + v), coefficient));
    }
    float* sums = args.sums + v;
    for (int j = 0; j < args.line_count; ++j) {
      if constexpr (Kind == Format::kFloat32) {
        add_to<T>(sums, coefficient, T::load(reinterpret_cast<const float*>(args.lines) + j * kLanes + v));
        sums += kLanes;
      } else if constexpr (Kind == Format::kFloat16) {
        add_to<T>(sums, coefficient, T::load_f16(reinterpret_cast<const std::uint16_t*>(args.lines) + j * kLanes + v));
        sums += kLanes;
      } else {
        const I line = T::load_int(args.lines + j * 64 + v * 4);
        if constexpr (Kind == Format::kInt8) {
          add_bytes<T>(sums, coefficient, line);
          sums += 4 * kLanes;
        } else if constexpr (Kind == Format::kInt4) {
          add_bytes<T>(sums, coefficient, T::low_nibbles(line));
          add_bytes<T>(sums + 4 * kLanes, coefficient, T::high_nibbles(line));
          sums += 8 * kLanes;
        } else {
          add_to<T>(sums, coefficient, T::low_bf16(line));
          add_to<T>(sums + kLanes, coefficient, T::high_bf16(line));
          sums += 2 * kLanes;
        }
      }
    }
  }
}

}  // namespace
}  // namespace moegraft
