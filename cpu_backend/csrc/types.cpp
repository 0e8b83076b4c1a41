#include "types.h"

#include <array>
#include <stdexcept>

namespace moegraft {
namespace {

constexpr std::array<const char*, kWeightTypes> kWeightTypeNames = {"float32", "float16", "bfloat16", "int8", "int4"};
constexpr std::array<const char*, kActivations> kActivationNames = {"silu", "gelu",     "gelu_tanh", "relu",
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
  return static_cast<WeightType>(index_of(kWeightTypeNames, name, "weight type"));
}
const char* name_of(WeightType type) { return kWeightTypeNames[static_cast<std::size_t>(type)]; }

Activation parse_activation(const std::string& name) {
  return static_cast<Activation>(index_of(kActivationNames, name, "activation"));
}
const char* name_of(Activation activation) { return kActivationNames[static_cast<std::size_t>(activation)]; }

Part parse_part(const std::string& name) { return static_cast<Part>(index_of(kPartNames, name, "part")); }
const char* name_of(Part part) { return kPartNames[static_cast<std::size_t>(part)]; }

}  // namespace moegraft
