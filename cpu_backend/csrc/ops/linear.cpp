#include "ops/linear.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "experts/routing.h"

namespace moegraft {
namespace {

constexpr int kUnitsPerWorker = 8;
constexpr int kMaxUnitBlocks = 8;

}  // namespace

LinearJob::LinearJob(const Kernels& kernels, std::vector<const PackedLinear*> linears, ActivationType activations, int workers,
                     const Phases& phases)
    : kernels_(kernels),
      linears_(std::move(linears)),
      activations_(activations),
      format_(format_of(linears_.front()->type(), activations)),
      workers_(workers),
      phases_(phases),
      max_tokens_(kernels.max_tokens[static_cast<int>(format_)]),
      groups_(round_up(linears_.front()->cols(), kGroup) / kGroup),
      words_(static_cast<std::size_t>(groups_) * words_per_group(format_)),
      unit_ends_(linears_.size()) {}

void LinearJob::prepare(const Batch& batch, const Scratch& scratch) {
  batch_ = batch;
  scratch_ = scratch;
  int blocks = 0;
  for (const PackedLinear* linear : linears_) blocks += linear->blocks();
  unit_blocks_ = std::clamp(blocks / (workers_ * kUnitsPerWorker), 1, kMaxUnitBlocks);
  int units = 0;
  for (std::size_t i = 0; i < linears_.size(); ++i) unit_ends_[i] = units += (linears_[i]->blocks() + unit_blocks_ - 1) / unit_blocks_;
  scratch.records->reserve(static_cast<std::size_t>(batch.tokens) * words_ * 4);
  for (int worker = 0; worker < workers_; ++worker)
    scratch.workers[worker].reserve(static_cast<std::size_t>(groups_) * kGroup * sizeof(float));
  phases_.encode->reset(batch.tokens);
  phases_.rows->reset(units);
}

void LinearJob::run(int worker) noexcept {
  auto* widened = reinterpret_cast<float*>(scratch_.workers[worker].data());
  int count = 0;
  for (int token = phases_.encode->take(worker); token >= 0; token = phases_.encode->take(worker), ++count) encode_token(token, widened);
  phases_.encode->finish(count);
  phases_.encode->wait();
  count = 0;
  for (int unit = phases_.rows->take(worker); unit >= 0; unit = phases_.rows->take(worker), ++count) compute_rows(unit);
  phases_.rows->finish(count);
  phases_.rows->wait();
}

void LinearJob::encode_token(int token, float* widened) {
  const int cols = linears_.front()->cols();
  kernels_.widen(activations_, batch_.input + element_bytes(activations_) * static_cast<std::size_t>(token) * cols, widened, cols);
  std::memset(widened + cols, 0, sizeof(float) * static_cast<std::size_t>(groups_ * kGroup - cols));
  const Tiling tiling(batch_.tokens, max_tokens_);
  const Tile tile = tiling.holding(token);
  auto* records = reinterpret_cast<std::uint32_t*>(scratch_.records->data()) + static_cast<std::size_t>(tile.first) * words_;
  const std::size_t words = static_cast<std::size_t>(words_per_group(format_));
  kernels_.encode[static_cast<int>(format_)](widened, groups_, records + words * static_cast<std::size_t>(token - tile.first),
                                             words * static_cast<std::size_t>(tile.tokens));
}

void LinearJob::compute_rows(int unit) {
  std::size_t i = 0;
  while (unit >= unit_ends_[i]) ++i;
  compute_rows_of(*linears_[i], batch_.outs[i], i == 0 ? unit : unit - unit_ends_[i - 1]);
}

void LinearJob::compute_rows_of(const PackedLinear& linear, std::byte* out, int unit) {
  alignas(64) float rows[kMaxTileTokens * kBlockRows];
  alignas(64) float biased[kBlockRows];
  const Tiling tiling(batch_.tokens, max_tokens_);
  const int end = std::min((unit + 1) * unit_blocks_, linear.blocks());
  for (int block = unit * unit_blocks_; block < end; ++block) {
    const float* bias = linear.bias() ? linear.bias() + block * kBlockRows : nullptr;
    const int present = std::min(kBlockRows, linear.rows() - block * kBlockRows);
    for (int index = 0; index < tiling.count(); ++index) {
      const Tile tile = tiling[index];
      TileArgs args = tile_args(linear.block(block), linear.type(), groups_, tile, index, tiling.count());
      args.records = reinterpret_cast<const std::uint32_t*>(scratch_.records->data()) + static_cast<std::size_t>(tile.first) * words_;
      args.out = rows;
      kernels_.tile[static_cast<int>(format_)](args);
      for (int i = 0; i < tile.tokens; ++i) {
        const float* result = rows + i * kBlockRows;
        if (bias) {
          for (int r = 0; r < kBlockRows; ++r) biased[r] = result[r] + bias[r];
          result = biased;
        }
        const std::size_t element = static_cast<std::size_t>(tile.first + i) * linear.rows() + static_cast<std::size_t>(block) * kBlockRows;
        kernels_.narrow(activations_, result, out + element_bytes(activations_) * element, present);
      }
    }
  }
}

}  // namespace moegraft
