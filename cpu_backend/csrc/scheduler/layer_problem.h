// One layer's active experts and what each costs where, and how long a split of them takes. All times are ms from now.
//
// The CPU computes its experts one after another and pays `first_cpu_ms` once. The link brings one missing expert each `transfer_ms`. The
// GPU computes resident experts first and the others as they arrive.
#pragma once

#include <cstdint>
#include <vector>

namespace moegraft {

struct LayerProblem {
  int experts;
  const std::int32_t* loads;  // tokens
  const double* cpu_ms;
  const double* gpu_ms;
  const double* arrival_ms;  // 0: on the GPU; finite: on its way, lands then; infinite: not on the GPU
  double transfer_ms;
  double first_cpu_ms;
  double cpu_free_ms;
  double gpu_free_ms;
  double link_free_ms;
  int max_transfers;
};

// Throws std::invalid_argument, naming the value, where a cost, a time or a count is negative or not a number. Costs may be infinite.
void check(const LayerProblem& problem);

// Most tokens first; of equal loads the first position.
void sort_by_load(const LayerProblem& problem, std::vector<int>& experts);

// The experts by where they are, each group in the order in which the GPU takes them. For a given split these orders are optimal: transfers
// of equal length go in descending GPU time (Johnson's rule), and the GPU takes what arrives first.
class ExpertGroups {
 public:
  void sort(const LayerProblem& problem);
  const std::vector<int>& resident() const { return resident_; }
  const std::vector<int>& in_flight() const { return in_flight_; }  // by arrival
  const std::vector<int>& missing() const { return missing_; }      // by GPU time, longest first; ties: CPU time, load, position

  // When the last expert is done. `on_cpu` (experts): 1 on the CPU, 0 on the GPU. A device without an expert is done at 0.
  double makespan(const LayerProblem& problem, const std::uint8_t* on_cpu) const;

 private:
  double gpu_end(const LayerProblem& problem, const std::uint8_t* on_cpu) const;

  std::vector<int> resident_;
  std::vector<int> in_flight_;
  std::vector<int> missing_;
};

// When the CPU is done, 0 where it has nothing to do.
double cpu_end(const LayerProblem& problem, const std::uint8_t* on_cpu);

}  // namespace moegraft
