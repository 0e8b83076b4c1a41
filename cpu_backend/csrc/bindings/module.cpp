#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/functions.h"
#include "core/crc32.h"
#include "core/machine.h"
#include "core/runtime.h"
#include "simd/isa.h"

namespace py = pybind11;

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
  PyRuntime(int threads, const std::optional<std::string>& isa, bool share_threads, std::optional<int> matrix_tokens, int node_groups)
      : runtime_(std::make_unique<Runtime>(threads, isa.value_or(""), share_threads, matrix_tokens, node_groups)) {}
  ~PyRuntime() {
    py::gil_scoped_release release;  // joining threads must not stop Python
    runtime_.reset();
  }

  Runtime& get() { return *runtime_; }

  void forward(const ForwardCall& call, const AdapterCall* adapters = nullptr) {
    ForwardArgs args = call.checked();
    if (adapters != nullptr) {
      if (args.experts->kind() == LayoutKind::kSparse)
        raise_value_error("adapted_forward: expected experts in the dense layout, found the sparse one");
      args.terms = adapters->checked(args.experts->shape(), args.tokens, args.top_k);
    }
    py::gil_scoped_release release;
    runtime_->forward(args);
  }

  std::uint64_t submit(const ForwardCall& call) {
    const std::uint64_t ticket = runtime_->submit(call.checked());
    owners_[py::int_(ticket)] = call.owners();
    return ticket;
  }

  double wait(std::uint64_t ticket) {
    const py::object kept = owners_.attr("pop")(ticket, py::none());
    py::gil_scoped_release release;
    return runtime_->wait(ticket);
  }

 private:
  py::dict owners_;  // of submitted work by ticket, until it was waited for
  std::unique_ptr<Runtime> runtime_;
};

struct PyHostCall {
  PyHostCall(const py::object& py_runtime, const ForwardCall& arguments)
      : call(runtime_of(py_runtime), arguments.checked()), owners(arguments.owners()), runtime(py_runtime) {}
  HostCall call;
  py::tuple owners;
  py::object runtime;
};

// The least tokens of the matrix kernels by weight type, for bfloat16 activations.
py::dict matrix_tokens(const Kernels& kernels) {
  py::dict found;
  for (int i = 0; i < kWeightTypes; ++i) {
    const auto type = static_cast<WeightType>(i);
    const Format format = format_of(type, ActivationType::kBFloat16);
    if (kernels.matrix.serves(format, kNeverMatrix - 1))
      found[py::str(name_of(type))] = kernels.matrix.least_tokens[static_cast<int>(format)];
  }
  return found;
}

CpuFeatures cpu_with(const py::object& features) {
  CpuFeatures cpu;
  struct Field {
    const char* name;
    bool* value;
  };
  const Field fields[] = {{"avx2", &cpu.avx2}, {"avx512", &cpu.avx512},   {"vnni", &cpu.vnni},
                          {"bf16", &cpu.bf16}, {"amx", &cpu.amx},         {"tile_permission", &cpu.tile_permission},
                          {"neon", &cpu.neon}, {"dotprod", &cpu.dotprod}, {"i8mm", &cpu.i8mm}};
  for (const py::handle feature : features) {
    const auto name = feature.cast<std::string>();
    bool known = false;
    for (const Field& field : fields)
      if (name == field.name) *field.value = known = true;
    if (!known) raise_value_error("unknown CPU feature '" + name + "'");
  }
  return cpu;
}

constexpr const char* kForward =
    "experts, hidden_states, top_k_index, top_k_weights, out, *, threshold=0.0, neuron_counts=None, acted=None";

void bind_runtime(py::module_& module) {
  Binder(py::class_<PyHostCall>(module, "HostCall"))
      .property("address", [](PyHostCall& self) { return reinterpret_cast<std::uintptr_t>(&self.call); })
      .def("check", "", [](PyHostCall& self) { self.call.check(); });
  Binder(py::class_<PyRuntime>(module, "Runtime"))
      .constructor("threads=0, isa=None, share_threads=True, matrix_tokens=None, node_groups=0",
                   [](int threads, const std::optional<std::string>& isa, bool share_threads, std::optional<int> matrix_tokens,
                      int node_groups) { return std::make_unique<PyRuntime>(threads, isa, share_threads, matrix_tokens, node_groups); })
      .property("threads", [](PyRuntime& self) { return self.get().threads(); })
      .property("memory_nodes", [](PyRuntime& self) { return self.get().nodes().count(); })
      .property("isa", [](PyRuntime& self) { return self.get().kernels().isa; })
      .property("matrix_tokens", [](PyRuntime& self) { return matrix_tokens(self.get().kernels()); })
      .property("shares_threads", [](PyRuntime& self) { return self.get().shares_threads(); })
      .def("divide", "weights",
           [](PyRuntime& self, py::handle weights) {
             if (py::isinstance<PyExperts>(weights)) weights.cast<PyExperts&>().experts->divide(self.get().nodes());
             else if (py::isinstance<PackedLinear>(weights)) weights.cast<PackedLinear&>().divide(self.get().nodes());
             else throw py::type_error("divide: expected PackedExperts or a PackedLinear");
           })
      .def_static("available_isas", "", [] { return available_isas(); })
      .def_static("compiled_isas", "", [] { return compiled_isas(); })
      .def_static("default_isa", "", [] { return select_kernels(detect_cpu(), "").isa; })
      .def("forward", kForward,
           [](PyRuntime& self, const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
              const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts,
              const py::object& acted) {
             self.forward({experts, hidden_states, top_k_index, top_k_weights, out, threshold, neuron_counts, acted});
           })
      .def("adapted_forward", "experts, hidden_states, top_k_index, top_k_weights, out, *, gate_up=None, activations=None",
           [](PyRuntime& self, const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
              const py::array& top_k_weights, const py::array& out, const py::object& gate_up, const py::object& activations) {
             const AdapterCall adapters = {gate_up, py::none(), activations, py::none()};
             self.forward({experts, hidden_states, top_k_index, top_k_weights, out, 0.0f, py::none(), py::none()}, &adapters);
           })
      .def("submit", kForward,
           [](PyRuntime& self, const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
              const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts,
              const py::object& acted) {
             return self.submit({experts, hidden_states, top_k_index, top_k_weights, out, threshold, neuron_counts, acted});
           })
      .def("wait", "ticket", &PyRuntime::wait)
      .def("linear", "linear, x, out",
           [](PyRuntime& self, const PackedLinear& packed, py::handle x, py::handle out) { linear(self.get(), packed, x, out); })
      .def("linear_gradient", "linear, gradient, out",
           [](PyRuntime& self, const PackedLinear& packed, py::handle gradient, py::handle out) {
             linear_gradient(self.get(), packed, gradient, out);
           })
      .def("experts_gradient",
           "experts, hidden_states, top_k_index, top_k_weights, gradient, hidden_gradient, weight_gradients, *, gate_up=None, "
           "activation_gradients=None, activations=None, gate_up_gradients=None",
           [](PyRuntime& self, const PyExperts& packed, py::handle hidden_states, py::handle top_k_index, py::handle top_k_weights,
              py::handle gradient, py::handle hidden_gradient, py::handle weight_gradients, py::handle gate_up,
              py::handle activation_gradients, py::handle activations, py::handle gate_up_gradients) {
             experts_gradient(self.get(), *packed.experts,
                              {hidden_states, top_k_index, top_k_weights, gradient, hidden_gradient, weight_gradients},
                              {gate_up, activation_gradients, activations, gate_up_gradients});
           })
      .def("norm", "norm, x, weight, out, gate=None",
           [](PyRuntime& self, const PyNorm& spec, py::handle x, py::handle weight, py::handle out, py::handle gate) {
             norm(self.get(), spec, x, weight, out, gate);
           })
      .def("route", "router, x, weight, logits, weights, index",
           [](PyRuntime& self, const PyRouter& router, py::handle x, py::handle weight, py::handle logits, py::handle weights,
              py::handle index) { route(self.get(), router, {x, weight, logits, weights, index}); })
      .def("attention", "query, key, value, out, *, scale, mask=None, causal=False, softcap=0.0, sinks=None, key_tail=None",
           [](PyRuntime& self, const py::array& query, const py::array& key, const py::array& value, const py::array& out, float scale,
              const py::object& mask, bool causal, float softcap, const py::object& sinks, const py::object& key_tail) {
             attention(self.get(), {query, key, value, out, mask, sinks, key_tail, scale, softcap, causal});
           })
      .def("paged_attention",
           "query, key, value, out, pool, table, held, *, page_tokens, key_start, value_start, scale, window=0, softcap=0.0, sinks=None, "
           "latent=False",
           [](PyRuntime& self, const py::array& query, const py::array& key, const py::array& value, const py::array& out, py::handle pool,
              py::handle table, py::handle held, int page_tokens, std::int64_t key_start, std::int64_t value_start, float scale, int window,
              float softcap, const py::object& sinks, bool latent) {
             paged_attention(self.get(), {query, key, value, out, pool, table, held, sinks, page_tokens, key_start, value_start, window,
                                          latent, scale, softcap});
           })
      .def("matmul", "a, b, out",
           [](PyRuntime& self, const py::array& a, const py::array& b, const py::array& out) { matmul(self.get(), a, b, out); })
      .def("recurrent", "name, operands, numbers, past=()",
           [](PyRuntime& self, const std::string& name, const py::sequence& operands, const std::vector<double>& numbers,
              const py::sequence& past) { recurrent(self.get(), name, operands, numbers, past); })
      .def("_host_call", "experts, hidden_states, top_k_index, top_k_weights, out, *, threshold=0.0, neuron_counts=None",
           [](const py::object& self, const py::object& experts, const py::array& hidden_states, const py::array& top_k_index,
              const py::array& top_k_weights, const py::array& out, float threshold, const py::object& neuron_counts) {
             return std::make_unique<PyHostCall>(
                 self, ForwardCall{experts, hidden_states, top_k_index, top_k_weights, out, threshold, neuron_counts, py::none()});
           })
      .def("_keep_awake", "",
           [](PyRuntime& self) {
             py::gil_scoped_release release;  // waking threads takes system calls
             self.get().keep_awake();
           })
      .def("_let_sleep", "", [](PyRuntime& self) { self.get().let_sleep(); })
      .def("host_function", "", [](const py::object& self) {
        return py::make_tuple(reinterpret_cast<std::uintptr_t>(&HostCall::run), self.attr("_host_call"));
      });
}

PYBIND11_MODULE(_kernel, module) {
  module.doc() = "Packed weights, their kernels for the CPU, and the planner of hybrid layers.";
  // Programs end an OSError in one sentence.
  py::register_exception<ReadError>(module, "ReadError", py::make_tuple(py::handle(PyExc_RuntimeError), py::handle(PyExc_OSError)));
  bind_specs(module);
  bind_weights(module);
  bind_ops(module);
  bind_runtime(module);
  bind_scheduler(module);
  bind_program(module);
  Binder(module)
      .def("activations", "",
           [] {
             std::vector<std::string> names;
             for (int i = 0; i < kActivations; ++i) names.emplace_back(name_of(static_cast<Activation>(i)));
             return names;
           })
      .def("default_threads", "", [] { return default_threads(); })
      .def("crc32", "data",
           [](const py::array& data) {
             require_layout(data, "data", 1);
             require_dtype(data, "data", 'u', 1, "uint8");
             const auto* const bytes = static_cast<const std::byte*>(data.data());
             const auto count = static_cast<std::size_t>(data.nbytes());
             py::gil_scoped_release release;
             return crc32(bytes, count);
           })
      .def("select_isa", "features, wanted=''",
           [](const py::object& features, const std::string& wanted) {
             const Kernels& kernels = select_kernels(cpu_with(features), wanted);
             return py::make_tuple(kernels.isa, matrix_tokens(kernels));
           })
      .def("cores_of_cpu_max", "text", [](const std::string& text) { return cores_of_cpu_max(text); });
  module.attr("LAYOUT_VERSION") = kLayoutVersion;
}

}  // namespace

Runtime& runtime_of(const py::object& py_runtime) { return py_runtime.cast<PyRuntime&>().get(); }

}  // namespace moegraft
