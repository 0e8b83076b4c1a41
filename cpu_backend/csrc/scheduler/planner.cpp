#include "scheduler/scheduler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace moegraft {
namespace {

constexpr const char* kNames[] = {"all_cpu", "fixed", "on_demand", "greedy", "two_threshold"};

// Makes values non-increasing along `order` and at least 0: rising runs are replaced by their mean (isotonic regression).
void pool_rises(const std::vector<int>& order, double* values) {
  const std::size_t count = order.size();
  for (std::size_t first = 0; first < count;) {
    // Finds the run from `first` with the highest mean, which later values cannot raise.
    double sum = 0.0, best_mean = -HUGE_VAL;
    std::size_t best_end = first + 1;
    for (std::size_t end = first; end < count; ++end) {
      sum += values[order[end]];
      const double mean = sum / static_cast<double>(end - first + 1);
      if (mean > best_mean) best_mean = mean, best_end = end + 1;
    }
    for (std::size_t i = first; i < best_end; ++i) values[order[i]] = std::max(0.0, best_mean);
    first = best_end;
  }
}

}  // namespace

Schedule parse_schedule(const std::string& name) {
  std::string known;
  for (std::size_t i = 0; i < std::size(kNames); ++i) {
    if (name == kNames[i]) return static_cast<Schedule>(i);
    known += (i ? ", " : "") + std::string(kNames[i]);
  }
  throw std::invalid_argument("unknown schedule '" + name + "'; expected one of " + known);
}

// Assigns missing experts to the GPU in descending load as far as `max_transfers` allows, and the others to the CPU.
void Planner::transfer_largest(const LayerProblem& problem) {
  std::fill(on_cpu_.begin(), on_cpu_.end(), std::uint8_t{0});
  const std::size_t max_transfers = static_cast<std::size_t>(problem.max_transfers);
  if (groups_.missing().size() <= max_transfers) return;
  by_load_ = groups_.missing();
  sort_by_load(problem, by_load_);
  for (std::size_t i = max_transfers; i < by_load_.size(); ++i) on_cpu_[by_load_[i]] = 1;
}

void Planner::split(const LayerProblem& problem, Schedule schedule) {
  groups_.sort(problem);
  on_cpu_.resize(static_cast<std::size_t>(problem.experts));
  switch (schedule) {
    case Schedule::kAllCpu: std::fill(on_cpu_.begin(), on_cpu_.end(), std::uint8_t{1}); break;
    case Schedule::kFixed:
      for (int i = 0; i < problem.experts; ++i) on_cpu_[i] = problem.arrival_ms[i] != 0.0;
      break;
    case Schedule::kOnDemand: transfer_largest(problem); break;
    case Schedule::kGreedy: greedy_.split(problem, groups_, on_cpu_.data()); break;
    case Schedule::kTwoThreshold: two_threshold_.split(problem, groups_, on_cpu_.data()); break;
  }
}

LayerPlan Planner::plan(const LayerProblem& problem, Schedule schedule) {
  split(problem, schedule);
  transfers_.clear();
  for (const int expert : groups_.missing())
    if (!on_cpu_[expert]) transfers_.push_back(expert);
  return {on_cpu_.data(), transfers_.data(), static_cast<int>(transfers_.size()), groups_.makespan(problem, on_cpu_.data())};
}

double Planner::makespan(const LayerProblem& problem, const std::uint8_t* on_cpu) {
  groups_.sort(problem);
  int transfers = 0;
  for (const int expert : groups_.missing()) transfers += !on_cpu[expert];
  if (transfers > problem.max_transfers)
    throw std::invalid_argument("the split needs " + std::to_string(transfers) + " transfers where max_transfers is " +
                                std::to_string(problem.max_transfers));
  return groups_.makespan(problem, on_cpu);
}

void Planner::gains(const LayerProblem& problem, Schedule schedule, double* gains_ms) {
  std::fill(gains_ms, gains_ms + problem.experts, 0.0);
  arrival_ms_.assign(problem.arrival_ms, problem.arrival_ms + problem.experts);
  LayerProblem simulated = problem;
  simulated.arrival_ms = arrival_ms_.data();
  split(simulated, schedule);
  double before_ms = groups_.makespan(simulated, on_cpu_.data());
  gain_order_ = groups_.missing();
  sort_by_load(problem, gain_order_);
  for (const int expert : gain_order_) {
    arrival_ms_[expert] = 0.0;
    split(simulated, schedule);
    const double after_ms = groups_.makespan(simulated, on_cpu_.data());
    gains_ms[expert] = before_ms == after_ms ? 0.0 : before_ms - after_ms;  // both may be infinite
    before_ms = after_ms;
  }
  pool_rises(gain_order_, gains_ms);
}

}  // namespace moegraft
