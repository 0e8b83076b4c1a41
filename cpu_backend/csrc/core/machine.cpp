#include "core/machine.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif

namespace moegraft {
namespace {

constexpr std::size_t kPage = 4096;  // at least: with larger pages, each is touched several times

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// In ascending order; empty where the system does not report them.
std::vector<int> allowed_cores() {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
#endif
  return cores;
}

// Sibling threads share a line such as "0,64": distinct lines are distinct cores.
int physical_cores() {
  std::set<std::string> cores;
  for (const int core : allowed_cores()) {
    const std::string name = std::to_string(core);
    const std::string siblings = first_line("/sys/devices/system/cpu/cpu" + name + "/topology/thread_siblings_list");
    cores.insert(siblings.empty() ? name : siblings);
  }
  return cores.empty() ? static_cast<int>(std::max(1u, std::thread::hardware_concurrency())) : static_cast<int>(cores.size());
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

// While it lives, this thread runs on a node's cores. Pages that it writes to first are then there, unless a memory policy (numactl) asks for
// others; setting a policy here would need a right that containers lack.
class OnNode {
 public:
  explicit OnNode(const MemoryNode& node) {
#if defined(__linux__)
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (const int core : node.cores) CPU_SET(core, &cores);
    moved_ = sched_getaffinity(0, sizeof earlier_, &earlier_) == 0 && sched_setaffinity(0, sizeof cores, &cores) == 0;
#else
    (void)node;
#endif
  }
  ~OnNode() {
#if defined(__linux__)
    if (moved_) (void)sched_setaffinity(0, sizeof earlier_, &earlier_);
#endif
  }
  OnNode(const OnNode&) = delete;
  OnNode& operator=(const OnNode&) = delete;

 private:
#if defined(__linux__)
  cpu_set_t earlier_;
  bool moved_ = false;
#endif
};

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

std::vector<int> numbers_of_list(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::istringstream ends(range);
    int first = 0, last = 0;
    char dash = 0;
    if (!(ends >> first) || first < 0) return {};
    last = first;
    if (ends >> dash && (dash != '-' || !(ends >> last) || last < first || last - first > 1 << 16)) return {};
    for (int number = first; number <= last; ++number) numbers.push_back(number);
  }
  return numbers;
}

MemoryNodes MemoryNodes::of_system(const std::string& folder) {
  const std::vector<int> allowed = allowed_cores();
  std::vector<MemoryNode> nodes;
  for (const int number : numbers_of_list(first_line(folder + "/online"))) {
    MemoryNode node{number, {}};
    for (const int core : numbers_of_list(first_line(folder + "/node" + std::to_string(number) + "/cpulist")))
      if (std::binary_search(allowed.begin(), allowed.end(), core)) node.cores.push_back(core);
    if (!node.cores.empty()) nodes.push_back(std::move(node));  // others are memory alone
  }
  return nodes.size() > 1 ? MemoryNodes(std::move(nodes)) : groups(1);
}

MemoryNodes MemoryNodes::groups(int count) {
  const std::vector<int> cores = allowed_cores();
  const int all = static_cast<int>(cores.size());
  std::vector<MemoryNode> nodes;
  for (int node = 0; node < count; ++node)
    nodes.push_back({-1, {cores.begin() + first_part(all, node, count), cores.begin() + first_part(all, node + 1, count)}});
  return MemoryNodes(std::move(nodes));
}

MemoryNodes MemoryNodes::for_threads(int threads) const {
  for (int node = 0; node < count() && count() > 1; ++node) {
    const int share = first_part(threads, node + 1, count()) - first_part(threads, node, count());
    const bool full = (*this)[node].number >= 0 && static_cast<int>((*this)[node].cores.size()) < share;
    if (share == 0 || full) return groups(1);
  }
  return *this;
}

void MemoryNodes::place(std::byte* first, int parts, std::size_t part_bytes) const {
  if (!have_memory()) return;
  for (int node = 0; node < count(); ++node) {
    const OnNode there((*this)[node]);
    const auto begin = reinterpret_cast<std::uintptr_t>(first + part_bytes * static_cast<std::size_t>(first_part(parts, node, count())));
    const auto end = reinterpret_cast<std::uintptr_t>(first + part_bytes * static_cast<std::size_t>(first_part(parts, node + 1, count())));
    // Adding nothing writes to the page and not to its bytes, which another thread may be writing.
    for (std::uintptr_t byte = begin; byte < end; byte = (byte / kPage + 1) * kPage)
      __atomic_fetch_or(reinterpret_cast<volatile unsigned char*>(byte), 0, __ATOMIC_RELAXED);
  }
}

}  // namespace moegraft
