#include "sparse_job.h"

#include <algorithm>
#include <cstring>

#include "prefetch.h"

namespace moegraft {
namespace {

constexpr std::size_t kSegmentBytes = std::size_t{384} << 10;  // as for the dense layout
constexpr std::size_t kAheadBytes = 4096;  // of rows that are under way while one is computed (tuned on EPYC Zen 5)

int rows_ahead(std::size_t row_bytes) { return std::clamp(static_cast<int>(kAheadBytes / row_bytes), 1, 32); }


void prefetch_bytes(const std::byte* start, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(start + at, 0, 2);
}

int first_bit(std::uint32_t mask) { return __builtin_ctz(mask); }

}  // namespace

struct SparseJob::Worker {
  Worker(std::byte* memory, std::size_t gathered_words)
      : gathered(reinterpret_cast<std::uint32_t*>(memory)), sums(reinterpret_cast<float*>(memory + gathered_words * 4)) {}

  std::uint32_t* gathered;
  float* sums;  // (tokens, columns a group and corrections, 16); also one token's hidden state while encoding
  int gathered_segment = -1;
  // 32 neurons whose active rows of up are being fetched while the next gate rows are computed.
  const Segment* pending = nullptr;
  int pending_group = 0;
  std::uint32_t pending_active = 0;
  std::int64_t active_neurons = 0;
  std::size_t active[64];  // neurons on their way through the last phase
  alignas(64) float rows[kMostTileTokens * kBlockRows];
  alignas(64) float acted[kMostTileTokens * kBlockRows];
};

struct SparseJob::Columns {
  int first_chunk;
  int chunks;
  int first_line;           // of each chunk
  int lines;                // of each chunk
  int first_column;         // of each group
  int columns;              // of each group
  std::size_t chunk_floats;  // a token's sums of a chunk: the columns, then the corrections
  std::size_t token_floats;
};

SparseJob::SparseJob(const Kernels& kernels, const PackedExperts& experts, ActivationType activations, const SparseArgs& args, int workers,
                     const ExpertsPhases& phases)
    : kernels_(kernels),
      experts_(experts),
      layout_(experts.layout()),
      activations_(activations),
      format_(format_of(experts.types().gate_up, activations)),
      args_(args),
      workers_(workers),
      phases_(phases),
      max_tokens_(kernels.max_tokens[static_cast<int>(format_)]),
      hidden_groups_(round_up(experts.shape().hidden, kGroup) / kGroup),
      neuron_groups_(layout_.neurons / kGroup),
      chunks_(chunks_of(experts.shape().hidden)),
      hidden_words_(static_cast<std::size_t>(hidden_groups_) * words_per_group(format_)),
      lane_words_(static_cast<std::size_t>(chunks_) * kLanes * words_per_group(format_)) {}

int SparseJob::segment_pairs() const {
  const int fitting = static_cast<int>(kSegmentBytes / (hidden_words_ * 4));
  return std::max(1, fitting / max_tokens_) * max_tokens_;
}

std::uint32_t* SparseJob::masks() const {
  const std::size_t pairs = batch_.routing->pairs().size();
  return reinterpret_cast<std::uint32_t*>(scratch_.neurons->data()) + pairs * static_cast<std::size_t>(layout_.neurons);
}

void SparseJob::prepare(const ExpertsBatch& batch, const ExpertsScratch& scratch) {
  first_token_ += static_cast<std::size_t>(batch_.tokens);  // those of the passes before
  batch_ = batch;
  scratch_ = scratch;
  const std::size_t tokens = static_cast<std::size_t>(batch.tokens);
  const std::size_t segments = batch.routing->segments().size();
  unit_chunks_ = std::max(1, chunks_ / workers_);  // long runs of a row
  parts_ = 1;                                      // or, for many workers, a part of every chunk; it has at least 4 lines
  while (parts_ < 4 && chunks_ * parts_ < workers_) parts_ *= 2;
  scratch.records->reserve(tokens * hidden_words_ * 4);
  scratch.lanes->reserve(tokens * lane_words_ * 4);
  scratch.neurons->reserve((batch.routing->pairs().size() * static_cast<std::size_t>(layout_.neurons) + segments * static_cast<std::size_t>(neuron_groups_)) * 4);
  const std::size_t sums = std::max(tokens * static_cast<std::size_t>(unit_chunks_) * (kChunk / parts_ + kLanes), static_cast<std::size_t>(hidden_groups_) * kGroup);
  for (int worker = 0; worker < workers_; ++worker)
    scratch.workers[worker].reserve((static_cast<std::size_t>(segment_pairs()) * hidden_words_ + sums) * 4);
  phases_.encode->reset(batch.tokens);
  phases_.neurons->reset(static_cast<int>(segments) * neuron_groups_);
  phases_.rows->reset((chunks_ + unit_chunks_ - 1) / unit_chunks_ * parts_);
}

void SparseJob::run(int worker) noexcept {
  Worker mine(scratch_.workers[worker].data(), static_cast<std::size_t>(segment_pairs()) * hidden_words_);
  const auto work = [&](Phase& phase, void (SparseJob::*compute)(int, Worker&)) {
    int count = 0;
    for (int unit = phase.take(worker); unit >= 0; unit = phase.take(worker), ++count) (this->*compute)(unit, mine);
    compute_pending(mine);
    phase.finish(count);
    phase.wait();
  };
  work(*phases_.encode, &SparseJob::encode_token);
  work(*phases_.neurons, &SparseJob::compute_neurons);
  if (args_.counts != nullptr) add_counts(mine.active_neurons, worker == 0);
  work(*phases_.rows, &SparseJob::compute_rows);
}

void SparseJob::add_counts(std::int64_t active, bool all) const {
  __atomic_fetch_add(&args_.counts[0], active, __ATOMIC_RELAXED);
  if (!all) return;
  const std::int64_t neurons = static_cast<std::int64_t>(batch_.routing->pairs().size()) * experts_.shape().intermediate;
  __atomic_fetch_add(&args_.counts[1], neurons, __ATOMIC_RELAXED);
}

void SparseJob::encode_token(int token, Worker& mine) {
  const int hidden = experts_.shape().hidden;
  kernels_.widen(activations_, batch_.hidden_states + element_bytes(activations_) * static_cast<std::size_t>(token) * hidden, mine.sums, hidden);
  std::memset(mine.sums + hidden, 0, sizeof(float) * static_cast<std::size_t>(hidden_groups_ * kGroup - hidden));
  auto* record = reinterpret_cast<std::uint32_t*>(scratch_.records->data()) + static_cast<std::size_t>(token) * hidden_words_;
  kernels_.encode[static_cast<int>(format_)](mine.sums, hidden_groups_, record, static_cast<std::size_t>(words_per_group(format_)));
  lay_in_lanes(record, hidden_groups_, format_, reinterpret_cast<std::uint32_t*>(scratch_.lanes->data()) + static_cast<std::size_t>(token) * lane_words_);
}

void SparseJob::compute_neurons(int unit, Worker& mine) {
  const int segment_index = unit / neuron_groups_;
  const int group = unit % neuron_groups_;
  const Segment& segment = batch_.routing->segments()[static_cast<std::size_t>(segment_index)];
  const ExpertsShape& shape = experts_.shape();
  const std::byte* expert = experts_.expert(segment.expert);
  const std::size_t bias_offset = shape.gated ? layout_.gate_bias_offset : layout_.up_bias_offset;
  const auto* bias = shape.bias ? reinterpret_cast<const float*>(expert + bias_offset) + group * kGroup : nullptr;
  const int present = std::min(kGroup, shape.intermediate - group * kGroup);
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const Records hidden = {reinterpret_cast<const std::uint32_t*>(scratch_.records->data()), hidden_words_,
                          static_cast<std::size_t>(words_per_group(format_))};
  const Tiling tiling(segment.pairs, max_tokens_);
  if (mine.gathered_segment != segment_index) gather_segment(hidden, pairs, tiling, mine.gathered);
  mine.gathered_segment = segment_index;
  std::uint32_t active = 0;
  for (int index = 0; index < tiling.count(); ++index) {
    const Tile tile = tiling[index];
    const std::byte* block = expert + layout_.gate_up_block_bytes * static_cast<std::size_t>(group);
    TileArgs args = tile_args(block, experts_.types().gate_up, hidden_groups_, tile, index, tiling.count());
    args.records = tile_records(hidden, pairs, tile, mine.gathered);
    args.out = mine.rows;
    kernels_.tile[static_cast<int>(format_)](args);
    const GateArgs gate = {&experts_.gate(), mine.rows, shape.gated ? bias : nullptr, bias, tile.tokens, false, mine.acted};
    shape.gated ? kernels_.act(gate) : kernels_.gate(gate);
    for (int token = 0; token < tile.tokens; ++token) {
      float* neurons = neurons_of(segment.first_pair + tile.first + token) + group * kGroup;
      std::memcpy(neurons, mine.acted + token * kBlockRows, sizeof(float) * kGroup);
      std::uint32_t reached = 0;
      for (int i = 0; i < present; ++i) reached |= static_cast<std::uint32_t>(is_active(neurons[i])) << i;
      active |= reached;
      mine.active_neurons += __builtin_popcount(reached);
      if (args_.acted == nullptr) continue;
      const std::size_t slot = first_token_ * static_cast<std::size_t>(args_.top_k) + static_cast<std::size_t>(pairs[tile.first + token].slot);
      std::memcpy(args_.acted + slot * static_cast<std::size_t>(shape.intermediate) + group * kGroup, neurons, sizeof(float) * static_cast<std::size_t>(present));
    }
  }
  masks()[static_cast<std::size_t>(segment_index) * neuron_groups_ + group] = active;
  if (shape.gated) {
    const std::byte* rows = expert + layout_.up_offset + layout_.neuron_bytes * static_cast<std::size_t>(group * kGroup);
    std::uint32_t ahead = active;
    for (int i = 0; i < rows_ahead(layout_.neuron_bytes) && ahead != 0; ++i, ahead &= ahead - 1)
      prefetch_bytes(rows + layout_.neuron_bytes * static_cast<std::size_t>(first_bit(ahead)), layout_.neuron_bytes);
  }
  compute_pending(mine);
  mine.pending = &segment;
  mine.pending_group = group;
  mine.pending_active = active;
}

void SparseJob::compute_pending(Worker& mine) {
  if (mine.pending == nullptr) return;
  compute_up(*mine.pending, mine.pending_group, mine.pending_active);
  mine.pending = nullptr;
}

void SparseJob::compute_up(const Segment& segment, int group, std::uint32_t active) {
  const ExpertsShape& shape = experts_.shape();
  const GateSpec& spec = experts_.gate();
  const std::byte* expert = experts_.expert(segment.expert);
  const std::byte* rows = expert + layout_.up_offset + layout_.neuron_bytes * static_cast<std::size_t>(group * kGroup);
  const auto* bias = shape.bias ? reinterpret_cast<const float*>(expert + layout_.up_bias_offset) + group * kGroup : nullptr;
  const std::size_t scales = row_scale_bytes(experts_.types().gate_up, shape.hidden);
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  const auto* lanes = reinterpret_cast<const std::uint32_t*>(scratch_.lanes->data());
  if (shape.gated) {
    std::uint32_t ahead = active;  // the first rows are on their way already
    for (int i = 0; i < rows_ahead(layout_.neuron_bytes) && ahead != 0; ++i) ahead &= ahead - 1;
    for (std::uint32_t left = active; left != 0; left &= left - 1) {
      const int neuron = first_bit(left);
      if (ahead != 0) prefetch_bytes(rows + layout_.neuron_bytes * static_cast<std::size_t>(first_bit(ahead)), layout_.neuron_bytes);
      ahead &= ahead - (ahead != 0);
      const std::byte* row = rows + layout_.neuron_bytes * static_cast<std::size_t>(neuron);
      for (int i = 0; i < segment.pairs; ++i) {
        float& value = neurons_of(segment.first_pair + i)[group * kGroup + neuron];
        if (!is_active(value)) {
          value = 0.0f;
          continue;
        }
        const float dot = kernels_.dot_row[static_cast<int>(format_)]({row, row + scales, lanes + static_cast<std::size_t>(pairs[i].token) * lane_words_, chunks_});
        const float up = dot + (bias ? bias[neuron] : 0.0f);
        const float limit = static_cast<float>(spec.up_limit);
        value *= (up > limit ? limit : up < -limit ? -limit : up) + static_cast<float>(spec.up_offset);
      }
    }
    return;
  }
  for (int i = 0; i < segment.pairs; ++i) {
    float* neurons = neurons_of(segment.first_pair + i) + group * kGroup;
    for (std::uint32_t left = active; left != 0; left &= left - 1)
      if (!is_active(neurons[first_bit(left)])) neurons[first_bit(left)] = 0.0f;
  }
}

void SparseJob::compute_rows(int unit, Worker& mine) {
  const int lines = lines_per_chunk(experts_.types().gate_up);
  Columns columns{};
  columns.first_chunk = unit / parts_ * unit_chunks_;
  columns.chunks = std::min(unit_chunks_, chunks_ - columns.first_chunk);
  columns.lines = lines / parts_;
  columns.first_line = unit % parts_ * columns.lines;
  columns.first_column = columns.first_line * (kGroup / lines);
  columns.columns = columns.lines * (kGroup / lines);
  columns.chunk_floats = static_cast<std::size_t>(columns.columns + 1) * kLanes;
  columns.token_floats = columns.chunk_floats * static_cast<std::size_t>(columns.chunks);
  std::memset(mine.sums, 0, sizeof(float) * columns.token_floats * static_cast<std::size_t>(batch_.tokens));
  int index = 0;
  for (const Segment& segment : batch_.routing->segments()) {
    add_segment(segment, index++, columns, mine);
    if (experts_.shape().bias) add_bias(segment, columns, mine);
  }
  write_columns(columns, mine);
}

void SparseJob::add_segment(const Segment& segment, int segment_index, const Columns& columns, Worker& mine) const {
  const std::byte* down = experts_.expert(segment.expert) + layout_.down_offset;
  const std::size_t width = static_cast<std::size_t>(line_bytes(experts_.types().gate_up));
  const std::size_t chunk_bytes = width * static_cast<std::size_t>(lines_per_chunk(experts_.types().gate_up));
  const std::size_t scales = static_cast<std::size_t>(columns.first_chunk) * kLanes * 2;
  const std::size_t lines = row_scale_bytes(experts_.types().gate_up, experts_.shape().hidden) + chunk_bytes * static_cast<std::size_t>(columns.first_chunk) +
                            width * static_cast<std::size_t>(columns.first_line);
  const std::size_t span = chunk_bytes * static_cast<std::size_t>(columns.chunks - 1) + width * static_cast<std::size_t>(columns.lines);
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  // Two neurons; the second may be the first again, with no share.
  const auto add = [&](std::size_t first, std::size_t second) {
    const std::byte* rows[2] = {down + layout_.neuron_bytes * first, down + layout_.neuron_bytes * second};
    for (int i = 0; i < segment.pairs; ++i) {
      const float* values = neurons_of(segment.first_pair + i);
      const float others = second == first ? 0.0f : values[second];
      if (values[first] == 0.0f && others == 0.0f) continue;
      RowAddArgs args{};
      for (int row = 0; row < 2; ++row) {
        args.scales[row] = rows[row] + scales;
        args.lines[row] = rows[row] + lines;
      }
      args.coefficients[0] = values[first] * pairs[i].weight;
      args.coefficients[1] = others * pairs[i].weight;
      args.line_count = columns.lines;
      args.sums = mine.sums + static_cast<std::size_t>(pairs[i].token) * columns.token_floats;
      for (int chunk = 0; chunk < columns.chunks; ++chunk) {
        args.corrections = args.sums + columns.columns * kLanes;
        kernels_.add_row[static_cast<int>(format_)](args);
        for (int row = 0; row < 2; ++row) {
          args.scales[row] += kLanes * 2;
          args.lines[row] += chunk_bytes;
        }
        args.sums += columns.chunk_floats;
      }
    }
  };
  // A ring of the next active neurons, whose lines are fetched while the first of them are added.
  std::size_t put = 0, taken = 0;
  const std::size_t most_ahead = static_cast<std::size_t>(rows_ahead(span)) + 1;
  const auto add_next_two = [&] {
    add(mine.active[taken % 64], mine.active[(taken + 1) % 64]);
    taken += 2;
  };
  const std::uint32_t* mask = masks() + static_cast<std::size_t>(segment_index) * neuron_groups_;
  for (int group = 0; group < neuron_groups_; ++group) {
    for (std::uint32_t left = mask[group]; left != 0; left &= left - 1) {
      const std::size_t neuron = static_cast<std::size_t>(group * kGroup + first_bit(left));
      prefetch_bytes(down + layout_.neuron_bytes * neuron + lines, span);
      __builtin_prefetch(down + layout_.neuron_bytes * neuron + scales, 0, 2);
      mine.active[put++ % 64] = neuron;
      if (put - taken > most_ahead) add_next_two();
    }
  }
  while (taken + 1 < put) add_next_two();
  if (taken < put) add(mine.active[taken % 64], mine.active[taken % 64]);
}

void SparseJob::add_bias(const Segment& segment, const Columns& columns, Worker& mine) const {
  const auto* bias = reinterpret_cast<const float*>(experts_.expert(segment.expert) + layout_.down_bias_offset);
  const Pair* pairs = batch_.routing->pairs().data() + segment.first_pair;
  for (int i = 0; i < segment.pairs; ++i) {
    float* sums = mine.sums + static_cast<std::size_t>(pairs[i].token) * columns.token_floats;
    for (int chunk = 0; chunk < columns.chunks; ++chunk, sums += columns.chunk_floats) {
      for (int k = 0; k < columns.columns; ++k) {
        for (int lane = 0; lane < kLanes; ++lane) {
          const int column = (columns.first_chunk + chunk) * kChunk + lane * kGroup + columns.first_column + k;
          if (column < experts_.shape().hidden) sums[k * kLanes + lane] += pairs[i].weight * bias[column];
        }
      }
    }
  }
}

void SparseJob::write_columns(const Columns& columns, const Worker& mine) const {
  const int hidden = experts_.shape().hidden;
  const float offset = experts_.types().gate_up == WeightType::kInt8 ? 128.0f : experts_.types().gate_up == WeightType::kInt4 ? 8.0f : 0.0f;
  const float* sums = mine.sums;
  for (int token = 0; token < batch_.tokens; ++token) {
    for (int chunk = 0; chunk < columns.chunks; ++chunk, sums += columns.chunk_floats) {
      const float* corrections = sums + columns.columns * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) {
        const int first = (columns.first_chunk + chunk) * kChunk + lane * kGroup + columns.first_column;
        const int present = std::min(columns.columns, hidden - first);
        if (present <= 0) break;
        float values[kGroup];
        for (int k = 0; k < present; ++k) values[k] = sums[k * kLanes + lane] - (offset != 0.0f ? offset * corrections[lane] : 0.0f);
        std::byte* out = batch_.out + element_bytes(activations_) * (static_cast<std::size_t>(token) * hidden + static_cast<std::size_t>(first));
        kernels_.narrow(activations_, values, out, present);
      }
    }
  }
}

}  // namespace moegraft
