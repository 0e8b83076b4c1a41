// The shortest makespan of a layer, found by exhaustive search. It takes milliseconds to seconds, and memory.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler/scheduler.h"

namespace moegraft {
namespace {

constexpr double kNever = 1e15;  // ms: replaces infinite times, which cannot be subtracted
constexpr std::size_t kMaxInFlight = 16;
constexpr std::size_t kMaxStates = 30'000'000;
constexpr int kBounds = 6;

struct Item {
  double cpu_ms, gpu_ms;
  bool missing;
};

struct State {
  double cpu_ms, gpu_ms;  // when each device is done with the items so far
};

// The Pareto-optimal states: by CPU time ascending and GPU time descending.
using Front = std::vector<State>;

// Weights of the three resources. For every split, the makespan is at least the weighted sum of their end times.
struct Bound {
  double cpu, gpu, link;
  std::vector<double> rest_ms;  // the least that items from i on add to this sum
};

void merge(const Front& a, const Front& b, Front& out) {
  out.clear();
  std::size_t i = 0, j = 0;
  while (i < a.size() || j < b.size()) {
    const bool from_a =
        j == b.size() || (i < a.size() && (a[i].cpu_ms < b[j].cpu_ms || (a[i].cpu_ms == b[j].cpu_ms && a[i].gpu_ms <= b[j].gpu_ms)));
    const State& state = from_a ? a[i++] : b[j++];
    if (out.empty() || state.gpu_ms < out.back().gpu_ms) out.push_back(state);
  }
}

// All splits of resident and missing experts for a given assignment of those in flight: dynamic programming over the fronts for each number
// of transfers, pruned by lower bounds.
class Search {
 public:
  Search(const LayerProblem& problem, std::vector<Item> items, std::vector<std::pair<double, double>> arriving, double cpu_start,
         double best)
      : problem_(problem), items_(std::move(items)), arriving_(std::move(arriving)), cpu_start_(cpu_start), best_(best) {
    choose_bounds();
  }

  double run() {
    fronts_.assign(1, {{cpu_start_, problem_.gpu_free_ms}});
    for (std::size_t i = 0; i < items_.size(); ++i) {
      step(items_[i]);
      prune(i + 1);
    }
    for (std::size_t m = 0; m < fronts_.size(); ++m)
      for (const State& state : fronts_[m]) best_ = std::min(best_, std::max(state.cpu_ms, arrive(state.gpu_ms, slot(m), kNever * 2)));
    return best_;
  }

 private:
  double slot(std::size_t m) const { return m == 0 ? -1.0 : problem_.link_free_ms + static_cast<double>(m) * problem_.transfer_ms; }

  // The GPU's time after the experts in flight that arrive in (from, until].
  double arrive(double gpu_ms, double from, double until) const {
    for (const auto& [arrival, takes] : arriving_)
      if (arrival > from && arrival <= until) gpu_ms = std::max(gpu_ms, arrival) + takes;
    return gpu_ms;
  }

  void step(const Item& item) {
    if (item.missing && static_cast<int>(fronts_.size()) <= problem_.max_transfers) fronts_.emplace_back();
    for (std::size_t m = fronts_.size(); m-- > 0;) {
      Front on_cpu = fronts_[m], on_gpu;
      for (State& state : on_cpu) state.cpu_ms += item.cpu_ms;
      if (!item.missing) on_gpu = fronts_[m];
      if (item.missing && m > 0) on_gpu = fronts_[m - 1];
      for (State& state : on_gpu) {
        if (item.missing) state.gpu_ms = std::max(arrive(state.gpu_ms, slot(m - 1), slot(m)), slot(m));
        state.gpu_ms += item.gpu_ms;
      }
      merge(on_cpu, on_gpu, fronts_[m]);
    }
  }

  void prune(std::size_t done) {
    std::size_t states = 0;
    for (std::size_t m = 0; m < fronts_.size(); ++m) {
      Front& front = fronts_[m];
      const auto worse = [&](const State& state) { return lower_bound(state, m, done) >= best_; };
      front.erase(std::remove_if(front.begin(), front.end(), worse), front.end());
      states += front.size();
    }
    if (states > kMaxStates)
      throw std::runtime_error("optimum: " + std::to_string(problem_.experts) + " experts are too many for these costs");
  }

  double lower_bound(const State& state, std::size_t m, std::size_t done) const {
    double highest = std::max(state.cpu_ms, state.gpu_ms);
    const double link_ms = static_cast<double>(m) * problem_.transfer_ms + (m > 0 ? problem_.link_free_ms : 0.0);
    for (const Bound& bound : bounds_)
      highest = std::max(highest, bound.cpu * state.cpu_ms + bound.gpu * state.gpu_ms + bound.link * link_ms + bound.rest_ms[done]);
    return highest;
  }

  double at_the_start(const Bound& bound) const { return bound.cpu * cpu_start_ + bound.gpu * problem_.gpu_free_ms + bound.rest_ms[0]; }

  void choose_bounds() {
    constexpr int kSteps = 24;
    std::vector<Bound> all;
    for (int cpu = 0; cpu <= kSteps; ++cpu)
      for (int gpu = 0; gpu + cpu <= kSteps; ++gpu) {
        Bound bound{cpu / double{kSteps}, gpu / double{kSteps}, (kSteps - cpu - gpu) / double{kSteps},
                    std::vector<double>(items_.size() + 1)};
        for (std::size_t i = items_.size(); i-- > 0;) {
          const double link = items_[i].missing ? bound.link * problem_.transfer_ms : 0.0;
          bound.rest_ms[i] = bound.rest_ms[i + 1] + std::min(bound.cpu * items_[i].cpu_ms, bound.gpu * items_[i].gpu_ms + link);
        }
        all.push_back(std::move(bound));
      }
    const std::size_t kept = std::min<std::size_t>(kBounds, all.size());
    std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept), all.end(),
                      [&](const Bound& a, const Bound& b) { return at_the_start(a) > at_the_start(b); });
    bounds_.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept));
  }

  const LayerProblem& problem_;
  const std::vector<Item> items_;  // residents, then the missing by GPU time, longest first: their order of transfer
  const std::vector<std::pair<double, double>> arriving_;  // in flight and computed by the GPU: arrival, GPU time
  const double cpu_start_;
  double best_;
  std::vector<Bound> bounds_;
  std::vector<Front> fronts_;  // by number of transfers
};

// The problem with finite times, in memory of its own.
struct Finite {
  explicit Finite(const LayerProblem& given)
      : problem(given), cpu_ms(given.cpu_ms, given.cpu_ms + given.experts), gpu_ms(given.gpu_ms, given.gpu_ms + given.experts) {
    for (double& value : cpu_ms) value = std::min(value, kNever);
    for (double& value : gpu_ms) value = std::min(value, kNever);
    problem.cpu_ms = cpu_ms.data();
    problem.gpu_ms = gpu_ms.data();
    problem.transfer_ms = std::min(given.transfer_ms, kNever);
    problem.first_cpu_ms = std::min(given.first_cpu_ms, kNever);
    problem.cpu_free_ms = std::min(given.cpu_free_ms, kNever);
    problem.gpu_free_ms = std::min(given.gpu_free_ms, kNever);
    problem.link_free_ms = std::min(given.link_free_ms, kNever);
  }
  LayerProblem problem;
  std::vector<double> cpu_ms, gpu_ms;
};

}  // namespace

// Exact to rounding. Throws std::invalid_argument for more than 16 experts in flight, std::runtime_error if the search exceeds its memory
// limit.
double optimum(const LayerProblem& given) {
  const Finite finite(given);
  const LayerProblem& problem = finite.problem;
  ExpertGroups groups;
  groups.sort(problem);
  if (groups.in_flight().size() > kMaxInFlight) throw std::invalid_argument("optimum: more than 16 experts in flight");
  Planner planner;
  double best = HUGE_VAL;
  for (const Schedule schedule : {Schedule::kAllCpu, Schedule::kFixed, Schedule::kOnDemand, Schedule::kGreedy, Schedule::kTwoThreshold})
    best = std::min(best, planner.plan(problem, schedule).makespan_ms);
  // The search counts both devices' start times; the two splits that leave a device idle are among the schedules above.
  std::vector<Item> items;
  for (const int expert : groups.resident()) items.push_back({problem.cpu_ms[expert], problem.gpu_ms[expert], false});
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cpu_ms > b.cpu_ms; });
  for (const int expert : groups.missing()) items.push_back({problem.cpu_ms[expert], problem.gpu_ms[expert], true});
  const std::vector<int>& in_flight = groups.in_flight();
  for (unsigned kept = 0; kept < 1u << in_flight.size(); ++kept) {
    std::vector<std::pair<double, double>> arriving;
    double cpu_start = problem.cpu_free_ms + problem.first_cpu_ms;
    for (std::size_t k = 0; k < in_flight.size(); ++k) {
      if (kept >> k & 1) arriving.emplace_back(problem.arrival_ms[in_flight[k]], problem.gpu_ms[in_flight[k]]);
      else cpu_start += problem.cpu_ms[in_flight[k]];
    }
    best = Search(problem, items, std::move(arriving), cpu_start, best).run();
  }
  return best >= kNever ? HUGE_VAL : best;
}

}  // namespace moegraft

extern "C" std::size_t problem_bytes() { return sizeof(moegraft::LayerProblem); }

// Returns 0 and the makespan; or 1 (invalid argument) or 2 (search too large) and a message of at most `size` characters.
extern "C" int optimum_of(const moegraft::LayerProblem* problem, double* makespan_ms, char* message, std::size_t size) {
  try {
    *makespan_ms = moegraft::optimum(*problem);
    return 0;
  } catch (const std::invalid_argument& error) {
    std::snprintf(message, size, "%s", error.what());
    return 1;
  } catch (const std::exception& error) {
    std::snprintf(message, size, "%s", error.what());
    return 2;
  }
}
