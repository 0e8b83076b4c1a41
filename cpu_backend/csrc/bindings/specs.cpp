#include <pybind11/pybind11.h>

#include <cmath>
#include <limits>
#include <string>

#include "bindings/arrays.h"
#include "bindings/weights.h"

namespace py = pybind11;
using namespace py::literals;

namespace moegraft {
namespace {

GateSpec make_gate(const std::string& activation, double alpha, double gate_limit, double act_limit, double up_limit, double up_offset) {
  const GateSpec spec = {parse_activation(activation), alpha, gate_limit, act_limit, up_limit, up_offset};
  if (!std::isfinite(alpha) || !std::isfinite(up_offset)) refuse("GateSpec: alpha and up_offset must be finite");
  if (std::isnan(gate_limit) || std::isnan(act_limit) || !(up_limit >= 0.0)) refuse("GateSpec: limits must be numbers, and up_limit at least 0");
  return spec;
}

py::tuple gate_fields(const GateSpec& spec) {
  return py::make_tuple(name_of(spec.activation), spec.alpha, spec.gate_limit, spec.act_limit, spec.up_limit, spec.up_offset);
}

py::tuple shape_fields(const ExpertsShape& shape) {
  return py::make_tuple(shape.num_experts, shape.hidden, shape.intermediate, shape.gated, shape.bias);
}

}  // namespace

void bind_specs(py::module_& module) {
  const double inf = std::numeric_limits<double>::infinity();
  py::class_<GateSpec>(module, "GateSpec")
      .def(py::init(&make_gate), "activation"_a = "silu", "alpha"_a = 1.0, "gate_limit"_a = inf, "act_limit"_a = inf, "up_limit"_a = inf,
           "up_offset"_a = 0.0)
      .def_property_readonly("activation", [](const GateSpec& spec) { return name_of(spec.activation); })
      .def_readonly("alpha", &GateSpec::alpha)
      .def_readonly("gate_limit", &GateSpec::gate_limit)
      .def_readonly("act_limit", &GateSpec::act_limit)
      .def_readonly("up_limit", &GateSpec::up_limit)
      .def_readonly("up_offset", &GateSpec::up_offset)
      .def("__eq__", [](const GateSpec& a, const py::object& b) { return py::isinstance<GateSpec>(b) && gate_fields(a).equal(gate_fields(b.cast<GateSpec>())); })
      .def("__hash__", [](const GateSpec& spec) { return py::hash(gate_fields(spec)); })
      .def("__repr__", [](const GateSpec& spec) {
        return "GateSpec(activation='" + std::string(name_of(spec.activation)) + "', alpha=" + number_text(spec.alpha) + ", gate_limit=" +
               number_text(spec.gate_limit) + ", act_limit=" + number_text(spec.act_limit) + ", up_limit=" + number_text(spec.up_limit) +
               ", up_offset=" + number_text(spec.up_offset) + ")";
      })
      .def(py::pickle(&gate_fields, [](const py::tuple& f) {
        return make_gate(f[0].cast<std::string>(), f[1].cast<double>(), f[2].cast<double>(), f[3].cast<double>(), f[4].cast<double>(), f[5].cast<double>());
      }));
  py::class_<ExpertsShape>(module, "ExpertsShape")
      .def(py::init([](int num_experts, int hidden, int intermediate, bool gated, bool bias) {
             if (num_experts < 1 || hidden < 1 || intermediate < 1) refuse("ExpertsShape: num_experts, hidden and intermediate must be at least 1");
             return ExpertsShape{num_experts, hidden, intermediate, gated, bias};
           }),
           "num_experts"_a, "hidden"_a, "intermediate"_a, "gated"_a = true, "bias"_a = false)
      .def_readonly("num_experts", &ExpertsShape::num_experts)
      .def_readonly("hidden", &ExpertsShape::hidden)
      .def_readonly("intermediate", &ExpertsShape::intermediate)
      .def_readonly("gated", &ExpertsShape::gated)
      .def_readonly("bias", &ExpertsShape::bias)
      .def("__eq__", [](const ExpertsShape& a, const py::object& b) { return py::isinstance<ExpertsShape>(b) && shape_fields(a).equal(shape_fields(b.cast<ExpertsShape>())); })
      .def("__hash__", [](const ExpertsShape& shape) { return py::hash(shape_fields(shape)); })
      .def("__repr__", [](const ExpertsShape& shape) {
        return "ExpertsShape(num_experts=" + std::to_string(shape.num_experts) + ", hidden=" + std::to_string(shape.hidden) + ", intermediate=" +
               std::to_string(shape.intermediate) + ", gated=" + (shape.gated ? "True" : "False") + ", bias=" + (shape.bias ? "True" : "False") + ")";
      })
      .def(py::pickle(&shape_fields, [](const py::tuple& f) {
        return ExpertsShape{f[0].cast<int>(), f[1].cast<int>(), f[2].cast<int>(), f[3].cast<bool>(), f[4].cast<bool>()};
      }));
}

}  // namespace moegraft
