// What small operators know of a norm or a router, checked once; their calls then take addresses of tensors, because looking at arrays
// takes longer than the work.
#include "bindings/bindings.h"

#include <cmath>
#include <string>

namespace py = pybind11;
using namespace py::literals;

namespace moegraft {
namespace {

ActivationType parse_element_type(const std::string& name) {
  if (name == "float32") return ActivationType::kFloat32;
  if (name == "float16") return ActivationType::kFloat16;
  if (name == "bfloat16") return ActivationType::kBFloat16;
  throw py::value_error("'" + name + "' is no element type; they are float32, float16 and bfloat16");
}

Score parse_score(const std::string& name) {
  if (name == "softmax") return Score::kSoftmax;
  if (name == "sigmoid") return Score::kSigmoid;
  if (name == "chosen_softmax") return Score::kChosenSoftmax;
  throw py::value_error("'" + name + "' is no score; they are softmax, sigmoid and chosen_softmax");
}

GroupScore parse_group_score(const std::string& name) {
  if (name == "largest") return GroupScore::kLargest;
  if (name == "two_largest") return GroupScore::kTwoLargest;
  throw py::value_error("'" + name + "' is no score of groups; they are largest and two_largest");
}

std::vector<float> values_of(const py::object& object, const char* name, int experts) {
  if (object.is_none()) return {};
  const auto array = py::cast<py::array>(object);
  require_layout(array, name, 1);
  require_dtype(array, name, 'f', 4, "float32");
  if (array.shape(0) != experts)
    refuse(std::string(name) + " has shape " + shape_text(array) + " where (" + std::to_string(experts) + ",) is expected");
  const auto* values = static_cast<const float*>(array.data());
  return {values, values + experts};
}

}  // namespace

PyNorm::PyNorm(const std::string& type_name, int cols_of_row, float epsilon, float weight_offset, bool rounds_first)
    : type(parse_element_type(type_name)), cols(cols_of_row), form{epsilon, weight_offset, rounds_first} {
  if (cols < 1) refuse("a norm of " + std::to_string(cols) + " columns");
  if (!(epsilon >= 0.0f) || !std::isfinite(epsilon)) refuse("epsilon must be a number of at least 0");
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
  if (hidden < 1 || experts < 1) refuse("a router needs columns and experts");
  if (top_k < 1 || top_k > experts) refuse("top_k is " + std::to_string(top_k) + " of " + std::to_string(experts) + " experts");
  if (options.groups < 1 || experts % options.groups != 0)
    refuse(std::to_string(experts) + " experts in " + std::to_string(options.groups) + " groups");
  if (options.kept_groups < 1 || options.kept_groups > options.groups) refuse("kept_groups must be from 1 to groups");
  if (top_k > experts / options.groups * options.kept_groups) refuse("the kept groups have fewer than top_k experts");
  if (!choice_bias.empty()) selection.bias = choice_bias.data();
}

void bind_tokens(py::module_& module) {
  py::class_<PyNorm>(module, "NormSpec")
      .def(py::init<const std::string&, int, float, float, bool>(), "element_type"_a, "cols"_a, "epsilon"_a, "weight_offset"_a = 0.0f,
           "rounds_first"_a = false);
  py::class_<PyRouter>(module, "RouterSpec")
      .def(py::init([](int hidden, int experts, int top_k, const std::string& element_type, const std::string& logits_type,
                       const std::string& weights_type, bool rounds_logits, const std::string& score, bool normalise, float scale,
                       int groups, int kept_groups, const std::string& group_score, const py::object& choice_bias,
                       const py::object& logit_bias) {
             return std::make_unique<PyRouter>(hidden, experts, top_k,
                                               RouterOptions{element_type, logits_type, weights_type, rounds_logits, score, normalise,
                                                             scale, groups, kept_groups, group_score, choice_bias, logit_bias});
           }),
           "hidden"_a, "experts"_a, "top_k"_a, py::kw_only(), "element_type"_a, "logits_type"_a, "weights_type"_a,
           "rounds_logits"_a = false, "score"_a = "softmax", "normalise"_a = false, "scale"_a = 1.0f, "groups"_a = 1, "kept_groups"_a = 1,
           "group_score"_a = "two_largest", "choice_bias"_a = py::none(), "logit_bias"_a = py::none());
}

}  // namespace moegraft
