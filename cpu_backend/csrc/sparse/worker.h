// What one worker of a SparseJob holds, and how it fetches ahead.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/records.h"
#include "sparse/job.h"

namespace moegraft {

constexpr int kRunNeurons = 64;  // whose rows of down are widened together: a chunk of them is 128 KiB of floats, beside a 1 MiB L2 (EPYC Zen 5)

// The first lines of a row: the rest follows by the hardware's own prefetching, which reads rows that lie apart as fast as they come when it
// has several at once (EPYC Zen 5).
inline void prefetch_start(const std::byte* row) {
  for (int at = 0; at < 256; at += 64) __builtin_prefetch(row + at, 0, 3);
}

inline int first_bit(std::uint32_t mask) { return __builtin_ctz(mask); }

// Consecutive arrays in one piece of memory, each on a line of its own; without memory only their bytes are counted.
class Arrays {
 public:
  explicit Arrays(std::byte* memory) : memory_(memory) {}
  std::size_t bytes() const { return bytes_; }
  template <class Element>
  Element* take(std::size_t count) {
    std::byte* start = memory_ != nullptr ? memory_ + bytes_ : nullptr;
    bytes_ += (count * sizeof(Element) + 63) / 64 * 64;
    return reinterpret_cast<Element*>(start);
  }

 private:
  std::byte* memory_;
  std::size_t bytes_ = 0;
};

struct SparseSizes {
  std::size_t pairs;  // of a segment
  std::size_t neurons;
  std::size_t hidden_words;
  std::size_t hidden;
};

struct SparseJob::Worker {
  Worker(std::byte* memory, const SparseSizes& sizes) {
    Arrays arrays(memory);
    gathered = arrays.take<std::uint32_t>(sizes.pairs * sizes.hidden_words);
    hidden = arrays.take<float>(sizes.hidden);
    ups = arrays.take<float>(sizes.pairs * kGroup);
    row_tokens = arrays.take<int>(sizes.pairs * kGroup);
    lanes = arrays.take<const std::uint32_t*>(sizes.pairs);
    outs = arrays.take<float*>(sizes.pairs);
    neurons = arrays.take<int>(sizes.neurons);
    items = arrays.take<std::uint32_t>(std::size_t{kRunNeurons + 1} * kChunk);
    coefficients = arrays.take<std::uint32_t>(sizes.pairs * kRunNeurons);
    picked = arrays.take<int>(sizes.pairs * (kRunNeurons + 1));
    picked_counts = arrays.take<int>(sizes.pairs);
    bytes = arrays.bytes();
  }

  std::size_t bytes;
  std::uint32_t* gathered;         // the records of one segment, tile by tile
  float* hidden;                   // one token's, while encoding
  float* ups;                      // (pairs, 32)
  int* row_tokens;                 // (32, pairs): for which of a segment's pairs a neuron is active
  const std::uint32_t** lanes;     // pointers of one call of a kernel
  float** outs;
  int* neurons;                    // of one segment, those that are active
  std::uint32_t* items;
  std::uint32_t* coefficients;     // (pairs, items)
  int* picked;                     // (pairs, items and one)
  int* picked_counts;              // -1: all items
  int gathered_segment = -1;
  // 32 neurons whose active rows of up are being fetched while the next gate rows are computed.
  const Segment* pending = nullptr;
  int pending_group = 0;
  std::uint32_t pending_active = 0;
  std::uint32_t active = 0;        // of the group whose gate was computed last
  std::int64_t active_neurons = 0;
  alignas(64) float rows[kMostTileTokens * kBlockRows];
  alignas(64) float acted[kMostTileTokens * kBlockRows];
};

}  // namespace moegraft
