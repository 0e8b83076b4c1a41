// The last phases of a sparse job: rows of down times the neurons' values, for a segment and a range of columns; then each token's sum.
#include <algorithm>
#include <cstring>

#include "sparse/job.h"
#include "sparse/worker.h"

namespace moegraft {
namespace {

constexpr int kFewPairs = 4;  // of a segment: up to these, each reads the rows by itself, the second from cache (tuned on EPYC Zen 5)
// Share of the items that a token needs, up to which it adds these alone and does not go along with the others (tuned on EPYC Zen 5).
constexpr float kPickedShare = 0.45f;

}  // namespace

// What one unit covers.
struct SparseJob::Columns {
  int first_chunk;
  int chunks;
  std::size_t scales;  // from a row's start
  std::size_t lines;   // from a row's start
  std::size_t bytes;   // of lines
};

// Some neurons' rows of down, which are widened together.
struct SparseJob::Run {
  const std::byte* down;  // the expert's rows
  std::size_t row_bytes;
  const int* neurons;
  int count;
  const std::byte* row(int index) const { return down + row_bytes * static_cast<std::size_t>(neurons[index]); }
};

// Fetches the rows of a run, some lines at a time: a long burst of prefetches made nothing faster (EPYC Zen 5).
class SparseJob::Ahead {
 public:
  Ahead(const Run& run, std::size_t first, std::size_t end) : run_(run), first_(first), end_(end), at_(first) {}
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

// Whole rows begin with their scales; of parts of rows only the lines are fetched.
SparseJob::Ahead SparseJob::ahead_of(const Run& run, const Columns& columns) const {
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
  for (int i = 0; i < segment.pairs; ++i)
    std::memset(sums_of(segment.first_pair + i) + columns.first_chunk * kChunk, 0, sizeof(float) * static_cast<std::size_t>(columns.chunks * kChunk));
  const int count = active_neurons(segment_index, mine.neurons);
  segment.pairs <= kFewPairs ? add_few(segment, count, columns, mine) : add_many(segment, count, columns, mine);
  if (experts_.shape().bias) add_bias(segment, columns);
}

void SparseJob::add_few(const Segment& segment, int count, const Columns& columns, Worker& mine) const {
  const Run rows = {experts_.expert(segment.expert) + layout_.down_offset, layout_.neuron_bytes, mine.neurons, count};
  for (int k = 0; k < count; k += kMostRows) {
    for (int next = k + kMostRows; next < std::min(count, k + 2 * kMostRows) && scale_bytes_ != 0; ++next)
      __builtin_prefetch(rows.row(next) + columns.scales, 0, 3);
    for (int i = 0; i < segment.pairs; ++i) {
      const float* values = neurons_of(segment.first_pair + i);
      RowAddArgs args{};
      args.sums = sums_of(segment.first_pair + i) + columns.first_chunk * kChunk;
      bool any = false;
      for (int row = 0; row < kMostRows; ++row) {
        const std::byte* start = rows.row(std::min(k + row, count - 1));  // what is missing is the last one again, with no share
        args.scales[row] = start + columns.scales;
        args.lines[row] = start + columns.lines;
        args.coefficients[row] = k + row < count ? values[rows.neurons[k + row]] : 0.0f;
        any = any || args.coefficients[row] != 0.0f;
        if (i == 0 && k + row + kMostRows < count) args.ahead[row] = rows.row(k + row + kMostRows) + columns.lines;
      }
      for (int chunk = 0; chunk < columns.chunks && any; ++chunk, args.sums += kChunk) {
        kernels_.rows.add_rows[static_cast<int>(format_)](args);
        for (const std::byte*& ahead : args.ahead) ahead = ahead != nullptr ? ahead + chunk_bytes_ : nullptr;
        for (int row = 0; row < kMostRows; ++row) args.scales[row] += kLanes * 2;
        for (int row = 0; row < kMostRows; ++row) args.lines[row] += chunk_bytes_;
      }
    }
  }
}

void SparseJob::add_many(const Segment& segment, int count, const Columns& columns, Worker& mine) const {
  const auto run_at = [&](int first) {
    return Run{experts_.expert(segment.expert) + layout_.down_offset, layout_.neuron_bytes, mine.neurons + first,
               std::clamp(count - first, 0, kRunNeurons)};
  };
  for (int first = 0; first < count; first += kRunNeurons) {
    const Run run = run_at(first), next = run_at(first + kRunNeurons);
    take_coefficients(segment, run.neurons, run.count, mine);
    Ahead ahead = ahead_of(next, columns);
    // Evenly over the calls of kernels.
    const int calls = columns.chunks * ((run.count + 1) / 2 + kTiles);
    const int lines = (ahead.lines() + calls - 1) / calls;
    for (int chunk = 0; chunk < columns.chunks; ++chunk) {
      widen_chunk(run, columns, chunk, ahead, lines, mine);
      add_chunk(segment, run.count, columns.first_chunk + chunk, ahead, lines, mine);
    }
  }
}

// The tokens' values as items need them, and which items a token that needs few adds alone.
void SparseJob::take_coefficients(const Segment& segment, const int* neurons, int count, Worker& mine) const {
  const bool pairs = kernels_.rows.in_pairs[static_cast<int>(format_)];
  const int items = pairs ? (count + 1) / 2 : count;
  const std::uint32_t bits = pairs ? 0x7fff7fffu : 0x7fffffffu;  // all but signs
  for (int i = 0; i < segment.pairs; ++i) {
    const float* values = neurons_of(segment.first_pair + i);
    std::uint32_t* coefficients = mine.coefficients + i * kRunNeurons;
    float taken[kRunNeurons] = {};
    if (neurons[count - 1] - neurons[0] == count - 1) std::memcpy(taken, values + neurons[0], sizeof(float) * static_cast<std::size_t>(count));
    else for (int k = 0; k < count; ++k) taken[k] = values[neurons[k]];
    if (pairs) kernels_.encode[static_cast<int>(Format::kBFloat16Dot)](taken, kRunNeurons / kGroup, coefficients, kGroup / 2);
    else std::memcpy(coefficients, taken, sizeof taken);
    int wanted = 0;
    for (int item = 0; item < items; ++item) wanted += (coefficients[item] & bits) != 0;
    mine.picked_counts[i] = -1;
    if (static_cast<float>(wanted) > kPickedShare * static_cast<float>(items)) continue;
    mine.picked_counts[i] = wanted;
    int* picked = mine.picked + i * (kRunNeurons + 1);
    int found = 0;
    for (int item = 0; item < items; ++item) {
      picked[found] = item;
      found += (coefficients[item] & bits) != 0;
    }
  }
}

// One item more than there are: tiles at a distance of whole pages would share their places in L1.
std::size_t SparseJob::tile_stride() const {
  return static_cast<std::size_t>(kRunNeurons / (kernels_.rows.in_pairs[static_cast<int>(format_)] ? 2 : 1) + 1) * kTileWords;
}

void SparseJob::widen_chunk(const Run& run, const Columns& columns, int chunk, Ahead& ahead, int lines_ahead, Worker& mine) const {
  const bool pairs = kernels_.rows.in_pairs[static_cast<int>(format_)];
  const std::size_t scales = columns.scales + static_cast<std::size_t>(chunk) * kLanes * 2;
  const std::size_t lines = columns.lines + static_cast<std::size_t>(chunk) * chunk_bytes_;
  for (int k = 0; k < run.count; k += 2) {
    const std::byte *first = run.row(k), *second = run.row(std::min(k + 1, run.count - 1));
    ahead.fetch(lines_ahead);
    kernels_.rows.widen_rows[static_cast<int>(format_)]({{first + scales, second + scales}, {first + lines, second + lines},
                                                         mine.items + static_cast<std::size_t>(pairs ? k / 2 : k) * kTileWords, tile_stride()});
  }
}

void SparseJob::add_chunk(const Segment& segment, int neurons, int chunk, Ahead& ahead, int lines_ahead, Worker& mine) const {
  const int format = static_cast<int>(format_);
  const int items = kernels_.rows.in_pairs[format] ? (neurons + 1) / 2 : neurons;
  int together = 0;
  for (int i = 0; i < segment.pairs; ++i) {
    float* sums = sums_of(segment.first_pair + i) + chunk * kChunk;
    const std::uint32_t* coefficients = mine.coefficients + i * kRunNeurons;
    if (mine.picked_counts[i] >= 0) {
      const int* picked = mine.picked + i * (kRunNeurons + 1);
      kernels_.rows.add_picked[format]({mine.items, tile_stride(), picked, mine.picked_counts[i], coefficients, sums});
    } else {
      mine.lanes[together] = coefficients;
      mine.outs[together++] = sums;
    }
  }
  for (int tile = 0; tile < kTiles; ++tile) {
    ahead.fetch(lines_ahead);
    if (together == 0) continue;
    kernels_.rows.add_items[format]({mine.items + static_cast<std::size_t>(tile) * tile_stride(), items, together, mine.lanes, mine.outs,
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

// Adds up what a token's experts gave to a chunk, in the order of their slots, and turns lanes into columns.
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
