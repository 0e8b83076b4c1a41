// The neurons phase of a sparse job: gate for all tokens, then up for the active neurons.
#include <algorithm>
#include <cstring>

#include "experts/prefetch.h"
#include "sparse/job.h"
#include "sparse/worker.h"

namespace moegraft {
namespace {

// Share of a group's products that are wanted, up to which the rows are multiplied with their own tokens alone (tuned on EPYC Zen 5).
constexpr float kPickedShare = 0.25f;

constexpr int kMostPicked = 64;  // tokens in one call

// Neurons by fours (kernels' rows at once), as a kernel takes them.
struct RowBatch {
  int neurons[kMostRows];
  int count;
};

RowBatch take_rows(std::uint32_t& left, int most) {
  RowBatch batch{};
  for (; left != 0 && batch.count < most; left &= left - 1) batch.neurons[batch.count++] = first_bit(left);
  return batch;
}

void prefetch_starts(const std::byte* rows, std::size_t row_bytes, const RowBatch& batch) {
  for (int i = 0; i < batch.count; ++i) prefetch_start(rows + row_bytes * static_cast<std::size_t>(batch.neurons[i]));
}

}  // namespace

void SparseJob::compute_neurons(int unit, Worker& mine) {
  const int segment_index = unit / neuron_groups_;
  const int group = unit % neuron_groups_;
  const Segment& segment = batch_.routing->segments()[static_cast<std::size_t>(segment_index)];
  if (mine.gathered_segment != segment_index) {
    const Records hidden = {reinterpret_cast<const std::uint32_t*>(scratch_.records->data()), hidden_words_,
                            static_cast<std::size_t>(words_per_group(format_))};
    gather_segment(hidden, batch_.routing->pairs().data() + segment.first_pair, Tiling(segment.pairs, max_tokens_), mine.gathered);
    mine.gathered_segment = segment_index;
  }
  compute_gate(segment, group, mine);
  const std::uint32_t active = mine.active;
  masks_[static_cast<std::size_t>(segment_index) * neuron_groups_ + group] = active;
  if (experts_.shape().gated) {
    const std::byte* rows = experts_.expert(segment.expert) + layout_.up_offset + layout_.neuron_bytes * static_cast<std::size_t>(group * kGroup);
    std::uint32_t ahead = active;
    prefetch_starts(rows, layout_.neuron_bytes, take_rows(ahead, kernels_.rows.dot_rows_at_once));
  }
  compute_pending(mine);
  mine.pending = &segment;
  mine.pending_group = group;
  mine.pending_active = active;
}

void SparseJob::compute_gate(const Segment& segment, int group, Worker& mine) {
  const ExpertsShape& shape = experts_.shape();
  const std::byte* expert = experts_.expert(segment.expert);
  const std::byte* block = expert + layout_.gate_up_block_bytes * static_cast<std::size_t>(group);
  const std::size_t bias_offset = shape.gated ? layout_.gate_bias_offset : layout_.up_bias_offset;
  const auto* bias = shape.bias ? reinterpret_cast<const float*>(expert + bias_offset) + group * kGroup : nullptr;
  const int present = std::min(kGroup, shape.intermediate - group * kGroup);
  const std::uint32_t exists = 0xffffffffu >> (kGroup - present);
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const Records hidden = {reinterpret_cast<const std::uint32_t*>(scratch_.records->data()), hidden_words_,
                          static_cast<std::size_t>(words_per_group(format_))};
  const Tiling tiling(segment.pairs, max_tokens_);
  mine.active = 0;
  for (int index = 0; index < tiling.count(); ++index) {
    const Tile tile = tiling[index];
    TileArgs args = tile_args(block, type_, hidden_groups_, tile, index, tiling.count());
    args.records = tile_records(hidden, pairs, tile, mine.gathered);
    args.out = mine.rows;
    kernels_.tile[static_cast<int>(format_)](args);
    const GateArgs gate = {&experts_.gate(), mine.rows, shape.gated ? bias : nullptr, bias, tile.tokens, false, mine.acted};
    shape.gated ? kernels_.act(gate) : kernels_.gate(gate);
    for (int token = 0; token < tile.tokens; ++token) {
      float* neurons = neurons_of(segment.first_pair + tile.first + token) + group * kGroup;
      std::memcpy(neurons, mine.acted + token * kBlockRows, sizeof(float) * kGroup);
      const std::uint32_t reached = kernels_.rows.reached(neurons, args_.threshold) & exists;
      mine.active |= reached;
      mine.active_neurons += __builtin_popcount(reached);
      if (args_.acted == nullptr) continue;
      const std::size_t slot = first_token_ * static_cast<std::size_t>(args_.top_k) + static_cast<std::size_t>(pairs[tile.first + token].slot);
      std::memcpy(args_.acted + slot * static_cast<std::size_t>(shape.intermediate) + group * kGroup, neurons, sizeof(float) * static_cast<std::size_t>(present));
    }
  }
}

void SparseJob::compute_pending(Worker& mine) {
  if (mine.pending == nullptr) return;
  compute_up(*mine.pending, mine.pending_group, mine.pending_active, mine);
  mine.pending = nullptr;
}

void SparseJob::compute_up(const Segment& segment, int group, std::uint32_t active, Worker& mine) {
  const ExpertsShape& shape = experts_.shape();
  const std::byte* expert = experts_.expert(segment.expert);
  const auto* bias = shape.bias ? reinterpret_cast<const float*>(expert + layout_.up_bias_offset) + group * kGroup : nullptr;
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const int present = std::min(kGroup, shape.intermediate - group * kGroup);
  if (shape.gated) {
    const std::byte* rows = expert + layout_.up_offset + layout_.neuron_bytes * static_cast<std::size_t>(group * kGroup);
    int wanted = 0;
    for (int i = 0; i < segment.pairs; ++i)
      wanted += __builtin_popcount(active & kernels_.rows.reached(neurons_of(segment.first_pair + i) + group * kGroup, args_.threshold));
    const bool most = static_cast<float>(wanted) > kPickedShare * static_cast<float>(__builtin_popcount(active) * segment.pairs);
    for (int i = 0; i < segment.pairs; ++i) mine.outs[i] = mine.ups + i * kGroup;
    for (int i = 0; i < segment.pairs; ++i) mine.lanes[i] = lanes_of(pairs[i].token);
    most ? dot_all_tokens(segment, rows, active, mine) : dot_active_tokens(segment, rows, group, active, mine);
  }
  for (int i = 0; i < segment.pairs; ++i) {
    float* neurons = neurons_of(segment.first_pair + i) + group * kGroup;
    kernels_.rows.finish({&experts_.gate(), args_.threshold, pairs[i].weight, shape.gated ? mine.ups + i * kGroup : nullptr, bias, neurons});
    // Padded neurons come from padded rows: an infinite activation would leave a NaN in them.
    if (present < kGroup) std::memset(neurons + present, 0, sizeof(float) * static_cast<std::size_t>(kGroup - present));
  }
}

// The products of neurons that are inactive for a token are not looked at.
void SparseJob::dot_all_tokens(const Segment& segment, const std::byte* rows, std::uint32_t active, Worker& mine) const {
  const int at_once = kernels_.rows.dot_rows_at_once;
  RowBatch next = take_rows(active, at_once);  // these are on their way already
  while (next.count > 0) {
    const RowBatch batch = next;
    next = take_rows(active, at_once);
    // A lone token's rows are always read together: what is missing is the last one again.
    const int count = segment.pairs == 1 ? at_once : batch.count;
    RowDotsArgs args = {{}, {}, count, segment.pairs, mine.lanes, mine.outs, scale_bytes_, chunks_, nullptr};
    const std::byte* ahead[kMostRows];
    for (int i = 0; i < count; ++i) {
      args.places[i] = batch.neurons[std::min(i, batch.count - 1)];
      args.rows[i] = rows + layout_.neuron_bytes * static_cast<std::size_t>(args.places[i]);
      ahead[i] = i < next.count ? rows + layout_.neuron_bytes * static_cast<std::size_t>(next.neurons[i]) : args.rows[i];
    }
    // Several tokens compute for long, while the next rows may come whole.
    if (segment.pairs > 1) args.ahead = ahead;
    else prefetch_starts(rows, layout_.neuron_bytes, next);
    kernels_.rows.dot_rows[static_cast<int>(format_)](args);
  }
}

void SparseJob::dot_active_tokens(const Segment& segment, const std::byte* rows, int group, std::uint32_t active, Worker& mine) const {
  int counts[kGroup] = {};
  for (int i = 0; i < segment.pairs; ++i) {
    std::uint32_t own = active & kernels_.rows.reached(neurons_of(segment.first_pair + i) + group * kGroup, args_.threshold);
    for (; own != 0; own &= own - 1) {
      const int neuron = first_bit(own);
      mine.row_tokens[neuron * segment.pairs + counts[neuron]++] = i;
    }
  }
  std::uint32_t ahead = active;
  take_rows(ahead, kernels_.rows.dot_rows_at_once);  // these are on their way already
  const std::uint32_t* lanes[kMostPicked];
  float* outs[kMostPicked];
  for (; active != 0; active &= active - 1) {
    const int neuron = first_bit(active);
    const std::byte* next = rows + layout_.neuron_bytes * static_cast<std::size_t>(first_bit(ahead != 0 ? ahead : active));
    ahead &= ahead - (ahead != 0);
    for (int first = 0; first < counts[neuron]; first += kMostPicked) {
      const int tokens = std::min(kMostPicked, counts[neuron] - first);
      const int* own = mine.row_tokens + neuron * segment.pairs + first;
      for (int i = 0; i < tokens; ++i) lanes[i] = mine.lanes[own[i]];
      for (int i = 0; i < tokens; ++i) outs[i] = mine.outs[own[i]];
      const std::byte* row = rows + layout_.neuron_bytes * static_cast<std::size_t>(neuron);
      kernels_.rows.dot_rows[static_cast<int>(format_)]({{row}, {neuron}, 1, tokens, lanes, outs, scale_bytes_, chunks_, &next});
    }
  }
}

}  // namespace moegraft
