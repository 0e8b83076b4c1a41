// Memory nodes that the machine of the test lacks: nodes of a folder, the policies that placing pages asks the system for, and the order in
// which workers take units. Linked with --wrap=syscall. Prints each check that fails.
#include "core/machine.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <set>
#include <vector>

#include "core/thread_pool.h"

namespace {

struct Policy {
  int mode;
  unsigned long nodes;
};
std::vector<Policy> policies;  // that were set
Policy current = {MPOL_INTERLEAVE, 3};  // as under numactl --interleave=all
int failures = 0;

void check(bool right, const char* what) {
  if (right) return;
  std::printf("%s\n", what);
  ++failures;
}

}  // namespace

extern "C" long __wrap_syscall(long number, ...) {
  va_list arguments;
  va_start(arguments, number);
  if (number == SYS_get_mempolicy) {
    *va_arg(arguments, int*) = current.mode;
    *va_arg(arguments, unsigned long*) = current.nodes;
  } else if (number == SYS_set_mempolicy) {
    current.mode = va_arg(arguments, int);
    current.nodes = *va_arg(arguments, unsigned long*);
    policies.push_back(current);
  } else {
    check(false, "an unexpected system call");
  }
  va_end(arguments);
  return 0;
}

namespace {

using moegraft::MemoryNodes;

void check_lists() {
  using moegraft::numbers_of_list;
  check(numbers_of_list("0-3,8") == std::vector<int>({0, 1, 2, 3, 8}), "a list of ranges");
  check(numbers_of_list("").empty() && numbers_of_list("a").empty() && numbers_of_list("3-1").empty(), "no list");
}

void check_parts() {
  for (int nodes = 1; nodes <= 5; ++nodes)
    for (int count = 1; count <= 40; ++count)
      for (int part = 0; part < count; ++part) {
        const int node = MemoryNodes::node_of_part(part, count, nodes);
        check(MemoryNodes::first_part(count, node, nodes) <= part && part < MemoryNodes::first_part(count, node + 1, nodes),
              "a part's node");
      }
}

void check_system(const char* folder) {
  const MemoryNodes nodes = MemoryNodes::of_system(folder);
  check(nodes.count() == 2 && nodes[0].number == 0 && nodes[1].number == 2, "nodes with cores, of the folder");
  check(nodes.for_threads(2).count() == 2 && nodes.for_threads(1).count() == 1, "as many nodes as threads");
  check(nodes.for_threads(64).count() == 1, "a node with fewer cores than threads");
  check(MemoryNodes::of_system("/no/such/folder").count() == 1, "a system without nodes");

  std::vector<unsigned char> memory(10 * 6000, 7);  // parts that end within pages
  nodes.place(reinterpret_cast<std::byte*>(memory.data()), 10, 6000);
  check(policies.size() == 4, "a policy for each node, and the earlier one after it");
  if (policies.size() != 4) return;
  check(policies[0].mode == MPOL_PREFERRED && policies[0].nodes == 1, "the first node's pages");
  check(policies[2].mode == MPOL_PREFERRED && policies[2].nodes == 1ul << 2, "the second node's pages");
  for (const int after : {1, 3}) check(policies[after].mode == MPOL_INTERLEAVE && policies[after].nodes == 3, "the thread's own policy");
  for (const unsigned char byte : memory) check(byte == 7, "contents that placing changed");
  policies.clear();
  MemoryNodes::groups(1).place(reinterpret_cast<std::byte*>(memory.data()), 10, 6000);
  check(policies.empty(), "one node needs no policy");
}

// Takes all units as workers that are equally fast, or as one that is alone: each takes its node's until none is left.
void check_units(int workers, int nodes, int outer, int inner, bool alone) {
  moegraft::Phase phase(workers, nodes);
  const auto node_of = [&](int unit) { return MemoryNodes::node_of_part(unit % inner, inner, nodes); };
  phase.reset_by_node(outer * inner, node_of);
  std::vector<int> left(static_cast<std::size_t>(nodes));
  for (int unit = 0; unit < outer * inner; ++unit) ++left[static_cast<std::size_t>(node_of(unit))];
  std::set<int> seen;
  const auto take = [&](int worker) {
    const int unit = phase.take(worker);
    if (unit < 0) return false;
    check(unit < outer * inner && seen.insert(unit).second, "a unit that is taken once");
    const int own = MemoryNodes::node_of_part(worker, workers, nodes);
    check(node_of(unit) == own || left[static_cast<std::size_t>(own)] == 0, "a unit of another node while the own one has units");
    --left[static_cast<std::size_t>(node_of(unit))];
    return true;
  };
  if (alone)
    while (take(0)) {
    }
  for (bool more = !alone; more;) {
    more = false;
    for (int worker = 0; worker < workers; ++worker) more = take(worker) || more;
  }
  check(static_cast<int>(seen.size()) == outer * inner, "units that nobody takes");
}

}  // namespace

int main(int, char** arguments) {
  check_lists();
  check_parts();
  check_system(arguments[1]);
  for (const int workers : {1, 2, 3, 8})
    for (const int nodes : {1, 2, 3})
      for (const int inner : {1, 2, 7, 24})
        for (const bool alone : {false, true})
          if (nodes <= workers) check_units(workers, nodes, 5, inner, alone);
  return failures == 0 ? 0 : 1;
}
