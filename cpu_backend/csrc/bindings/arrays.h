// What every binding checks of an array before it reads it.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>

#include "core/types.h"

namespace moegraft {

[[noreturn]] void refuse(const std::string& message);  // throws ValueError
std::string shape_text(const pybind11::array& array);
std::string number_text(double value);
void require_layout(const pybind11::array& array, const char* name, pybind11::ssize_t dims);
void require_dtype(const pybind11::array& array, const char* name, char kind, pybind11::ssize_t bytes, const char* expected);
WeightType float_type_of(const pybind11::array& array, const char* name);  // bfloat16 crosses as uint16
ActivationType activation_type_of(const pybind11::array& array, const char* name);

}  // namespace moegraft
