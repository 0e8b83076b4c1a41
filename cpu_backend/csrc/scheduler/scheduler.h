// The planner of hybrid layers: which device computes each active expert of a layer, given the costs on both. All times are ms from now.
//
// The CPU computes its experts one after another and pays `first_cpu_ms` once. The link transfers one missing expert per `transfer_ms`. The
// GPU computes resident experts first and the others as they arrive.
//
// A Planner owns the memory that it reuses from plan to plan and is used by one thread at a time, without threads of its own. Problems and
// their arrays belong to the caller; a LayerPlan is valid until the planner's next call. layer_problem.cpp computes the makespan of a
// split, greedy.cpp and two_threshold.cpp the two schedules with a search, planner.cpp the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moegraft {

struct LayerProblem {
  int experts;
  const std::int32_t* loads;  // tokens
  const double* cpu_ms;
  const double* gpu_ms;
  const double* arrival_ms;  // 0 if resident on the GPU, infinite if missing, else the arrival of the transfer in flight
  double transfer_ms;
  double first_cpu_ms;
  double cpu_free_ms;
  double gpu_free_ms;
  double link_free_ms;
  int max_transfers;
};

// Throws std::invalid_argument if a cost, a time or a count is negative or NaN; the message names it. Costs may be infinite.
void check(const LayerProblem& problem);

// Sorts in descending order of load; equal loads are sorted by position.
void sort_by_load(const LayerProblem& problem, std::vector<int>& experts);

// Resident experts, those in flight and missing ones, each group in the order in which the GPU computes them. For a given split these
// orders are optimal: transfers of equal length run in descending GPU time (Johnson's rule), and the GPU computes experts as they arrive.
class ExpertGroups {
 public:
  void sort(const LayerProblem& problem);
  const std::vector<int>& resident() const { return resident_; }
  const std::vector<int>& in_flight() const { return in_flight_; }  // by arrival
  const std::vector<int>& missing() const { return missing_; }  // by descending GPU time, then CPU time, load, position

  // The time when the last expert is done. `on_cpu` (experts): 1 on the CPU, 0 on the GPU. A device without an expert is done at 0.
  double makespan(const LayerProblem& problem, const std::uint8_t* on_cpu) const;

 private:
  double gpu_end(const LayerProblem& problem, const std::uint8_t* on_cpu) const;

  std::vector<int> resident_;
  std::vector<int> in_flight_;
  std::vector<int> missing_;
};

// The time when the CPU is done; 0 if it has no expert.
double cpu_end(const LayerProblem& problem, const std::uint8_t* on_cpu);

// HybriMoE's schedule (section IV-B): a simulation that always takes the operation that finishes first.
//
// The GPU takes the resident or arrived expert with the most tokens, or waits for the next arrival. The CPU takes the missing expert with
// the fewest tokens and, when none is left, steals the one with the fewest tokens from the GPU's queue. The link transfers the missing
// expert with the most tokens to the GPU's queue. Ties go to the GPU, then to the CPU; of equal loads the first position counts as larger.

class GreedySchedule {
 public:
  // Fills `on_cpu` (experts). An expert that was transferred and then stolen counts as the CPU's; its transfer is not made.
  void split(const LayerProblem& problem, const ExpertGroups& groups, std::uint8_t* on_cpu);

 private:
  enum class State : std::uint8_t { kMissing, kComing, kArrived, kDone };
  struct Coming {
    int rank;
    double arrival_ms;
  };

  void start(const LayerProblem& problem, const ExpertGroups& groups);
  void arrive(double now_ms);
  Coming next_for_gpu(double now_ms);  // rank -1 if there is none
  int next_for_cpu();
  int largest_missing();
  const Coming* first_coming(const std::vector<Coming>& queue, std::size_t& head) const;

  // Experts are numbered by rank; rank 0 has the most tokens. The bounds below skip finished experts.
  std::vector<int> expert_of_;
  std::vector<int> rank_of_;
  std::vector<State> states_;
  std::vector<Coming> in_flight_;
  std::vector<Coming> transferred_;
  std::size_t in_flight_head_ = 0;
  std::size_t transferred_head_ = 0;
  int first_arrived_ = 0;  // no lower rank waits for the GPU
  int first_missing_ = 0;  // no lower rank is missing
  int last_missing_ = 0;  // no higher rank is missing
  int last_left_ = 0;  // every higher rank is done
};

// The near-optimal schedule: the CPU computes the experts that are cheapest on it, up to one threshold among the missing experts and one
// among the resident ones.
//
// If all experts take the same time on the GPU, two thresholds are optimal. After sorting, a sweep over one threshold with the best value
// of the other finds them in linear time. Experts in flight have a third threshold, in order of CPU time or of arrival; the sweep is
// repeated for each of its few positions. Where GPU times differ, moves and swaps close to the thresholds remove most of the remaining gap.
class TwoThresholdSchedule {
 public:
  // Fills `on_cpu` (experts) with a split that is no slower than all experts on the CPU, and no slower than resident experts on the GPU and
  // the others on the CPU.
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
  void sweep_all(const LayerProblem& problem, const ExpertGroups& groups, const std::vector<int>& in_flight, std::uint8_t* on_cpu,
                 Thresholds& best);
  void find_near(const LayerProblem& problem, const Thresholds& best);
  void search_locally(const LayerProblem& problem, const ExpertGroups& groups, std::uint8_t* on_cpu);

  std::vector<int> resident_;  // in ascending order of CPU time
  std::vector<int> missing_;
  std::vector<int> cheapest_;  // experts in flight in ascending order of CPU time
  std::vector<int> latest_;
  std::vector<double> resident_cpu_ms_;  // of the first b residents
  std::vector<double> resident_gpu_ms_;  // of all but the first b residents
  std::vector<double> missing_cpu_ms_;  // of the first a missing
  std::vector<double> arriving_gpu_ms_;  // of the last m missing experts and those in flight
  std::vector<double> arriving_end_ms_;  // when these experts are done on an otherwise idle GPU
  double in_flight_cpu_ms_ = 0.0;
  std::vector<int> near_;  // experts close to a threshold, which may be moved
};

enum class Schedule { kAllCpu, kFixed, kOnDemand, kGreedy, kTwoThreshold };

Schedule parse_schedule(const std::string& name);  // throws std::invalid_argument, whose message lists the known schedules

struct LayerPlan {
  const std::uint8_t* on_cpu;  // (experts)
  const std::int32_t* transfers;  // positions, in the order of their transfer
  int transfer_count;
  double makespan_ms;
};

// Plans layers in memory that it reuses. Problems must have passed `check`.
class Planner {
 public:
  // The plan is stored in this object and valid until the next call.
  LayerPlan plan(const LayerProblem& problem, Schedule schedule);

  // The makespan of any split. Throws std::invalid_argument if it needs more than `max_transfers`.
  double makespan(const LayerProblem& problem, const std::uint8_t* on_cpu);

  // Writes by how many ms the schedule's plan gets shorter when missing experts become resident, one by one in descending load (ties by
  // position). Where an expert gains more than those before it, they share the sum evenly, since it gains only together with them. Experts
  // that are not missing gain 0. `gains_ms`: (experts).
  void gains(const LayerProblem& problem, Schedule schedule, double* gains_ms);

 private:
  void split(const LayerProblem& problem, Schedule schedule);
  void transfer_largest(const LayerProblem& problem);

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
