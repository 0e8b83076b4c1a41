#pragma once

#include <pybind11/numpy.h>

#include "core/runtime.h"

namespace moegraft {

// The checked form of Runtime::attention; the arrays are views of PyTorch's tensors, strides and all.
struct AttentionCall {
  pybind11::array query, key, value, out;
  pybind11::object mask, sinks;
  float scale;
  float softcap;
  bool causal;
};

void attention(Runtime& runtime, const AttentionCall& call);

}  // namespace moegraft
