// Times the planner without Python. Compiled by schedulers.py together with the planner's sources, with the extension's own flags.
#include <chrono>
#include <cstddef>
#include <vector>

#include "scheduler/scheduler.h"

using namespace moegraft;

namespace {

volatile double sink;  // keeps the plans

// Measures microseconds per call in `repeats` passes over all problems, which alternate so that branch prediction does not learn one.
template <typename Call>
void time_passes(int count, int repeats, double* pass_us, const Call& call) {
  using Clock = std::chrono::steady_clock;
  for (int repeat = -1; repeat < repeats; ++repeat) {  // one to warm up
    const auto start = Clock::now();
    for (int i = 0; i < count; ++i) sink = call(i);
    if (repeat >= 0) pass_us[repeat] = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / count;
  }
}

}  // namespace

extern "C" std::size_t problem_bytes() { return sizeof(LayerProblem); }

extern "C" void time_plans(const char* name, const LayerProblem* problems, int count, int repeats, double* pass_us) {
  const Schedule schedule = parse_schedule(name);
  Planner planner;
  time_passes(count, repeats, pass_us, [&](int i) { return planner.plan(problems[i], schedule).makespan_ms; });
}

extern "C" void time_gains(const char* name, const LayerProblem* problems, int count, int repeats, double* pass_us) {
  const Schedule schedule = parse_schedule(name);
  Planner planner;
  std::vector<double> gains_ms(4096);
  time_passes(count, repeats, pass_us, [&](int i) {
    planner.gains(problems[i], schedule, gains_ms.data());
    return gains_ms[0];
  });
}
