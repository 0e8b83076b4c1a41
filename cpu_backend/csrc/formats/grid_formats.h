// Formats of GGUF whose codes are indexes into a grid, or numbers of several columns.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/format_parts.h"
#include "formats/grid_points.h"

namespace moegraft {
namespace {

// GGUF's TQ1_0: five numbers of 0 to 2 in a byte, whose first digit in base 3 is the integer part of 3 / 256 times the byte.
struct Tq10 {
  static constexpr const char* kName = "tq1_0";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{52, 2}, {48, 4}, {0, 4},  {4, 4},  {8, 4},  {12, 4}, {16, 4},
                                      {20, 4}, {24, 4}, {28, 4}, {32, 4}, {36, 4}, {40, 4}, {44, 4}};
  static constexpr int kColumns = 256, kFileBytes = 54, kLowBits = 0, kHighBits = 0, kParts = 1, kOffset = 1;
  static constexpr int word_offset(int, int) { return 0; }
  static void codes(const std::uint8_t* header, const std::uint32_t*, int group, GroupCodes& codes) {
    const std::uint8_t *last = header + 2, *first = header + 6;
    constexpr int kPowers[] = {1, 3, 9, 27, 81};
    const auto digit = [&](int byte, int place) { return static_cast<std::uint8_t>((byte * kPowers[place] & 255) * 3 >> 8); };
    for (int k = 0; k < kGroup; ++k) {  // 160 columns in 32 bytes, 80 in 16, and 16 in 4
      const int column = group * kGroup + k;
      if (column < 160) codes[k] = digit(first[column % 32], column / 32);
      else if (column < 240) codes[k] = digit(first[32 + column % 16], (column - 160) / 16);
      else codes[k] = digit(last[column % 4], (column - 240) / 4);
    }
  }
  static GroupScales scales(const std::uint8_t* header, const std::uint32_t*, int) { return {{half_at(header)}, {}}; }
};

// The bytes of each index's columns, the first in the lowest.
template <int Count>
struct GridBytes {
  std::uint64_t bytes[Count];
};
template <int Columns, int Levels, int Count>
constexpr GridBytes<Count> grid_bytes(const std::uint16_t (&grid)[Count], const std::uint8_t (&levels)[Levels]) {
  GridBytes<Count> found{};
  constexpr int kBits = Levels == 3 ? 2 : 3;
  for (int i = 0; i < Count; ++i)
    for (int k = 0; k < Columns; ++k)
      found.bytes[i] |= static_cast<std::uint64_t>(levels[grid[i] >> kBits * k & ((1 << kBits) - 1)]) << 8 * k;
  return found;
}
struct SignMasks {
  std::uint64_t bytes[256];
};
constexpr SignMasks sign_masks() {
  SignMasks found{};
  for (int i = 0; i < 256; ++i)
    for (int k = 0; k < 8; ++k) found.bytes[i] |= i >> k & 1 ? std::uint64_t{255} << 8 * k : 0;
  return found;
}
constexpr SignMasks kSignMasks = sign_masks();
constexpr std::uint64_t kEachByte = 0x0101010101010101ull;

// Stores eight columns: Offset plus or minus a magnitude of at most that.
template <int Offset>
inline void store_signed(std::uint64_t magnitudes, unsigned signs, std::uint8_t* codes) {
  const std::uint64_t plus = Offset * kEachByte + magnitudes, minus = Offset * kEachByte - magnitudes, mask = kSignMasks.bytes[signs & 255];
  const std::uint64_t chosen = (plus & ~mask) | (minus & mask);
  std::memcpy(codes, &chosen, 8);
}
// The signs of eight columns: seven bits, and one that makes the number of negative ones even.
inline unsigned even_signs(unsigned seven) {
  seven &= 127;
  return seven | (static_cast<unsigned>(__builtin_popcount(seven)) & 1) << 7;
}
inline int byte_of(std::uint32_t word, int index) { return static_cast<int>(word >> 8 * index & 255); }

constexpr std::uint8_t kIq2Levels[] = {8, 25, 43};

// Of IQ2_XS and IQ2_S: a byte of scales for a group, whose halves are those of 16 columns each.
inline GroupScales half_byte_scales(float d, int both) {
  return {{d * (0.5f + static_cast<float>(both & 15)) * 0.25f, d * (0.5f + static_cast<float>(both >> 4)) * 0.25f}, {}};
}

struct Iq2Xxs {
  static constexpr const char* kName = "iq2_xxs";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}};
  static constexpr int kColumns = 256, kFileBytes = 66, kLowBits = 2, kHighBits = 0, kParts = 1, kOffset = 43;
  static constexpr const auto& kPoints = kIq2XxsGrid;
  static constexpr const auto& kLevels = kIq2Levels;
  static constexpr GridBytes<256> kBytes = grid_bytes<8>(kPoints, kLevels);
  static constexpr GridForm kSearch = {32, 8, true, true};
  static constexpr int word_offset(int group, int word) { return 2 + 8 * group + 4 * word; }
  static void codes(const std::uint8_t*, const std::uint32_t* words, int, GroupCodes& codes) {
    for (int i = 0; i < 4; ++i) store_signed<kOffset>(kBytes.bytes[byte_of(words[0], i)], even_signs(words[1] >> 7 * i), codes + 8 * i);
  }
  static GroupScales scales(const std::uint8_t* header, const std::uint32_t* words, int) {
    return {{half_at(header) * (0.5f + static_cast<float>(words[1] >> 28)) * 0.25f}, {}};
  }
};

struct Iq2Xs {
  static constexpr const char* kName = "iq2_xs";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}, {66, 4}, {70, 4}};
  static constexpr int kColumns = 256, kFileBytes = 74, kLowBits = 2, kHighBits = 0, kParts = 2, kOffset = 43;
  static constexpr const auto& kPoints = kIq2XsGrid;
  static constexpr const auto& kLevels = kIq2Levels;
  static constexpr GridBytes<512> kBytes = grid_bytes<8>(kPoints, kLevels);
  static constexpr GridForm kSearch = {16, 8, true, true};
  static constexpr int word_offset(int group, int word) { return 2 + 8 * group + 4 * word; }
  static void codes(const std::uint8_t*, const std::uint32_t* words, int, GroupCodes& codes) {
    for (int i = 0; i < 4; ++i) {
      const unsigned both = words[i / 2] >> 16 * (i % 2) & 0xffff;
      store_signed<kOffset>(kBytes.bytes[both & 511], even_signs(both >> 9), codes + 8 * i);
    }
  }
  static GroupScales scales(const std::uint8_t* header, const std::uint32_t*, int group) {
    return half_byte_scales(half_at(header), header[2 + group]);
  }
};

struct Iq2S {
  static constexpr const char* kName = "iq2_s";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}, {66, 4}, {70, 4}, {74, 4}, {78, 4}};
  static constexpr int kColumns = 256, kFileBytes = 82, kLowBits = 2, kHighBits = 0, kParts = 2, kOffset = 43;
  static constexpr const auto& kPoints = kIq2SGrid;
  static constexpr const auto& kLevels = kIq2Levels;
  static constexpr GridBytes<1024> kBytes = grid_bytes<8>(kPoints, kLevels);
  static constexpr GridForm kSearch = {16, 8, false, true};
  static constexpr int word_offset(int group, int word) { return 2 + 4 * group + 32 * word; }
  static void codes(const std::uint8_t* header, const std::uint32_t* words, int group, GroupCodes& codes) {
    for (int i = 0; i < 4; ++i) {
      const int index = byte_of(words[0], i) | (header[2 + group] >> 2 * i & 3) << 8;
      store_signed<kOffset>(kBytes.bytes[index], static_cast<unsigned>(byte_of(words[1], i)), codes + 8 * i);
    }
  }
  static GroupScales scales(const std::uint8_t* header, const std::uint32_t*, int group) {
    return half_byte_scales(half_at(header), header[10 + group]);
  }
};

struct Iq3Xxs {
  static constexpr const char* kName = "iq3_xxs";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}};
  static constexpr int kColumns = 256, kFileBytes = 98, kLowBits = 3, kHighBits = 0, kParts = 1, kOffset = 62;
  static constexpr std::uint8_t kLevels[] = {4, 12, 20, 28, 36, 44, 52, 62};
  static constexpr const auto& kPoints = kIq3XxsGrid;
  static constexpr GridBytes<256> kBytes = grid_bytes<4>(kPoints, kLevels);
  static constexpr GridForm kSearch = {32, 4, true, true};
  static constexpr int word_offset(int group, int word) { return word < 2 ? 2 + 8 * group + 4 * word : 66 + 4 * group; }
  static void codes(const std::uint8_t*, const std::uint32_t* words, int, GroupCodes& codes) {
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t two = words[i / 2] >> 16 * (i % 2);
      const std::uint64_t magnitudes = kBytes.bytes[byte_of(two, 0)] | kBytes.bytes[byte_of(two, 1)] << 32;
      store_signed<kOffset>(magnitudes, even_signs(words[2] >> 7 * i), codes + 8 * i);
    }
  }
  static GroupScales scales(const std::uint8_t* header, const std::uint32_t* words, int) {
    return {{half_at(header) * (0.5f + static_cast<float>(words[2] >> 28)) * 0.5f}, {}};
  }
};

struct Iq3S {
  static constexpr const char* kName = "iq3_s";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}, {66, 4}, {70, 4}, {106, 4}};
  static constexpr int kColumns = 256, kFileBytes = 110, kLowBits = 3, kHighBits = 0, kParts = 1, kOffset = 15;
  static constexpr std::uint8_t kLevels[] = {1, 3, 5, 7, 9, 11, 13, 15};
  static constexpr const auto& kPoints = kIq3SGrid;
  static constexpr GridBytes<512> kBytes = grid_bytes<4>(kPoints, kLevels);
  static constexpr GridForm kSearch = {32, 4, false, true};
  static constexpr int word_offset(int group, int word) { return word < 2 ? 2 + 8 * group + 4 * word : 74 + 4 * group; }
  static void codes(const std::uint8_t* header, const std::uint32_t* words, int group, GroupCodes& codes) {
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t two = words[i / 2] >> 16 * (i % 2);
      const int upper = header[2 + group] >> 2 * i;
      const std::uint64_t magnitudes =
          kBytes.bytes[byte_of(two, 0) | (upper & 1) << 8] | kBytes.bytes[byte_of(two, 1) | (upper >> 1 & 1) << 8] << 32;
      store_signed<kOffset>(magnitudes, static_cast<unsigned>(byte_of(words[2], i)), codes + 8 * i);
    }
  }
  static GroupScales scales(const std::uint8_t* header, const std::uint32_t*, int group) {
    return {{half_at(header) * static_cast<float>(1 + 2 * (header[10 + group / 2] >> 4 * (group % 2) & 15))}, {}};
  }
};

// Eight times -1, 0 or 1, plus or minus 1.
struct Iq1S {
  static constexpr const char* kName = "iq1_s";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}, {34, 4}, {38, 4}, {42, 4}, {46, 4}};
  static constexpr int kColumns = 256, kFileBytes = 50, kLowBits = 1, kHighBits = 0, kParts = 1, kOffset = 9;
  static constexpr std::uint8_t kLevels[] = {0, 8, 16};
  static constexpr const auto& kPoints = kIq1SGrid;
  static constexpr GridBytes<2048> kBytes = grid_bytes<8>(kPoints, kLevels);
  static constexpr GridForm kSearch = {32, 8, false, false};
  static constexpr int word_offset(int group, int) { return 2 + 4 * group; }
  static int upper(const std::uint8_t* header, int group) { return header[2 + 2 * group] | header[3 + 2 * group] << 8; }
  static void codes(const std::uint8_t* header, const std::uint32_t* words, int group, GroupCodes& codes) {
    const int bits = upper(header, group);
    for (int i = 0; i < 4; ++i) {
      const std::uint64_t eight = kBytes.bytes[byte_of(words[0], i) | (bits >> 3 * i & 7) << 8] + (bits & 0x8000 ? 0 : 2) * kEachByte;
      std::memcpy(codes + 8 * i, &eight, 8);
    }
  }
  static GroupScales scales(const std::uint8_t* header, const std::uint32_t*, int group) {
    return {{half_at(header) * static_cast<float>(2 * (upper(header, group) >> 12 & 7) + 1) * 0.125f}, {}};
  }
};

// The same with scales for 16 columns and a sign for 8. The block's scale is in the upper bits of four numbers, above four scales of 3 bits
// each.
struct Iq1M {
  static constexpr const char* kName = "iq1_m";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{48, 4}, {52, 4}, {32, 4}, {36, 4}, {40, 4}, {44, 4}};
  static constexpr int kColumns = 256, kFileBytes = 56, kLowBits = 1, kHighBits = 0, kParts = 2, kOffset = 9;
  static constexpr int kScaleNibbles = 48;
  static constexpr const auto& kBytes = Iq1S::kBytes;
  static constexpr int word_offset(int group, int) { return 4 * group; }
  static int number(const std::uint8_t* header, int index) { return header[2 * index] | header[2 * index + 1] << 8; }
  static void codes(const std::uint8_t* header, const std::uint32_t* words, int group, GroupCodes& codes) {
    for (int i = 0; i < 4; ++i) {
      const int bits = number(header + 8, group) >> 4 * i;
      const std::uint64_t eight = kBytes.bytes[byte_of(words[0], i) | (bits & 7) << 8] + (bits & 8 ? 0 : 2) * kEachByte;
      std::memcpy(codes + 8 * i, &eight, 8);
    }
  }
  static GroupScales scales(const std::uint8_t* header, const std::uint32_t*, int group) {
    int half = 0;
    for (int i = 0; i < 4; ++i) half |= number(header, i) >> 12 << 4 * i;
    const float d = float_from_f16(static_cast<std::uint16_t>(half));
    const auto scale = [&](int part) {
      return d * static_cast<float>(2 * (number(header, group / 2) >> (6 * (group % 2) + 3 * part) & 7) + 1) * 0.125f;
    };
    return {{scale(0), scale(1)}, {}};
  }
};

}  // namespace
}  // namespace moegraft
