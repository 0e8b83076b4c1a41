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

// The arguments of forward, submit and of a HostCall.
struct ForwardCall {
  py::object experts;
  py::array hidden_states, top_k_index, top_k_weights, out;
  float threshold;
  py::object neuron_counts;  // an array or None
  py::object acted;          // an array or None

  ForwardArgs checked() const;
  py::tuple owners() const {  // what must outlive the call
    return py::make_tuple(experts, hidden_states, top_k_index, top_k_weights, out, neuron_counts, acted);
  }
};

float* acted_values(const py::object& object, const py::array& top_k_index, int intermediate) {
  if (object.is_none()) return nullptr;
  const auto array = py::cast<py::array>(object);
  require_layout(array, "acted", 3);
  require_dtype(array, "acted", 'f', 4, "float32");
  const py::ssize_t tokens = top_k_index.shape(0), top_k = top_k_index.shape(1);
  if (array.shape(0) != tokens || array.shape(1) != top_k || array.shape(2) != intermediate)
    raise_shape_error(array, "acted",
                      "(" + std::to_string(tokens) + ", " + std::to_string(top_k) + ", " + std::to_string(intermediate) + ")");
  if (!array.writeable()) raise_value_error("acted is read-only");
  return static_cast<float*>(const_cast<void*>(array.data()));
}

ForwardArgs ForwardCall::checked() const {
  const PackedExperts& packed = *experts.cast<const PyExperts&>().experts;
  const std::string hidden = std::to_string(packed.shape().hidden);
  require_layout(hidden_states, "hidden_states", 2);
  const ActivationType type = activation_type_of(hidden_states, "hidden_states");
  const py::ssize_t tokens = hidden_states.shape(0);
  if (hidden_states.shape(1) != packed.shape().hidden) raise_shape_error(hidden_states, "hidden_states", "(tokens, " + hidden + ")");
  require_layout(top_k_index, "top_k_index", 2);
  require_dtype(top_k_index, "top_k_index", 'i', 8, "int64");
  require_layout(top_k_weights, "top_k_weights", 2);
  require_dtype(top_k_weights, "top_k_weights", 'f', 4, "float32");
  if (top_k_index.shape(0) != tokens)
    raise_shape_error(top_k_index, "top_k_index", "(" + std::to_string(tokens) + ", K), one row for each token");
  if (top_k_weights.shape(0) != tokens || top_k_weights.shape(1) != top_k_index.shape(1))
    raise_shape_error(top_k_weights, "top_k_weights", shape_text(top_k_index) + ", that of top_k_index");
  require_layout(out, "out", 2);
  if (!out.dtype().equal(hidden_states.dtype()))
    throw py::type_error("out: expected dtype " + py::str(hidden_states.dtype()).cast<std::string>() + " as hidden_states, found " +
                         py::str(out.dtype()).cast<std::string>());
  if (out.shape(0) != tokens || out.shape(1) != packed.shape().hidden)
    raise_shape_error(out, "out", "(" + std::to_string(tokens) + ", " + hidden + ")");
  if (!out.writeable()) raise_value_error("out is read-only");
  if (!(threshold >= 0.0f)) raise_value_error("threshold is " + number_text(threshold) + "; it must be at least 0");
  const bool sparse = threshold > 0.0f || !neuron_counts.is_none() || !acted.is_none();
  if (sparse && packed.kind() != LayoutKind::kSparse)
    raise_value_error(
        "threshold, neuron_counts and acted need experts in the sparse layout, and these are dense; pack them with PackedExperts(..., "
        "sparse=True)");
  return {&packed,
          hidden_states.data(),
          static_cast<const std::int64_t*>(top_k_index.data()),
          static_cast<const float*>(top_k_weights.data()),
          const_cast<void*>(out.data()),
          type,
          tokens,
          static_cast<int>(top_k_index.shape(1)),
          threshold,
          count_values(neuron_counts),
          acted_values(acted, top_k_index, packed.shape().intermediate)};
}

class PyRuntime {
 public:
  PyRuntime(int threads, const std::optional<std::string>& isa, bool share_threads, std::optional<int> matrix_tokens)
      : runtime_(std::make_unique<Runtime>(threads, isa.value_or(""), share_threads, matrix_tokens)) {}
  ~PyRuntime() {
    py::gil_scoped_release release;  // joining threads must not stop Python
    runtime_.reset();
  }

  Runtime& get() { return *runtime_; }

  void forward(const ForwardCall& call) {
    const ForwardArgs args = call.checked();
    py::gil_scoped_release release;
    runtime_->forward(args);
  }

  std::uint64_t submit(const ForwardCall& call) {
    const std::uint64_t ticket = runtime_->submit(call.checked());
    owners_[ticket] = call.owners();
    return ticket;
  }

  void wait(std::uint64_t ticket) {
    const auto found = owners_.find(ticket);
    const py::object kept = found == owners_.end() ? py::object() : found->second;
    if (found != owners_.end()) owners_.erase(found);
    py::gil_scoped_release release;
    runtime_->wait(ticket);
  }

 private:
  std::unordered_map<std::uint64_t, py::object> owners_;  // of submitted work, until it was waited for
  std::unique_ptr<Runtime> runtime_;
};

struct PyHostCall {
  PyHostCall(const py::object& py_runtime, const ForwardCall& arguments)
      : call(py_runtime.cast<PyRuntime&>().get(), arguments.checked()), owners(arguments.owners()), runtime(py_runtime) {}
  HostCall call;
  py::tuple owners;
  py::object runtime;
};

// The least tokens of the matrix kernels by weight type, for bfloat16 activations.
std::map<std::string, int> matrix_tokens(const Kernels& kernels) {
  std::map<std::string, int> found;
  for (int i = 0; i < kWeightTypes; ++i) {
    const auto type = static_cast<WeightType>(i);
    const Format format = format_of(type, ActivationType::kBFloat16);
    if (kernels.matrix.serves(format, kNeverMatrix - 1)) found[name_of(type)] = kernels.matrix.least_tokens[static_cast<int>(format)];
  }
  return found;
}

CpuFeatures cpu_with(const std::set<std::string>& features) {
  CpuFeatures cpu;
  const std::map<std::string, bool*> fields = {{"avx2", &cpu.avx2}, {"avx512", &cpu.avx512},   {"vnni", &cpu.vnni},
                                               {"bf16", &cpu.bf16}, {"amx", &cpu.amx},         {"tile_permission", &cpu.tile_permission},
                                               {"neon", &cpu.neon}, {"dotprod", &cpu.dotprod}, {"i8mm", &cpu.i8mm}};
  for (const std::string& feature : features) {
    if (fields.count(feature) == 0) raise_value_error("unknown CPU feature '" + feature + "'");
    *fields.at(feature) = true;
  }
  return cpu;
}

void bind_runtime(py::module_& module) {
  const auto experts = "experts"_a;
  const auto hidden_states = py::arg("hidden_states").noconvert(), top_k_index = py::arg("top_k_index").noconvert();
  const auto top_k_weights = py::arg("top_k_weights").noconvert(), out = py::arg("out").noconvert();
  const auto threshold = "threshold"_a = 0.0f, neuron_counts = "neuron_counts"_a = py::none(), acted = "acted"_a = py::none();
  py::class_<PyHostCall>(module, "HostCall")
      .def_property_readonly("address", [](PyHostCall& self) { return reinterpret_cast<std::uintptr_t>(&self.call); })
      .def("check", [](PyHostCall& self) { self.call.check(); });
  py::class_<PyRuntime>(module, "Runtime")
      .def(py::init<int, const std::optional<std::string>&, bool, std::optional<int>>(), "threads"_a = 0, "isa"_a = py::none(),
           "share_threads"_a = true, "matrix_tokens"_a = py::none())
      .def_property_readonly("threads", [](PyRuntime& self) { return self.get().threads(); })
      .def_property_readonly("isa", [](PyRuntime& self) { return self.get().kernels().isa; })
      .def_property_readonly("matrix_tokens", [](PyRuntime& self) { return matrix_tokens(self.get().kernels()); })
      .def_property_readonly("shares_threads", [](PyRuntime& self) { return self.get().shares_threads(); })
      .def_static("available_isas", [] { return available_isas(); })
      .def_static("compiled_isas", &compiled_isas)
      .def_static("default_isa", [] { return select_kernels(detect_cpu(), "").isa; })
      .def(
          "forward",
          [](PyRuntime& self, const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
             const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts,
             const py::object& acted) {
            self.forward({experts, hidden_states, top_k_index, top_k_weights, out, threshold, neuron_counts, acted});
          },
          experts, hidden_states, top_k_index, top_k_weights, out, py::kw_only(), threshold, neuron_counts, acted)
      .def(
          "submit",
          [](PyRuntime& self, const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
             const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts,
             const py::object& acted) {
            return self.submit({experts, hidden_states, top_k_index, top_k_weights, out, threshold, neuron_counts, acted});
          },
          experts, hidden_states, top_k_index, top_k_weights, out, py::kw_only(), threshold, neuron_counts, acted)
      .def("wait", &PyRuntime::wait, "ticket"_a)
      .def(
          "linear", [](PyRuntime& self, const PackedLinear& packed, py::handle x, py::handle out) { linear(self.get(), packed, x, out); },
          "linear"_a, "x"_a, "out"_a)
      .def(
          "norm",
          [](PyRuntime& self, const PyNorm& spec, py::handle x, py::handle weight, py::handle out) {
            norm(self.get(), spec, x, weight, out);
          },
          "norm"_a, "x"_a, "weight"_a, "out"_a)
      .def(
          "route",
          [](PyRuntime& self, const PyRouter& router, py::handle x, py::handle weight, py::handle logits, py::handle weights,
             py::handle index) { route(self.get(), router, {x, weight, logits, weights, index}); },
          "router"_a, "x"_a, "weight"_a, "logits"_a, "weights"_a, "index"_a)
      .def(
          "attention",
          [](PyRuntime& self, const py::array& query, const py::array& key, const py::array& value, const py::array& out, float scale,
             const py::object& mask, bool causal, float softcap, const py::object& sinks, const py::object& key_tail) {
            attention(self.get(), {query, key, value, out, mask, sinks, key_tail, scale, softcap, causal});
          },
          py::arg("query").noconvert(), py::arg("key").noconvert(), py::arg("value").noconvert(), out, py::kw_only(), "scale"_a,
          "mask"_a = py::none(), "causal"_a = false, "softcap"_a = 0.0f, "sinks"_a = py::none(), "key_tail"_a = py::none())
      .def(
          "paged_attention",
          [](PyRuntime& self, const py::array& query, const py::array& key, const py::array& value, const py::array& out, py::handle pool,
             py::handle table, py::handle held, int page_tokens, std::int64_t key_start, std::int64_t value_start, float scale, int window,
             float softcap, const py::object& sinks, bool latent) {
            paged_attention(self.get(), {query, key, value, out, pool, table, held, sinks, page_tokens, key_start, value_start, window,
                                         latent, scale, softcap});
          },
          py::arg("query").noconvert(), py::arg("key").noconvert(), py::arg("value").noconvert(), out, "pool"_a, "table"_a, "held"_a,
          py::kw_only(), "page_tokens"_a, "key_start"_a, "value_start"_a, "scale"_a, "window"_a = 0, "softcap"_a = 0.0f,
          "sinks"_a = py::none(), "latent"_a = false)
      .def(
          "matmul", [](PyRuntime& self, const py::array& a, const py::array& b, const py::array& out) { matmul(self.get(), a, b, out); },
          py::arg("a").noconvert(), py::arg("b").noconvert(), out)
      .def(
          "recurrent",
          [](PyRuntime& self, const std::string& name, const py::sequence& operands, const std::vector<double>& numbers,
             const py::sequence& past) { recurrent(self.get(), name, operands, numbers, past); },
          "name"_a, "operands"_a, "numbers"_a, "past"_a = py::tuple())
      .def("host_function", [=](const py::object& self) {
        const auto make = [self](const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
                                 const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts) {
          return std::make_unique<PyHostCall>(
              self, ForwardCall{experts, hidden_states, top_k_index, top_k_weights, out, threshold, neuron_counts, py::none()});
        };
        return py::make_tuple(
            reinterpret_cast<std::uintptr_t>(&HostCall::run),
            py::cpp_function(make, experts, hidden_states, top_k_index, top_k_weights, out, py::kw_only(), threshold, neuron_counts));
      });
}

PYBIND11_MODULE(_kernel, module) {
  module.doc() = "Packed weights, their kernels for the CPU, and the planner of hybrid layers.";
  bind_specs(module);
  bind_weights(module);
  bind_ops(module);
  bind_runtime(module);
  bind_scheduler(module);
  bind_program(module, [](const py::object& runtime) -> Runtime& { return runtime.cast<PyRuntime&>().get(); });
  module.def("activations", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kActivations; ++i) names.emplace_back(name_of(static_cast<Activation>(i)));
    return names;
  });
  module.def("default_threads", &default_threads);
  module.def(
      "select_isa",
      [](const std::set<std::string>& features, const std::string& wanted) {
        const Kernels& kernels = select_kernels(cpu_with(features), wanted);
        return std::make_pair(kernels.isa, matrix_tokens(kernels));
      },
      "features"_a, "wanted"_a = "");
  module.def("cores_of_cpu_max", &cores_of_cpu_max, "text"_a);
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
}

}  // namespace
}  // namespace moegraft
