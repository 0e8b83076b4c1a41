#include "ops/matmul.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace moegraft {
namespace {

constexpr int kProductUnitsPerWorker = 4;
constexpr std::int64_t kLeastCols = 8;
constexpr int kMixedRows = 4, kMixedAhead = 16;  // rows of b that are multiplied at once, and how many are prefetched

}  // namespace

void MatmulArgs::check() const {
  if ((cols > 1 && out.col_stride != 1) || (inner > 1 && a.col_stride != 1))
    throw std::invalid_argument("matmul: the rows of a and out must be contiguous");
  if (inner > 1 && cols > 1 && b.row_stride != 1 && b.col_stride != 1)
    throw std::invalid_argument("matmul: b is contiguous in no dimension");
}

MatmulJob::MatmulJob(const Kernels& kernels, const MatmulArgs& args, int workers, Phase& columns)
    : kernels_(kernels), args_(args), workers_(workers), columns_(columns) {}

void MatmulJob::prepare(AlignedMemory& memory, AlignedMemory* workers) {
  scratch_ = workers;
  padded_ = round_up(static_cast<int>(args_.inner), 32);
  const auto elements = static_cast<std::size_t>(padded_) * static_cast<std::size_t>(args_.batch * args_.rows);
  const std::size_t bytes = element_bytes(args_.type);
  memory.reserve((sizeof(float) + sizeof(std::uint16_t)) * elements);
  auto* widened = reinterpret_cast<float*>(memory.data());
  auto* halves = reinterpret_cast<std::uint16_t*>(widened + elements);
  widened_ = widened;
  halves_ = halves;
  const std::int64_t batch = args_.inner == 0 ? 0 : args_.batch;  // without values the arrays may have no address
  for (std::int64_t i = 0; i < batch; ++i)
    for (std::int64_t row = 0; row < args_.rows; ++row, widened += padded_, halves += padded_) {
      const std::byte* source = args_.a.data + static_cast<std::ptrdiff_t>(bytes) * (i * args_.a.batch_stride + row * args_.a.row_stride);
      kernels_.widen(args_.type, source, widened, static_cast<int>(args_.inner));
      if (args_.type != ActivationType::kFloat32) std::memcpy(halves, source, bytes * static_cast<std::size_t>(args_.inner));
    }
  const std::int64_t wanted = std::max<std::int64_t>(1, workers_ * kProductUnitsPerWorker / std::max<std::int64_t>(args_.batch, 1));
  unit_cols_ = std::max<std::int64_t>(kLeastCols, (args_.cols + wanted - 1) / wanted);
  units_per_matrix_ = (args_.cols + unit_cols_ - 1) / unit_cols_;
  for (int worker = 0; worker < workers_; ++worker)
    workers[worker].reserve(sizeof(float) * kAttentionRows * static_cast<std::size_t>(round_up(static_cast<int>(unit_cols_), 32)));
  columns_.reset(static_cast<int>(args_.batch * units_per_matrix_));
}

void MatmulJob::run(int worker) noexcept {
  auto* sums = reinterpret_cast<float*>(scratch_[worker].data());
  int count = 0;
  for (int unit = columns_.take(worker); unit >= 0; unit = columns_.take(worker), ++count) compute(unit, sums);
  columns_.finish(count);
  columns_.wait();
}

void MatmulJob::compute(int unit, float* sums) const {
  const MatrixView &b = args_.b, &out = args_.out;
  const auto bytes = static_cast<std::ptrdiff_t>(element_bytes(args_.type));
  const std::int64_t matrix = unit / units_per_matrix_, first = unit % units_per_matrix_ * unit_cols_;
  const int cols = static_cast<int>(std::min(unit_cols_, args_.cols - first)), stride = round_up(cols, 32);
  const int inner = static_cast<int>(args_.inner), type = static_cast<int>(args_.type);
  const bool dots = inner <= 1 || b.row_stride == 1;
  const auto columns_of = [&](int index) {
    return b.data + bytes * (index / units_per_matrix_ * b.batch_stride + index % units_per_matrix_ * unit_cols_ * b.col_stride);
  };
  const std::byte* columns = inner == 0 ? nullptr : columns_of(unit);
  for (std::int64_t row = 0; row < args_.rows; row += kAttentionRows) {
    const int rows = static_cast<int>(std::min<std::int64_t>(kAttentionRows, args_.rows - row));
    const std::ptrdiff_t place = padded_ * static_cast<std::ptrdiff_t>(matrix * args_.rows + row);
    if (dots && inner > 0) {
      const std::ptrdiff_t column = bytes * b.col_stride;
      kernels_.attention.score[type](
          {widened_ + place, halves_ + place, padded_, rows, columns, columns + 16 * column, column, cols, inner, sums, stride});
    } else {
      std::fill_n(sums, static_cast<std::ptrdiff_t>(rows) * stride, 0.0f);
      // The kernel reads a few columns of all its rows, then the next ones: a pattern that hardware prefetchers do not follow.
      const std::ptrdiff_t row_bytes = bytes * b.row_stride;
      const bool last = unit + 1 == args_.batch * units_per_matrix_;
      for (int mixed = 0; mixed < inner; mixed += kMixedRows) {
        const int count = std::min(kMixedRows, inner - mixed);
        for (int i = 0; i < count && row == 0; ++i) {
          const int ahead = mixed + i + kMixedAhead;
          if (ahead >= inner && last) break;
          const std::byte* values = ahead < inner ? columns + row_bytes * ahead : columns_of(unit + 1) + row_bytes * (ahead - inner);
          for (std::ptrdiff_t byte = 0; byte < bytes * cols; byte += 64) __builtin_prefetch(values + byte, 0, 3);
        }
        kernels_.attention.mix[type](
            {widened_ + place + mixed, padded_, rows, columns + row_bytes * mixed, row_bytes, count, cols, sums, stride});
      }
    }
    for (int r = 0; r < rows; ++r) {
      float* sum = sums + static_cast<std::ptrdiff_t>(r) * stride;
      for (int i = 0; args_.bias != nullptr && i < cols; ++i) {
        float value;
        kernels_.widen(args_.type, args_.bias + bytes * (first + i) * args_.bias_stride, &value, 1);
        sum[i] += value;
      }
      kernels_.narrow(args_.type, sum, out.data + bytes * (matrix * out.batch_stride + (row + r) * out.row_stride + first), cols);
    }
  }
}

}  // namespace moegraft
