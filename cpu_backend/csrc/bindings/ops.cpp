// Linear layers, norms, routers and the rules of recurrent layers, which a decode step calls dozens of times, so that the checks must be
// fast.
#include <cmath>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/functions.h"
#include "core/names.h"
#include "recurrent/jobs.h"

namespace py = pybind11;

namespace moegraft {
namespace {

template <class Value, std::size_t N>
Value parse(const std::string& name, const char* what, const std::pair<const char*, Value> (&known)[N]) {
  std::string names;
  for (const auto& [text, value] : known) {
    if (name == text) return value;
    names += (names.empty() ? "" : ", ") + std::string(text);
  }
  raise_value_error("unknown " + std::string(what) + " '" + name + "'; expected one of " + names);
}

ActivationType parse_element_type(const std::string& name) {
  return parse<ActivationType>(
      name, "element type",
      {{"float32", ActivationType::kFloat32}, {"float16", ActivationType::kFloat16}, {"bfloat16", ActivationType::kBFloat16}});
}

Score parse_score(const std::string& name) {
  return parse<Score>(name, "score",
                      {{"softmax", Score::kSoftmax}, {"sigmoid", Score::kSigmoid}, {"chosen_softmax", Score::kChosenSoftmax}});
}

GroupScore parse_group_score(const std::string& name) {
  return parse<GroupScore>(name, "group_score", {{"largest", GroupScore::kLargest}, {"two_largest", GroupScore::kTwoLargest}});
}

std::vector<float> values_of(const py::object& object, const char* name, int experts) {
  if (object.is_none()) return {};
  const auto array = py::cast<py::array>(object);
  require_layout(array, name, 1);
  require_dtype(array, name, 'f', 4, "float32");
  if (array.shape(0) != experts) raise_shape_error(array, name, "(" + std::to_string(experts) + ",)");
  const auto* values = static_cast<const float*>(array.data());
  return {values, values + experts};
}

}  // namespace

PyNorm::PyNorm(const std::string& type_name, int cols_of_row, float epsilon, float weight_offset, bool rounds_first)
    : type(parse_element_type(type_name)), cols(cols_of_row), form{epsilon, weight_offset, rounds_first} {
  if (cols < 1) raise_value_error("NormSpec: cols is " + std::to_string(cols) + "; it must be at least 1");
  if (!(epsilon >= 0.0f) || !std::isfinite(epsilon)) raise_value_error("NormSpec: epsilon must be finite and at least 0");
}

void PyNorm::set_gate(const std::string& function, int group, bool first, bool wide) {
  if (group < 1 || group > kMostGroupCols || cols % group != 0 || (!first && group != cols))
    raise_value_error("NormSpec: groups of " + std::to_string(group) + " columns; a gated norm has equal groups of at most " +
                      std::to_string(kMostGroupCols) + ", and one alone where the gate is not first");
  gating = {{parse_activation(function)}, group, first, wide};
}

PyRouter::PyRouter(int hidden_size, int experts, int top_k, const RouterOptions& options)
    : hidden(hidden_size),
      type(parse_element_type(options.type)),
      logits_type(parse_element_type(options.logits_type)),
      weights_type(parse_element_type(options.weights_type)),
      rounds_logits(options.rounds_logits),
      choice_bias(values_of(options.choice_bias, "choice_bias", experts)),
      logit_bias(values_of(options.logit_bias, "logit_bias", experts)),
      selection{parse_score(options.score),
                experts,
                top_k,
                nullptr,
                options.groups,
                options.kept_groups,
                parse_group_score(options.group_score),
                options.normalise,
                options.scale} {
  if (hidden < 1 || experts < 1) raise_value_error("RouterSpec: hidden and experts must be at least 1");
  if (top_k < 1 || top_k > experts)
    raise_value_error("RouterSpec: top_k is " + std::to_string(top_k) + "; it must be from 1 to " + std::to_string(experts) +
                      ", the number of experts");
  if (options.groups < 1 || experts % options.groups != 0)
    raise_value_error("RouterSpec: " + std::to_string(experts) + " experts cannot be divided into " + std::to_string(options.groups) +
                      " equal groups");
  if (options.kept_groups < 1 || options.kept_groups > options.groups)
    raise_value_error("RouterSpec: kept_groups must be from 1 to groups");
  if (top_k > experts / options.groups * options.kept_groups)
    raise_value_error("RouterSpec: the kept groups have fewer than top_k experts");
  if (!choice_bias.empty()) selection.bias = choice_bias.data();
}

void linear(Runtime& runtime, const PackedLinear& linear, py::handle x, py::handle out) {
  const TensorView input(x, "x"), output(out, "out");
  const ActivationType type = input.float_type();
  const std::int64_t tokens = input.rows(linear.cols());
  output.require_float(type);
  output.require_rows_of(input, linear.rows());
  output.require_writable();
  const LinearArgs args = {&linear, input.data(), output.data(), type, tokens};
  py::gil_scoped_release release;
  runtime.linear(args);
}

void linear_gradient(Runtime& runtime, const PackedLinear& linear, py::handle gradient, py::handle out) {
  const TensorView given(gradient, "gradient"), output(out, "out");
  const ActivationType type = given.float_type();
  const std::int64_t tokens = given.rows(linear.rows());
  output.require_float(type);
  output.require_rows_of(given, linear.cols());
  output.require_writable();
  const LinearArgs args = {&linear, given.data(), output.data(), type, tokens};
  py::gil_scoped_release release;
  runtime.linear_gradient(args);
}

AdapterTerms AdapterCall::checked(const ExpertsShape& shape, std::int64_t tokens, std::int64_t top_k) const {
  const auto values = [&](py::handle given, const char* name, std::int64_t rows, bool written) -> float* {
    if (given.is_none()) return nullptr;
    const TensorView view(given, name);
    view.require_float(ActivationType::kFloat32);
    view.require_shape({tokens, top_k, rows});
    if (written) view.require_writable();
    return reinterpret_cast<float*>(view.data());
  };
  const std::int64_t gate_up_rows = shape.intermediate * (shape.gated ? 2 : 1);
  return {values(gate_up, "gate_up", gate_up_rows, false), values(activation_gradients, "activation_gradients", shape.intermediate, false),
          values(activations, "activations", shape.intermediate, true), values(gate_up_gradients, "gate_up_gradients", gate_up_rows, true)};
}

void experts_gradient(Runtime& runtime, const PackedExperts& experts, const ExpertsGradientCall& call, const AdapterCall& adapters) {
  if (experts.kind() == LayoutKind::kSparse)
    raise_value_error("experts_gradient: expected experts in the dense layout, found the sparse one");
  const TensorView x(call.hidden_states, "hidden_states"), index(call.top_k_index, "top_k_index"),
      weights(call.top_k_weights, "top_k_weights");
  const TensorView gradient(call.gradient, "gradient"), hidden_gradient(call.hidden_gradient, "hidden_gradient");
  const TensorView weight_gradients(call.weight_gradients, "weight_gradients");
  const ActivationType type = x.float_type();
  const std::int64_t hidden = experts.shape().hidden, tokens = x.rows(hidden);
  index.require_int64();
  const std::int64_t top_k = index.dims() == 2 ? index.shape(1) : 0;
  index.require_shape({tokens, top_k});
  for (const TensorView* each : {&weights, &weight_gradients}) {
    each->require_float(ActivationType::kFloat32);
    each->require_shape({tokens, top_k});
  }
  for (const TensorView* each : {&x, &gradient, &hidden_gradient}) {
    each->require_float(type);
    each->require_shape({tokens, hidden});
  }
  hidden_gradient.require_writable();
  weight_gradients.require_writable();
  const ExpertsGradientArgs args = {&experts,
                                    x.data(),
                                    reinterpret_cast<const std::int64_t*>(index.data()),
                                    reinterpret_cast<const float*>(weights.data()),
                                    gradient.data(),
                                    hidden_gradient.data(),
                                    reinterpret_cast<float*>(weight_gradients.data()),
                                    type,
                                    tokens,
                                    static_cast<int>(top_k),
                                    adapters.checked(experts.shape(), tokens, top_k)};
  py::gil_scoped_release release;
  runtime.experts_gradient(args);
}

void norm(Runtime& runtime, const PyNorm& norm, py::handle x, py::handle weight_or_none, py::handle out, py::handle gate_or_none) {
  const TensorView input(x, "x"), output(out, "out");
  input.require_float(norm.type);
  const std::int64_t rows = input.rows(norm.cols);
  output.require_float(norm.type);
  output.require_rows_of(input, norm.cols);
  output.require_writable();
  const std::byte* weight = nullptr;
  if (!weight_or_none.is_none()) {
    const TensorView view(weight_or_none, "weight");
    view.require_float(norm.type);
    view.require_shape({norm.cols});
    weight = view.data();
  }
  const std::byte* gate = nullptr;
  if (gate_or_none.is_none() != (norm.gating.group == 0) || (!gate_or_none.is_none() && weight == nullptr))
    raise_value_error("norm: a gate and a weight are given if, and only if, the norm has a gate");
  if (!gate_or_none.is_none()) {
    const TensorView view(gate_or_none, "gate");
    view.require_float(norm.type);
    view.require_rows_of(input, norm.cols);
    gate = view.data();
  }
  const NormArgs args = {input.data(), weight, output.data(), norm.type, rows, norm.cols, norm.form, gate, norm.gating};
  py::gil_scoped_release release;
  runtime.norm(args);
}

void route(Runtime& runtime, const PyRouter& router, const RouterCall& call) {
  const TensorView x(call.x, "x"), weight(call.weight, "weight"), logits(call.logits, "logits");
  const TensorView weights(call.weights, "weights"), index(call.index, "index");
  const int experts = router.selection.experts, top_k = router.selection.top_k;
  x.require_float(router.type);
  const std::int64_t tokens = x.rows(router.hidden);
  weight.require_float(router.type);
  weight.require_shape({experts, router.hidden});
  logits.require_float(router.logits_type);
  logits.require_shape({tokens, experts});
  weights.require_float(router.weights_type);
  weights.require_shape({tokens, top_k});
  index.require_int64();
  index.require_shape({tokens, top_k});
  for (const TensorView* result : {&logits, &weights, &index}) result->require_writable();
  const RouterArgs args = {x.data(),
                           weight.data(),
                           router.logit_bias.empty() ? nullptr : router.logit_bias.data(),
                           router.type,
                           tokens,
                           router.hidden,
                           router.rounds_logits,
                           router.selection,
                           logits.data(),
                           router.logits_type,
                           weights.data(),
                           router.weights_type,
                           reinterpret_cast<std::int64_t*>(index.data())};
  py::gil_scoped_release release;
  runtime.route(args);
}

void recurrent(Runtime& runtime, const std::string& name, const py::sequence& operands, const std::vector<double>& numbers,
               const py::sequence& past) {
  RecurrentJob job(runtime.kernels(), name, numbers, runtime.threads());
  const auto view_of = [&](const py::handle object, bool written) {
    StridedView view;
    if (object.is_none()) return view;
    const TensorView tensor(object, name.c_str(), true);
    if (tensor.dims() > static_cast<int>(view.sizes.size())) raise_value_error(name + ": an operand has too many dimensions");
    if (written) tensor.require_writable();
    view.data = tensor.data();
    view.type = tensor.float_type();
    view.dims = tensor.dims();
    for (int dim = 0; dim < view.dims; ++dim) {
      view.sizes[static_cast<std::size_t>(dim)] = tensor.shape(dim);
      view.strides[static_cast<std::size_t>(dim)] = tensor.stride(dim);
    }
    return view;
  };
  std::vector<StridedView> views, past_views;
  for (const py::handle object : operands) views.push_back(view_of(object, views.size() < RecurrentJob::kWritten));
  for (const py::handle object : past) past_views.push_back(view_of(object, true));
  job.set(views, std::move(past_views));
  py::gil_scoped_release release;
  runtime.run(job, [&] { job.prepare(); });
}

void bind_ops(py::module_& module) {
  Binder(py::class_<PyNorm>(module, "NormSpec"))
      .constructor("element_type, cols, epsilon, weight_offset=0.0, rounds_first=False, *, gate='', group=0, gate_first=False, wide=False",
                   [](const std::string& type, int cols, float epsilon, float weight_offset, bool rounds_first, const std::string& gate,
                      int group, bool gate_first, bool wide) {
                     auto norm = std::make_unique<PyNorm>(type, cols, epsilon, weight_offset, rounds_first);
                     if (!gate.empty()) norm->set_gate(gate, group, gate_first, wide);
                     return norm;
                   });
  Binder(py::class_<PyRouter>(module, "RouterSpec"))
      .constructor(
          "hidden, experts, top_k, *, element_type, logits_type, weights_type, rounds_logits=False, score='softmax', "
          "normalise=False, scale=1.0, groups=1, kept_groups=1, group_score='two_largest', choice_bias=None, logit_bias=None",
          [](int hidden, int experts, int top_k, std::string type, std::string logits_type, std::string weights_type, bool rounds_logits,
             std::string score, bool normalise, float scale, int groups, int kept_groups, std::string group_score,
             const py::object& choice_bias, const py::object& logit_bias) {
            return std::make_unique<PyRouter>(
                hidden, experts, top_k,
                RouterOptions{std::move(type), std::move(logits_type), std::move(weights_type), rounds_logits, std::move(score), normalise,
                              scale, groups, kept_groups, std::move(group_score), choice_bias, logit_bias});
          });
}

}  // namespace moegraft
