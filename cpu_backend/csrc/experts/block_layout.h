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
// GGUF's Q4_K and Q6_K have super-blocks of 256 columns; the number of columns must be a multiple of that. `words` are 32 rows of 32 bits,
// [row]:
//   q4_k      [super-block]{d f16 [32 rows]; dmin f16 [32 rows]; words of the 12 bytes that hold 8 scales and 8 minima of 6 bits, in
//             the order of the file, [3]; [group] nibbles as int4's, without its offset}       value = d * scale * code - dmin * minimum
//   q6_k      [super-block]{d f16 [32 rows]; words of 4 int8 scales, one for 16 columns, [4]; [group]{low nibbles as int4's; words of the
//             upper bits, [2]: of columns kk = 16 * word + 4 * j + byte, bits 2j and 2j + 1 of the byte}}  value = d * scale * (code - 32)
//
// In the sparse layout each row is read separately, so lanes are groups of columns: 16 groups of 32 columns (a chunk) take the place of 16
// rows of one group above. Quantised rows begin with the float16 scales of all their chunks, padded to a line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/types.h"

namespace moegraft {

constexpr int kLanes = 16;  // output rows in a 64-byte line
constexpr int kBlockRows = 2 * kLanes;  // two lines per step: two accumulators per token
constexpr int kGroup = 32;  // columns that share a scale: GGUF's Q8_0 and Q4_0
constexpr int kScaleBytes = kBlockRows * 2;  // one line of float16 scales per group
constexpr int kInt8GroupBytes = kScaleBytes + kBlockRows * kGroup;
constexpr int kNibbleBytes = kBlockRows * kGroup / 2;
constexpr int kInt4GroupBytes = kScaleBytes + kNibbleBytes;
constexpr int kSuperBlock = 256;  // columns of a super-block
constexpr int kSuperGroups = kSuperBlock / kGroup;
constexpr int kWordsBytes = kBlockRows * 4;  // one 32-bit word of every row
constexpr int kQ4KScaleWords = 3;
constexpr int kQ4KGroupBytes = kNibbleBytes;
constexpr int kQ4KBytes = 2 * kScaleBytes + kQ4KScaleWords * kWordsBytes + kSuperGroups * kQ4KGroupBytes;
constexpr int kQ6KScaleWords = 4;
constexpr int kQ6KGroupBytes = kNibbleBytes + 2 * kWordsBytes;
constexpr int kQ6KBytes = kScaleBytes + kQ6KScaleWords * kWordsBytes + kSuperGroups * kQ6KGroupBytes;
constexpr int kLayoutVersion = 1;  // increased whenever the meaning of packed bytes changes: caches on disk are keyed by it

constexpr std::size_t block_bytes(WeightType type, int cols) {
  const std::size_t groups = static_cast<std::size_t>(round_up(cols, kGroup) / kGroup);
  switch (type) {
    case WeightType::kFloat32: return groups * kGroup * kBlockRows * 4;
    case WeightType::kFloat16:
    case WeightType::kBFloat16: return groups * kGroup * kBlockRows * 2;
    case WeightType::kInt8: return groups * kInt8GroupBytes;
    case WeightType::kInt4: return groups * kInt4GroupBytes;
    case WeightType::kQ4K: return static_cast<std::size_t>(round_up(cols, kSuperBlock) / kSuperBlock) * kQ4KBytes;
    case WeightType::kQ6K: return static_cast<std::size_t>(round_up(cols, kSuperBlock) / kSuperBlock) * kQ6KBytes;
  }
  return 0;
}

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

// Rows as GGUF stores them in Q4_K or Q6_K: (rows, cols / 256) blocks, one after the other.
struct SuperBlockRowsView {
  const std::uint8_t* blocks;
  int rows;
  int cols;
};

// Bytes of a row in a GGUF file.
constexpr std::size_t file_row_bytes(WeightType type, int cols) {
  return static_cast<std::size_t>(cols / kSuperBlock) * (type == WeightType::kQ4K ? kQ4KBytes : kQ6KBytes) / kBlockRows;
}

// Packs rows [first_row, first_row + 16) of the source into half a block of `type`; rows past the end become zeros.
void pack_half_block(WeightType type, HalfBlock target, const RowsView& source, int first_row);
void pack_half_block(WeightType type, HalfBlock target, const QuantizedRowsView& source, int first_row);

// Unpacks half a block without rounding: writes its existing rows, dequantised, into `rows_out` (rows, cols) float32.
void unpack_half_block(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row);

// Packs one row of the sparse layout from a row of the source or, if `transposed`, from a column of it.
void pack_sparse_row(WeightType type, std::byte* target, const RowsView& source, int index, bool transposed);
void pack_sparse_row(WeightType type, std::byte* target, const QuantizedRowsView& source, int row);
// Writes column `col` of the row to values[col * stride].
void unpack_sparse_row(WeightType type, const std::byte* source, int cols, float* values, std::size_t stride);

// Dequantises codes to float32 (rows, cols).
void dequantize(const QuantizedRowsView& source, float* rows_out);

// Fields of the super-blocks of Q4_K and Q6_K. `static inline`, as in float_conversion.h: files compiled for different instruction sets
// include this.

constexpr std::size_t super_block_bytes(WeightType type) { return type == WeightType::kQ4K ? kQ4KBytes : kQ6KBytes; }

static inline std::uint32_t word_at(const std::byte* words, int index, int row) {
  std::uint32_t word;
  std::memcpy(&word, words + index * kWordsBytes + row * 4, 4);
  return word;
}

struct ScaleAndMinimum {
  int scale;
  int minimum;
};

// The scale and minimum of a group. The first four groups have their 6 bits in the bytes of words 0 and 1; the others have 4 bits in word 2
// and 2 in the upper bits of the first four groups' bytes.
static inline ScaleAndMinimum scale_of_q4_k(const std::byte* words, int row, int group) {
  const int shift = 8 * (group % 4);
  const int first = static_cast<int>(word_at(words, 0, row) >> shift & 255),
            second = static_cast<int>(word_at(words, 1, row) >> shift & 255);
  if (group < 4) return {first & 63, second & 63};
  const int low = static_cast<int>(word_at(words, 2, row) >> shift & 255);
  return {(low & 15) | (first >> 6) << 4, low >> 4 | (second >> 6) << 4};
}

// The scale of 16 columns; `part` is their index in the super-block.
static inline int scale_of_q6_k(const std::byte* words, int row, int part) {
  return static_cast<std::int8_t>(word_at(words, part / 4, row) >> 8 * (part % 4) & 255);
}

// The code of column kk of a group in lines of nibbles.
static inline int nibble_at(const std::byte* lines, int row, int kk) {
  return static_cast<int>(lines[kk / 8 * kWordsBytes + row * 4 + kk % 4]) >> (kk % 8 < 4 ? 0 : 4) & 15;
}

static inline int code_of_q6_k(const std::byte* group, int row, int kk) {
  const int upper = static_cast<int>(word_at(group + kNibbleBytes, kk / 16, row) >> (8 * (kk % 4) + 2 * (kk % 16 / 4)) & 3);
  return nibble_at(group, row, kk) | upper << 4;
}

void pack_super_half_block(WeightType type, HalfBlock target, const SuperBlockRowsView& source, int first_row);
void unpack_super_half_block(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row);

}  // namespace moegraft
