// The only file that knows Python: arrays are checked here, then the GIL is released.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "bindings_scheduler.h"
#include "isa.h"
#include "machine.h"
#include "partition.h"
#include "runtime.h"

namespace py = pybind11;
using namespace py::literals;

namespace moegraft {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw py::value_error(message); }

std::string shape_text(const py::array& array) {
  std::string text = "(";
  for (py::ssize_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + (array.ndim() == 1 ? ",)" : ")");
}

char kind_of(const py::array& array) { return array.dtype().kind(); }

bool is_dtype(const py::array& array, char kind, py::ssize_t bytes) {
  return kind_of(array) == kind && array.itemsize() == bytes && array.dtype().byteorder() != '>';
}

void require_layout(const py::array& array, const char* name, py::ssize_t dims) {
  if (array.ndim() != dims)
    refuse(std::string(name) + " has shape " + shape_text(array) + " where " + std::to_string(dims) + " dimensions are expected");
  if (!(array.flags() & py::array::c_style)) refuse(std::string(name) + " is not C-contiguous; pass a contiguous copy");
}

void require_dtype(const py::array& array, const char* name, char kind, py::ssize_t bytes, const char* expected) {
  if (!is_dtype(array, kind, bytes))
    throw py::type_error(std::string(name) + " has dtype " + py::str(array.dtype()).cast<std::string>() + " where " + expected + " is expected");
}

WeightType float_type_of(const py::array& array, const char* name) {
  if (is_dtype(array, 'f', 4)) return WeightType::kFloat32;
  if (is_dtype(array, 'f', 2)) return WeightType::kFloat16;
  if (is_dtype(array, 'u', 2)) return WeightType::kBFloat16;
  throw py::type_error(std::string(name) + " has dtype " + py::str(array.dtype()).cast<std::string>() +
                       " where float32, float16 or bfloat16 (as uint16) is expected");
}

RowsView rows_view(const py::array& array) {
  require_layout(array, "array", 2);
  return {array.data(), float_type_of(array, "array"), static_cast<int>(array.shape(0)), static_cast<int>(array.shape(1))};
}

QuantizedRowsView quantized_view(const py::array& codes, const py::array& scales) {
  require_layout(codes, "codes", 2);
  require_dtype(codes, "codes", 'i', 1, "int8");
  require_layout(scales, "scales", 2);
  require_dtype(scales, "scales", 'f', 2, "float16");
  if (codes.shape(1) % kGroup != 0) refuse("codes has " + std::to_string(codes.shape(1)) + " columns, no multiple of 32");
  if (scales.shape(0) != codes.shape(0) || scales.shape(1) * kGroup != codes.shape(1))
    refuse("scales has shape " + shape_text(scales) + " where (" + std::to_string(codes.shape(0)) + ", " + std::to_string(codes.shape(1) / kGroup) +
           ") is expected: one for each 32 columns of codes");
  return {static_cast<const std::int8_t*>(codes.data()), static_cast<const std::uint16_t*>(scales.data()), static_cast<int>(codes.shape(0)),
          static_cast<int>(codes.shape(1))};
}

const float* bias_values(const py::array& array) {
  require_layout(array, "array", 1);
  require_dtype(array, "array", 'f', 4, "float32");
  return static_cast<const float*>(array.data());
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

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

// Keeps the array of an external buffer alive beside the experts.
struct PyExperts {
  PyExperts(const ExpertsShape& shape, const GateSpec& gate, const std::string& weight_type, const py::object& buffer_or_none, bool sparse)
      : experts(make(shape, gate, parse_weight_type(weight_type), sparse ? LayoutKind::kSparse : LayoutKind::kDense, buffer_or_none)),
        buffer(buffer_or_none) {}

  static std::unique_ptr<PackedExperts> make(const ExpertsShape& shape, const GateSpec& gate, WeightType type, LayoutKind kind,
                                             const py::object& buffer_or_none) {
    if (buffer_or_none.is_none()) return std::make_unique<PackedExperts>(shape, gate, type, kind);
    if (!py::isinstance<py::array>(buffer_or_none)) throw py::type_error("buffer must be a numpy array of uint8");
    const auto array = py::cast<py::array>(buffer_or_none);
    require_layout(array, "buffer", 1);
    require_dtype(array, "buffer", 'u', 1, "uint8");
    auto* data = reinterpret_cast<std::byte*>(const_cast<void*>(array.data()));
    return std::make_unique<PackedExperts>(shape, gate, type, kind, ExternalBuffer{data, static_cast<std::size_t>(array.nbytes()), array.writeable()});
  }

  std::unique_ptr<PackedExperts> experts;
  py::object buffer;
};

ActivationType activation_type_of(const py::array& array, const char* name) {
  switch (float_type_of(array, name)) {
    case WeightType::kFloat32: return ActivationType::kFloat32;
    case WeightType::kFloat16: return ActivationType::kFloat16;
    default: return ActivationType::kBFloat16;
  }
}

void check_out(const py::array& out, const py::array& like, py::ssize_t cols) {
  require_layout(out, "out", 2);
  if (!out.dtype().equal(like.dtype()))
    throw py::type_error("out has dtype " + py::str(out.dtype()).cast<std::string>() + " where the input's, " +
                         py::str(like.dtype()).cast<std::string>() + ", is expected");
  if (out.shape(0) != like.shape(0) || out.shape(1) != cols)
    refuse("out has shape " + shape_text(out) + " where (" + std::to_string(like.shape(0)) + ", " + std::to_string(cols) + ") is expected");
  if (!out.writeable()) refuse("out is read-only");
}

// The keywords of forward that only sparse layouts take.
struct SparseKeywords {
  float threshold;
  py::object neuron_counts;  // an array or None
  py::object acted;          // an array or None
};

std::int64_t* count_values(const py::object& object) {
  if (object.is_none()) return nullptr;
  const auto array = py::cast<py::array>(object);
  require_layout(array, "neuron_counts", 1);
  require_dtype(array, "neuron_counts", 'i', 8, "int64");
  if (array.shape(0) != 2) refuse("neuron_counts has shape " + shape_text(array) + " where (2,) is expected: active neurons, and all");
  if (!array.writeable()) refuse("neuron_counts is read-only");
  return static_cast<std::int64_t*>(const_cast<void*>(array.data()));
}

float* acted_values(const py::object& object, const py::array& top_k_index, int intermediate) {
  if (object.is_none()) return nullptr;
  const auto array = py::cast<py::array>(object);
  require_layout(array, "acted", 3);
  require_dtype(array, "acted", 'f', 4, "float32");
  if (array.shape(0) != top_k_index.shape(0) || array.shape(1) != top_k_index.shape(1) || array.shape(2) != intermediate)
    refuse("acted has shape " + shape_text(array) + " where that of top_k_index, " + shape_text(top_k_index) + ", and " + std::to_string(intermediate) +
           " neurons are expected");
  if (!array.writeable()) refuse("acted is read-only");
  return static_cast<float*>(const_cast<void*>(array.data()));
}

ForwardArgs forward_args(const PyExperts& packed, const py::array& hidden_states, const py::array& top_k_index, const py::array& top_k_weights,
                         const py::array& out, const SparseKeywords& sparse) {
  const PackedExperts& experts = *packed.experts;
  require_layout(hidden_states, "hidden_states", 2);
  const ActivationType type = activation_type_of(hidden_states, "hidden_states");
  const py::ssize_t tokens = hidden_states.shape(0);
  if (hidden_states.shape(1) != experts.shape().hidden)
    refuse("hidden_states has shape " + shape_text(hidden_states) + " where (tokens, " + std::to_string(experts.shape().hidden) + ") is expected");
  require_layout(top_k_index, "top_k_index", 2);
  require_dtype(top_k_index, "top_k_index", 'i', 8, "int64");
  require_layout(top_k_weights, "top_k_weights", 2);
  require_dtype(top_k_weights, "top_k_weights", 'f', 4, "float32");
  if (top_k_index.shape(0) != tokens)
    refuse("top_k_index has shape " + shape_text(top_k_index) + " where (" + std::to_string(tokens) + ", K) is expected: one row for each token");
  if (top_k_weights.shape(0) != tokens || top_k_weights.shape(1) != top_k_index.shape(1))
    refuse("top_k_weights has shape " + shape_text(top_k_weights) + " where that of top_k_index, " + shape_text(top_k_index) + ", is expected");
  check_out(out, hidden_states, experts.shape().hidden);
  if (!(sparse.threshold >= 0.0f)) refuse("threshold is " + number_text(sparse.threshold) + "; it must be at least 0");
  const bool asked = sparse.threshold > 0.0f || !sparse.neuron_counts.is_none() || !sparse.acted.is_none();
  if (asked && experts.kind() != LayoutKind::kSparse)
    refuse((sparse.threshold > 0.0f ? "threshold is " + number_text(sparse.threshold) : "neurons are to be counted or shown") +
           " but the experts are dense; pack them with PackedExperts(..., sparse=True)");
  return {&experts, hidden_states.data(), static_cast<const std::int64_t*>(top_k_index.data()), static_cast<const float*>(top_k_weights.data()),
          const_cast<void*>(out.data()), type, tokens, static_cast<int>(top_k_index.shape(1)), sparse.threshold, count_values(sparse.neuron_counts),
          acted_values(sparse.acted, top_k_index, experts.shape().intermediate)};
}

// Keeps the arguments of submitted work alive until it was waited for.
class PyRuntime {
 public:
  PyRuntime(int threads, const std::optional<std::string>& isa, bool share_threads)
      : runtime_(std::make_unique<Runtime>(threads, isa.value_or(""), share_threads)) {}
  ~PyRuntime() {
    py::gil_scoped_release release;  // joining must not stop Python
    runtime_.reset();
  }

  Runtime& get() { return *runtime_; }

  void forward(const PyExperts& experts, const py::array& hidden_states, const py::array& top_k_index, const py::array& top_k_weights,
               const py::array& out, float threshold, const py::object& neuron_counts, const py::object& acted) {
    const ForwardArgs args = forward_args(experts, hidden_states, top_k_index, top_k_weights, out, {threshold, neuron_counts, acted});
    py::gil_scoped_release release;
    runtime_->forward(args);
  }

  std::uint64_t submit(const py::object& experts, const py::array& hidden_states, const py::array& top_k_index, const py::array& top_k_weights,
                       const py::array& out, float threshold, const py::object& neuron_counts, const py::object& acted) {
    const ForwardArgs args =
        forward_args(experts.cast<const PyExperts&>(), hidden_states, top_k_index, top_k_weights, out, {threshold, neuron_counts, acted});
    const std::uint64_t ticket = runtime_->submit(args);
    alive_[ticket] = py::make_tuple(experts, hidden_states, top_k_index, top_k_weights, out, neuron_counts, acted);
    return ticket;
  }

  void wait(std::uint64_t ticket) {
    const auto found = alive_.find(ticket);
    const py::object kept = found == alive_.end() ? py::object() : found->second;
    if (found != alive_.end()) alive_.erase(found);
    py::gil_scoped_release release;
    runtime_->wait(ticket);
  }

  void linear(const PackedLinear& linear, const py::array& x, const py::array& out) {
    require_layout(x, "x", 2);
    const ActivationType type = activation_type_of(x, "x");
    if (x.shape(1) != linear.cols()) refuse("x has shape " + shape_text(x) + " where (tokens, " + std::to_string(linear.cols()) + ") is expected");
    check_out(out, x, linear.rows());
    const LinearArgs args = {&linear, x.data(), const_cast<void*>(out.data()), type, x.shape(0)};
    py::gil_scoped_release release;
    runtime_->linear(args);
  }

 private:
  std::unordered_map<std::uint64_t, py::object> alive_;
  std::unique_ptr<Runtime> runtime_;
};

struct PyHostCall {
  PyHostCall(PyRuntime& runtime, const ForwardArgs& args, py::tuple kept) : call(runtime.get(), args), alive(std::move(kept)) {}
  HostCall call;
  py::tuple alive;
};

py::array_t<float> unpacked(int rows, int cols) { return py::array_t<float>({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(cols)}); }

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

void bind_weights(py::module_& module) {
  py::class_<PyExperts>(module, "PackedExperts")
      .def(py::init<const ExpertsShape&, const GateSpec&, const std::string&, const py::object&, bool>(), "shape"_a, "gate_spec"_a, "weight_type"_a,
           "buffer"_a = py::none(), py::kw_only(), "sparse"_a = false)
      .def_static("expert_bytes_for",
                  [](const ExpertsShape& shape, const std::string& type, bool sparse) {
                    return ExpertLayout(shape, parse_weight_type(type), sparse ? LayoutKind::kSparse : LayoutKind::kDense).expert_bytes;
                  },
                  "shape"_a, "weight_type"_a, py::kw_only(), "sparse"_a = false)
      .def_property_readonly("sparse", [](const PyExperts& self) { return self.experts->kind() == LayoutKind::kSparse; })
      .def_property_readonly("shape", [](const PyExperts& self) { return self.experts->shape(); })
      .def_property_readonly("gate_spec", [](const PyExperts& self) { return self.experts->gate(); })
      .def_property_readonly("weight_type", [](const PyExperts& self) { return name_of(self.experts->type()); })
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
                               for (int e = 0; e < self.experts->shape().num_experts; ++e) mask.mutable_at(e) = self.experts->packed_mask(e);
                               return mask;
                             })
      .def_property_readonly("weights_ready",
                             [](const PyExperts& self) {
                               for (int e = 0; e < self.experts->shape().num_experts; ++e)
                                 if (!self.experts->complete(e)) return false;
                               return true;
                             })
      .def("pack", [](PyExperts& self, int expert, const std::string& part, const py::array& array) {
             const RowsView rows = rows_view(array);
             const Part which = parse_part(part);
             py::gil_scoped_release release;
             self.experts->pack(expert, which, rows);
           }, "expert"_a, "part"_a, py::arg("array").noconvert())
      .def("pack_quantized", [](PyExperts& self, int expert, const std::string& part, const py::array& codes, const py::array& scales) {
             const QuantizedRowsView rows = quantized_view(codes, scales);
             const Part which = parse_part(part);
             py::gil_scoped_release release;
             self.experts->pack_quantized(expert, which, rows);
           }, "expert"_a, "part"_a, py::arg("codes").noconvert(), py::arg("scales").noconvert())
      .def("pack_bias", [](PyExperts& self, int expert, const std::string& part, const py::array& array) {
             self.experts->pack_bias(expert, parse_part(part), bias_values(array), static_cast<int>(array.shape(0)));
           }, "expert"_a, "part"_a, py::arg("array").noconvert())
      .def("unpack", [](const PyExperts& self, int expert, const std::string& part) {
             const Part which = parse_part(part);
             auto rows = unpacked(self.experts->rows_of(which), self.experts->cols_of(which));
             float* data = rows.mutable_data();
             {
               py::gil_scoped_release release;
               self.experts->unpack(expert, which, data);
             }
             return rows;
           }, "expert"_a, "part"_a);
  py::class_<PackedLinear>(module, "PackedLinear")
      .def(py::init([](int rows, int cols, const std::string& type) { return std::make_unique<PackedLinear>(rows, cols, parse_weight_type(type)); }),
           "rows"_a, "cols"_a, "weight_type"_a)
      .def_property_readonly("rows", &PackedLinear::rows)
      .def_property_readonly("cols", &PackedLinear::cols)
      .def_property_readonly("weight_type", [](const PackedLinear& self) { return name_of(self.type()); })
      .def_property_readonly("nbytes", &PackedLinear::bytes)
      .def_property_readonly("buffer",
                             [](const py::object& self) {
                               const auto& linear = self.cast<const PackedLinear&>();
                               const std::size_t bytes = block_bytes(linear.type(), linear.cols()) * static_cast<std::size_t>(linear.blocks());
                               py::array_t<std::uint8_t> view(static_cast<py::ssize_t>(bytes), reinterpret_cast<const std::uint8_t*>(linear.block(0)), self);
                               view.attr("flags").attr("writeable") = false;
                               return view;
                             })
      .def_static("nbytes_for", [](int rows, int cols, const std::string& type) {
             return block_bytes(parse_weight_type(type), cols) * static_cast<std::size_t>(round_up(rows, kBlockRows) / kBlockRows);
           }, "rows"_a, "cols"_a, "weight_type"_a)
      .def("pack", [](PackedLinear& self, const py::array& array) {
             const RowsView rows = rows_view(array);
             py::gil_scoped_release release;
             self.pack(rows);
           }, py::arg("array").noconvert())
      .def("pack_quantized", [](PackedLinear& self, const py::array& codes, const py::array& scales) {
             const QuantizedRowsView rows = quantized_view(codes, scales);
             py::gil_scoped_release release;
             self.pack_quantized(rows);
           }, py::arg("codes").noconvert(), py::arg("scales").noconvert())
      .def("pack_bias", [](PackedLinear& self, const py::array& array) { self.pack_bias(bias_values(array), static_cast<int>(array.shape(0))); },
           py::arg("array").noconvert())
      .def("unpack", [](const PackedLinear& self) {
             auto rows = unpacked(self.rows(), self.cols());
             self.unpack(rows.mutable_data());
             return rows;
           });
}

void bind_runtime(py::module_& module) {
  py::class_<PyHostCall>(module, "HostCall")
      .def_property_readonly("address", [](PyHostCall& self) { return reinterpret_cast<std::uintptr_t>(&self.call); })
      .def("check", [](PyHostCall& self) { self.call.check(); });
  py::class_<PyRuntime>(module, "Runtime")
      .def(py::init<int, const std::optional<std::string>&, bool>(), "threads"_a = 0, "isa"_a = py::none(), "share_threads"_a = true)
      .def_property_readonly("threads", [](PyRuntime& self) { return self.get().threads(); })
      .def_property_readonly("isa", [](PyRuntime& self) { return self.get().isa(); })
      .def_property_readonly("shares_threads", [](PyRuntime& self) { return self.get().shares_threads(); })
      .def_static("available_isas", &available_isas)
      .def_static("compiled_isas", &compiled_isas)
      .def_static("untested_isas", &untested_isas)
      .def("forward", &PyRuntime::forward, "experts"_a, py::arg("hidden_states").noconvert(), py::arg("top_k_index").noconvert(),
           py::arg("top_k_weights").noconvert(), py::arg("out").noconvert(), py::kw_only(), "threshold"_a = 0.0f, "neuron_counts"_a = py::none(),
           "acted"_a = py::none())
      .def("submit", &PyRuntime::submit, "experts"_a, py::arg("hidden_states").noconvert(), py::arg("top_k_index").noconvert(),
           py::arg("top_k_weights").noconvert(), py::arg("out").noconvert(), py::kw_only(), "threshold"_a = 0.0f, "neuron_counts"_a = py::none(),
           "acted"_a = py::none())
      .def("wait", &PyRuntime::wait, "ticket"_a)
      .def("linear", &PyRuntime::linear, "linear"_a, py::arg("x").noconvert(), py::arg("out").noconvert())
      .def("host_function", [](const py::object& self) {
        const auto make = [self](const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
                                 const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts) {
          const ForwardArgs args =
              forward_args(experts.cast<const PyExperts&>(), hidden_states, top_k_index, top_k_weights, out, {threshold, neuron_counts, py::none()});
          return std::make_unique<PyHostCall>(self.cast<PyRuntime&>(), args,
                                              py::make_tuple(self, experts, hidden_states, top_k_index, top_k_weights, out, neuron_counts));
        };
        return py::make_tuple(reinterpret_cast<std::uintptr_t>(&HostCall::run),
                              py::cpp_function(make, "experts"_a, py::arg("hidden_states").noconvert(), py::arg("top_k_index").noconvert(),
                                               py::arg("top_k_weights").noconvert(), py::arg("out").noconvert(), py::kw_only(), "threshold"_a = 0.0f,
                                               "neuron_counts"_a = py::none()));
      });
}

PYBIND11_MODULE(_kernel, module) {
  module.doc() = "The C++ experts kernel.";
  bind_specs(module);
  bind_weights(module);
  bind_runtime(module);
  bind_scheduler(module);
  module.def("activations", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kActivations; ++i) names.emplace_back(name_of(static_cast<Activation>(i)));
    return names;
  });
  module.def("default_threads", &default_threads);
  module.def("cores_of_cpu_max", &cores_of_cpu_max, "text"_a);
  module.def("partition_blocks", [](int blocks, const std::vector<int>& threads_of_nodes) {
    std::vector<std::pair<int, int>> ranges;
    for (const UnitRange& range : partition_blocks(blocks, threads_of_nodes)) ranges.emplace_back(range.first, range.end);
    return ranges;
  }, "blocks"_a, "threads_of_nodes"_a);
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
}

}  // namespace
}  // namespace moegraft
