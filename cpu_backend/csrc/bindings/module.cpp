// The module and what computes. Only files named bindings* know Python: arrays are checked there, then the GIL is released.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "bindings/bindings.h"
#include "core/machine.h"
#include "core/runtime.h"
#include "simd/isa.h"

namespace py = pybind11;
using namespace py::literals;

namespace moegraft {
namespace {

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
    refuse("acted has shape " + shape_text(array) + " where that of top_k_index, " + shape_text(top_k_index) + ", and " +
           std::to_string(intermediate) + " neurons are expected");
  if (!array.writeable()) refuse("acted is read-only");
  return static_cast<float*>(const_cast<void*>(array.data()));
}

ForwardArgs forward_args(const PyExperts& packed, const py::array& hidden_states, const py::array& top_k_index,
                         const py::array& top_k_weights, const py::array& out, const SparseKeywords& sparse) {
  const PackedExperts& experts = *packed.experts;
  require_layout(hidden_states, "hidden_states", 2);
  const ActivationType type = activation_type_of(hidden_states, "hidden_states");
  const py::ssize_t tokens = hidden_states.shape(0);
  if (hidden_states.shape(1) != experts.shape().hidden)
    refuse("hidden_states has shape " + shape_text(hidden_states) + " where (tokens, " + std::to_string(experts.shape().hidden) +
           ") is expected");
  require_layout(top_k_index, "top_k_index", 2);
  require_dtype(top_k_index, "top_k_index", 'i', 8, "int64");
  require_layout(top_k_weights, "top_k_weights", 2);
  require_dtype(top_k_weights, "top_k_weights", 'f', 4, "float32");
  if (top_k_index.shape(0) != tokens)
    refuse("top_k_index has shape " + shape_text(top_k_index) + " where (" + std::to_string(tokens) +
           ", K) is expected: one row for each token");
  if (top_k_weights.shape(0) != tokens || top_k_weights.shape(1) != top_k_index.shape(1))
    refuse("top_k_weights has shape " + shape_text(top_k_weights) + " where that of top_k_index, " + shape_text(top_k_index) +
           ", is expected");
  check_out(out, hidden_states, experts.shape().hidden);
  if (!(sparse.threshold >= 0.0f)) refuse("threshold is " + number_text(sparse.threshold) + "; it must be at least 0");
  const bool asked = sparse.threshold > 0.0f || !sparse.neuron_counts.is_none() || !sparse.acted.is_none();
  if (asked && experts.kind() != LayoutKind::kSparse)
    refuse((sparse.threshold > 0.0f ? "threshold is " + number_text(sparse.threshold) : "neurons are to be counted or shown") +
           " but the experts are dense; pack them with PackedExperts(..., sparse=True)");
  return {&experts,
          hidden_states.data(),
          static_cast<const std::int64_t*>(top_k_index.data()),
          static_cast<const float*>(top_k_weights.data()),
          const_cast<void*>(out.data()),
          type,
          tokens,
          static_cast<int>(top_k_index.shape(1)),
          sparse.threshold,
          count_values(sparse.neuron_counts),
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

  std::uint64_t submit(const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
                       const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts,
                       const py::object& acted) {
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
    if (x.shape(1) != linear.cols())
      refuse("x has shape " + shape_text(x) + " where (tokens, " + std::to_string(linear.cols()) + ") is expected");
    check_out(out, x, linear.rows());
    const LinearArgs args = {&linear, x.data(), const_cast<void*>(out.data()), type, x.shape(0)};
    py::gil_scoped_release release;
    runtime_->linear(args);
  }

  void linear_at(const PackedLinear& linear, int type, Address x, std::int64_t tokens, Address out) {
    if (type < 0 || type > static_cast<int>(ActivationType::kBFloat16)) refuse(std::to_string(type) + " is no element type");
    const LinearArgs args = {&linear, at(x), at(out), static_cast<ActivationType>(type), tokens};
    py::gil_scoped_release release;
    runtime_->linear(args);
  }

  void norm_at(const PyNorm& norm, Address x, Address weight, std::int64_t rows, Address out) {
    const NormArgs args = {at(x), at(weight), at(out), norm.type, rows, norm.cols, norm.form};
    py::gil_scoped_release release;
    runtime_->norm(args);
  }

  void route_at(const PyRouter& router, Address x, Address weight, std::int64_t tokens, Address logits, Address weights, Address index) {
    const RouterArgs args = {at(x),
                             at(weight),
                             router.logit_bias.empty() ? nullptr : router.logit_bias.data(),
                             router.type,
                             tokens,
                             router.hidden,
                             router.rounds_logits,
                             router.selection,
                             at(logits),
                             router.logits_type,
                             at(weights),
                             router.weights_type,
                             at<std::int64_t>(index)};
    py::gil_scoped_release release;
    runtime_->route(args);
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

// By weight type, for bfloat16 activations.
std::map<std::string, std::string> tile_isas(const SelectedKernels& selected) {
  std::map<std::string, std::string> found;
  for (int i = 0; i < kWeightTypes; ++i) {
    const auto type = static_cast<WeightType>(i);
    found[name_of(type)] = selected.tile_isas[static_cast<std::size_t>(format_of(type, ActivationType::kBFloat16))];
  }
  return found;
}

CpuFeatures cpu_with(const std::set<std::string>& features) {
  CpuFeatures cpu;
  const std::map<std::string, bool*> fields = {{"avx2", &cpu.avx2}, {"avx512", &cpu.avx512}, {"vnni", &cpu.vnni},
                                               {"bf16", &cpu.bf16}, {"amx", &cpu.amx},       {"tile_permission", &cpu.tile_permission}};
  for (const std::string& feature : features) {
    if (fields.count(feature) == 0) refuse("unknown CPU feature '" + feature + "'");
    *fields.at(feature) = true;
  }
  return cpu;
}

void bind_runtime(py::module_& module) {
  py::class_<PyHostCall>(module, "HostCall")
      .def_property_readonly("address", [](PyHostCall& self) { return reinterpret_cast<std::uintptr_t>(&self.call); })
      .def("check", [](PyHostCall& self) { self.call.check(); });
  py::class_<PyRuntime>(module, "Runtime")
      .def(py::init<int, const std::optional<std::string>&, bool>(), "threads"_a = 0, "isa"_a = py::none(), "share_threads"_a = true)
      .def_property_readonly("threads", [](PyRuntime& self) { return self.get().threads(); })
      .def_property_readonly("isa", [](PyRuntime& self) { return self.get().selected().name(); })
      .def_property_readonly("tile_isas", [](PyRuntime& self) { return tile_isas(self.get().selected()); })
      .def_property_readonly("shares_threads", [](PyRuntime& self) { return self.get().shares_threads(); })
      .def_static("available_isas", [] { return available_isas(); })
      .def_static("compiled_isas", &compiled_isas)
      .def_static("default_isa", [] { return select_kernels(detect_cpu(), "").name(); })
      .def("forward", &PyRuntime::forward, "experts"_a, py::arg("hidden_states").noconvert(), py::arg("top_k_index").noconvert(),
           py::arg("top_k_weights").noconvert(), py::arg("out").noconvert(), py::kw_only(), "threshold"_a = 0.0f,
           "neuron_counts"_a = py::none(), "acted"_a = py::none())
      .def("submit", &PyRuntime::submit, "experts"_a, py::arg("hidden_states").noconvert(), py::arg("top_k_index").noconvert(),
           py::arg("top_k_weights").noconvert(), py::arg("out").noconvert(), py::kw_only(), "threshold"_a = 0.0f,
           "neuron_counts"_a = py::none(), "acted"_a = py::none())
      .def("wait", &PyRuntime::wait, "ticket"_a)
      .def("linear", &PyRuntime::linear, "linear"_a, py::arg("x").noconvert(), py::arg("out").noconvert())
      .def("linear_at", &PyRuntime::linear_at, "linear"_a, "element_type"_a, "x"_a, "tokens"_a, "out"_a)
      .def("norm_at", &PyRuntime::norm_at, "norm"_a, "x"_a, "weight"_a, "rows"_a, "out"_a)
      .def("route_at", &PyRuntime::route_at, "router"_a, "x"_a, "weight"_a, "tokens"_a, "logits"_a, "weights"_a, "index"_a)
      .def(
          "attention",
          [](PyRuntime& self, const py::array& query, const py::array& key, const py::array& value, const py::array& out, float scale,
             const py::object& mask, bool causal, float softcap,
             const py::object& sinks) { attention(self.get(), {query, key, value, out, mask, sinks, scale, softcap, causal}); },
          py::arg("query").noconvert(), py::arg("key").noconvert(), py::arg("value").noconvert(), py::arg("out").noconvert(), py::kw_only(),
          "scale"_a, "mask"_a = py::none(), "causal"_a = false, "softcap"_a = 0.0f, "sinks"_a = py::none())
      .def("host_function", [](const py::object& self) {
        const auto make = [self](const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
                                 const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts) {
          const ForwardArgs args = forward_args(experts.cast<const PyExperts&>(), hidden_states, top_k_index, top_k_weights, out,
                                                {threshold, neuron_counts, py::none()});
          return std::make_unique<PyHostCall>(self.cast<PyRuntime&>(), args,
                                              py::make_tuple(self, experts, hidden_states, top_k_index, top_k_weights, out, neuron_counts));
        };
        return py::make_tuple(reinterpret_cast<std::uintptr_t>(&HostCall::run),
                              py::cpp_function(make, "experts"_a, py::arg("hidden_states").noconvert(), py::arg("top_k_index").noconvert(),
                                               py::arg("top_k_weights").noconvert(), py::arg("out").noconvert(), py::kw_only(),
                                               "threshold"_a = 0.0f, "neuron_counts"_a = py::none()));
      });
}

PYBIND11_MODULE(_kernel, module) {
  module.doc() = "The C++ experts kernel.";
  bind_specs(module);
  bind_weights(module);
  bind_tokens(module);
  bind_runtime(module);
  bind_scheduler(module);
  module.def("activations", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kActivations; ++i) names.emplace_back(name_of(static_cast<Activation>(i)));
    return names;
  });
  module.def("default_threads", &default_threads);
  module.def(
      "select_isas",
      [](const std::set<std::string>& features, const std::string& wanted) {
        const SelectedKernels selected = select_kernels(cpu_with(features), wanted);
        return std::make_pair(selected.name(), tile_isas(selected));
      },
      "features"_a, "wanted"_a = "");
  module.def("cores_of_cpu_max", &cores_of_cpu_max, "text"_a);
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
}

}  // namespace
}  // namespace moegraft
