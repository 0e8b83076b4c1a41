// The memory layout of a matrix: blocks of 32 output rows, each block one stream that is read from front to back.
//
// Lanes are output rows, so a kernel streams weights, broadcasts activations and never sums across lanes; the same bytes serve a
// GEMV and the register tiles of a GEMM, with 512-bit vectors (16 rows) and 256-bit ones (8 rows). Columns are padded to 32 with
// zeros. For row r = 16 * half + lane of a block and column k = 32 * group + kk:
//   float32   [k][r]                      one float
//   float16   [k][r]                      one half: 16 rows widen from 32 consecutive bytes
//   bfloat16  [k / 2][half][lane][k % 2]  pairs of columns, the order of vdpbf16ps
//   int8      [group]{scale f16 [32 rows]; code + 128 as u8 [kk / 4][half][lane][kk % 4]}            the order of vpdpbusd
//   int4      [group]{scale f16 [32 rows]; nibbles, code + 8, [kk / 8][half][lane][kk % 4], low nibble kk % 8 < 4, high otherwise}
// Scales are stored with their weights so that one stream is read in order. Every line is 64 bytes.
//
// Those two and all formats of files (formats/) are [block]{fields of the header, each [32 rows]; [group] codes}. Of a file's format,
// columns must be whole blocks, and a row has the bytes of the file.
//
// In the sparse layout each row is read separately, so lanes are groups of columns: 16 groups of 32 columns (a chunk) take the place of 16
// rows of one group above. Quantised rows begin with the float16 scales of all their chunks, padded to a line.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "formats/format_list.h"

namespace moegraft {

constexpr int kScaleBytes = kBlockRows * 2;  // one line of float16 scales per group
constexpr int kLayoutVersion = 1;  // increased whenever the meaning of packed bytes changes: caches on disk are keyed by it

// Of 32 rows, in whole lines. Every 256th column begins at a line.
std::size_t block_bytes(WeightType type, int cols);

constexpr int kChunk = kLanes * kGroup;  // columns of a sparse row that share their lines
constexpr int chunks_of(int cols) { return round_up(cols, kChunk) / kChunk; }

// 64-byte lines of a chunk (32-byte ones for float16), and the columns of each group that one line holds.
constexpr int lines_per_chunk(WeightType type) {
  return type == WeightType::kBFloat16 ? 16 : type == WeightType::kInt8 ? 8 : type == WeightType::kInt4 ? 4 : 32;
}
constexpr int line_bytes(WeightType type) { return type == WeightType::kFloat16 ? 32 : 64; }
constexpr std::size_t row_scale_bytes(WeightType type, int cols) {
  return type == WeightType::kInt8 || type == WeightType::kInt4 ? static_cast<std::size_t>(round_up(chunks_of(cols) * kLanes * 2, 64)) : 0;
}
constexpr std::size_t row_bytes(WeightType type, int cols) {
  return row_scale_bytes(type, cols) +
         static_cast<std::size_t>(chunks_of(cols)) * static_cast<std::size_t>(lines_per_chunk(type) * line_bytes(type));
}

// 16 consecutive rows of a matrix: half a block.
struct HalfBlock {
  std::byte* block;
  int half;
};

// Source rows of a matrix in nn.Linear orientation, row-major.
struct RowsView {
  const void* data;
  WeightType type;  // kFloat32, kFloat16 or kBFloat16
  int rows;
  int cols;
};

// Quantised rows: codes (rows, cols) and float16 scales (rows, cols / 32).
struct QuantizedRowsView {
  const std::int8_t* codes;
  const std::uint16_t* scales;
  int rows;
  int cols;
};

// Rows as files store them: (rows, cols / columns of a block) blocks, one after the other.
struct StoredRowsView {
  const std::uint8_t* blocks;
  int rows;
  int cols;
};

// Bytes of a row in a file.
std::size_t file_row_bytes(WeightType type, int cols);

// Packs rows [first_row, first_row + 16) of the source into half a block of `type`; rows past the end become zeros.
void pack_half_block(WeightType type, HalfBlock target, const RowsView& source, int first_row);
void pack_half_block(WeightType type, HalfBlock target, const QuantizedRowsView& source, int first_row);
void pack_half_block(WeightType type, HalfBlock target, const StoredRowsView& source, int first_row);

// Fills rows of random blocks for tests: (rows, file_row_bytes(type, cols)), with small finite scales.
void random_blocks(WeightType type, std::uint8_t* blocks, int rows, int cols, unsigned seed);

// Unpacks half a block without rounding: writes its existing rows, dequantised, into `rows_out` (rows, cols) float32.
void unpack_half_block(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row);
void unpack_stored(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row);  // where is_stored(type)

// Packs one row of the sparse layout from a row of the source or, if `transposed`, from a column of it.
void pack_sparse_row(WeightType type, std::byte* target, const RowsView& source, int index, bool transposed);
void pack_sparse_row(WeightType type, std::byte* target, const QuantizedRowsView& source, int row);
// Writes column `col` of the row to values[col * stride].
void unpack_sparse_row(WeightType type, const std::byte* source, int cols, float* values, std::size_t stride);

// Dequantises codes to float32 (rows, cols).
void dequantize(const QuantizedRowsView& source, float* rows_out);

}  // namespace moegraft
