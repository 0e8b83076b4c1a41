#include "ops/linear.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "experts/routing.h"

namespace moegraft {
namespace {

constexpr int kLinearUnitsPerWorker = 8;
constexpr int kMaxLinearBlocks = 8;
constexpr int kPartGroups = 64;  // of the matrix kernel: 2048 columns, which leave room in L2 for a segment of 100 tokens and more

}  // namespace

LinearJob::LinearJob(const Kernels& kernels, std::vector<const PackedLinear*> linears, ActivationType activations, int workers,
                     const Phases& phases)
    : kernels_(kernels),
      linears_(std::move(linears)),
      activations_(activations),
      format_(format_of(linears_.front()->type(), activations)),
      workers_(workers),
      phases_(phases),
      groups_(round_up(linears_.front()->cols(), kGroup) / kGroup),
      part_groups_(std::min(groups_, kPartGroups)),
      unit_ends_(linears_.size()) {
  int blocks = 0;
  for (const PackedLinear* linear : linears_) blocks += linear->blocks();
  unit_blocks_ = std::clamp(blocks / (workers_ * kLinearUnitsPerWorker), 1, kMaxLinearBlocks);
  for (std::size_t i = 0; i < linears_.size(); ++i) unit_ends_[i] = units_ += (linears_[i]->blocks() + unit_blocks_ - 1) / unit_blocks_;
}

SegmentProduct LinearJob::product_of(const Tile& segment) const {
  return {kernels_, linears_.front()->type(), format_, groups_, segment.tokens};
}

void LinearJob::prepare(const Batch& batch, const Scratch& scratch) {
  batch_ = batch;
  scratch_ = scratch;
  int segment_tokens = batch.tokens;
  if (kernels_.matrix.serves(format_, batch.tokens)) {
    const int part_bytes = part_groups_ * group_words(kernels_.matrix.records_of(format_)) * 4, tile = kernels_.matrix.tile_tokens;
    segment_tokens = std::max(1, static_cast<int>(kernels_.matrix.segment_bytes) / part_bytes / tile) * tile;
  }
  segments_ = Tiling(batch.tokens, segment_tokens);
  const SegmentProduct longest = product_of(segments_[0]);
  segment_words_ = longest.words();
  block_floats_ = static_cast<std::size_t>(longest.rows()) * kBlockRows;
  const std::size_t outs = longest.by_matrix() && part_groups_ < groups_ ? static_cast<std::size_t>(unit_blocks_) : 1;
  scratch.records->reserve(static_cast<std::size_t>(segments_.count()) * segment_words_ * 4);
  for (int worker = 0; worker < workers_; ++worker)
    scratch.workers[worker].reserve(std::max(static_cast<std::size_t>(groups_) * kGroup, outs * block_floats_) * sizeof(float));
  phases_.encode->reset(batch.tokens);
  const int nodes = phases_.rows->nodes();
  phases_.rows->reset_by_node(units_, [&](int unit) {
    const Rows rows = rows_of(unit);
    return MemoryNodes::node_of_part(rows.first, linears_[rows.linear]->blocks(), nodes);
  });
}

LinearJob::Rows LinearJob::rows_of(int unit) const {
  std::size_t i = 0;
  while (unit >= unit_ends_[i]) ++i;
  const int first = (i == 0 ? unit : unit - unit_ends_[i - 1]) * unit_blocks_;
  return {i, first, std::min(first + unit_blocks_, linears_[i]->blocks())};
}

Upcoming LinearJob::first_rows(int worker) const {
  if (phases_.rows->nodes() > 1) return {};  // which units a worker has is known when the phase begins
  const int unit = Phase::first_unit(units_, worker, workers_);
  if (unit >= units_) return {};
  const Rows rows = rows_of(unit);
  const PackedLinear& linear = *linears_[rows.linear];
  return {linear.block(rows.first), block_bytes(linear.type(), linear.cols()) * static_cast<std::size_t>(linear.blocks() - rows.first)};
}

void LinearJob::run(int worker) noexcept {
  Upcoming none;
  run(worker, none, none);
}

void LinearJob::run(int worker, Upcoming& rows, Upcoming& after) noexcept {
  const MatrixUse use(kernels_, kernels_.matrix.serves(format_, batch_.tokens));
  auto* floats = reinterpret_cast<float*>(scratch_.workers[worker].data());
  ExpandedWeights expanded;
  int count = 0;
  for (int token = phases_.encode->take(worker); token >= 0; token = phases_.encode->take(worker), ++count) encode_token(token, floats);
  phases_.encode->finish(count);
  phases_.encode->wait(rows);
  count = 0;
  for (int unit = phases_.rows->take(worker); unit >= 0; unit = phases_.rows->take(worker), ++count) compute_rows(unit, floats, expanded);
  phases_.rows->finish(count);
  phases_.rows->wait(after);
}

void LinearJob::encode_token(int token, float* widened) {
  const int cols = linears_.front()->cols();
  kernels_.widen(activations_, batch_.input + element_bytes(activations_) * static_cast<std::size_t>(token) * cols, widened, cols);
  std::memset(widened + cols, 0, sizeof(float) * static_cast<std::size_t>(groups_ * kGroup - cols));
  const int segment = segments_.index_of(token);
  const SegmentProduct product = product_of(segments_[segment]);
  const int within = token - segments_[segment].first, tile = product.tiling().index_of(within);
  auto* records = reinterpret_cast<std::uint32_t*>(scratch_.records->data()) + segment_words_ * static_cast<std::size_t>(segment);
  records += product.tile_start(tile) + product.group_words() * static_cast<std::size_t>(within - product.tiling()[tile].first);
  kernels_.encode[static_cast<int>(product.records())](widened, groups_, records, product.group_stride(tile));
}

void LinearJob::compute_rows(int unit, float* floats, ExpandedWeights& expanded) {
  const auto [i, first, end] = rows_of(unit);
  const PackedLinear& linear = *linears_[i];
  for (int index = 0; index < segments_.count(); ++index) {
    const Tile segment = segments_[index];
    const SegmentProduct product = product_of(segment);
    const auto* records =
        reinterpret_cast<const std::uint32_t*>(scratch_.records->data()) + segment_words_ * static_cast<std::size_t>(index);
    const int part_groups = product.by_matrix() ? part_groups_ : groups_;
    for (int group = 0; group < groups_; group += part_groups) {
      const bool whole = part_groups == groups_, last = group + part_groups >= groups_;
      for (int block = first; block < end; ++block) {
        float* out = floats + (whole ? 0 : static_cast<std::size_t>(block - first) * block_floats_);
        const std::byte* next = block + 1 < end ? linear.block(block + 1) : nullptr;
        if (whole) product.multiply(linear.block(block), next, true, records, out, expanded);
        else
          product.multiply_part(linear.block(block), next, true, records, {group, std::min(part_groups, groups_ - group)}, out, expanded);
        if (last) write(linear, block, product, out, batch_.outs[i], segment.first);
      }
    }
  }
}

// Adds the bias to a block's rows and rounds them.
void LinearJob::write(const PackedLinear& linear, int block, const SegmentProduct& product, const float* out, std::byte* target,
                      int first_token) const {
  alignas(64) float biased[kBlockRows];
  const float* bias = linear.bias() ? linear.bias() + block * kBlockRows : nullptr;
  const int present = std::min(kBlockRows, linear.rows() - block * kBlockRows);
  for (int index = 0; index < product.tiling().count(); ++index) {
    const Tile tile = product.tiling()[index];
    const float* result = out + product.first_row(index) * kBlockRows;
    for (int i = 0; i < tile.tokens; ++i, result += kBlockRows) {
      if (bias)
        for (int r = 0; r < kBlockRows; ++r) biased[r] = result[r] + bias[r];
      const std::size_t element =
          static_cast<std::size_t>(first_token + tile.first + i) * linear.rows() + static_cast<std::size_t>(block) * kBlockRows;
      kernels_.narrow(activations_, bias ? biased : result, target + element_bytes(activations_) * element, present);
    }
  }
}

}  // namespace moegraft
