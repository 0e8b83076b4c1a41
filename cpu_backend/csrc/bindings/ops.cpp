// Linear layers, norms, routers and the rules of recurrent layers, which a decode step calls dozens of times, so that the checks must be
// fast.
#include <cmath>
#include <utility>

#include "bindings/bindings.h"
#include "recurrent/recurrent.h"

namespace py = pybind11;
using namespace py::literals;

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

// Reads keyword arguments by name and reports unknown ones.
class Keywords {
 public:
  explicit Keywords(const py::kwargs& given) : left_(given) {}
  template <class T>
  T take(const char* name) {
    if (!left_.contains(name)) throw py::type_error("RouterSpec: missing keyword argument '" + std::string(name) + "'");
    return left_.attr("pop")(name).template cast<T>();
  }
  template <class T>
  T take(const char* name, T fallback) {
    return left_.contains(name) ? take<T>(name) : fallback;
  }
  void require_empty() const {
    if (!left_.empty()) throw py::type_error("RouterSpec: unknown keyword argument '" + left_.begin()->first.cast<std::string>() + "'");
  }

 private:
  py::dict left_;
};

RouterOptions router_options(const py::kwargs& given) {
  Keywords keywords(given);
  RouterOptions options;
  options.type = keywords.take<std::string>("element_type");
  options.logits_type = keywords.take<std::string>("logits_type");
  options.weights_type = keywords.take<std::string>("weights_type");
  options.rounds_logits = keywords.take("rounds_logits", false);
  options.score = keywords.take<std::string>("score", "softmax");
  options.normalise = keywords.take("normalise", false);
  options.scale = keywords.take("scale", 1.0f);
  options.groups = keywords.take("groups", 1);
  options.kept_groups = keywords.take("kept_groups", 1);
  options.group_score = keywords.take<std::string>("group_score", "two_largest");
  options.choice_bias = keywords.take<py::object>("choice_bias", py::none());
  options.logit_bias = keywords.take<py::object>("logit_bias", py::none());
  keywords.require_empty();
  return options;
}

}  // namespace

PyNorm::PyNorm(const std::string& type_name, int cols_of_row, float epsilon, float weight_offset, bool rounds_first)
    : type(parse_element_type(type_name)), cols(cols_of_row), form{epsilon, weight_offset, rounds_first} {
  if (cols < 1) raise_value_error("NormSpec: cols is " + std::to_string(cols) + "; it must be at least 1");
  if (!(epsilon >= 0.0f) || !std::isfinite(epsilon)) raise_value_error("NormSpec: epsilon must be finite and at least 0");
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

void norm(Runtime& runtime, const PyNorm& norm, py::handle x, py::handle weight_or_none, py::handle out) {
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
  const NormArgs args = {input.data(), weight, output.data(), norm.type, rows, norm.cols, norm.form};
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

void recurrent(Runtime& runtime, const std::string& name, const py::sequence& operands, const std::vector<double>& numbers) {
  RecurrentJob job(runtime.kernels(), name, numbers, runtime.threads());
  std::vector<StridedView> views;
  for (const py::handle object : operands) {
    views.emplace_back();
    if (object.is_none()) continue;
    const TensorView tensor(object, name.c_str(), true);
    StridedView& view = views.back();
    if (tensor.dims() > static_cast<int>(view.sizes.size())) raise_value_error(name + ": an operand has too many dimensions");
    if (views.size() <= RecurrentJob::kWritten) tensor.require_writable();
    view.data = tensor.data();
    view.type = tensor.float_type();
    view.dims = tensor.dims();
    for (int dim = 0; dim < view.dims; ++dim) {
      view.sizes[static_cast<std::size_t>(dim)] = tensor.shape(dim);
      view.strides[static_cast<std::size_t>(dim)] = tensor.stride(dim);
    }
  }
  job.set(views);
  py::gil_scoped_release release;
  runtime.run(job, [&] { job.prepare(); });
}

void bind_ops(py::module_& module) {
  py::class_<PyNorm>(module, "NormSpec")
      .def(py::init<const std::string&, int, float, float, bool>(), "element_type"_a, "cols"_a, "epsilon"_a, "weight_offset"_a = 0.0f,
           "rounds_first"_a = false);
  py::class_<PyRouter>(module, "RouterSpec")
      .def(py::init([](int hidden, int experts, int top_k, const py::kwargs& keywords) {
             return std::make_unique<PyRouter>(hidden, experts, top_k, router_options(keywords));
           }),
           "hidden"_a, "experts"_a, "top_k"_a);
}

}  // namespace moegraft
