#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "experts/packed_weights.h"

namespace moegraft {

// Keeps the array of an external buffer alive beside the experts.
struct PyExperts {
  PyExperts(const ExpertsShape& shape, const GateSpec& gate, const std::string& weight_type, const pybind11::object& buffer_or_none, bool sparse);
  std::unique_ptr<PackedExperts> experts;
  pybind11::object buffer;
};

void bind_specs(pybind11::module_& module);    // GateSpec, ExpertsShape
void bind_weights(pybind11::module_& module);  // PackedExperts, PackedLinear

}  // namespace moegraft
