// What every binding checks of an array before it reads it.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/runtime.h"
#include "core/types.h"
#include "experts/packed_weights.h"
#include "ops/norm.h"
#include "ops/router.h"

namespace moegraft {

[[noreturn]] void refuse(const std::string& message);  // throws ValueError
std::string shape_text(const pybind11::array& array);
std::string number_text(double value);
void require_layout(const pybind11::array& array, const char* name, pybind11::ssize_t dims);
void require_dtype(const pybind11::array& array, const char* name, char kind, pybind11::ssize_t bytes, const char* expected);
WeightType float_type_of(const pybind11::array& array, const char* name);  // bfloat16 crosses as uint16
ActivationType activation_type_of(const pybind11::array& array, const char* name);

// Keeps the array of an external buffer alive beside the experts.
struct PyExperts {
  PyExperts(const ExpertsShape& shape, const GateSpec& gate, const std::string& weight_type, const pybind11::object& buffer_or_none,
            bool sparse);
  std::unique_ptr<PackedExperts> experts;
  pybind11::object buffer;
};

void bind_specs(pybind11::module_& module);    // GateSpec, ExpertsShape
void bind_weights(pybind11::module_& module);  // PackedExperts, PackedLinear

// What norms of one kind have in common. Not to be moved: see PyRouter.
struct PyNorm {
  PyNorm(const std::string& type_name, int cols_of_row, float epsilon, float weight_offset, bool rounds_first);
  ActivationType type;
  int cols;
  NormForm form;
};

struct RouterOptions {
  std::string type, logits_type, weights_type;
  bool rounds_logits;
  std::string score;
  bool normalise;
  float scale;
  int groups, kept_groups;
  std::string group_score;
  pybind11::object choice_bias, logit_bias;  // arrays or None
};

// One router. `selection` points into `choice_bias`, so it is never copied.
struct PyRouter {
  PyRouter(int hidden_size, int experts, int top_k, const RouterOptions& options);
  PyRouter(const PyRouter&) = delete;
  PyRouter& operator=(const PyRouter&) = delete;
  int hidden;
  ActivationType type, logits_type, weights_type;
  bool rounds_logits;
  std::vector<float> choice_bias, logit_bias;
  Selection selection;
};

// Tensors by address: whoever calls has seen to their types, shapes and order.
using Address = std::uintptr_t;
template <class T = std::byte>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_tokens(pybind11::module_& module);  // NormSpec, RouterSpec

// The checked form of Runtime::attention; the arrays are views of PyTorch's tensors, strides and all.
struct AttentionCall {
  pybind11::array query, key, value, out;
  pybind11::object mask, sinks;
  float scale;
  float softcap;
  bool causal;
};

void attention(Runtime& runtime, const AttentionCall& call);

void bind_scheduler(pybind11::module_& module);

}  // namespace moegraft
