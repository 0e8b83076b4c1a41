// What this process may use: threads, by physical cores, affinity and container quota, and memory nodes.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace moegraft {

// Cores that the quota text of cgroup v2's cpu.max allows ("max 100000", "150000 100000"); 0: no limit or not understood.
int cores_of_cpu_max(const std::string& text);

// One thread for each physical core in this process's affinity, at most the container's CPU quota, at least 1.
int default_threads();

// The memory nodes (NUMA) of a machine, such as its sockets: cores with memory of their own, which others read more slowly.
//
// The rows of each matrix are divided over the nodes, in contiguous ranges, and the workers of a node begin with its own (thread_pool.h).
// There is one copy of the weights in all. As rows are divided in the down projection too, no sums are added across nodes, and results are
// to the bit those of one node; nodes exchange activations instead, which are as small.
struct MemoryNode {
  int number;              // the system's; -1: it has no memory of its own
  std::vector<int> cores;  // of it that this process may use
};

// Numbers of a list such as "0-3,8"; none where it is not understood.
std::vector<int> numbers_of_list(const std::string& text);

class MemoryNodes {
 public:
  // The nodes in `folder` with cores that this process may use; one without number where the system does not list them.
  static MemoryNodes of_system(const std::string& folder = "/sys/devices/system/node");
  // The cores that this process may use in `count` groups, of which none has memory of its own.
  static MemoryNodes groups(int count);

  // Itself where each node has a thread, and cores for its share of the threads, else one node with all cores.
  MemoryNodes for_threads(int threads) const;

  int count() const { return static_cast<int>(nodes_.size()); }
  // Whether there are several, each with memory of its own.
  bool have_memory() const { return count() > 1 && nodes_[0].number >= 0; }
  const MemoryNode& operator[](int node) const { return nodes_[static_cast<std::size_t>(node)]; }

  // `count` parts of equal size are divided in ranges that begin here and end where the next node's begins.
  static int first_part(int count, int node, int nodes) { return static_cast<int>(static_cast<long long>(count) * node / nodes); }
  static int node_of_part(int part, int count, int nodes) {
    return static_cast<int>((static_cast<long long>(part + 1) * nodes - 1) / count);
  }

  // Writes first to every page of `parts` parts of `part_bytes` bytes from `first` on, each from a core of its node, where the system then puts
  // it. A page across a boundary goes to the lower node. Nodes without memory of their own change nothing.
  void place(std::byte* first, int parts, std::size_t part_bytes) const;

 private:
  explicit MemoryNodes(std::vector<MemoryNode> nodes) : nodes_(std::move(nodes)) {}
  std::vector<MemoryNode> nodes_;
};

}  // namespace moegraft
