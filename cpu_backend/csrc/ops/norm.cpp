#include "ops/norm.h"

#include <algorithm>

namespace moegraft {
namespace {

constexpr std::int64_t kUnitRows = 8;

}  // namespace

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
  const std::size_t row_bytes = element_bytes(args_.type) * static_cast<std::size_t>(args_.cols);
  for (std::int64_t row = first; row < end; ++row) {
    const std::size_t offset = row_bytes * static_cast<std::size_t>(row);
    kernels_.norm({args_.x + offset, args_.weight, args_.out + offset, args_.type, args_.cols, args_.form});
  }
}

}  // namespace moegraft
