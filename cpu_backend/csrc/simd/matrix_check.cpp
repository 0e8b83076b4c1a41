// The self-test of the matrix kernels: blocks of every format times random tokens, against sums in double.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/memory.h"
#include "experts/segment_product.h"
#include "simd/isa.h"

namespace moegraft {
namespace {

// Values of a few bits: their sums are exact, so that an error is the kernel's and not the reference's.
float test_value(unsigned index) { return static_cast<float>(static_cast<int>(index * 2654435761u >> 16) % 129 - 64) / 64.0f; }

constexpr int kTestCols = 512 + 3 * kGroup;  // three panels, the last one short; whole blocks where these are longer

// One block of random weights, and its values.
struct TestBlock {
  WeightType type;
  int cols;
  AlignedMemory packed;
  std::vector<float> values;  // (32, cols)
};

TestBlock test_block(WeightType type) {
  TestBlock block{type, is_coded(type) ? kTestCols / coded_format(type).columns * coded_format(type).columns : kTestCols, {}, {}};
  block.packed = AlignedMemory(block_bytes(type, block.cols));
  block.values.resize(static_cast<std::size_t>(kBlockRows) * static_cast<std::size_t>(block.cols));
  if (is_stored(type)) {
    std::vector<std::uint8_t> file(file_row_bytes(type, block.cols) * kBlockRows);
    random_blocks(type, file.data(), kBlockRows, block.cols, 1);
    for (int half = 0; half < 2; ++half) {
      pack_half_block(type, {block.packed.data(), half}, StoredRowsView{file.data(), kBlockRows, block.cols}, half * kLanes);
      unpack_half_block(type, {block.packed.data(), half}, block.values.data(), kBlockRows, block.cols, half * kLanes);
    }
  } else {
    std::vector<float> source(block.values.size());
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = test_value(static_cast<unsigned>(i));
    for (int half = 0; half < 2; ++half) {
      pack_half_block(type, {block.packed.data(), half}, RowsView{source.data(), WeightType::kFloat32, kBlockRows, block.cols},
                      half * kLanes);
      unpack_half_block(type, {block.packed.data(), half}, block.values.data(), kBlockRows, block.cols, half * kLanes);
    }
  }
  return block;
}

}  // namespace

bool matrix_is_right(const Kernels& kernels, Format format) {
  constexpr double kLimit = 1e-2;  // relative: expanded weights have 8 bits
  const TestBlock block = test_block(weights_of(format));
  Kernels always = kernels;
  for (int& least : always.matrix.least_tokens) least = 1;
  const auto expanded = std::make_unique<ExpandedWeights>();
  const MatrixUse use(always, true);
  bool right = true;
  for (const int tokens : {1, 20, 44, 70}) {  // one pass of each width, and several
    const SegmentProduct product(always, block.type, format, block.cols / kGroup, tokens);
    AlignedMemory records(product.words() * 4);
    std::vector<float> x(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(block.cols));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = test_value(static_cast<unsigned>(i) + 77777u);
    for (int index = 0; index < product.tiling().count(); ++index) {
      const Tile tile = product.tiling()[index];
      for (int i = 0; i < tile.tokens; ++i)
        always.encode[static_cast<int>(product.records())](
            x.data() + static_cast<std::size_t>(tile.first + i) * static_cast<std::size_t>(block.cols), block.cols / kGroup,
            reinterpret_cast<std::uint32_t*>(records.data()) + product.tile_start(index) +
                product.group_words() * static_cast<std::size_t>(i),
            product.group_stride(index));
    }
    std::vector<float> out[2];  // the second time, the first groups have been expanded ahead
    for (std::vector<float>& found : out) {
      found.resize(static_cast<std::size_t>(product.rows()) * kBlockRows);
      product.multiply(block.packed.data(), block.packed.data(), true, reinterpret_cast<const std::uint32_t*>(records.data()), found.data(),
                       *expanded);
    }
    for (int index = 0; index < product.tiling().count(); ++index) {
      const Tile tile = product.tiling()[index];
      for (int i = 0; i < tile.tokens; ++i) {
        double errors = 0.0, squares = 0.0;
        for (int row = 0; row < kBlockRows; ++row) {
          double sum = 0.0;
          for (int col = 0; col < block.cols; ++col)
            sum += static_cast<double>(block.values[static_cast<std::size_t>(row * block.cols + col)]) *
                   static_cast<double>(
                       x[static_cast<std::size_t>(tile.first + i) * static_cast<std::size_t>(block.cols) + static_cast<std::size_t>(col)]);
          const auto place = static_cast<std::size_t>((product.first_row(index) + i) * kBlockRows + row);
          right = right && out[0][place] == out[1][place];
          errors += (out[0][place] - sum) * (out[0][place] - sum);
          squares += sum * sum;
        }
        right = right && std::sqrt(errors) <= kLimit * std::sqrt(squares);
      }
    }
  }
  return right;
}

}  // namespace moegraft
