#include "scheduler/scheduler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moegraft {

void GreedySchedule::start(const LayerProblem& problem, const ExpertGroups& groups) {
  const int count = problem.experts;
  expert_of_.resize(count);
  rank_of_.resize(count);
  states_.assign(count, State::kMissing);
  std::iota(expert_of_.begin(), expert_of_.end(), 0);
  sort_by_load(problem, expert_of_);
  for (int rank = 0; rank < count; ++rank) rank_of_[expert_of_[rank]] = rank;
  for (const int expert : groups.resident()) states_[rank_of_[expert]] = State::kArrived;
  in_flight_.clear();
  for (const int expert : groups.in_flight()) {
    states_[rank_of_[expert]] = State::kComing;
    in_flight_.push_back({rank_of_[expert], problem.arrival_ms[expert]});
  }
  transferred_.clear();
  in_flight_head_ = transferred_head_ = 0;
  first_arrived_ = first_missing_ = 0;
  last_missing_ = last_left_ = count - 1;
}

const GreedySchedule::Coming* GreedySchedule::first_coming(const std::vector<Coming>& queue, std::size_t& head) const {
  while (head < queue.size() && states_[queue[head].rank] != State::kComing) ++head;
  return head < queue.size() ? &queue[head] : nullptr;
}

void GreedySchedule::arrive(double now_ms) {
  const auto take = [&](const std::vector<Coming>& queue, std::size_t& head) {
    for (const Coming* coming = first_coming(queue, head); coming && coming->arrival_ms <= now_ms; coming = first_coming(queue, head)) {
      states_[coming->rank] = State::kArrived;
      first_arrived_ = std::min(first_arrived_, coming->rank);
    }
  };
  take(in_flight_, in_flight_head_);
  take(transferred_, transferred_head_);
}

GreedySchedule::Coming GreedySchedule::next_for_gpu(double now_ms) {
  arrive(now_ms);
  const int count = static_cast<int>(states_.size());
  while (first_arrived_ < count && states_[first_arrived_] != State::kArrived) ++first_arrived_;
  if (first_arrived_ < count) return {first_arrived_, 0.0};
  const Coming* in_flight = first_coming(in_flight_, in_flight_head_);
  const Coming* transferred = first_coming(transferred_, transferred_head_);
  if (!in_flight && !transferred) return {-1, HUGE_VAL};
  if (!in_flight || (transferred && transferred->arrival_ms < in_flight->arrival_ms)) return *transferred;
  return *in_flight;
}

int GreedySchedule::next_for_cpu() {
  while (last_missing_ >= 0 && states_[last_missing_] != State::kMissing) --last_missing_;
  if (last_missing_ >= 0) return last_missing_;
  while (states_[last_left_] == State::kDone) --last_left_;
  return last_left_;
}

int GreedySchedule::largest_missing() {
  const int count = static_cast<int>(states_.size());
  while (first_missing_ < count && states_[first_missing_] != State::kMissing) ++first_missing_;
  return first_missing_ < count ? first_missing_ : -1;
}

void GreedySchedule::split(const LayerProblem& problem, const ExpertGroups& groups, std::uint8_t* on_cpu) {
  start(problem, groups);
  double cpu_clock = problem.cpu_free_ms + problem.first_cpu_ms;
  double gpu_clock = problem.gpu_free_ms;
  double link_clock = problem.link_free_ms;
  int transfers_left = problem.max_transfers;
  for (int left = problem.experts; left > 0;) {
    const Coming gpu = next_for_gpu(gpu_clock);
    const int cpu = next_for_cpu();
    const int link = transfers_left > 0 ? largest_missing() : -1;
    const double gpu_end = gpu.rank < 0 ? HUGE_VAL : std::max(gpu_clock, gpu.arrival_ms) + problem.gpu_ms[expert_of_[gpu.rank]];
    const double cpu_end = cpu_clock + problem.cpu_ms[expert_of_[cpu]];
    const double link_end = link < 0 ? HUGE_VAL : link_clock + problem.transfer_ms;
    if (gpu.rank >= 0 && gpu_end <= cpu_end && gpu_end <= link_end) {
      gpu_clock = gpu_end;
      states_[gpu.rank] = State::kDone;
      on_cpu[expert_of_[gpu.rank]] = 0;
      --left;
    } else if (link < 0 || cpu_end <= link_end) {
      cpu_clock = cpu_end;
      states_[cpu] = State::kDone;
      on_cpu[expert_of_[cpu]] = 1;
      --left;
    } else {
      link_clock = link_end;
      states_[link] = State::kComing;
      transferred_.push_back({link, link_end});
      --transfers_left;
    }
  }
}

}  // namespace moegraft
