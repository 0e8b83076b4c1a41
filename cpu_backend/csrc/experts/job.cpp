#include "experts/job.h"

#include <algorithm>
#include <cstring>

#include "experts/routing.h"

namespace moegraft {
namespace {

constexpr int kUnitsPerWorker = 4;  // of the last phase: enough for balance, few enough for long sequential reads
constexpr int kMaxUnitBlocks = 8;

std::size_t whole_lines(std::size_t words) { return (words + 15) / 16 * 16; }

}  // namespace

void add_terms(const float* terms, const ExpertsShape& shape, const SegmentProduct& product, const Pair* pairs, int count, int block,
               float* out) {
  const int width = shape.gated ? kGroup / 2 : kGroup, first = block * width, present = std::min(width, shape.intermediate - first);
  const std::size_t rows = static_cast<std::size_t>(shape.intermediate) * (shape.gated ? 2 : 1);
  for (int i = 0; i < count; ++i) {
    const float* added = terms + static_cast<std::size_t>(pairs[i].slot) * rows + first;
    float* row = out + static_cast<std::size_t>(product.row_of(i)) * kBlockRows;
    for (int part = 0; part < (shape.gated ? 2 : 1); ++part, added += shape.intermediate, row += width)
      for (int n = 0; n < present; ++n) row[n] += added[n];
  }
}

struct ExpertsJob::Worker {
  Worker(std::byte* memory, std::size_t gathered_words, std::size_t rows)
      : gathered(reinterpret_cast<std::uint32_t*>(memory)),
        out(reinterpret_cast<float*>(gathered + whole_lines(gathered_words))),
        neurons(out + rows * kBlockRows),
        sums(neurons + rows * kBlockRows) {}

  std::uint32_t* gathered;  // the records of one segment, tile by tile
  float* out;               // (rows, 32) of a product
  float* neurons;           // (pairs, 32)
  float* sums;              // (tokens, unit rows); also one token's hidden state while encoding
  int gathered_segment = -1;
  ExpandedWeights expanded;
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
      hidden_groups_(round_up(experts.shape().hidden, kGroup) / kGroup),
      neuron_groups_(layout_.neurons / kGroup),
      hidden_(kernels, format_, hidden_groups_),
      starts_(static_cast<std::size_t>(workers)) {}

int ExpertsJob::segment_pairs() const { return moegraft::segment_pairs(kernels_, format_, hidden_groups_); }

SegmentProduct ExpertsJob::gate_up_of(const Segment& segment) const {
  return {kernels_, experts_.types().gate_up, format_, hidden_groups_, segment.pairs};
}

SegmentProduct ExpertsJob::down_of(const Segment& segment) const {
  return {kernels_, experts_.types().down, down_format_, neuron_groups_, segment.pairs};
}

void ExpertsJob::prepare(const ExpertsBatch& batch, const ExpertsScratch& scratch) {
  batch_ = batch;
  scratch_ = scratch;
  const std::size_t tokens = static_cast<std::size_t>(batch.tokens);
  hidden_.begin(batch.tokens);
  uses_matrix_ = false;
  gathered_words_ = rows_ = 0;
  std::size_t neuron_words = 0;
  neuron_starts_.clear();
  for (const Segment& segment : batch.routing->segments()) {
    const SegmentProduct product = gate_up_of(segment), down = down_of(segment);
    hidden_.serve(product);
    uses_matrix_ = uses_matrix_ || product.by_matrix() || down.by_matrix();
    gathered_words_ = std::max(gathered_words_, product.words());
    rows_ = std::max(rows_, static_cast<std::size_t>(std::max(product.rows(), down.rows())));
    neuron_starts_.push_back(neuron_words);
    neuron_words += whole_lines(down.words());
  }
  unit_blocks_ = std::clamp(layout_.down_blocks / (workers_ * kUnitsPerWorker), 1, kMaxUnitBlocks);
  scratch.records->reserve(hidden_.words() * 4);
  hidden_.place(reinterpret_cast<std::uint32_t*>(scratch.records->data()));
  scratch.neurons->reserve(neuron_words * 4);
  const std::size_t sums =
      std::max(tokens * static_cast<std::size_t>(unit_blocks_) * kBlockRows, static_cast<std::size_t>(hidden_groups_) * kGroup);
  for (int worker = 0; worker < workers_; ++worker)
    scratch.workers[worker].reserve((whole_lines(gathered_words_) + 2 * rows_ * kBlockRows + sums) * 4);
  phases_.encode->reset(batch.tokens);
  const int neurons = static_cast<int>(neuron_starts_.size()) * neuron_groups_;
  const int rows = (layout_.down_blocks + unit_blocks_ - 1) / unit_blocks_, nodes = phases_.rows->nodes();
  if (experts_.frames() == nullptr) {
    phases_.neurons->reset_by_node(neurons,
                                   [&](int unit) { return MemoryNodes::node_of_part(unit % neuron_groups_, neuron_groups_, nodes); });
    // Where a unit begins: it may end on the next node.
    phases_.rows->reset_by_node(rows, [&](int unit) { return MemoryNodes::node_of_part(unit * unit_blocks_, layout_.down_blocks, nodes); });
  } else {  // frames are divided over no nodes, and set the order of the units
    phases_.neurons->reset(neurons);
    phases_.rows->reset(rows);
  }
  for (int worker = 0; worker < workers_; ++worker) starts_[static_cast<std::size_t>(worker)] = {first_neurons(worker), first_rows(worker)};
}

Upcoming ExpertsJob::first_neurons(int worker) const {
  const int unit = phases_.neurons->first_unit(worker), blocks = experts_.shape().gated ? 2 : 1;
  const std::vector<Segment>& segments = batch_.routing->segments();
  if (unit >= static_cast<int>(segments.size()) * neuron_groups_) return {};
  const int first = unit % neuron_groups_ * blocks;
  const std::byte* expert = experts_.in_memory(segments[static_cast<std::size_t>(batch_.routing->in_order(unit / neuron_groups_))].expert);
  if (expert == nullptr) return {};
  return {expert + layout_.gate_up_block_bytes * static_cast<std::size_t>(first),
          layout_.gate_up_block_bytes * static_cast<std::size_t>(layout_.gate_up_blocks - first)};
}

Upcoming ExpertsJob::first_rows(int worker) const {
  const int first = phases_.rows->first_unit(worker) * unit_blocks_;
  const std::vector<Segment>& segments = batch_.routing->segments();
  if (segments.empty() || first >= layout_.down_blocks) return {};
  const std::byte* expert = experts_.in_memory(segments[0].expert);
  if (expert == nullptr) return {};
  return {expert + layout_.down_offset + layout_.down_block_bytes * static_cast<std::size_t>(first),
          layout_.down_block_bytes * static_cast<std::size_t>(std::min(unit_blocks_, layout_.down_blocks - first))};
}

void ExpertsJob::run(int worker) noexcept {
  Upcoming none;
  run(worker, none);
}

void ExpertsJob::run(int worker, Upcoming& after) noexcept {
  Worker mine(scratch_.workers[worker].data(), gathered_words_, rows_);
  const MatrixUse use(kernels_, uses_matrix_);
  const auto work = [&](Phase& phase, void (ExpertsJob::*compute)(int, Worker&)) {
    int count = 0;
    for (int unit = phase.take(worker); unit >= 0; unit = phase.take(worker), ++count) (this->*compute)(unit, mine);
    phase.finish(count);
  };
  work(*phases_.encode, &ExpertsJob::encode_token);
  Start& start = starts_[static_cast<std::size_t>(worker)];
  phases_.encode->wait(start.neurons);
  work(*phases_.neurons, &ExpertsJob::compute_neurons);
  phases_.neurons->wait(start.rows);
  work(*phases_.rows, &ExpertsJob::compute_rows);
  phases_.rows->wait(after);
}

void ExpertsJob::encode_token(int token, Worker& mine) {
  const int hidden = experts_.shape().hidden;
  const int padded = hidden_groups_ * kGroup;
  kernels_.widen(activations_, batch_.hidden_states + element_bytes(activations_) * static_cast<std::size_t>(token) * hidden, mine.sums,
                 hidden);
  std::memset(mine.sums + hidden, 0, sizeof(float) * static_cast<std::size_t>(padded - hidden));
  hidden_.encode(token, mine.sums);
}

void ExpertsJob::compute_neurons(int unit, Worker& mine) {
  const int segment_index = batch_.routing->in_order(unit / neuron_groups_);
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
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const SegmentProduct product = gate_up_of(segment);
  const Records hidden = hidden_.of(product);
  const std::uint32_t* records = mine.gathered;
  if (segment.pairs == 1 && !product.by_matrix()) records = hidden.of(pairs->token);  // read in place
  else if (mine.gathered_segment != segment_index) product.gather(hidden, pairs, mine.gathered), mine.gathered_segment = segment_index;
  for (int b = 0; b < blocks; ++b) {
    const int index = group * blocks + b;
    const std::byte* block = expert + layout_.gate_up_block_bytes * static_cast<std::size_t>(index);
    const std::byte* next = index + 1 < layout_.gate_up_blocks ? block + layout_.gate_up_block_bytes : nullptr;
    product.multiply(block, next, true, records, mine.out, mine.expanded);
    if (batch_.terms.gate_up != nullptr) add_terms(batch_.terms.gate_up, shape, product, pairs, segment.pairs, index, mine.out);
    for (int i = 0; i < product.tiling().count(); ++i) {
      const Tile tile = product.tiling()[i];
      kernels_.gate({&experts_.gate(), mine.out + product.first_row(i) * kBlockRows, gate_bias ? gate_bias + b * width : nullptr,
                     up_bias ? up_bias + b * width : nullptr, tile.tokens, shape.gated,
                     mine.neurons + tile.first * kBlockRows + b * width});
    }
  }
  const SegmentProduct down = down_of(segment);
  auto* neuron_records =
      reinterpret_cast<std::uint32_t*>(scratch_.neurons->data()) + neuron_starts_[static_cast<std::size_t>(segment_index)];
  // Padded neurons come from padded rows, in which an infinite activation would leave a NaN.
  for (int i = 0; i < segment.pairs && present < kGroup; ++i)
    std::memset(mine.neurons + i * kBlockRows + present, 0, sizeof(float) * static_cast<std::size_t>(kGroup - present));
  if (batch_.terms.activations != nullptr)
    for (int i = 0; i < segment.pairs; ++i)
      std::memcpy(batch_.terms.activations + static_cast<std::size_t>(pairs[i].slot) * static_cast<std::size_t>(shape.intermediate) +
                      group * kGroup,
                  mine.neurons + i * kBlockRows, sizeof(float) * static_cast<std::size_t>(present));
  down.encode(mine.neurons, group, neuron_records);
}

void ExpertsJob::compute_rows(int unit, Worker& mine) {
  const ExpertsShape& shape = experts_.shape();
  const int first_block = unit * unit_blocks_;
  const int blocks = std::min(unit_blocks_, layout_.down_blocks - first_block);
  const int rows = blocks * kBlockRows;
  std::memset(mine.sums, 0, sizeof(float) * static_cast<std::size_t>(batch_.tokens) * rows);
  const std::vector<Segment>& segments = batch_.routing->segments();
  const auto block_of = [&](const Segment& segment, int b) {
    return experts_.expert(segment.expert) + layout_.down_offset + layout_.down_block_bytes * static_cast<std::size_t>(first_block + b);
  };
  for (std::size_t index = 0; index < segments.size(); ++index) {
    const Segment& segment = segments[index];
    const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
    const auto* records = reinterpret_cast<const std::uint32_t*>(scratch_.neurons->data()) + neuron_starts_[index];
    const auto* bias = shape.bias ? reinterpret_cast<const float*>(experts_.expert(segment.expert) + layout_.down_bias_offset) : nullptr;
    const SegmentProduct product = down_of(segment);
    for (int b = 0; b < blocks; ++b) {
      const bool last = b + 1 == blocks;
      const std::byte* next = !last ? block_of(segment, b + 1) : index + 1 < segments.size() ? block_of(segments[index + 1], 0) : nullptr;
      product.multiply(block_of(segment, b), next, !last, records, mine.out, mine.expanded);
      const float* block_bias = bias ? bias + (first_block + b) * kBlockRows : nullptr;
      for (int t = 0; t < product.tiling().count(); ++t) {
        const Tile tile = product.tiling()[t];
        const float* out = mine.out + product.first_row(t) * kBlockRows;
        for (int i = 0; i < tile.tokens; ++i, out += kBlockRows) {
          const Pair& pair = pairs[tile.first + i];
          kernels_.accumulate(mine.sums + static_cast<std::size_t>(pair.token) * rows + b * kBlockRows, out, block_bias, pair.weight);
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
