// Which instruction sets were compiled and which this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace moegraft {

std::vector<std::string> compiled_isas();   // from the plainest to the richest
std::vector<std::string> available_isas();  // those of them that this CPU and system run

std::vector<std::string> untested_isas();   // compiled, but never run on hardware by us: used only where asked for by name

// An empty name means: MOEGRAFT_ISA if it is set, else the richest that is available and tested. Throws std::invalid_argument on an unknown or unavailable one.
const Kernels& kernels_for(const std::string& isa);

}  // namespace moegraft
