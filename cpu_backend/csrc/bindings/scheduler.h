#pragma once

#include <pybind11/pybind11.h>

namespace moegraft {

void bind_scheduler(pybind11::module_& module);

}  // namespace moegraft
