#include "experts/super_blocks.h"

#include <algorithm>

#include "core/float_conversion.h"

namespace moegraft {
namespace {

constexpr std::size_t file_block_bytes(WeightType type) { return file_row_bytes(type, kSuperBlock); }

// llama.cpp's order (ggml-common.h): Q4_K is d, dmin, scales [12], nibbles [128]; Q6_K is low nibbles [128], upper bits [64], scales [16], d.
constexpr int kQ4KNibbles = 16;
constexpr int kQ6KUpper = 128, kQ6KScales = 192, kQ6KD = 208;

void store_nibbles(const std::uint8_t* codes, std::byte* lines, int row) {
  for (int line = 0; line < kGroup / 8; ++line)
    for (int byte = 0; byte < 4; ++byte)
      lines[line * kWordsBytes + row * 4 + byte] = static_cast<std::byte>((codes[8 * line + byte] & 15) | (codes[8 * line + 4 + byte] & 15) << 4);
}

void store_upper_bits(const std::uint8_t* codes, std::byte* words, int row) {
  for (int word = 0; word < 2; ++word) {
    for (int byte = 0; byte < 4; ++byte) {
      int bits = 0;
      for (int j = 0; j < 4; ++j) bits |= codes[16 * word + 4 * j + byte] >> 4 << 2 * j;
      words[word * kWordsBytes + row * 4 + byte] = static_cast<std::byte>(bits);
    }
  }
}

void store_words(const std::uint8_t* bytes, int count, std::byte* words, int row) {
  for (int word = 0; word < count; ++word) std::memcpy(words + word * kWordsBytes + row * 4, bytes + 4 * word, 4);
}

void pack_q4_k(const std::uint8_t* block, std::byte* target, int row) {
  std::memcpy(target + row * 2, block, 2);
  std::memcpy(target + kScaleBytes + row * 2, block + 2, 2);
  store_words(block + 4, kQ4KScaleWords, target + 2 * kScaleBytes, row);
  std::byte* lines = target + 2 * kScaleBytes + kQ4KScaleWords * kWordsBytes;
  for (int group = 0; group < kSuperGroups; ++group, lines += kQ4KGroupBytes) {
    const std::uint8_t* pairs = block + kQ4KNibbles + group / 2 * kGroup;  // two groups share 32 bytes
    std::uint8_t codes[kGroup];
    for (int k = 0; k < kGroup; ++k) codes[k] = static_cast<std::uint8_t>(group % 2 ? pairs[k] >> 4 : pairs[k] & 15);
    store_nibbles(codes, lines, row);
  }
}

void pack_q6_k(const std::uint8_t* block, std::byte* target, int row) {
  std::memcpy(target + row * 2, block + kQ6KD, 2);
  store_words(block + kQ6KScales, kQ6KScaleWords, target + kScaleBytes, row);
  std::byte* lines = target + kScaleBytes + kQ6KScaleWords * kWordsBytes;
  for (int group = 0; group < kSuperGroups; ++group, lines += kQ6KGroupBytes) {
    const int half = group / 4, quarter = group % 4;  // of 128 columns, whose 64 bytes of nibbles and 32 of upper bits lie together
    const std::uint8_t* low = block + 64 * half + 32 * (quarter % 2);
    const std::uint8_t* high = block + kQ6KUpper + 32 * half;
    std::uint8_t codes[kGroup];
    for (int k = 0; k < kGroup; ++k)
      codes[k] = static_cast<std::uint8_t>((low[k] >> (quarter < 2 ? 0 : 4) & 15) | (high[k] >> 2 * quarter & 3) << 4);
    store_nibbles(codes, lines, row);
    store_upper_bits(codes, lines + kNibbleBytes, row);
  }
}

float half_at(const std::byte* halves, int row) {
  std::uint16_t half;
  std::memcpy(&half, halves + row * 2, 2);
  return float_from_f16(half);
}

// In the steps of the package `gguf`, so that roundings are the same.
void unpack_q4_k(const std::byte* block, int row, float* values) {
  const std::byte* words = block + 2 * kScaleBytes;
  const std::byte* lines = words + kQ4KScaleWords * kWordsBytes;
  for (int group = 0; group < kSuperGroups; ++group, lines += kQ4KGroupBytes, values += kGroup) {
    const ScaleAndMinimum found = scale_of_q4_k(words, row, group);
    const float scale = half_at(block, row) * static_cast<float>(found.scale);
    const float minimum = half_at(block + kScaleBytes, row) * static_cast<float>(found.minimum);
    for (int k = 0; k < kGroup; ++k) values[k] = scale * static_cast<float>(nibble_at(lines, row, k)) - minimum;
  }
}

void unpack_q6_k(const std::byte* block, int row, float* values) {
  const std::byte* words = block + kScaleBytes;
  const std::byte* lines = words + kQ6KScaleWords * kWordsBytes;
  for (int group = 0; group < kSuperGroups; ++group, lines += kQ6KGroupBytes, values += kGroup) {
    for (int k = 0; k < kGroup; ++k) {
      const float scale = half_at(block, row) * static_cast<float>(scale_of_q6_k(words, row, 2 * group + k / 16));
      values[k] = scale * static_cast<float>(code_of_q6_k(lines, row, k) - 32);
    }
  }
}

}  // namespace

void pack_super_half_block(WeightType type, HalfBlock target, const SuperBlockRowsView& source, int first_row) {
  static constexpr std::uint8_t kZeros[kQ6KBytes / kBlockRows] = {};
  const std::size_t row_bytes = file_row_bytes(type, source.cols);
  for (int index = 0; index < source.cols / kSuperBlock; ++index) {
    std::byte* block = target.block + super_block_bytes(type) * static_cast<std::size_t>(index);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = first_row + lane;
      const std::uint8_t* from =
          row < source.rows ? source.blocks + row_bytes * static_cast<std::size_t>(row) + file_block_bytes(type) * static_cast<std::size_t>(index) : kZeros;
      (type == WeightType::kQ4K ? pack_q4_k : pack_q6_k)(from, block, kLanes * target.half + lane);
    }
  }
}

void unpack_super_half_block(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row) {
  for (int index = 0; index < cols / kSuperBlock; ++index) {
    const std::byte* block = source.block + super_block_bytes(type) * static_cast<std::size_t>(index);
    for (int lane = 0; lane < std::min(kLanes, rows - first_row); ++lane) {
      float* values = rows_out + static_cast<std::size_t>(first_row + lane) * cols + index * kSuperBlock;
      (type == WeightType::kQ4K ? unpack_q4_k : unpack_q6_k)(block, kLanes * source.half + lane, values);
    }
  }
}

}  // namespace moegraft
