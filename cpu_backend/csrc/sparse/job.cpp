#include "sparse/job.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/memory.h"
#include "experts/routing.h"

namespace moegraft {

namespace {

// Rows of down that are converted together: 128 KiB of floats for a chunk, which fits a 1 MiB L2 (EPYC Zen 5).
constexpr int kRunNeurons = 64;

// Prefetches the first lines of a row. The hardware prefetches the other lines, and reads several scattered rows at full speed (EPYC Zen
// 5).
void prefetch_start(const std::byte* row) {
  for (int at = 0; at < 256; at += 64) __builtin_prefetch(row + at, 0, 3);
}

int first_bit(std::uint32_t mask) { return __builtin_ctz(mask); }

constexpr int kSparseUnitsPerWorker = 4;  // of the rows phase, for balance; with as many segments, a unit reads whole rows

// Largest share of needed products in a group at which each row is multiplied only with the tokens that need it (tuned on EPYC Zen 5).
constexpr float kPickedProducts = 0.25f;

constexpr int kMaxPicked = 64;  // selected tokens in one kernel call

// The neurons of one kernel call.
struct RowBatch {
  int neurons[kMaxRows];
  int count;
};

// Removes up to `max_rows` neurons from the mask `left` and returns them.
RowBatch take_rows(std::uint32_t& left, int max_rows) {
  RowBatch batch{};
  for (; left != 0 && batch.count < max_rows; left &= left - 1) batch.neurons[batch.count++] = first_bit(left);
  return batch;
}

void prefetch_starts(const std::byte* rows, std::size_t row_bytes, const RowBatch& batch) {
  for (int i = 0; i < batch.count; ++i) prefetch_start(rows + row_bytes * static_cast<std::size_t>(batch.neurons[i]));
}

// Largest number of a segment's pairs at which each token reads the rows separately, all but the first from cache (tuned on EPYC Zen 5).
constexpr int kFewPairs = 4;
// Largest share of items that a token needs at which it adds only these instead of all items in a tile (tuned on EPYC Zen 5).
constexpr float kPickedItems = 0.45f;

constexpr int kBlocksOfChunk = kChunk / kBlockRows;

}  // namespace

struct SparseJob::Worker {
  Worker(std::byte* memory, const SparseSizes& sizes) {
    Arrays arrays(memory);
    gathered = arrays.take<std::uint32_t>(sizes.gathered_words);
    products = arrays.take<float>(sizes.rows * kBlockRows);
    blocks = arrays.take<std::byte>(sizes.block_bytes);
    recorded = arrays.take<std::uint32_t>(sizes.neuron_words);
    values = arrays.take<float>(sizes.values);
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
  std::uint32_t* gathered;  // the records of one segment, tile by tile
  float* products;  // (rows, 32) of a product
  std::byte* blocks;  // of the dense layout
  std::uint32_t* recorded;  // the neurons of one segment as records, tile by tile
  float* values;  // one token's hidden state or neurons while encoding
  float* ups;  // (pairs, 32)
  int* row_tokens;  // (32, pairs): the pairs of a segment for which each neuron is active
  const std::uint32_t** lanes;  // pointers for one kernel call
  float** outs;
  int* neurons;  // the active neurons of one segment
  std::uint32_t* items;
  std::uint32_t* coefficients;  // (pairs, items)
  int* picked;  // (pairs, items + 1)
  int* picked_counts;  // -1 for all items
  const std::uint32_t* records = nullptr;  // of `gathered_segment`
  int gathered_segment = -1;
  int recorded_segment = -1;
  ExpandedWeights expanded_gate;
  ExpandedWeights expanded;
  // 32 neurons whose active rows of up are being prefetched while the next gate rows are computed.
  const Segment* pending = nullptr;
  int pending_group = 0;
  std::uint32_t pending_active = 0;
  int pending_wanted = 0;
  std::uint32_t active = 0;  // of the group whose gate was computed last
  int wanted = 0;  // of its products
  std::int64_t active_neurons = 0;
  alignas(64) float acted[kMaxTileTokens * kBlockRows];
};

SparseJob::SparseJob(const Kernels& kernels, const PackedExperts& experts, ActivationType activations, const SparseArgs& args, int workers,
                     const ExpertsPhases& phases)
    : kernels_(kernels),
      experts_(experts),
      layout_(experts.layout()),
      activations_(activations),
      type_(experts.types().gate_up),
      format_(format_of(type_, activations)),
      args_(args),
      workers_(workers),
      phases_(phases),
      down_format_(format_of_down_blocks(format_)),
      hidden_groups_(round_up(experts.shape().hidden, kGroup) / kGroup),
      neuron_groups_(layout_.neurons / kGroup),
      chunks_(chunks_of(experts.shape().hidden)),
      lane_words_(static_cast<std::size_t>(chunks_) * kLanes * group_words(format_)),
      scale_bytes_(row_scale_bytes(type_, experts.shape().hidden)),
      chunk_bytes_(static_cast<std::size_t>(lines_per_chunk(type_)) * static_cast<std::size_t>(line_bytes(type_))),
      hidden_(kernels, format_, hidden_groups_) {}

int SparseJob::segment_pairs() const { return moegraft::segment_pairs(kernels_, format_, hidden_groups_); }

SegmentProduct SparseJob::gate_of(const Segment& segment) const { return {kernels_, type_, format_, hidden_groups_, segment.pairs}; }

SegmentProduct SparseJob::down_of(const Segment& segment) const {
  return {kernels_, weights_of(down_format_), down_format_, neuron_groups_, segment.pairs};
}

bool SparseJob::may_be_dense(const Segment& segment) const {
  return kernels_.sparse.up_block[static_cast<int>(format_)] != nullptr && segment.pairs >= kDenseTokens;
}

// Whether too few products can be left out for skipping them to be faster: `wanted` of those of `neurons` neurons are needed.
bool SparseJob::mostly_needed(const Segment& segment, int wanted, int neurons) const {
  return may_be_dense(segment) &&
         static_cast<float>(wanted) > kernels_.sparse.dense_share[static_cast<int>(format_)] * static_cast<float>(neurons * segment.pairs);
}

void SparseJob::prepare(const ExpertsBatch& batch, const ExpertsScratch& scratch) {
  first_token_ += static_cast<std::size_t>(batch_.tokens);  // the tokens of the previous pass
  batch_ = batch;
  scratch_ = scratch;
  const std::size_t tokens = static_cast<std::size_t>(batch.tokens);
  const int segments = static_cast<int>(batch.routing->segments().size());
  parts_ = 1;
  while (parts_ < chunks_ && segments * parts_ < workers_ * kSparseUnitsPerWorker) parts_ *= 2;
  unit_chunks_ = (chunks_ + parts_ - 1) / parts_;
  parts_ = (chunks_ + unit_chunks_ - 1) / unit_chunks_;
  sizes_ = needed_sizes();
  scratch.records->reserve(hidden_.words() * 4);
  hidden_.place(reinterpret_cast<std::uint32_t*>(scratch.records->data()));
  scratch.lanes->reserve(tokens * lane_words_ * 4);
  scratch.neurons->reserve(place_arrays(nullptr));
  place_arrays(scratch.neurons->data());
  const Worker needed(nullptr, sizes_);
  for (int worker = 0; worker < workers_; ++worker) scratch.workers[worker].reserve(needed.bytes);
  std::fill_n(pairs_of_slots_, tokens * static_cast<std::size_t>(args_.top_k), -1);
  int pair = 0;
  for (const Pair& found : batch.routing->pairs()) pairs_of_slots_[found.slot] = pair++;
  phases_.encode->reset(batch.tokens);
  phases_.neurons->reset(segments * neuron_groups_);
  phases_.rows->reset(segments * parts_);
  phases_.sums->reset(batch.tokens * chunks_);
  add_count(1, static_cast<std::int64_t>(batch.routing->pairs().size()) * experts_.shape().intermediate);
}

// Places the arrays that all workers share in `memory` and returns their bytes; without memory it only counts.
std::size_t SparseJob::place_arrays(std::byte* memory) {
  const std::size_t pairs = batch_.routing->pairs().size();
  Arrays arrays(memory);
  neurons_ = arrays.take<float>(pairs * static_cast<std::size_t>(layout_.neurons));
  masks_ = arrays.take<std::uint32_t>(batch_.routing->segments().size() * static_cast<std::size_t>(neuron_groups_));
  wanted_ = arrays.take<int>(batch_.routing->segments().size() * static_cast<std::size_t>(neuron_groups_));
  pairs_of_slots_ = arrays.take<int>(static_cast<std::size_t>(batch_.tokens) * static_cast<std::size_t>(args_.top_k));
  sums_ = arrays.take<float>(pairs * static_cast<std::size_t>(chunks_ * kChunk));
  return arrays.bytes();
}

SparseSizes SparseJob::needed_sizes() {
  SparseSizes sizes{
      1, static_cast<std::size_t>(layout_.neurons), static_cast<std::size_t>(std::max(hidden_groups_ * kGroup, layout_.neurons)), 0, 1, 0,
      0};
  hidden_.begin(batch_.tokens);
  hidden_.serve_tiles();  // the lanes are made of these
  uses_matrix_ = false;
  const auto grow = [](std::size_t& size, std::size_t needed) { size = std::max(size, needed); };
  for (const Segment& segment : batch_.routing->segments()) {
    const SegmentProduct gate = gate_of(segment);
    hidden_.serve(gate);
    uses_matrix_ = uses_matrix_ || gate.by_matrix();
    grow(sizes.pairs, static_cast<std::size_t>(segment.pairs));
    grow(sizes.gathered_words, gate.words());
    grow(sizes.rows, static_cast<std::size_t>(gate.rows()));
    if (!may_be_dense(segment)) continue;
    const SegmentProduct down = down_of(segment);
    uses_matrix_ = uses_matrix_ || down.by_matrix();
    grow(sizes.rows, static_cast<std::size_t>(down.rows()));
    grow(sizes.neuron_words, down.words());
    grow(sizes.block_bytes, block_bytes(type_, experts_.shape().hidden));
    grow(sizes.block_bytes,
         static_cast<std::size_t>(down_blocks_at_once(format_)) * block_bytes(weights_of(down_format_), layout_.neurons));
  }
  return sizes;
}

void SparseJob::run(int worker) noexcept {
  Worker mine(scratch_.workers[worker].data(), sizes_);
  const MatrixUse use(kernels_, uses_matrix_);
  const auto work = [&](Phase& phase, void (SparseJob::*compute)(int, Worker&)) {
    int count = 0;
    for (int unit = phase.take(worker); unit >= 0; unit = phase.take(worker), ++count) (this->*compute)(unit, mine);
    compute_pending(mine);
    phase.finish(count);
    phase.wait();
  };
  work(*phases_.encode, &SparseJob::encode_token);
  work(*phases_.neurons, &SparseJob::compute_neurons);
  add_count(0, mine.active_neurons);
  work(*phases_.rows, &SparseJob::compute_rows);
  work(*phases_.sums, &SparseJob::write_chunk);
}

void SparseJob::add_count(int which, std::int64_t neurons) const {
  if (args_.counts != nullptr) __atomic_fetch_add(&args_.counts[which], neurons, __ATOMIC_RELAXED);
}

void SparseJob::encode_token(int token, Worker& mine) {
  const int hidden = experts_.shape().hidden;
  kernels_.widen(activations_, batch_.hidden_states + element_bytes(activations_) * static_cast<std::size_t>(token) * hidden, mine.values,
                 hidden);
  std::memset(mine.values + hidden, 0, sizeof(float) * static_cast<std::size_t>(hidden_groups_ * kGroup - hidden));
  hidden_.encode(token, mine.values);
  transpose_to_lanes(hidden_.tile_record(token), hidden_groups_, format_, lanes_of(token));
}

// The neurons phase computes the gate for all tokens, then up for the active neurons. Up is computed one unit later, when its rows have
// been prefetched.
void SparseJob::compute_neurons(int unit, Worker& mine) {
  const int segment_index = unit / neuron_groups_;
  const int group = unit % neuron_groups_;
  const Segment& segment = batch_.routing->segments()[static_cast<std::size_t>(segment_index)];
  if (mine.gathered_segment != segment_index) {
    compute_pending(mine);  // with the records of its segment
    const SegmentProduct product = gate_of(segment);
    const Records hidden = hidden_.of(product);
    const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
    mine.records = mine.gathered;
    if (segment.pairs == 1 && !product.by_matrix()) mine.records = hidden.of(pairs->token);  // read in place
    else product.gather(hidden, pairs, mine.gathered);
    mine.gathered_segment = segment_index;
  }
  compute_gate(segment, group, mine);
  const std::uint32_t active = mine.active;
  masks_[static_cast<std::size_t>(segment_index) * neuron_groups_ + group] = active;
  wanted_[static_cast<std::size_t>(segment_index) * neuron_groups_ + group] = mine.wanted;
  if (experts_.shape().gated) {
    const std::byte* rows =
        experts_.expert(segment.expert) + layout_.up_offset + layout_.neuron_bytes * static_cast<std::size_t>(group * kGroup);
    std::uint32_t ahead = active;
    prefetch_starts(rows, layout_.neuron_bytes, take_rows(ahead, kernels_.sparse.dot_rows_at_once));
  }
  compute_pending(mine);
  mine.pending = &segment;
  mine.pending_group = group;
  mine.pending_active = active;
  mine.pending_wanted = mine.wanted;
}

// Computes act(gate) of 32 neurons for all tokens of a segment, and the mask of neurons that are active for any token.
void SparseJob::compute_gate(const Segment& segment, int group, Worker& mine) {
  const ExpertsShape& shape = experts_.shape();
  const std::byte* expert = experts_.expert(segment.expert);
  const std::byte* block = expert + layout_.gate_up_block_bytes * static_cast<std::size_t>(group);
  const std::size_t bias_offset = shape.gated ? layout_.gate_bias_offset : layout_.up_bias_offset;
  const auto* bias = shape.bias ? reinterpret_cast<const float*>(expert + bias_offset) + group * kGroup : nullptr;
  const int present = std::min(kGroup, shape.intermediate - group * kGroup);
  const std::uint32_t exists = 0xffffffffu >> (kGroup - present);
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const SegmentProduct product = gate_of(segment);
  product.multiply(block, group + 1 < neuron_groups_ ? block + layout_.gate_up_block_bytes : nullptr, true, mine.records, mine.products,
                   mine.expanded_gate);
  mine.active = 0;
  mine.wanted = 0;
  for (int index = 0; index < product.tiling().count(); ++index) {
    const Tile tile = product.tiling()[index];
    const float* rows = mine.products + product.first_row(index) * kBlockRows;
    const GateArgs gate = {&experts_.gate(), rows, shape.gated ? bias : nullptr, bias, tile.tokens, false, mine.acted};
    shape.gated ? kernels_.act(gate) : kernels_.gate(gate);
    for (int token = 0; token < tile.tokens; ++token) {
      float* neurons = neurons_of(segment.first_pair + tile.first + token) + group * kGroup;
      std::memcpy(neurons, mine.acted + token * kBlockRows, sizeof(float) * kGroup);
      const std::uint32_t reached = kernels_.sparse.reached(neurons, args_.threshold) & exists;
      mine.active |= reached;
      mine.wanted += __builtin_popcount(reached);
      if (args_.acted == nullptr) continue;
      const std::size_t slot =
          first_token_ * static_cast<std::size_t>(args_.top_k) + static_cast<std::size_t>(pairs[tile.first + token].slot);
      std::memcpy(args_.acted + slot * static_cast<std::size_t>(shape.intermediate) + group * kGroup, neurons,
                  sizeof(float) * static_cast<std::size_t>(present));
    }
  }
  mine.active_neurons += mine.wanted;
}

void SparseJob::compute_pending(Worker& mine) {
  if (mine.pending == nullptr) return;
  compute_up(*mine.pending, mine.pending_group, mine.pending_active, mine.pending_wanted, mine);
  mine.pending = nullptr;
}

// Computes up for the active neurons of a group, and the group's weighted neuron values.
void SparseJob::compute_up(const Segment& segment, int group, std::uint32_t active, int wanted, Worker& mine) {
  const ExpertsShape& shape = experts_.shape();
  const std::byte* expert = experts_.expert(segment.expert);
  const auto* bias = shape.bias ? reinterpret_cast<const float*>(expert + layout_.up_bias_offset) + group * kGroup : nullptr;
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const int present = std::min(kGroup, shape.intermediate - group * kGroup);
  if (shape.gated) {
    const std::byte* rows = expert + layout_.up_offset + layout_.neuron_bytes * static_cast<std::size_t>(group * kGroup);
    const bool in_tiles = static_cast<float>(wanted) > kPickedProducts * static_cast<float>(__builtin_popcount(active) * segment.pairs);
    for (int i = 0; i < segment.pairs; ++i) mine.outs[i] = mine.ups + i * kGroup;
    for (int i = 0; i < segment.pairs; ++i) mine.lanes[i] = lanes_of(pairs[i].token);
    if (mostly_needed(segment, wanted, kGroup)) dot_block(segment, rows, mine);
    else if (in_tiles) dot_all_tokens(segment, rows, active, mine);
    else dot_active_tokens(segment, rows, group, active, mine);
  }
  for (int i = 0; i < segment.pairs; ++i) {
    float* neurons = neurons_of(segment.first_pair + i) + group * kGroup;
    kernels_.sparse.finish(
        {&experts_.gate(), args_.threshold, pairs[i].weight, shape.gated ? mine.ups + i * kGroup : nullptr, bias, neurons});
    // Padded neurons come from padded rows, in which an infinite activation would leave a NaN.
    if (present < kGroup) std::memset(neurons + present, 0, sizeof(float) * static_cast<std::size_t>(kGroup - present));
  }
}

// Multiplies all rows with all tokens, as a block of the dense layout; meanwhile the next group's rows are prefetched.
void SparseJob::dot_block(const Segment& segment, const std::byte* rows, Worker& mine) const {
  kernels_.sparse.up_block[static_cast<int>(format_)]({rows, layout_.neuron_bytes, scale_bytes_, hidden_groups_, mine.blocks});
  const SegmentProduct product = gate_of(segment);
  product.multiply(mine.blocks, rows + layout_.neuron_bytes * kGroup, false, mine.records, mine.products, mine.expanded);
  for (int index = 0; index < product.tiling().count(); ++index) {
    const Tile tile = product.tiling()[index];
    std::memcpy(mine.ups + tile.first * kGroup, mine.products + product.first_row(index) * kBlockRows,
                sizeof(float) * static_cast<std::size_t>(tile.tokens * kGroup));
  }
}

// Multiplies the active rows with all tokens; products of neurons that are inactive for a token are ignored.
void SparseJob::dot_all_tokens(const Segment& segment, const std::byte* rows, std::uint32_t active, Worker& mine) const {
  const int at_once = kernels_.sparse.dot_rows_at_once;
  RowBatch next = take_rows(active, at_once);  // already being prefetched
  while (next.count > 0) {
    const RowBatch batch = next;
    next = take_rows(active, at_once);
    // A single token's rows are always read together; missing rows repeat the last one.
    const int count = segment.pairs == 1 ? at_once : batch.count;
    RowDotsArgs args = {{}, {}, count, segment.pairs, mine.lanes, mine.outs, scale_bytes_, chunks_, nullptr};
    const std::byte* ahead[kMaxRows];
    for (int i = 0; i < count; ++i) {
      args.places[i] = batch.neurons[std::min(i, batch.count - 1)];
      args.rows[i] = rows + layout_.neuron_bytes * static_cast<std::size_t>(args.places[i]);
      ahead[i] = i < next.count ? rows + layout_.neuron_bytes * static_cast<std::size_t>(next.neurons[i]) : args.rows[i];
    }
    // With several tokens, the computation takes long enough to prefetch the next rows completely.
    if (segment.pairs > 1) args.ahead = ahead;
    else prefetch_starts(rows, layout_.neuron_bytes, next);
    kernels_.sparse.dot_rows[static_cast<int>(format_)](args);
  }
}

// Multiplies each active row only with the tokens that need it.
void SparseJob::dot_active_tokens(const Segment& segment, const std::byte* rows, int group, std::uint32_t active, Worker& mine) const {
  int counts[kGroup] = {};
  for (int i = 0; i < segment.pairs; ++i) {
    std::uint32_t own = active & kernels_.sparse.reached(neurons_of(segment.first_pair + i) + group * kGroup, args_.threshold);
    for (; own != 0; own &= own - 1) {
      const int neuron = first_bit(own);
      mine.row_tokens[neuron * segment.pairs + counts[neuron]++] = i;
    }
  }
  std::uint32_t ahead = active;
  take_rows(ahead, kernels_.sparse.dot_rows_at_once);  // already being prefetched
  const std::uint32_t* lanes[kMaxPicked];
  float* outs[kMaxPicked];
  for (; active != 0; active &= active - 1) {
    const int neuron = first_bit(active);
    const std::byte* next = rows + layout_.neuron_bytes * static_cast<std::size_t>(first_bit(ahead != 0 ? ahead : active));
    ahead &= ahead - (ahead != 0);
    for (int first = 0; first < counts[neuron]; first += kMaxPicked) {
      const int tokens = std::min(kMaxPicked, counts[neuron] - first);
      const int* own = mine.row_tokens + neuron * segment.pairs + first;
      for (int i = 0; i < tokens; ++i) lanes[i] = mine.lanes[own[i]];
      for (int i = 0; i < tokens; ++i) outs[i] = mine.outs[own[i]];
      const std::byte* row = rows + layout_.neuron_bytes * static_cast<std::size_t>(neuron);
      kernels_.sparse.dot_rows[static_cast<int>(format_)]({{row}, {neuron}, 1, tokens, lanes, outs, scale_bytes_, chunks_, &next});
    }
  }
}

// The last phases multiply rows of down with the neurons' values, for a segment and a range of columns, and sum up each token.

// The range of columns of one unit.
struct SparseJob::Columns {
  int first_chunk;
  int chunks;
  std::size_t scales;  // from a row's start
  std::size_t lines;  // from a row's start
  std::size_t bytes;  // of the lines
};

// The rows of down of some neurons, which are converted together.
struct SparseJob::Run {
  const std::byte* down;  // the expert's rows
  std::size_t row_bytes;
  const int* neurons;
  int count;
  const std::byte* row(int index) const { return down + row_bytes * static_cast<std::size_t>(neurons[index]); }
};

// Prefetches the rows of a run, a few lines at a time: long bursts were no faster (EPYC Zen 5).
class SparseJob::RowPrefetch {
 public:
  RowPrefetch(const Run& run, std::size_t first, std::size_t end) : run_(run), first_(first), end_(end), at_(first) {}
  int lines() const { return run_.count * static_cast<int>((end_ - first_) / 64); }
  void fetch(int lines) {
    for (; lines > 0 && row_ < run_.count; --lines) {
      __builtin_prefetch(run_.row(row_) + at_, 0, 3);
      if ((at_ += 64) >= end_) {
        at_ = first_;
        ++row_;
      }
    }
  }

 private:
  const Run run_;
  const std::size_t first_;  // of each row's bytes
  const std::size_t end_;
  std::size_t at_;
  int row_ = 0;
};

SparseJob::Columns SparseJob::columns_of(int part) const {
  Columns columns{};
  columns.first_chunk = part * unit_chunks_;
  columns.chunks = std::min(unit_chunks_, chunks_ - columns.first_chunk);
  columns.scales = static_cast<std::size_t>(columns.first_chunk) * kLanes * 2;
  columns.lines = scale_bytes_ + chunk_bytes_ * static_cast<std::size_t>(columns.first_chunk);
  columns.bytes = chunk_bytes_ * static_cast<std::size_t>(columns.chunks);
  return columns;
}

// Prefetches whole rows with their scales, or only the lines where a unit covers a part of each row.
SparseJob::RowPrefetch SparseJob::prefetch_of(const Run& run, const Columns& columns) const {
  return {run, columns.chunks == chunks_ ? 0 : columns.lines, columns.lines + columns.bytes};
}

int SparseJob::active_neurons(int segment_index, int* neurons) const {
  const std::uint32_t* mask = masks_ + static_cast<std::size_t>(segment_index) * static_cast<std::size_t>(neuron_groups_);
  int count = 0;
  for (int group = 0; group < neuron_groups_; ++group)
    for (std::uint32_t left = mask[group]; left != 0; left &= left - 1) neurons[count++] = group * kGroup + first_bit(left);
  return count;
}

void SparseJob::compute_rows(int unit, Worker& mine) {
  const Columns columns = columns_of(unit % parts_);
  const int segment_index = unit / parts_;
  const Segment& segment = batch_.routing->segments()[static_cast<std::size_t>(segment_index)];
  const int* wanted = wanted_ + static_cast<std::size_t>(segment_index) * static_cast<std::size_t>(neuron_groups_);
  int all_wanted = 0;
  for (int group = 0; group < neuron_groups_; ++group) all_wanted += wanted[group];
  if (mostly_needed(segment, all_wanted, experts_.shape().intermediate)) {
    add_blocks(segment, segment_index, columns, mine);
    if (experts_.shape().bias) add_bias(segment, columns);
    return;
  }
  for (int i = 0; i < segment.pairs; ++i)
    std::memset(sums_of(segment.first_pair + i) + columns.first_chunk * kChunk, 0,
                sizeof(float) * static_cast<std::size_t>(columns.chunks * kChunk));
  const int count = active_neurons(segment_index, mine.neurons);
  segment.pairs <= kFewPairs ? add_few(segment, count, columns, mine) : add_many(segment, count, columns, mine);
  if (experts_.shape().bias) add_bias(segment, columns);
}

// Multiplies all rows with all tokens, as blocks of the dense layout.
void SparseJob::add_blocks(const Segment& segment, int segment_index, const Columns& columns, Worker& mine) const {
  const SegmentProduct product = down_of(segment);
  if (mine.recorded_segment != segment_index) {
    const float factor = type_ == WeightType::kInt4 ? 1.0f / static_cast<float>(kInt4Steps) : 1.0f;
    for (int index = 0; index < product.tiling().count(); ++index) {
      const Tile tile = product.tiling()[index];
      for (int i = 0; i < tile.tokens; ++i) {
        float* neurons = neurons_of(segment.first_pair + tile.first + i);
        for (int at = 0; at < layout_.neurons && factor != 1.0f; ++at) mine.values[at] = factor * neurons[at];
        std::uint32_t* record = mine.recorded + product.tile_start(index) + product.group_words() * static_cast<std::size_t>(i);
        kernels_.encode[static_cast<int>(product.records())](factor != 1.0f ? mine.values : neurons, neuron_groups_, record,
                                                             product.group_stride(index));
      }
    }
    mine.recorded_segment = segment_index;
  }
  const int at_once = down_blocks_at_once(format_);
  const std::size_t bytes = block_bytes(weights_of(down_format_), layout_.neurons);
  const std::size_t step = chunk_bytes_ * static_cast<std::size_t>(at_once) / kBlocksOfChunk;
  DownBlocksArgs args = {experts_.expert(segment.expert) + layout_.down_offset,
                         layout_.neuron_bytes,
                         columns.scales,
                         columns.lines,
                         neuron_groups_,
                         mine.blocks,
                         bytes};
  for (int first = columns.first_chunk * kBlocksOfChunk; first < (columns.first_chunk + columns.chunks) * kBlocksOfChunk;
       first += at_once) {
    args.scales = static_cast<std::size_t>(first / kBlocksOfChunk) * kLanes * 2;
    kernels_.sparse.down_blocks[static_cast<int>(format_)](args);
    args.lines += step;
    for (int b = 0; b < at_once; ++b) {
      const std::byte* block = mine.blocks + bytes * static_cast<std::size_t>(b);
      const bool last = b + 1 == at_once;
      product.multiply(block, last ? block : block + bytes, !last, mine.recorded, mine.products, mine.expanded);
      for (int index = 0; index < product.tiling().count(); ++index) {
        const Tile tile = product.tiling()[index];
        for (int i = 0; i < tile.tokens; ++i)
          std::memcpy(sums_of(segment.first_pair + tile.first + i) + (first + b) * kBlockRows,
                      mine.products + (product.first_row(index) + i) * kBlockRows, sizeof(float) * kBlockRows);
      }
    }
  }
}

// Adds the active rows to each token of a small segment directly.
void SparseJob::add_few(const Segment& segment, int count, const Columns& columns, Worker& mine) const {
  const Run rows = {experts_.expert(segment.expert) + layout_.down_offset, layout_.neuron_bytes, mine.neurons, count};
  for (int k = 0; k < count; k += kMaxRows) {
    for (int next = k + kMaxRows; next < std::min(count, k + 2 * kMaxRows) && scale_bytes_ != 0; ++next)
      __builtin_prefetch(rows.row(next) + columns.scales, 0, 3);
    for (int i = 0; i < segment.pairs; ++i) {
      const float* values = neurons_of(segment.first_pair + i);
      RowAddArgs args{};
      args.sums = sums_of(segment.first_pair + i) + columns.first_chunk * kChunk;
      bool any = false;
      for (int row = 0; row < kMaxRows; ++row) {
        const std::byte* start = rows.row(std::min(k + row, count - 1));  // missing rows repeat the last one with a coefficient of 0
        args.scales[row] = start + columns.scales;
        args.lines[row] = start + columns.lines;
        args.coefficients[row] = k + row < count ? values[rows.neurons[k + row]] : 0.0f;
        any = any || args.coefficients[row] != 0.0f;
        if (i == 0 && k + row + kMaxRows < count) args.ahead[row] = rows.row(k + row + kMaxRows) + columns.lines;
      }
      for (int chunk = 0; chunk < columns.chunks && any; ++chunk, args.sums += kChunk) {
        kernels_.sparse.add_rows[static_cast<int>(format_)](args);
        for (const std::byte*& ahead : args.ahead) ahead = ahead != nullptr ? ahead + chunk_bytes_ : nullptr;
        for (int row = 0; row < kMaxRows; ++row) args.scales[row] += kLanes * 2;
        for (int row = 0; row < kMaxRows; ++row) args.lines[row] += chunk_bytes_;
      }
    }
  }
}

// Converts runs of active rows to items, which all tokens of a large segment share.
void SparseJob::add_many(const Segment& segment, int count, const Columns& columns, Worker& mine) const {
  const auto run_at = [&](int first) {
    return Run{experts_.expert(segment.expert) + layout_.down_offset, layout_.neuron_bytes, mine.neurons + first,
               std::clamp(count - first, 0, kRunNeurons)};
  };
  for (int first = 0; first < count; first += kRunNeurons) {
    const Run run = run_at(first), next = run_at(first + kRunNeurons);
    take_coefficients(segment, run.neurons, run.count, mine);
    RowPrefetch ahead = prefetch_of(next, columns);
    // Prefetches are spread evenly over the kernel calls.
    const int calls = columns.chunks * ((run.count + 1) / 2 + kTiles);
    const int lines = (ahead.lines() + calls - 1) / calls;
    for (int chunk = 0; chunk < columns.chunks; ++chunk) {
      widen_chunk(run, columns, chunk, ahead, lines, mine);
      add_chunk(segment, run.count, columns.first_chunk + chunk, ahead, lines, mine);
    }
  }
}

// Converts the tokens' values to coefficients of items, and lists the items of tokens that need only few.
void SparseJob::take_coefficients(const Segment& segment, const int* neurons, int count, Worker& mine) const {
  const bool pairs = kernels_.sparse.in_pairs[static_cast<int>(format_)];
  const int items = pairs ? (count + 1) / 2 : count;
  const std::uint32_t bits = pairs ? 0x7fff7fffu : 0x7fffffffu;  // all bits but the signs
  for (int i = 0; i < segment.pairs; ++i) {
    const float* values = neurons_of(segment.first_pair + i);
    std::uint32_t* coefficients = mine.coefficients + i * kRunNeurons;
    float taken[kRunNeurons] = {};
    if (neurons[count - 1] - neurons[0] == count - 1)
      std::memcpy(taken, values + neurons[0], sizeof(float) * static_cast<std::size_t>(count));
    else
      for (int k = 0; k < count; ++k) taken[k] = values[neurons[k]];
    if (pairs) kernels_.encode[static_cast<int>(Format::kBFloat16Dot)](taken, kRunNeurons / kGroup, coefficients, kGroup / 2);
    else std::memcpy(coefficients, taken, sizeof taken);
    int wanted = 0;
    for (int item = 0; item < items; ++item) wanted += (coefficients[item] & bits) != 0;
    mine.picked_counts[i] = -1;
    if (static_cast<float>(wanted) > kPickedItems * static_cast<float>(items)) continue;
    mine.picked_counts[i] = wanted;
    int* picked = mine.picked + i * (kRunNeurons + 1);
    int found = 0;
    for (int item = 0; item < items; ++item) {
      picked[found] = item;
      found += (coefficients[item] & bits) != 0;
    }
  }
}

// One item more than needed, because tiles at a distance of whole pages would share their sets in L1.
std::size_t SparseJob::tile_stride() const {
  return static_cast<std::size_t>(kRunNeurons / (kernels_.sparse.in_pairs[static_cast<int>(format_)] ? 2 : 1) + 1) * kTileWords;
}

void SparseJob::widen_chunk(const Run& run, const Columns& columns, int chunk, RowPrefetch& ahead, int lines_ahead, Worker& mine) const {
  const bool pairs = kernels_.sparse.in_pairs[static_cast<int>(format_)];
  const std::size_t scales = columns.scales + static_cast<std::size_t>(chunk) * kLanes * 2;
  const std::size_t lines = columns.lines + static_cast<std::size_t>(chunk) * chunk_bytes_;
  for (int k = 0; k < run.count; k += 2) {
    const std::byte *first = run.row(k), *second = run.row(std::min(k + 1, run.count - 1));
    ahead.fetch(lines_ahead);
    kernels_.sparse.widen_rows[static_cast<int>(format_)]({{first + scales, second + scales},
                                                           {first + lines, second + lines},
                                                           mine.items + static_cast<std::size_t>(pairs ? k / 2 : k) * kTileWords,
                                                           tile_stride()});
  }
}

// Adds a chunk's items to the sums of all tokens: tokens with few items one by one, the others together in tiles.
void SparseJob::add_chunk(const Segment& segment, int neurons, int chunk, RowPrefetch& ahead, int lines_ahead, Worker& mine) const {
  const int format = static_cast<int>(format_);
  const int items = kernels_.sparse.in_pairs[format] ? (neurons + 1) / 2 : neurons;
  int together = 0;
  for (int i = 0; i < segment.pairs; ++i) {
    float* sums = sums_of(segment.first_pair + i) + chunk * kChunk;
    const std::uint32_t* coefficients = mine.coefficients + i * kRunNeurons;
    if (mine.picked_counts[i] >= 0) {
      const int* picked = mine.picked + i * (kRunNeurons + 1);
      kernels_.sparse.add_picked[format]({mine.items, tile_stride(), picked, mine.picked_counts[i], coefficients, sums});
    } else {
      mine.lanes[together] = coefficients;
      mine.outs[together++] = sums;
    }
  }
  for (int tile = 0; tile < kTiles; ++tile) {
    ahead.fetch(lines_ahead);
    if (together == 0) continue;
    kernels_.sparse.add_items[format]({mine.items + static_cast<std::size_t>(tile) * tile_stride(), items, together, mine.lanes, mine.outs,
                                       static_cast<std::size_t>(tile) * kTileWords});
  }
}

void SparseJob::add_bias(const Segment& segment, const Columns& columns) const {
  const auto* bias = reinterpret_cast<const float*>(experts_.expert(segment.expert) + layout_.down_bias_offset);
  for (int i = 0; i < segment.pairs; ++i) {
    const float weight = batch_.routing->pairs()[static_cast<std::size_t>(segment.first_pair + i)].weight;
    float* sums = sums_of(segment.first_pair + i);
    for (int chunk = columns.first_chunk; chunk < columns.first_chunk + columns.chunks; ++chunk) {
      for (int at = 0; at < kChunk; ++at) {
        const int column = chunk * kChunk + at;
        if (column < experts_.shape().hidden) sums[chunk * kChunk + at % kGroup * kLanes + at / kGroup] += weight * bias[column];
      }
    }
  }
}

// Adds the outputs of a token's experts for a chunk in the order of their slots, and transposes lanes to columns.
void SparseJob::write_chunk(int unit, Worker&) {
  const int token = unit / chunks_, chunk = unit % chunks_;
  const int hidden = experts_.shape().hidden;
  float sums[kChunk] = {}, columns[kChunk];
  for (int slot = token * args_.top_k; slot < (token + 1) * args_.top_k; ++slot) {
    if (pairs_of_slots_[slot] < 0) continue;
    const float* own = sums_of(pairs_of_slots_[slot]) + chunk * kChunk;
    for (int at = 0; at < kChunk; ++at) sums[at] += own[at];
  }
  for (int lane = 0; lane < kLanes; ++lane)
    for (int k = 0; k < kGroup; ++k) columns[lane * kGroup + k] = sums[k * kLanes + lane];
  const std::size_t first = static_cast<std::size_t>(token) * static_cast<std::size_t>(hidden) + static_cast<std::size_t>(chunk * kChunk);
  kernels_.narrow(activations_, columns, batch_.out + element_bytes(activations_) * first, std::min(kChunk, hidden - chunk * kChunk));
}

}  // namespace moegraft
