#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ops/norm.h"
#include "ops/router.h"

namespace moegraft {

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

}  // namespace moegraft
