#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <cmath>
#include <limits>
#include <string>

#include "bindings/bindings.h"
#include "ops/grid_search.h"

namespace py = pybind11;
using namespace py::literals;

namespace moegraft {
namespace {

GateSpec make_gate(const std::string& activation, double alpha, double gate_limit, double act_limit, double up_limit, double up_offset) {
  const GateSpec spec = {parse_activation(activation), alpha, gate_limit, act_limit, up_limit, up_offset};
  if (!std::isfinite(alpha) || !std::isfinite(up_offset)) raise_value_error("GateSpec: alpha and up_offset must be finite");
  if (std::isnan(gate_limit) || std::isnan(act_limit) || !(up_limit >= 0.0))
    raise_value_error("GateSpec: limits must be numbers, and up_limit at least 0");
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
      .def("__eq__",
           [](const GateSpec& a, const py::object& b) {
             return py::isinstance<GateSpec>(b) && gate_fields(a).equal(gate_fields(b.cast<GateSpec>()));
           })
      .def("__hash__", [](const GateSpec& spec) { return py::hash(gate_fields(spec)); })
      .def("__repr__",
           [](const GateSpec& spec) {
             return "GateSpec(activation='" + std::string(name_of(spec.activation)) + "', alpha=" + number_text(spec.alpha) +
                    ", gate_limit=" + number_text(spec.gate_limit) + ", act_limit=" + number_text(spec.act_limit) +
                    ", up_limit=" + number_text(spec.up_limit) + ", up_offset=" + number_text(spec.up_offset) + ")";
           })
      .def(py::pickle(&gate_fields, [](const py::tuple& f) {
        return make_gate(f[0].cast<std::string>(), f[1].cast<double>(), f[2].cast<double>(), f[3].cast<double>(), f[4].cast<double>(),
                         f[5].cast<double>());
      }));
  py::class_<ExpertsShape>(module, "ExpertsShape")
      .def(py::init([](int num_experts, int hidden, int intermediate, bool gated, bool bias) {
             if (num_experts < 1 || hidden < 1 || intermediate < 1)
               raise_value_error("ExpertsShape: num_experts, hidden and intermediate must be at least 1");
             return ExpertsShape{num_experts, hidden, intermediate, gated, bias};
           }),
           "num_experts"_a, "hidden"_a, "intermediate"_a, "gated"_a = true, "bias"_a = false)
      .def_readonly("num_experts", &ExpertsShape::num_experts)
      .def_readonly("hidden", &ExpertsShape::hidden)
      .def_readonly("intermediate", &ExpertsShape::intermediate)
      .def_readonly("gated", &ExpertsShape::gated)
      .def_readonly("bias", &ExpertsShape::bias)
      .def("__eq__",
           [](const ExpertsShape& a, const py::object& b) {
             return py::isinstance<ExpertsShape>(b) && shape_fields(a).equal(shape_fields(b.cast<ExpertsShape>()));
           })
      .def("__hash__", [](const ExpertsShape& shape) { return py::hash(shape_fields(shape)); })
      .def("__repr__",
           [](const ExpertsShape& shape) {
             return "ExpertsShape(num_experts=" + std::to_string(shape.num_experts) + ", hidden=" + std::to_string(shape.hidden) +
                    ", intermediate=" + std::to_string(shape.intermediate) + ", gated=" + (shape.gated ? "True" : "False") +
                    ", bias=" + (shape.bias ? "True" : "False") + ")";
           })
      .def(py::pickle(&shape_fields, [](const py::tuple& f) {
        return ExpertsShape{f[0].cast<int>(), f[1].cast<int>(), f[2].cast<int>(), f[3].cast<bool>(), f[4].cast<bool>()};
      }));
}

namespace {

RowsView rows_view(const py::array& array) {
  require_layout(array, "array", 2);
  return {array.data(), float_type_of(array, "array"), static_cast<int>(array.shape(0)), static_cast<int>(array.shape(1))};
}

QuantizedRowsView quantized_view(const py::array& codes, const py::array& scales) {
  require_layout(codes, "codes", 2);
  require_dtype(codes, "codes", 'i', 1, "int8");
  require_layout(scales, "scales", 2);
  require_dtype(scales, "scales", 'f', 2, "float16");
  if (codes.shape(1) % kGroup != 0) raise_value_error("codes: expected a multiple of 32 columns, found " + std::to_string(codes.shape(1)));
  if (scales.shape(0) != codes.shape(0) || scales.shape(1) * kGroup != codes.shape(1))
    raise_shape_error(
        scales, "scales",
        "(" + std::to_string(codes.shape(0)) + ", " + std::to_string(codes.shape(1) / kGroup) + "), one for each 32 columns of codes");
  return {static_cast<const std::int8_t*>(codes.data()), static_cast<const std::uint16_t*>(scales.data()), static_cast<int>(codes.shape(0)),
          static_cast<int>(codes.shape(1))};
}

// Rows in the format of a file. Types that are not stored so are rejected by pack_blocks itself.
StoredRowsView stored_view(const py::array& blocks, WeightType type, int cols) {
  require_layout(blocks, "blocks", 2);
  require_dtype(blocks, "blocks", 'u', 1, "uint8");
  if (!is_stored(type)) return {nullptr, static_cast<int>(blocks.shape(0)), cols};
  const auto bytes = static_cast<py::ssize_t>(file_row_bytes(type, cols));
  if (blocks.shape(1) != bytes)
    raise_value_error("blocks: expected " + std::to_string(bytes) + " bytes in each row for " + std::to_string(cols) + " columns of " +
                      name_of(type) + ", found " + std::to_string(blocks.shape(1)));
  return {static_cast<const std::uint8_t*>(blocks.data()), static_cast<int>(blocks.shape(0)), cols};
}

const float* bias_values(const py::array& array) {
  require_layout(array, "array", 1);
  require_dtype(array, "array", 'f', 4, "float32");
  return static_cast<const float*>(array.data());
}

std::unique_ptr<PackedExperts> make_experts(const ExpertsShape& shape, const GateSpec& gate, WeightTypes types, LayoutKind kind,
                                            const py::object& buffer_or_none) {
  if (buffer_or_none.is_none()) return std::make_unique<PackedExperts>(shape, gate, types, kind);
  if (!py::isinstance<py::array>(buffer_or_none)) throw py::type_error("buffer must be a numpy array of uint8");
  const auto array = py::cast<py::array>(buffer_or_none);
  require_layout(array, "buffer", 1);
  require_dtype(array, "buffer", 'u', 1, "uint8");
  auto* data = reinterpret_cast<std::byte*>(const_cast<void*>(array.data()));
  return std::make_unique<PackedExperts>(shape, gate, types, kind,
                                         ExternalBuffer{data, static_cast<std::size_t>(array.nbytes()), array.writeable()});
}

py::array_t<float> unpacked(int rows, int cols) {
  return py::array_t<float>({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(cols)});
}

void bind_experts(py::module_& module) {
  py::class_<PyExperts>(module, "PackedExperts")
      .def(py::init<const ExpertsShape&, const GateSpec&, const std::string&, const py::object&, bool>(), "shape"_a, "gate_spec"_a,
           "weight_type"_a, "buffer"_a = py::none(), py::kw_only(), "sparse"_a = false)
      .def_static(
          "expert_bytes_for",
          [](const ExpertsShape& shape, const std::string& type, bool sparse) {
            return ExpertLayout(shape, parse_weight_types(type), sparse ? LayoutKind::kSparse : LayoutKind::kDense).expert_bytes;
          },
          "shape"_a, "weight_type"_a, py::kw_only(), "sparse"_a = false)
      .def_property_readonly("sparse", [](const PyExperts& self) { return self.experts->kind() == LayoutKind::kSparse; })
      .def_property_readonly("shape", [](const PyExperts& self) { return self.experts->shape(); })
      .def_property_readonly("gate_spec", [](const PyExperts& self) { return self.experts->gate(); })
      .def_property_readonly("weight_type", [](const PyExperts& self) { return name_of(self.experts->types()); })
      .def(
          "weight_type_of", [](const PyExperts& self, const std::string& part) { return name_of(self.experts->type_of(parse_part(part))); },
          "part"_a)
      .def_property_readonly("expert_bytes", [](const PyExperts& self) { return self.experts->layout().expert_bytes; })
      .def_property_readonly("nbytes", [](const PyExperts& self) { return self.experts->bytes(); })
      .def_property_readonly("buffer",
                             [](const py::object& self) {
                               const PackedExperts& experts = *self.cast<const PyExperts&>().experts;
                               const auto* data = reinterpret_cast<const std::uint8_t*>(experts.data());
                               py::array_t<std::uint8_t> view(static_cast<py::ssize_t>(experts.bytes()), data, self);
                               if (!experts.writable()) view.attr("flags").attr("writeable") = false;
                               return view;
                             })
      .def_property_readonly("packed_mask",
                             [](const PyExperts& self) {
                               py::array_t<std::uint8_t> mask(self.experts->shape().num_experts);
                               for (int e = 0; e < self.experts->shape().num_experts; ++e)
                                 mask.mutable_at(e) = self.experts->packed_mask(e);
                               return mask;
                             })
      .def_property_readonly("weights_ready",
                             [](const PyExperts& self) {
                               for (int e = 0; e < self.experts->shape().num_experts; ++e)
                                 if (!self.experts->complete(e)) return false;
                               return true;
                             })
      .def(
          "pack",
          [](PyExperts& self, int expert, const std::string& part, const py::array& array) {
            const RowsView rows = rows_view(array);
            const Part which = parse_part(part);
            py::gil_scoped_release release;
            self.experts->pack(expert, which, rows);
          },
          "expert"_a, "part"_a, py::arg("array").noconvert())
      .def(
          "pack_quantized",
          [](PyExperts& self, int expert, const std::string& part, const py::array& codes, const py::array& scales) {
            const QuantizedRowsView rows = quantized_view(codes, scales);
            const Part which = parse_part(part);
            py::gil_scoped_release release;
            self.experts->pack_quantized(expert, which, rows);
          },
          "expert"_a, "part"_a, py::arg("codes").noconvert(), py::arg("scales").noconvert())
      .def(
          "pack_blocks",
          [](PyExperts& self, int expert, const std::string& part, const py::array& blocks) {
            const Part which = parse_part(part);
            const StoredRowsView rows = stored_view(blocks, self.experts->type_of(which), self.experts->cols_of(which));
            py::gil_scoped_release release;
            self.experts->pack_blocks(expert, which, rows);
          },
          "expert"_a, "part"_a, py::arg("blocks").noconvert())
      .def(
          "pack_bias",
          [](PyExperts& self, int expert, const std::string& part, const py::array& array) {
            self.experts->pack_bias(expert, parse_part(part), bias_values(array), static_cast<int>(array.shape(0)));
          },
          "expert"_a, "part"_a, py::arg("array").noconvert())
      .def(
          "unpack",
          [](const PyExperts& self, int expert, const std::string& part) {
            const Part which = parse_part(part);
            auto rows = unpacked(self.experts->rows_of(which), self.experts->cols_of(which));
            float* data = rows.mutable_data();
            {
              py::gil_scoped_release release;
              self.experts->unpack(expert, which, data);
            }
            return rows;
          },
          "expert"_a, "part"_a);
}

void bind_linear(py::module_& module) {
  py::class_<PackedLinear>(module, "PackedLinear")
      .def(py::init([](int rows, int cols, const std::string& type) {
             return std::make_unique<PackedLinear>(rows, cols, parse_weight_type(type));
           }),
           "rows"_a, "cols"_a, "weight_type"_a)
      .def_property_readonly("rows", &PackedLinear::rows)
      .def_property_readonly("cols", &PackedLinear::cols)
      .def_property_readonly("weight_type", [](const PackedLinear& self) { return name_of(self.type()); })
      .def_property_readonly("nbytes", &PackedLinear::bytes)
      .def_property_readonly(
          "buffer",
          [](const py::object& self) {
            const auto& linear = self.cast<const PackedLinear&>();
            const std::size_t bytes = block_bytes(linear.type(), linear.cols()) * static_cast<std::size_t>(linear.blocks());
            py::array_t<std::uint8_t> view(static_cast<py::ssize_t>(bytes), reinterpret_cast<const std::uint8_t*>(linear.block(0)), self);
            view.attr("flags").attr("writeable") = false;
            return view;
          })
      .def_static(
          "nbytes_for",
          [](int rows, int cols, const std::string& type) { return PackedLinear::bytes_for(rows, cols, parse_weight_type(type)); },
          "rows"_a, "cols"_a, "weight_type"_a)
      .def(
          "pack",
          [](PackedLinear& self, const py::array& array) {
            const RowsView rows = rows_view(array);
            py::gil_scoped_release release;
            self.pack(rows);
          },
          py::arg("array").noconvert())
      .def(
          "pack_quantized",
          [](PackedLinear& self, const py::array& codes, const py::array& scales) {
            const QuantizedRowsView rows = quantized_view(codes, scales);
            py::gil_scoped_release release;
            self.pack_quantized(rows);
          },
          py::arg("codes").noconvert(), py::arg("scales").noconvert())
      .def(
          "pack_blocks",
          [](PackedLinear& self, const py::array& blocks) {
            const StoredRowsView rows = stored_view(blocks, self.type(), self.cols());
            py::gil_scoped_release release;
            self.pack_blocks(rows);
          },
          py::arg("blocks").noconvert())
      .def(
          "pack_bias",
          [](PackedLinear& self, const py::array& array) { self.pack_bias(bias_values(array), static_cast<int>(array.shape(0))); },
          py::arg("array").noconvert())
      .def("unpack", [](const PackedLinear& self) {
        auto rows = unpacked(self.rows(), self.cols());
        self.unpack(rows.mutable_data());
        return rows;
      });
}

py::tuple search(const std::string& weight_type, const py::array& x, const py::array& weight, const py::array& scales, float shift,
                 int threads) {
  const WeightType type = parse_weight_type(weight_type);
  const GridForm form = grid_form(type);
  const auto check = [](const py::array& array, const char* name) {
    require_layout(array, name, 2);
    require_dtype(array, name, 'f', 4, "float32");
  };
  check(x, "x");
  check(weight, "weight");
  check(scales, "scales");
  const py::ssize_t groups = x.shape(0), candidates = scales.shape(1);
  if (x.shape(1) != form.group) raise_shape_error(x, "x", "(groups, " + std::to_string(form.group) + ")");
  if (weight.shape(0) != groups || weight.shape(1) != form.group) raise_shape_error(weight, "weight", "that of x");
  if (scales.shape(0) != groups) raise_shape_error(scales, "scales", "(" + std::to_string(groups) + ", candidates)");
  if (threads < 1) raise_value_error("threads: expected at least 1, found " + std::to_string(threads));
  py::array_t<float> match({groups, candidates}), norm({groups, candidates});
  py::array_t<std::uint16_t> points({groups, candidates, static_cast<py::ssize_t>(form.group / form.columns)});
  py::array_t<std::uint8_t> signs({groups, candidates, static_cast<py::ssize_t>(form.group / 8)});
  const GridGroups found = {static_cast<const float*>(x.data()), static_cast<const float*>(weight.data()),
                            static_cast<const float*>(scales.data()), groups, static_cast<int>(candidates)};
  const GridChoice choice = {match.mutable_data(), norm.mutable_data(), points.mutable_data(), signs.mutable_data()};
  {
    py::gil_scoped_release release;
    search_grid(type, shift, found, choice, threads);
  }
  return py::make_tuple(match, norm, points, signs);
}

py::dict grid_points() {
  py::dict found;
  for (int i = kFirstCoded; i < kWeightTypes; ++i) {
    const CodedFormat& format = coded_format(static_cast<WeightType>(i));
    if (format.grid.bytes != nullptr) found[format.name] = py::array_t<std::uint64_t>(format.grid.count, format.grid.bytes);
  }
  return found;
}

}  // namespace

PyExperts::PyExperts(const ExpertsShape& shape, const GateSpec& gate, const std::string& weight_type, const py::object& buffer_or_none,
                     bool sparse)
    : experts(
          make_experts(shape, gate, parse_weight_types(weight_type), sparse ? LayoutKind::kSparse : LayoutKind::kDense, buffer_or_none)),
      buffer(buffer_or_none) {}

void bind_weights(py::module_& module) {
  module.def("grid_points", &grid_points);
  bind_experts(module);
  bind_linear(module);
  module.def("search_grid", &search, "weight_type"_a, py::arg("x").noconvert(), py::arg("weight").noconvert(),
             py::arg("scales").noconvert(), py::kw_only(), "shift"_a = 0.0f, "threads"_a = 1);
}

}  // namespace moegraft
