#include "scheduler/scheduler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace moegraft {
namespace {

[[noreturn]] void reject(const std::string& name, const std::string& value) {
  throw std::invalid_argument("LayerProblem: " + name + " is " + value + "; it must be at least 0");
}

void check_times(const double* times, int count, const char* name) {
  for (int i = 0; i < count; ++i)
    if (!(times[i] >= 0.0)) reject(std::string(name) + "[" + std::to_string(i) + "]", std::to_string(times[i]));
}

}  // namespace

void check(const LayerProblem& problem) {
  for (int i = 0; i < problem.experts; ++i)
    if (problem.loads[i] < 0) reject("loads[" + std::to_string(i) + "]", std::to_string(problem.loads[i]));
  check_times(problem.cpu_ms, problem.experts, "cpu_ms");
  check_times(problem.gpu_ms, problem.experts, "gpu_ms");
  check_times(problem.arrival_ms, problem.experts, "arrival_ms");
  const double single[] = {problem.transfer_ms, problem.first_cpu_ms, problem.cpu_free_ms, problem.gpu_free_ms, problem.link_free_ms};
  const char* names[] = {"transfer_ms", "first_cpu_ms", "cpu_free_ms", "gpu_free_ms", "link_free_ms"};
  for (int i = 0; i < 5; ++i)
    if (!(single[i] >= 0.0)) reject(names[i], std::to_string(single[i]));
  if (problem.max_transfers < 0) reject("max_transfers", std::to_string(problem.max_transfers));
}

void sort_by_load(const LayerProblem& problem, std::vector<int>& experts) {
  std::sort(experts.begin(), experts.end(),
            [&](int a, int b) { return problem.loads[a] != problem.loads[b] ? problem.loads[a] > problem.loads[b] : a < b; });
}

void ExpertGroups::sort(const LayerProblem& problem) {
  resident_.clear();
  in_flight_.clear();
  missing_.clear();
  for (int i = 0; i < problem.experts; ++i) {
    const double arrival = problem.arrival_ms[i];
    (arrival == 0.0 ? resident_ : std::isinf(arrival) ? missing_ : in_flight_).push_back(i);
  }
  if (in_flight_.size() > 1)
    std::sort(in_flight_.begin(), in_flight_.end(), [&](int a, int b) {
      return problem.arrival_ms[a] != problem.arrival_ms[b] ? problem.arrival_ms[a] < problem.arrival_ms[b] : a < b;
    });
  std::sort(missing_.begin(), missing_.end(), [&](int a, int b) {
    if (problem.gpu_ms[a] != problem.gpu_ms[b]) return problem.gpu_ms[a] > problem.gpu_ms[b];
    if (problem.cpu_ms[a] != problem.cpu_ms[b]) return problem.cpu_ms[a] > problem.cpu_ms[b];
    return problem.loads[a] != problem.loads[b] ? problem.loads[a] > problem.loads[b] : a < b;
  });
}

double cpu_end(const LayerProblem& problem, const std::uint8_t* on_cpu) {
  double clock = problem.cpu_free_ms + problem.first_cpu_ms;
  bool any = false;
  for (int i = 0; i < problem.experts; ++i) {
    if (!on_cpu[i]) continue;
    clock += problem.cpu_ms[i];
    any = true;
  }
  return any ? clock : 0.0;
}

double ExpertGroups::gpu_end(const LayerProblem& problem, const std::uint8_t* on_cpu) const {
  double clock = problem.gpu_free_ms;
  bool any = false;
  const auto compute = [&](int expert, double arrival) {
    clock = std::max(clock, arrival) + problem.gpu_ms[expert];
    any = true;
  };
  for (const int expert : resident_)
    if (!on_cpu[expert]) compute(expert, 0.0);
  double link = problem.link_free_ms;
  std::size_t next = 0;
  const auto compute_arrived = [&](double until) {
    for (; next < in_flight_.size() && problem.arrival_ms[in_flight_[next]] <= until; ++next)
      if (!on_cpu[in_flight_[next]]) compute(in_flight_[next], problem.arrival_ms[in_flight_[next]]);
  };
  for (const int expert : missing_) {
    if (on_cpu[expert]) continue;
    link += problem.transfer_ms;
    compute_arrived(link);
    compute(expert, link);
  }
  compute_arrived(HUGE_VAL);
  return any ? clock : 0.0;
}

double ExpertGroups::makespan(const LayerProblem& problem, const std::uint8_t* on_cpu) const {
  return std::max(cpu_end(problem, on_cpu), gpu_end(problem, on_cpu));
}

}  // namespace moegraft
