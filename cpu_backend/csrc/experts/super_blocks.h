// The super-blocks of Q4_K and Q6_K: how a half block is made of a file's rows, and what a row's words mean. block_layout.h has the order.
// Everything inline is `static inline`, as in numbers.h: files compiled for different instruction sets include this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "experts/block_layout.h"

namespace moegraft {

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

// Of a group: the first four have their 6 bits in the bytes of words 0 and 1, the others 4 in word 2 and 2 above the first four's.
static inline ScaleAndMinimum scale_of_q4_k(const std::byte* words, int row, int group) {
  const int shift = 8 * (group % 4);
  const int first = static_cast<int>(word_at(words, 0, row) >> shift & 255), second = static_cast<int>(word_at(words, 1, row) >> shift & 255);
  if (group < 4) return {first & 63, second & 63};
  const int low = static_cast<int>(word_at(words, 2, row) >> shift & 255);
  return {(low & 15) | (first >> 6) << 4, low >> 4 | (second >> 6) << 4};
}

// Of 16 columns: `part` counts them in the super-block.
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
