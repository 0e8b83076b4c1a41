// Memory nodes that the machine of the test lacks: nodes of a folder, the cores on which placing pages touches them, and the order in which
// workers take units. Linked with --wrap=sched_setaffinity. Prints each check that fails.
#include "core/machine.h"

#include <sched.h>

#include <cstdio>
#include <cstring>
#include <set>
#include <vector>

#include "core/thread_pool.h"
#include "experts/packed_weights.h"

namespace {

std::vector<std::vector<int>> bound;  // the cores to which this thread was bound, in order
int failures = 0;

std::vector<int> cores_in(const cpu_set_t& set) {
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

void check(bool right, const char* what) {
  if (right) return;
  std::printf("%s\n", what);
  ++failures;
}

}  // namespace

extern "C" int __wrap_sched_setaffinity(pid_t, std::size_t, const cpu_set_t* set) {
  bound.push_back(cores_in(*set));
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
  cpu_set_t earlier;
  sched_getaffinity(0, sizeof earlier, &earlier);
  const std::vector<int> own = cores_in(earlier);
  check(bound == std::vector<std::vector<int>>({nodes[0].cores, own, nodes[1].cores, own}), "on each node's cores, and then on its own");
  for (const unsigned char byte : memory) check(byte == 7, "contents that placing changed");
  bound.clear();
  for (const int groups : {1, 2}) MemoryNodes::groups(groups).place(reinterpret_cast<std::byte*>(memory.data()), 10, 6000);
  check(bound.empty(), "nodes without memory of their own");
}

// Packed weights that are divided have the bytes of those that are not, and their pages are touched on both nodes.
void check_weights(const char* folder) {
  using namespace moegraft;
  const MemoryNodes nodes = MemoryNodes::of_system(folder);
  constexpr int kRows = 1000;
  for (const ExpertsShape& shape : {ExpertsShape{3, 544, 200, true, false}, ExpertsShape{2, 64, 32, false, false}}) {
    PackedExperts whole(shape, GateSpec{}, {WeightType::kInt8, WeightType::kInt8}), divided(shape, GateSpec{}, whole.types());
    PackedLinear whole_linear(kRows, shape.hidden, WeightType::kInt8), divided_linear(kRows, shape.hidden, WeightType::kInt8);
    divided.divide(nodes);
    divided_linear.divide(nodes);
    check(bound.size() == 4, "rows of a linear layer, on both nodes");
    bound.clear();
    for (PackedExperts* experts : {&whole, &divided})
      for (int expert = 0; expert < shape.num_experts; ++expert)
        for (const Part part : {Part::kGate, Part::kUp, Part::kDown}) {
          if (part == Part::kGate && !shape.gated) continue;
          std::vector<float> rows(static_cast<std::size_t>(shape.hidden) * static_cast<std::size_t>(shape.intermediate));
          for (std::size_t i = 0; i < rows.size(); ++i)
            rows[i] = static_cast<float>((i * 37 + static_cast<std::size_t>(expert)) % 101) - 50.0f;
          experts->pack(expert, part, {rows.data(), WeightType::kFloat32, experts->rows_of(part), experts->cols_of(part)});
        }
    check(static_cast<int>(bound.size()) == 4 * shape.num_experts * (shape.gated ? 3 : 2), "each matrix of an expert, on both nodes");
    check(std::memcmp(whole.data(), divided.data(), whole.bytes()) == 0, "the bytes of experts");
    const std::vector<float> rows(static_cast<std::size_t>(kRows) * static_cast<std::size_t>(shape.hidden), 1.5f);
    for (PackedLinear* linear : {&whole_linear, &divided_linear}) linear->pack({rows.data(), WeightType::kFloat32, kRows, shape.hidden});
    check(std::memcmp(whole_linear.block(0), divided_linear.block(0), whole_linear.bytes()) == 0, "the bytes of a linear layer");
    bound.clear();
  }
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
  check_weights(arguments[1]);
  for (const int workers : {1, 2, 3, 8})
    for (const int nodes : {1, 2, 3})
      for (const int inner : {1, 2, 7, 24})
        for (const bool alone : {false, true})
          if (nodes <= workers) check_units(workers, nodes, 5, inner, alone);
  return failures == 0 ? 0 : 1;
}
