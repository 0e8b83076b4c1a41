#include "ops/norm.h"

#include <algorithm>
#include <cstring>

namespace moegraft {
namespace {

constexpr std::int64_t kUnitRows = 8;
constexpr int kStripBlocks = 8;  // of 16 columns

// values *= act(gate).
void multiply(const Kernels& kernels, const GateSpec& spec, ActivationType type, const std::byte* gate, float* values, int cols) {
  constexpr int kHalf = kBlockRows / 2, kStrip = kStripBlocks * kHalf;
  alignas(64) float gates[kStrip], blocks[kStripBlocks * kBlockRows];
  for (int first = 0; first < cols; first += kStrip) {
    const int count = std::min(kStrip, cols - first);
    kernels.widen(type, gate + static_cast<std::size_t>(first) * element_bytes(type), gates, count);
    const int whole = (count + kHalf - 1) / kHalf;
    for (int block = 0; block < whole; ++block) {
      const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(std::min(kHalf, count - block * kHalf));
      float* both = blocks + block * kBlockRows;
      if (bytes < kHalf * sizeof(float)) std::fill(both, both + kBlockRows, 0.0f);
      std::memcpy(both, gates + block * kHalf, bytes);
      std::memcpy(both + kHalf, values + first + block * kHalf, bytes);
    }
    kernels.gate({&spec, blocks, nullptr, nullptr, whole, true, blocks});
    for (int block = 0; block < whole; ++block)
      std::memcpy(values + first + block * kHalf, blocks + block * kBlockRows,
                  sizeof(float) * static_cast<std::size_t>(std::min(kHalf, count - block * kHalf)));
  }
}

// One group of a row.
void gated_norm(const Kernels& kernels, const NormArgs& args, std::size_t offset, const std::byte* weight) noexcept {
  const std::byte *x = args.x + offset, *gate = args.gate + offset;
  std::byte* out = args.out + offset;
  const NormGate& gating = args.gating;
  const int cols = gating.group;
  alignas(64) float values[kMostGroupCols], others[kMostGroupCols], normed[kMostGroupCols];
  if (gating.first) {
    kernels.widen(args.type, x, values, cols);
    multiply(kernels, gating.spec, args.type, gate, values, cols);
    kernels.norm({reinterpret_cast<const std::byte*>(values), nullptr, reinterpret_cast<std::byte*>(normed), ActivationType::kFloat32, cols,
                  args.form});
    kernels.narrow(args.type, normed, out, cols);
    kernels.widen(args.type, out, normed, cols);
    kernels.widen(args.type, weight, others, cols);
    kernels.elementwise({Elementwise::kMul, normed, others, nullptr, normed, cols});
  } else {
    if (gating.wide) {
      kernels.widen(args.type, x, values, cols);
      kernels.widen(args.type, weight, others, cols);
      kernels.norm({reinterpret_cast<const std::byte*>(values), reinterpret_cast<const std::byte*>(others),
                    reinterpret_cast<std::byte*>(normed), ActivationType::kFloat32, cols, args.form});
    } else {
      kernels.norm({x, weight, out, args.type, cols, args.form});
      kernels.widen(args.type, out, normed, cols);
    }
    multiply(kernels, gating.spec, args.type, gate, normed, cols);
  }
  kernels.narrow(args.type, normed, out, cols);
}

}  // namespace

void norm_row(const Kernels& kernels, const NormArgs& args, std::int64_t row) noexcept {
  const std::size_t bytes = element_bytes(args.type), offset = bytes * static_cast<std::size_t>(args.cols) * static_cast<std::size_t>(row);
  if (args.gate == nullptr) {
    kernels.norm({args.x + offset, args.weight, args.out + offset, args.type, args.cols, args.form});
    return;
  }
  for (int first = 0; first < args.cols; first += args.gating.group) {
    const std::size_t start = bytes * static_cast<std::size_t>(first);
    gated_norm(kernels, args, offset + start, args.weight + start);
  }
}

NormJob::NormJob(const Kernels& kernels, const NormArgs& args, Phase& rows) : kernels_(kernels), args_(args), rows_(rows) {
  rows_.reset(static_cast<int>((args.rows + kUnitRows - 1) / kUnitRows));
}

void NormJob::run(int worker) noexcept {
  int count = 0;
  for (int unit = rows_.take(worker); unit >= 0; unit = rows_.take(worker), ++count)
    run_rows(unit * kUnitRows, std::min<std::int64_t>(args_.rows, (unit + 1) * kUnitRows));
  rows_.finish(count);
  rows_.wait();
}

void NormJob::run_rows(std::int64_t first, std::int64_t end) const noexcept {
  for (std::int64_t row = first; row < end; ++row) norm_row(kernels_, args_, row);
}

}  // namespace moegraft
