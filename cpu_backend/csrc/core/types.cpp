#include "core/names.h"

#include <array>
#include <stdexcept>

#include "formats/format_list.h"

namespace moegraft {
namespace {

constexpr std::array<const char*, kFirstCoded> kPlainNames = {"float32", "float16", "bfloat16"};
constexpr std::array<const char*, kActivations> kActivationNames = {"silu",  "gelu",     "gelu_tanh", "relu",
                                                                    "relu2", "identity", "sigmoid",   "tanh"};
constexpr std::array<const char*, 3> kPartNames = {"gate", "up", "down"};

template <std::size_t N>
int index_of(const std::array<const char*, N>& names, const std::string& name, const char* what) {
  std::string known;
  for (std::size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<int>(i);
    known += (i ? ", " : "") + std::string(names[i]);
  }
  throw std::invalid_argument("unknown " + std::string(what) + " '" + name + "'; known are " + known);
}

}  // namespace

WeightType parse_weight_type(const std::string& name) {
  std::array<const char*, kWeightTypes> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = name_of(static_cast<WeightType>(i));
  return static_cast<WeightType>(index_of(names, name, "weight type"));
}
const char* name_of(WeightType type) { return is_coded(type) ? coded_format(type).name : kPlainNames[static_cast<std::size_t>(type)]; }

WeightTypes parse_weight_types(const std::string& name) {
  const std::size_t plus = name.find('+');
  if (plus == std::string::npos) return {parse_weight_type(name), parse_weight_type(name)};
  return {parse_weight_type(name.substr(0, plus)), parse_weight_type(name.substr(plus + 1))};
}

std::string name_of(WeightTypes types) {
  return types.gate_up == types.down ? name_of(types.gate_up) : std::string(name_of(types.gate_up)) + "+" + name_of(types.down);
}

Activation parse_activation(const std::string& name) { return static_cast<Activation>(index_of(kActivationNames, name, "activation")); }
const char* name_of(Activation activation) { return kActivationNames[static_cast<std::size_t>(activation)]; }

Part parse_part(const std::string& name) { return static_cast<Part>(index_of(kPartNames, name, "part")); }
const char* name_of(Part part) { return kPartNames[static_cast<std::size_t>(part)]; }

}  // namespace moegraft
