// The shortest makespan there is, for tests and benchmarks: it takes milliseconds to seconds, and memory.
#pragma once

#include "scheduler/scheduler.h"

namespace moegraft {

// Exact to rounding. Throws std::invalid_argument for more than 16 experts in flight, std::runtime_error when the search grows beyond
// memory's bounds.
double optimum(const LayerProblem& problem);

}  // namespace moegraft
