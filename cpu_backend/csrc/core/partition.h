// Who owns which units of work, as pure arithmetic.
//
// On a machine of several NUMA nodes each node is to own the same rows of every expert, in proportion to its threads: the weights are then
// spread once over the nodes' memories, and each node's threads read what lies there. `partition_blocks` says which blocks of rows those
// are; a pool of one node, all that has been run so far, owns everything.
#pragma once

#include <stdexcept>
#include <vector>

namespace moegraft {

struct UnitRange {
  int first;
  int end;
};

// The share of `mine` threads among `all`, where `before` threads stand in front of them: contiguous, and every unit has one owner.
constexpr UnitRange share_of(int units, int before, int mine, int all) {
  return {static_cast<int>(static_cast<long long>(units) * before / all), static_cast<int>(static_cast<long long>(units) * (before + mine) / all)};
}

// The blocks of each node. Throws std::invalid_argument when there is no thread at all.
inline std::vector<UnitRange> partition_blocks(int blocks, const std::vector<int>& threads_of_nodes) {
  int all = 0;
  for (const int threads : threads_of_nodes) {
    if (threads < 0 || blocks < 0) throw std::invalid_argument("partition_blocks: counts must not be negative");
    all += threads;
  }
  if (all == 0) throw std::invalid_argument("partition_blocks: no node has a thread");
  std::vector<UnitRange> ranges;
  int before = 0;
  for (const int threads : threads_of_nodes) {
    ranges.push_back(share_of(blocks, before, threads, all));
    before += threads;
  }
  return ranges;
}

}  // namespace moegraft
