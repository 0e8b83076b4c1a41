// Nearest points of the grids of GGUF's types IQ1_S to IQ3_S, with which operators/block_encoding.py quantises.
#pragma once

#include <cstdint>

#include "formats/format_list.h"

namespace moegraft {

GridForm grid_form(WeightType type);  // throws std::invalid_argument where numbers are not quantised to a grid of this type

struct GridGroups {
  const float* x;  // (groups, columns of a group)
  const float* weight;  // the same shape, of the squared errors
  const float* scales;  // (groups, candidates), not negative
  std::int64_t groups;
  int candidates;
};

// For each group and candidate. A column's value is scale * number, whose number is that of its point plus `shift`, times its sign.
struct GridChoice {
  float* match;  // (groups, candidates): sums of weight * x * number
  float* norm;  // of weight * number^2
  std::uint16_t* points;  // (groups, candidates, points of a group)
  std::uint8_t* signs;  // (groups, candidates, columns of a group / 8): bit i is set where column i is negative
};

// Finds the points and signs with the least sum of weight * (x - scale * number)^2, exactly: all points are compared, and where signs
// must be even, all columns whose sign may be turned. Runs in `threads` threads of its own.
void search_grid(WeightType type, float shift, const GridGroups& groups, const GridChoice& choice, int threads);

}  // namespace moegraft
