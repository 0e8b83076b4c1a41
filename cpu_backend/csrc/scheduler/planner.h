// The schedules of one layer's experts: who computes what, and what is transferred for it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/greedy.h"
#include "scheduler/layer_problem.h"
#include "scheduler/two_threshold.h"

namespace moegraft {

enum class Schedule { kAllCpu, kFixed, kOnDemand, kGreedy, kTwoThreshold };

Schedule parse_schedule(const std::string& name);  // throws std::invalid_argument, naming the known ones

struct LayerPlan {
  const std::uint8_t* on_cpu;    // (experts)
  const std::int32_t* transfers;  // positions, in the order of their transfer
  int transfer_count;
  double makespan_ms;
};

// Plans layers one after another in memory it keeps. For one thread at a time. Problems are taken to have passed `check`.
class Planner {
 public:
  // The plan lies in this object until its next call.
  LayerPlan plan(const LayerProblem& problem, Schedule schedule);

  // Of any split. Throws std::invalid_argument when it needs more than `max_transfers`.
  double makespan(const LayerProblem& problem, const std::uint8_t* on_cpu);

  // How much shorter the schedule's plan gets, in ms, by having each missing expert resident, one after another in descending load (ties: by
  // position). Where a later one gains more than those before it, they share their sum evenly: it counts only together with them. Experts
  // that are not missing gain 0. `gains_ms`: (experts).
  void gains(const LayerProblem& problem, Schedule schedule, double* gains_ms);

 private:
  void split(const LayerProblem& problem, Schedule schedule);
  void bring_most(const LayerProblem& problem);

  ExpertGroups groups_;
  GreedySchedule greedy_;
  TwoThresholdSchedule two_threshold_;
  std::vector<std::uint8_t> on_cpu_;
  std::vector<std::int32_t> transfers_;
  std::vector<int> by_load_;
  std::vector<int> gain_order_;
  std::vector<double> arrival_ms_;
};

}  // namespace moegraft
