// Elementwise functions of the small operations of a step program (program/), as plain loops that each instruction set's file compiles
// for itself.
#pragma once

#include "simd/kernels.h"

namespace moegraft {
namespace {

// `out` may be one of the arguments, but not overlap with another part of one: without checks for that a loop is half the code.
template <class Function>
inline void map_floats(const ElementwiseArgs& args, Function function) {
  float* const out = args.out;
  const int count = args.count;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) out[i] = function(i);
}

inline void elementwise(const ElementwiseArgs& args) {
  const float* a = args.a;
  const float* b = args.b;
  const float* c = args.c;
  switch (args.function) {
    case Elementwise::kCopy: return map_floats(args, [=](int i) { return a[i]; });
    case Elementwise::kNeg: return map_floats(args, [=](int i) { return -a[i]; });
    case Elementwise::kAbs: return map_floats(args, [=](int i) { return __builtin_fabsf(a[i]); });
    case Elementwise::kExp: return map_floats(args, [=](int i) { return __builtin_expf(a[i]); });
    case Elementwise::kLog: return map_floats(args, [=](int i) { return __builtin_logf(a[i]); });
    case Elementwise::kLog1p: return map_floats(args, [=](int i) { return __builtin_log1pf(a[i]); });
    case Elementwise::kSin: return map_floats(args, [=](int i) { return __builtin_sinf(a[i]); });
    case Elementwise::kCos: return map_floats(args, [=](int i) { return __builtin_cosf(a[i]); });
    case Elementwise::kSqrt: return map_floats(args, [=](int i) { return __builtin_sqrtf(a[i]); });
    case Elementwise::kRsqrt: return map_floats(args, [=](int i) { return 1.0f / __builtin_sqrtf(a[i]); });
    case Elementwise::kReciprocal: return map_floats(args, [=](int i) { return 1.0f / a[i]; });
    case Elementwise::kSigmoid: return map_floats(args, [=](int i) { return 1.0f / (1.0f + __builtin_expf(-a[i])); });
    case Elementwise::kSilu: return map_floats(args, [=](int i) { return a[i] / (1.0f + __builtin_expf(-a[i])); });
    case Elementwise::kGelu:
      return map_floats(args, [=](int i) { return a[i] * 0.5f * (1.0f + __builtin_erff(a[i] * 0.70710678118654752f)); });
    case Elementwise::kGeluTanh:
      return map_floats(args, [=](int i) {
        return 0.5f * a[i] * (1.0f + __builtin_tanhf(0.79788456080286536f * (a[i] + 0.044715f * a[i] * a[i] * a[i])));
      });
    case Elementwise::kRelu: return map_floats(args, [=](int i) { return a[i] < 0.0f ? 0.0f : a[i]; });  // a NaN stays
    case Elementwise::kTanh: return map_floats(args, [=](int i) { return __builtin_tanhf(a[i]); });
    case Elementwise::kFloor: return map_floats(args, [=](int i) { return __builtin_floorf(a[i]); });
    case Elementwise::kSign: return map_floats(args, [=](int i) { return static_cast<float>((a[i] > 0.0f) - (a[i] < 0.0f)); });
    case Elementwise::kNot: return map_floats(args, [=](int i) { return a[i] == 0.0f ? 1.0f : 0.0f; });
    case Elementwise::kAdd: return map_floats(args, [=](int i) { return a[i] + b[i]; });
    case Elementwise::kSub: return map_floats(args, [=](int i) { return a[i] - b[i]; });
    case Elementwise::kMul: return map_floats(args, [=](int i) { return a[i] * b[i]; });
    case Elementwise::kDiv: return map_floats(args, [=](int i) { return a[i] / b[i]; });
    case Elementwise::kMaximum: return map_floats(args, [=](int i) { return a[i] != a[i] || a[i] > b[i] ? a[i] : b[i]; });
    case Elementwise::kMinimum: return map_floats(args, [=](int i) { return a[i] != a[i] || a[i] < b[i] ? a[i] : b[i]; });
    case Elementwise::kPow: return map_floats(args, [=](int i) { return __builtin_powf(a[i], b[i]); });
    case Elementwise::kFloorDiv: return map_floats(args, [=](int i) { return __builtin_floorf(a[i] / b[i]); });
    case Elementwise::kEq: return map_floats(args, [=](int i) { return a[i] == b[i] ? 1.0f : 0.0f; });
    case Elementwise::kNe: return map_floats(args, [=](int i) { return a[i] != b[i] ? 1.0f : 0.0f; });
    case Elementwise::kLt: return map_floats(args, [=](int i) { return a[i] < b[i] ? 1.0f : 0.0f; });
    case Elementwise::kLe: return map_floats(args, [=](int i) { return a[i] <= b[i] ? 1.0f : 0.0f; });
    case Elementwise::kGt: return map_floats(args, [=](int i) { return a[i] > b[i] ? 1.0f : 0.0f; });
    case Elementwise::kGe: return map_floats(args, [=](int i) { return a[i] >= b[i] ? 1.0f : 0.0f; });
    case Elementwise::kAnd: return map_floats(args, [=](int i) { return a[i] != 0.0f && b[i] != 0.0f ? 1.0f : 0.0f; });
    case Elementwise::kOr: return map_floats(args, [=](int i) { return a[i] != 0.0f || b[i] != 0.0f ? 1.0f : 0.0f; });
    case Elementwise::kXor: return map_floats(args, [=](int i) { return (a[i] != 0.0f) != (b[i] != 0.0f) ? 1.0f : 0.0f; });
    case Elementwise::kWhere: return map_floats(args, [=](int i) { return a[i] != 0.0f ? b[i] : c[i]; });
    // softplus(a) = log(1 + e^(b a)) / b, or a where b a > c
    case Elementwise::kSoftplus:
      return map_floats(args, [=](int i) { return a[i] * b[i] > c[i] ? a[i] : __builtin_log1pf(__builtin_expf(a[i] * b[i])) / b[i]; });
  }
}

}  // namespace
}  // namespace moegraft
