// How a matrix lies in memory: blocks of 32 output rows, each block one stream that is read from front to back.
//
// Lanes are output rows, so a kernel streams weights, broadcasts activations and never sums across lanes; the same bytes serve a
// GEMV and the register tiles of a GEMM, with 512-bit vectors (16 rows) and 256-bit ones (8 rows). Columns are padded to 32 with
// zeros. For row r = 16 * half + lane of a block and column k = 32 * group + kk:
//   float32   [k][r]                      one float
//   float16   [k][r]                      one half: 16 rows widen from 32 consecutive bytes
//   bfloat16  [k / 2][half][lane][k % 2]  pairs of columns, as vdpbf16ps takes them
//   int8      [group]{scale f16 [32 rows]; code + 128 as u8 [kk / 4][half][lane][kk % 4]}            as vpdpbusd takes them
//   int4      [group]{scale f16 [32 rows]; nibbles, code + 8, [kk / 8][half][lane][kk % 4], low nibble kk % 8 < 4, high the rest}
// Scales stand beside their weights so that one stream is read in order. Every line is 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace moegraft {

constexpr int kLanes = 16;                    // output rows in a 64-byte line
constexpr int kBlockRows = 2 * kLanes;        // two lines a step: two accumulators a token
constexpr int kGroup = 32;                    // columns that share a scale: GGUF's Q8_0 and Q4_0
constexpr int kScaleBytes = kBlockRows * 2;   // one line of float16 scales a group
constexpr int kInt8GroupBytes = kScaleBytes + kBlockRows * kGroup;
constexpr int kInt4GroupBytes = kScaleBytes + kBlockRows * kGroup / 2;
constexpr int kLayoutVersion = 1;             // raised whenever packed bytes change meaning: caches on disk are keyed by it

constexpr std::size_t block_bytes(WeightType type, int cols) {
  const std::size_t groups = static_cast<std::size_t>(round_up(cols, kGroup) / kGroup);
  switch (type) {
    case WeightType::kFloat32: return groups * kGroup * kBlockRows * 4;
    case WeightType::kFloat16:
    case WeightType::kBFloat16: return groups * kGroup * kBlockRows * 2;
    case WeightType::kInt8: return groups * kInt8GroupBytes;
    case WeightType::kInt4: return groups * kInt4GroupBytes;
  }
  return 0;
}

// Where 16 consecutive rows of a matrix lie: half a block.
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

// Rows that are quantised already: codes (rows, cols) and float16 scales (rows, cols / 32).
struct QuantizedRowsView {
  const std::int8_t* codes;
  const std::uint16_t* scales;
  int rows;
  int cols;
};

// Packs rows [first_row, first_row + 16) of the source into half a block of `type`; rows past the end become zeros.
void pack_half_block(WeightType type, HalfBlock target, const RowsView& source, int first_row);
void pack_half_block(WeightType type, HalfBlock target, const QuantizedRowsView& source, int first_row);

// The reverse, dequantised, exact: writes the rows that exist into `rows_out` (rows, cols) float32.
void unpack_half_block(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row);

}  // namespace moegraft
