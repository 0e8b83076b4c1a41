// The near-optimal schedule: of the missing and of the resident experts each, those cheapest on the CPU go to it, up to a threshold.
//
// With one GPU time for all experts two thresholds are optimal. A sweep over both, each position of one with the best of the other, finds
// them in linear time after sorting. Experts in flight have a third, among the cheapest or among the latest: a sweep for each of its
// positions, for there are few. Where times differ from expert to expert, moves and swaps close to the thresholds remove most of what is left.
#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/layer_problem.h"

namespace moegraft {

class TwoThresholdSchedule {
 public:
  // Fills `on_cpu` (experts) with a split that is no slower than everything on the CPU, or than residents on the GPU and the rest on the CPU.
  void split(const LayerProblem& problem, const ExpertGroups& groups, std::uint8_t* on_cpu);

 private:
  struct Thresholds {
    const std::vector<int>* in_flight_order;
    int resident, missing, in_flight;  // how many of each go to the CPU
    double makespan_ms;
  };
  struct Sums;

  void sort(const LayerProblem& problem, const ExpertGroups& groups);
  void tabulate(const LayerProblem& problem, const ExpertGroups& groups, const std::uint8_t* on_cpu);
  void sweep(const LayerProblem& problem, const std::vector<int>& in_flight, int in_flight_on_cpu, Thresholds& best) const;
  void sweep_all(const LayerProblem& problem, const ExpertGroups& groups, const std::vector<int>& in_flight, std::uint8_t* on_cpu, Thresholds& best);
  void find_near(const LayerProblem& problem, const Thresholds& best);
  void polish(const LayerProblem& problem, const ExpertGroups& groups, std::uint8_t* on_cpu);

  std::vector<int> resident_;  // cheapest on the CPU first
  std::vector<int> missing_;
  std::vector<int> cheapest_;  // of those in flight
  std::vector<int> latest_;
  std::vector<double> resident_cpu_ms_;   // of the first b residents
  std::vector<double> resident_gpu_ms_;   // of all but them
  std::vector<double> missing_cpu_ms_;    // of the first a missing
  std::vector<double> arriving_gpu_ms_;   // of the last m missing and what is in flight
  std::vector<double> arriving_end_ms_;   // when those are done on a GPU that does nothing else
  double in_flight_cpu_ms_ = 0.0;
  std::vector<int> near_;  // experts close to a threshold, where moving them may gain
};

}  // namespace moegraft
