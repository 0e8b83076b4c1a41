#include "core/machine.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace moegraft {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Sibling threads share a line such as "0,64": distinct lines are distinct cores.
int physical_cores() {
#if defined(__linux__)
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed)) continue;
      const std::string name = std::to_string(cpu);
      const std::string siblings = first_line("/sys/devices/system/cpu/cpu" + name + "/topology/thread_siblings_list");
      cores.insert(siblings.empty() ? name : siblings);
    }
    if (!cores.empty()) return static_cast<int>(cores.size());
  }
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// The tightest quota from this process's cgroup up to the root.
int quota_cores() {
  int tightest = 0;
  const auto take = [&](int cores) {
    if (cores > 0) tightest = tightest == 0 ? cores : std::min(tightest, cores);
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    for (std::string path = line.substr(3); !path.empty(); path.resize(path.find_last_of('/')))
      take(cores_of_cpu_max(first_line("/sys/fs/cgroup" + path + "/cpu.max")));
  }
  take(cores_of_cpu_max(first_line("/sys/fs/cgroup/cpu.max")));
  const std::string quota = first_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");  // cgroup v1
  if (!quota.empty()) take(cores_of_cpu_max(quota + " " + first_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us")));
  return tightest;
}

}  // namespace

int cores_of_cpu_max(const std::string& text) {
  std::istringstream words(text);
  double quota = 0.0, period = 0.0;
  if (!(words >> quota >> period) || quota <= 0.0 || period <= 0.0) return 0;
  return std::max(1, static_cast<int>(std::floor(quota / period)));
}

int default_threads() {
  const int cores = physical_cores();
  const int quota = quota_cores();
  return quota > 0 ? std::min(cores, quota) : cores;
}

}  // namespace moegraft
