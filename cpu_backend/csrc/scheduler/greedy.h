// HybriMoE's schedule (section IV-B): a simulation that always takes the operation that finishes first.
//
// The GPU takes the resident or arrived expert with the most tokens, or waits for the first that arrives. The CPU takes the missing expert
// with the fewest tokens and, when none is left, steals from the GPU's queue the one with the fewest. The link brings the missing expert
// with the most into the GPU's queue. Ties go to the GPU, then to the CPU; of equal loads the first position counts as the largest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "scheduler/layer_problem.h"

namespace moegraft {

class GreedySchedule {
 public:
  // Fills `on_cpu` (experts). An expert that was brought and then stolen counts as the CPU's: its transfer is not made.
  void split(const LayerProblem& problem, const ExpertGroups& groups, std::uint8_t* on_cpu);

 private:
  enum class State : std::uint8_t { kMissing, kComing, kArrived, kDone };
  struct Coming {
    int rank;
    double arrival_ms;
  };

  void start(const LayerProblem& problem, const ExpertGroups& groups);
  void arrive(double now_ms);
  Coming next_for_gpu(double now_ms);  // rank -1: none
  int next_for_cpu();
  int largest_missing();
  const Coming* first_coming(const std::vector<Coming>& queue, std::size_t& head) const;

  // Experts are handled by rank, 0 being the one with the most tokens. The marks below only ever save looking at what is done.
  std::vector<int> expert_of_;
  std::vector<int> rank_of_;
  std::vector<State> states_;
  std::vector<Coming> in_flight_;
  std::vector<Coming> brought_;
  std::size_t in_flight_head_ = 0;
  std::size_t brought_head_ = 0;
  int first_arrived_ = 0;  // no lower rank waits for the GPU
  int first_missing_ = 0;  // no lower rank is missing
  int last_missing_ = 0;   // no higher rank is missing
  int last_left_ = 0;      // every higher rank is done
};

}  // namespace moegraft
