#include "experts/job.h"

#include <algorithm>
#include <cstring>

#include "experts/routing.h"

namespace moegraft {
namespace {

// Bytes of a segment's activations; a unit's weights need the remainder of the 1 MiB L2 (EPYC Zen 5).
constexpr std::size_t kSegmentBytes = std::size_t{384} << 10;
constexpr int kUnitsPerWorker = 4;  // of the last phase: enough for balance, few enough for long sequential reads
constexpr int kMaxUnitBlocks = 8;

}  // namespace

struct ExpertsJob::Worker {
  explicit Worker(std::byte* memory, std::size_t gathered_words)
      : gathered(reinterpret_cast<std::uint32_t*>(memory)), sums(reinterpret_cast<float*>(memory + gathered_words * 4)) {}

  std::uint32_t* gathered;  // the records of one segment, tile by tile
  float* sums;  // (tokens, unit rows); also one token's hidden state while encoding
  int gathered_segment = -1;
  alignas(64) float rows[kMaxTileTokens * kBlockRows];
  alignas(64) float neurons[kMaxTileTokens * kBlockRows];
};

ExpertsJob::ExpertsJob(const Kernels& kernels, const PackedExperts& experts, ActivationType activations, int workers,
                       const ExpertsPhases& phases)
    : kernels_(kernels),
      experts_(experts),
      layout_(experts.layout()),
      activations_(activations),
      format_(format_of(experts.types().gate_up, activations)),
      down_format_(format_of(experts.types().down, activations)),
      workers_(workers),
      phases_(phases),
      max_tokens_(std::min(kernels.max_tokens[static_cast<int>(format_)], kernels.max_tokens[static_cast<int>(down_format_)])),
      hidden_groups_(round_up(experts.shape().hidden, kGroup) / kGroup),
      neuron_groups_(layout_.neurons / kGroup),
      hidden_words_(static_cast<std::size_t>(hidden_groups_) * words_per_group(format_)),
      neuron_words_(static_cast<std::size_t>(neuron_groups_) * words_per_group(down_format_)) {}

int ExpertsJob::segment_pairs() const {
  const int fitting = static_cast<int>(kSegmentBytes / (hidden_words_ * 4));
  return std::max(1, fitting / max_tokens_) * max_tokens_;
}

void ExpertsJob::prepare(const ExpertsBatch& batch, const ExpertsScratch& scratch) {
  batch_ = batch;
  scratch_ = scratch;
  const std::size_t tokens = static_cast<std::size_t>(batch.tokens);
  const std::size_t segments = batch.routing->segments().size();
  unit_blocks_ = std::clamp(layout_.down_blocks / (workers_ * kUnitsPerWorker), 1, kMaxUnitBlocks);
  scratch.records->reserve(tokens * hidden_words_ * 4);
  scratch.neurons->reserve(batch.routing->pairs().size() * neuron_words_ * 4);
  const std::size_t sums =
      std::max(tokens * static_cast<std::size_t>(unit_blocks_) * kBlockRows, static_cast<std::size_t>(hidden_groups_) * kGroup);
  for (int worker = 0; worker < workers_; ++worker)
    scratch.workers[worker].reserve((static_cast<std::size_t>(segment_pairs()) * hidden_words_ + sums) * 4);
  phases_.encode->reset(batch.tokens);
  phases_.neurons->reset(static_cast<int>(segments) * neuron_groups_);
  phases_.rows->reset((layout_.down_blocks + unit_blocks_ - 1) / unit_blocks_);
}

void ExpertsJob::run(int worker) noexcept {
  Worker mine(scratch_.workers[worker].data(), static_cast<std::size_t>(segment_pairs()) * hidden_words_);
  const auto work = [&](Phase& phase, void (ExpertsJob::*compute)(int, Worker&)) {
    int count = 0;
    for (int unit = phase.take(worker); unit >= 0; unit = phase.take(worker), ++count) (this->*compute)(unit, mine);
    phase.finish(count);
  };
  work(*phases_.encode, &ExpertsJob::encode_token);
  phases_.encode->wait();
  work(*phases_.neurons, &ExpertsJob::compute_neurons);
  phases_.neurons->wait();
  work(*phases_.rows, &ExpertsJob::compute_rows);
  phases_.rows->wait();
}

void ExpertsJob::encode_token(int token, Worker& mine) {
  const int hidden = experts_.shape().hidden;
  const int padded = hidden_groups_ * kGroup;
  kernels_.widen(activations_, batch_.hidden_states + element_bytes(activations_) * static_cast<std::size_t>(token) * hidden, mine.sums,
                 hidden);
  std::memset(mine.sums + hidden, 0, sizeof(float) * static_cast<std::size_t>(padded - hidden));
  auto* record = reinterpret_cast<std::uint32_t*>(scratch_.records->data()) + static_cast<std::size_t>(token) * hidden_words_;
  kernels_.encode[static_cast<int>(format_)](mine.sums, hidden_groups_, record, static_cast<std::size_t>(words_per_group(format_)));
}

void ExpertsJob::compute_neurons(int unit, Worker& mine) {
  const int segment_index = unit / neuron_groups_;
  const int group = unit % neuron_groups_;
  const Segment& segment = batch_.routing->segments()[static_cast<std::size_t>(segment_index)];
  const ExpertsShape& shape = experts_.shape();
  const std::byte* expert = experts_.expert(segment.expert);
  const auto* gate_bias =
      shape.bias && shape.gated ? reinterpret_cast<const float*>(expert + layout_.gate_bias_offset) + group * kGroup : nullptr;
  const auto* up_bias = shape.bias ? reinterpret_cast<const float*>(expert + layout_.up_bias_offset) + group * kGroup : nullptr;
  const int blocks = shape.gated ? 2 : 1;
  const int width = kGroup / blocks;
  const int present = std::min(kGroup, shape.intermediate - group * kGroup);
  auto* records = reinterpret_cast<std::uint32_t*>(scratch_.neurons->data()) + static_cast<std::size_t>(segment.first_pair) * neuron_words_;
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const Records hidden = {reinterpret_cast<const std::uint32_t*>(scratch_.records->data()), hidden_words_,
                          static_cast<std::size_t>(words_per_group(format_))};
  const Tiling tiling(segment.pairs, max_tokens_);
  if (mine.gathered_segment != segment_index) gather_segment(hidden, pairs, tiling, mine.gathered);
  mine.gathered_segment = segment_index;
  for (int index = 0; index < tiling.count(); ++index) {
    const Tile tile = tiling[index];
    for (int b = 0; b < blocks; ++b) {
      const std::byte* block = expert + layout_.gate_up_block_bytes * static_cast<std::size_t>(group * blocks + b);
      TileArgs args = tile_args(block, experts_.types().gate_up, hidden_groups_, tile, index, tiling.count());
      args.records = tile_records(hidden, pairs, tile, mine.gathered);
      args.out = mine.rows;
      kernels_.tile[static_cast<int>(format_)](args);
      kernels_.gate({&experts_.gate(), mine.rows, gate_bias ? gate_bias + b * width : nullptr, up_bias ? up_bias + b * width : nullptr,
                     tile.tokens, shape.gated, mine.neurons + b * width});
    }
    std::uint32_t* words = records + static_cast<std::size_t>(tile.first) * neuron_words_ +
                           static_cast<std::size_t>(group) * words_per_group(down_format_) * tile.tokens;
    for (int token = 0; token < tile.tokens; ++token) {
      float* neurons = mine.neurons + token * kBlockRows;
      // Padded neurons come from padded rows, in which an infinite activation would leave a NaN.
      if (present < kGroup) std::memset(neurons + present, 0, sizeof(float) * static_cast<std::size_t>(kGroup - present));
      kernels_.encode[static_cast<int>(down_format_)](neurons, 1, words + token * words_per_group(down_format_), 0);
    }
  }
}

void ExpertsJob::compute_rows(int unit, Worker& mine) {
  const ExpertsShape& shape = experts_.shape();
  const int first_block = unit * unit_blocks_;
  const int blocks = std::min(unit_blocks_, layout_.down_blocks - first_block);
  const int rows = blocks * kBlockRows;
  std::memset(mine.sums, 0, sizeof(float) * static_cast<std::size_t>(batch_.tokens) * rows);
  for (const Segment& segment : batch_.routing->segments()) {
    const std::byte* expert = experts_.expert(segment.expert);
    const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
    const auto* records =
        reinterpret_cast<const std::uint32_t*>(scratch_.neurons->data()) + static_cast<std::size_t>(segment.first_pair) * neuron_words_;
    const auto* bias = shape.bias ? reinterpret_cast<const float*>(expert + layout_.down_bias_offset) : nullptr;
    const Tiling tiling(segment.pairs, max_tokens_);
    for (int b = 0; b < blocks; ++b) {
      const std::byte* block = expert + layout_.down_offset + layout_.down_block_bytes * static_cast<std::size_t>(first_block + b);
      const float* block_bias = bias ? bias + (first_block + b) * kBlockRows : nullptr;
      for (int index = 0; index < tiling.count(); ++index) {
        const Tile tile = tiling[index];
        TileArgs args = tile_args(block, experts_.types().down, neuron_groups_, tile, index, tiling.count());
        args.records = records + static_cast<std::size_t>(tile.first) * neuron_words_;
        args.out = mine.rows;
        kernels_.tile[static_cast<int>(down_format_)](args);
        for (int i = 0; i < tile.tokens; ++i) {
          const Pair& pair = pairs[tile.first + i];
          kernels_.accumulate(mine.sums + static_cast<std::size_t>(pair.token) * rows + b * kBlockRows, mine.rows + i * kBlockRows,
                              block_bias, pair.weight);
        }
      }
    }
  }
  const int first_row = first_block * kBlockRows;
  const int present = std::min(rows, shape.hidden - first_row);
  for (int token = 0; token < batch_.tokens; ++token) {
    std::byte* out = batch_.out + element_bytes(activations_) * (static_cast<std::size_t>(token) * shape.hidden + first_row);
    kernels_.narrow(activations_, mine.sums + static_cast<std::size_t>(token) * rows, out, present);
  }
}

}  // namespace moegraft
