// Programs: what operators/step_program builds. A program keeps alive what its operations use; bound buffers are the caller's.
#include "program/program.h"
#include "bindings/bindings.h"
#include "bindings/functions.h"

namespace py = pybind11;

namespace moegraft {
namespace {

Linear parse_linear(const py::handle& numbers) {
  const auto tuple = py::cast<py::tuple>(numbers);
  return {tuple[0].cast<std::int64_t>(), tuple[1].cast<std::int64_t>(), tuple[2].cast<std::int64_t>()};
}

// (buffer, type, offset, sizes, strides), each number as (base, slope, capacity); or (base, slope) of a number.
Operand parse_operand(const py::handle& object) {
  const auto tuple = py::cast<py::tuple>(object);
  Operand operand;
  if (tuple.size() == 2) {
    operand.number = tuple[0].cast<double>();
    operand.number_slope = tuple[1].cast<double>();
    return operand;
  }
  if (tuple.size() != 5) raise_value_error("an operand is (buffer, type, offset, sizes, strides) or (number, slope)");
  operand.buffer = tuple[0].cast<int>();
  if (operand.buffer < 0) raise_value_error("an operand's buffer is negative");
  operand.type = parse_element(tuple[1].cast<std::string>());
  operand.offset = parse_linear(tuple[2]);
  const auto sizes = py::cast<py::tuple>(tuple[3]), strides = py::cast<py::tuple>(tuple[4]);
  if (sizes.size() != strides.size() || sizes.size() > kMaxDims) raise_value_error("an operand has too many dimensions");
  operand.dims = static_cast<int>(sizes.size());
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    operand.sizes[dim] = parse_linear(sizes[dim]);
    operand.strides[dim] = parse_linear(strides[dim]);
  }
  return operand;
}

std::vector<Operand> parse_operands(const py::sequence& objects) {
  std::vector<Operand> operands;
  for (const py::handle object : objects) operands.push_back(parse_operand(object));
  return operands;
}

class PyProgram {
 public:
  explicit PyProgram(const py::object& runtime, Runtime& native) : runtime_(runtime), program_(native) {}

  void add_small(const std::string& name, const py::sequence& operands, std::vector<double> numbers) {
    program_.add(make_small_operation(name, parse_operands(operands), std::move(numbers)));
  }
  void add_norm(const PyNorm& norm, const py::sequence& operands) {
    program_.add(make_norm(parse_operands(operands), norm.form, norm.gating));
  }
  void add_linears(const py::sequence& linears, const py::sequence& operands) {
    std::vector<const PackedLinear*> found;
    for (const py::handle linear : linears) found.push_back(&linear.cast<const PackedLinear&>());
    program_.add(make_linears(program_.machine(), std::move(found), parse_operands(operands)));
    owners_.append(linears);
  }
  void add_experts(const py::object& experts, const py::sequence& operands, float threshold, const py::object& neuron_counts) {
    program_.add(make_experts(program_.machine(), *experts.cast<const PyExperts&>().experts, {threshold, count_values(neuron_counts)},
                              parse_operands(operands)));
    owners_.append(py::make_tuple(experts, neuron_counts));
  }
  void add_router(const py::object& router, const py::sequence& operands) {
    const auto& spec = router.cast<const PyRouter&>();
    RouterArgs form{};
    form.logit_bias = spec.logit_bias.empty() ? nullptr : spec.logit_bias.data();
    form.type = spec.type;
    form.hidden = spec.hidden;
    form.rounds_logits = spec.rounds_logits;
    form.selection = spec.selection;
    form.logits_type = spec.logits_type;
    form.weights_type = spec.weights_type;
    program_.add(make_router(program_.machine(), form, parse_operands(operands)));
    owners_.append(router);
  }
  void add_attention(const py::sequence& operands, float scale, float softcap, bool causal, bool mask, bool sinks, bool key_tail) {
    program_.add(make_attention(program_.machine(), {scale, softcap, causal}, {mask, sinks, key_tail}, parse_operands(operands)));
  }
  void add_paged_attention(const py::sequence& operands, float scale, float softcap, int page_tokens, int window, bool latent, bool sinks,
                           std::int64_t key_start, std::int64_t value_start) {
    program_.add(make_paged_attention(program_.machine(), {scale, softcap, page_tokens, window, latent, sinks, {key_start, value_start}},
                                      parse_operands(operands)));
  }
  void add_matmul(const py::sequence& operands) { program_.add(make_matmul(program_.machine(), parse_operands(operands))); }
  void add_recurrent(const std::string& name, const py::sequence& operands, const std::vector<double>& numbers) {
    program_.add(make_recurrent(program_.machine(), name, numbers, parse_operands(operands)));
  }
  int end_stage() { return program_.end_stage(); }

  void bind(int buffer, py::handle bytes, std::int64_t origin) {
    const TensorView view(bytes, "bytes");
    std::byte* data = view.data();
    program_.bind(buffer, data + origin, -origin, view.shape(0) - origin);
  }
  void check(std::int64_t first, std::int64_t last, std::int64_t room) { program_.check(first, last, room); }
  void run(std::int64_t position, int first, int end) {
    py::gil_scoped_release release;
    program_.run(position, first, end);
  }
  void set_loop(const py::sequence& operands, const py::object& hidden) {
    std::vector<Operand> found = parse_operands(operands);
    if (!hidden.is_none()) found.insert(found.begin(), parse_operand(hidden));
    program_.set_loop(std::move(found), !hidden.is_none());
  }
  void follow(std::int64_t position, const std::vector<std::int64_t>& tokens, py::array_t<float, py::array::c_style> logits) {
    if (program_.loop_tokens() == 0) raise_value_error("the program has no loop");
    if (static_cast<std::int64_t>(tokens.size()) != program_.loop_tokens()) raise_value_error("tokens are as many as the loop feeds");
    if (logits.ndim() != 2 || logits.shape(1) != program_.loop_vocabulary() || logits.size() != program_.loop_logits())
      raise_value_error("logits are (R, V) float32");
    float* const out = logits.mutable_data();
    py::gil_scoped_release release;
    program_.follow(position, tokens.data(), out);
  }
  std::vector<std::int64_t> greedy(std::int64_t position, std::int64_t token, std::int64_t count, std::vector<std::int64_t> ends,
                                   std::int64_t longest_ns, const py::object& hidden) {
    std::byte* states = nullptr;
    if (!hidden.is_none()) {
      const TensorView view(hidden, "hidden");
      if (program_.loop_hidden_bytes() == 0) raise_value_error("the loop has no hidden states");
      view.require_writable();
      if (view.dims() != 1 || view.shape(0) < count * program_.loop_hidden_bytes())
        raise_value_error("hidden has bytes for the states of each step");
      states = view.data();
    }
    py::gil_scoped_release release;
    return program_.greedy(position, token, {count, std::move(ends), longest_ns, states});
  }
  std::vector<std::int64_t> step_ns() const { return program_.step_ns(); }
  std::int64_t fed() const { return program_.fed(); }
  py::list spans() const {
    py::list found;
    for (const Program::Span& span : program_.spans()) found.append(py::make_tuple(span.began, span.ended));
    return found;
  }
  std::int64_t kernel_ns() const { return program_.kernel_ns(); }

 private:
  py::object runtime_;
  py::list owners_;
  Program program_;
};

}  // namespace

void bind_program(py::module_& module) {
  Binder(py::class_<Pace>(module, "Pace"))
      .constructor("workers", [](int workers) { return std::make_unique<Pace>(workers); })
      .property("alone", &Pace::alone)
      .def("took", "ns", &Pace::took);
  Binder(py::class_<PyProgram>(module, "Program"))
      .constructor("runtime", [](const py::object& runtime) { return std::make_unique<PyProgram>(runtime, runtime_of(runtime)); })
      .def("add_small", "name, operands, numbers=()", &PyProgram::add_small)
      .def("add_norm", "norm, operands", &PyProgram::add_norm)
      .def("add_linears", "linears, operands", &PyProgram::add_linears)
      .def("add_experts", "experts, operands, threshold=0.0, neuron_counts=None", &PyProgram::add_experts)
      .def("add_router", "router, operands", &PyProgram::add_router)
      .def("add_attention", "operands, scale, softcap, causal, mask, sinks, key_tail=False", &PyProgram::add_attention)
      .def("add_paged_attention", "operands, scale, softcap, page_tokens, window, latent, sinks, key_start, value_start",
           &PyProgram::add_paged_attention)
      .def("add_matmul", "operands", &PyProgram::add_matmul)
      .def("add_recurrent", "name, operands, numbers", &PyProgram::add_recurrent)
      .def("end_stage", "", &PyProgram::end_stage)
      .def("bind", "buffer, bytes, origin=0", &PyProgram::bind)
      .def("check", "first, last, room", &PyProgram::check)
      .def("run", "position, first, end", &PyProgram::run)
      .def("set_loop", "operands, hidden=None", &PyProgram::set_loop)
      .def("follow", "position, tokens, logits", &PyProgram::follow)
      .def("greedy", "position, token, count, ends, longest_ns, hidden=None", &PyProgram::greedy)
      .property("step_ns", &PyProgram::step_ns)
      .property("fed", &PyProgram::fed)
      .def("spans", "", &PyProgram::spans)
      .property("kernel_ns", &PyProgram::kernel_ns);
}

}  // namespace moegraft
