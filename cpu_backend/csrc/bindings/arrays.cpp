#include "bindings/bindings.h"

#include <cstdio>

namespace py = pybind11;

namespace moegraft {
namespace {

char kind_of(const py::array& array) { return array.dtype().kind(); }

bool is_dtype(const py::array& array, char kind, py::ssize_t bytes) {
  return kind_of(array) == kind && array.itemsize() == bytes && array.dtype().byteorder() != '>';
}

}  // namespace

void refuse(const std::string& message) { throw py::value_error(message); }

std::string shape_text(const py::array& array) {
  std::string text = "(";
  for (py::ssize_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + (array.ndim() == 1 ? ",)" : ")");
}

void require_layout(const py::array& array, const char* name, py::ssize_t dims) {
  if (array.ndim() != dims)
    refuse(std::string(name) + " has shape " + shape_text(array) + " where " + std::to_string(dims) + " dimensions are expected");
  if (!(array.flags() & py::array::c_style)) refuse(std::string(name) + " is not C-contiguous; pass a contiguous copy");
}

void require_dtype(const py::array& array, const char* name, char kind, py::ssize_t bytes, const char* expected) {
  if (!is_dtype(array, kind, bytes))
    throw py::type_error(std::string(name) + " has dtype " + py::str(array.dtype()).cast<std::string>() + " where " + expected +
                         " is expected");
}

WeightType float_type_of(const py::array& array, const char* name) {
  if (is_dtype(array, 'f', 4)) return WeightType::kFloat32;
  if (is_dtype(array, 'f', 2)) return WeightType::kFloat16;
  if (is_dtype(array, 'u', 2)) return WeightType::kBFloat16;
  throw py::type_error(std::string(name) + " has dtype " + py::str(array.dtype()).cast<std::string>() +
                       " where float32, float16 or bfloat16 (as uint16) is expected");
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

ActivationType activation_type_of(const py::array& array, const char* name) {
  switch (float_type_of(array, name)) {
    case WeightType::kFloat32: return ActivationType::kFloat32;
    case WeightType::kFloat16: return ActivationType::kFloat16;
    default: return ActivationType::kBFloat16;
  }
}

}  // namespace moegraft
