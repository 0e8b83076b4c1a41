// Names of types and parts, as Python has them. Apart from types.h, so that the kernels' files do not include <string>.
#pragma once

#include <string>

#include "core/types.h"

namespace moegraft {

// Throw std::invalid_argument where there is none of that name.
WeightType parse_weight_type(const std::string& name);
Activation parse_activation(const std::string& name);
Part parse_part(const std::string& name);
// One name for both, or `gate_up+down`. Throws std::invalid_argument.
WeightTypes parse_weight_types(const std::string& name);
std::string name_of(WeightTypes types);

}  // namespace moegraft
