#include "scheduler/scheduler.h"

#include <algorithm>
#include <cmath>

namespace moegraft {
namespace {

// The number of experts on each side of a threshold that are moved and swapped, and the number of rounds. On modelled prefills, a window of
// 3 is on average 0.0004% above the optimum, a window of 5 is 0.0003% above it, and a third round improved nothing.
constexpr int kWindow = 3;
constexpr int kRounds = 2;

}  // namespace

void TwoThresholdSchedule::sort(const LayerProblem& problem, const ExpertGroups& groups) {
  const auto cheaper = [&](int a, int b) {
    if (problem.cpu_ms[a] != problem.cpu_ms[b]) return problem.cpu_ms[a] < problem.cpu_ms[b];
    return problem.gpu_ms[a] != problem.gpu_ms[b] ? problem.gpu_ms[a] > problem.gpu_ms[b] : a > b;
  };
  resident_ = groups.resident();
  std::sort(resident_.begin(), resident_.end(), cheaper);
  // Where both devices' times grow with the load, the reverse of the GPU's order is the CPU's.
  missing_.assign(groups.missing().rbegin(), groups.missing().rend());
  if (!std::is_sorted(missing_.begin(), missing_.end(), cheaper)) std::sort(missing_.begin(), missing_.end(), cheaper);
  latest_.assign(groups.in_flight().rbegin(), groups.in_flight().rend());
  cheapest_ = latest_;
  if (cheapest_.size() > 1)
    std::sort(cheapest_.begin(), cheapest_.end(), [&](int a, int b) {
      if (problem.cpu_ms[a] != problem.cpu_ms[b]) return problem.cpu_ms[a] < problem.cpu_ms[b];
      return problem.arrival_ms[a] != problem.arrival_ms[b] ? problem.arrival_ms[a] > problem.arrival_ms[b] : a > b;
    });
  const std::size_t residents = resident_.size(), missing = missing_.size();
  resident_cpu_ms_.resize(residents + 1);
  resident_gpu_ms_.resize(residents + 1);
  missing_cpu_ms_.resize(missing + 1);
  arriving_gpu_ms_.resize(missing + 1);
  arriving_end_ms_.resize(missing + 1);
  resident_cpu_ms_[0] = missing_cpu_ms_[0] = resident_gpu_ms_[residents] = 0.0;
  for (std::size_t b = 0; b < residents; ++b) resident_cpu_ms_[b + 1] = resident_cpu_ms_[b] + problem.cpu_ms[resident_[b]];
  // Summed from the end instead of by differences, because a time may be infinite.
  for (std::size_t b = residents; b > 0; --b) resident_gpu_ms_[b - 1] = resident_gpu_ms_[b] + problem.gpu_ms[resident_[b - 1]];
  for (std::size_t a = 0; a < missing; ++a) missing_cpu_ms_[a + 1] = missing_cpu_ms_[a] + problem.cpu_ms[missing_[a]];
}

void TwoThresholdSchedule::tabulate(const LayerProblem& problem, const ExpertGroups& groups, const std::uint8_t* on_cpu) {
  const std::vector<int>& in_flight = groups.in_flight();
  double work = 0.0;
  in_flight_cpu_ms_ = 0.0;
  for (const int expert : in_flight)
    (on_cpu[expert] ? in_flight_cpu_ms_ : work) += (on_cpu[expert] ? problem.cpu_ms : problem.gpu_ms)[expert];
  double clock = 0.0;
  double link = problem.link_free_ms;
  std::size_t next = 0;
  const auto after = [&](double now, int expert) {
    return on_cpu[expert] ? now : std::max(now, problem.arrival_ms[expert]) + problem.gpu_ms[expert];
  };
  for (std::size_t m = 0; m <= missing_.size(); ++m) {
    if (m > 0) {
      link += problem.transfer_ms;
      for (; next < in_flight.size() && problem.arrival_ms[in_flight[next]] <= link; ++next) clock = after(clock, in_flight[next]);
      const double gpu_ms = problem.gpu_ms[missing_[missing_.size() - m]];
      clock = std::max(clock, link) + gpu_ms;
      work += gpu_ms;
    }
    double end = clock;
    for (std::size_t k = next; k < in_flight.size(); ++k) end = after(end, in_flight[k]);
    arriving_gpu_ms_[m] = work;
    arriving_end_ms_[m] = end;
  }
}

void TwoThresholdSchedule::sweep(const LayerProblem& problem, const std::vector<int>& in_flight, int in_flight_on_cpu,
                                 Thresholds& best) const {
  const int residents = static_cast<int>(resident_.size()), missing = static_cast<int>(missing_.size());
  const bool in_flight_on_gpu = in_flight_on_cpu < static_cast<int>(in_flight.size());
  const int fewest = std::max(0, missing - problem.max_transfers);
  const double cpu_start = problem.cpu_free_ms + problem.first_cpu_ms + in_flight_cpu_ms_;
  const auto cpu_end = [&](int b, int a) {
    return a + b + in_flight_on_cpu > 0 ? cpu_start + resident_cpu_ms_[b] + missing_cpu_ms_[a] : 0.0;
  };
  const auto gpu_end = [&](int b, int a) {
    const int m = missing - a;
    if (b == residents && m == 0 && !in_flight_on_gpu) return 0.0;
    return std::max(problem.gpu_free_ms + resident_gpu_ms_[b] + arriving_gpu_ms_[m], arriving_end_ms_[m]);
  };
  const auto consider = [&](int b, int a) {
    const double makespan_ms = std::max(cpu_end(b, a), gpu_end(b, a));
    if (makespan_ms < best.makespan_ms) best = {&in_flight, b, a, in_flight_on_cpu, makespan_ms};
  };
  // For each b, the best a is where the CPU's end, which grows with a, meets the GPU's, which falls with a; this a never grows with b.
  int a = missing;
  for (int b = 0; b <= residents; ++b) {
    while (a > fewest && cpu_end(b, a) > gpu_end(b, a)) --a;
    consider(b, a);
    if (a < missing) consider(b, a + 1);
    if (cpu_end(b, fewest) >= best.makespan_ms) break;
  }
}

void TwoThresholdSchedule::find_near(const LayerProblem& problem, const Thresholds& best) {
  near_.clear();
  const auto add = [&](const std::vector<int>& experts, int threshold) {
    const int end = std::min(static_cast<int>(experts.size()), threshold + kWindow);
    for (int i = std::max(0, threshold - kWindow); i < end; ++i) near_.push_back(experts[i]);
  };
  add(*best.in_flight_order, best.in_flight);
  add(resident_, best.resident);
  add(missing_, best.missing);
  const auto alike = [&](int expert) {
    return problem.cpu_ms[expert] == problem.cpu_ms[near_[0]] && problem.gpu_ms[expert] == problem.gpu_ms[near_[0]];
  };
  // If all of them cost the same, the sweep has already tried every split.
  if (std::all_of(near_.begin(), near_.end(), alike)) near_.clear();
}

// Lower bounds of each device's time, updated expert by expert, which rule out most moves without an evaluation.
struct TwoThresholdSchedule::Sums {
  double cpu_ms, gpu_ms;
  int on_cpu, on_gpu, transfers;

  void move(const LayerProblem& problem, int expert, bool to_cpu) {
    const int sign = to_cpu ? 1 : -1;
    cpu_ms += sign * problem.cpu_ms[expert];
    gpu_ms -= sign * problem.gpu_ms[expert];
    on_cpu += sign;
    on_gpu -= sign;
    transfers -= std::isinf(problem.arrival_ms[expert]) ? sign : 0;
  }
  // Differences of infinite times are NaN and compare as false, so that such a move is evaluated.
  bool cannot_improve(const LayerProblem& problem, double best_ms) const {
    return transfers > problem.max_transfers || (on_cpu > 0 && cpu_ms >= best_ms) || (on_gpu > 0 && gpu_ms >= best_ms);
  }
};

void TwoThresholdSchedule::search_locally(const LayerProblem& problem, const ExpertGroups& groups, std::uint8_t* on_cpu) {
  double best_ms = groups.makespan(problem, on_cpu);
  Sums sums{problem.cpu_free_ms + problem.first_cpu_ms, problem.gpu_free_ms, 0, problem.experts, 0};
  for (int i = 0; i < problem.experts; ++i) sums.gpu_ms += problem.gpu_ms[i];
  sums.transfers = static_cast<int>(missing_.size());
  for (int i = 0; i < problem.experts; ++i)
    if (on_cpu[i]) sums.move(problem, i, true);
  const auto flip = [&](int expert, Sums& changed) {
    on_cpu[expert] ^= 1;
    changed.move(problem, expert, on_cpu[expert] != 0);
  };
  for (int round = 0; round < kRounds; ++round) {
    int moved = -1, swapped = -1;
    const auto consider = [&](const Sums& changed, int x, int y) {
      if (changed.cannot_improve(problem, best_ms)) return;
      const double makespan_ms = groups.makespan(problem, on_cpu);
      if (makespan_ms < best_ms) best_ms = makespan_ms, moved = x, swapped = y;
    };
    for (std::size_t x = 0; x < near_.size(); ++x) {
      Sums one = sums;
      flip(near_[x], one);
      consider(one, near_[x], -1);
      for (std::size_t y = x + 1; y < near_.size(); ++y) {
        if (on_cpu[near_[y]] != on_cpu[near_[x]]) continue;  // a pair that moves in one direction
        Sums two = one;
        flip(near_[y], two);
        consider(two, near_[x], near_[y]);
        flip(near_[y], two);
      }
      flip(near_[x], one);
    }
    if (moved < 0) return;
    flip(moved, sums);
    if (swapped >= 0) flip(swapped, sums);
  }
}

void TwoThresholdSchedule::sweep_all(const LayerProblem& problem, const ExpertGroups& groups, const std::vector<int>& in_flight,
                                     std::uint8_t* on_cpu, Thresholds& best) {
  for (const int expert : in_flight) on_cpu[expert] = 0;
  tabulate(problem, groups, on_cpu);
  sweep(problem, in_flight, 0, best);
  for (std::size_t moved = 0; moved < in_flight.size(); ++moved) {
    on_cpu[in_flight[moved]] = 1;
    tabulate(problem, groups, on_cpu);
    sweep(problem, in_flight, static_cast<int>(moved) + 1, best);
  }
}

void TwoThresholdSchedule::split(const LayerProblem& problem, const ExpertGroups& groups, std::uint8_t* on_cpu) {
  sort(problem, groups);
  Thresholds best{&cheapest_, 0, static_cast<int>(missing_.size()), 0, HUGE_VAL};
  sweep_all(problem, groups, cheapest_, on_cpu, best);
  if (latest_.size() > 1) sweep_all(problem, groups, latest_, on_cpu, best);
  const auto assign = [&](const std::vector<int>& experts, int threshold) {
    for (std::size_t i = 0; i < experts.size(); ++i) on_cpu[experts[i]] = static_cast<int>(i) < threshold;
  };
  assign(resident_, best.resident);
  assign(missing_, best.missing);
  assign(*best.in_flight_order, best.in_flight);
  find_near(problem, best);
  if (!near_.empty()) search_locally(problem, groups, on_cpu);
}

}  // namespace moegraft
