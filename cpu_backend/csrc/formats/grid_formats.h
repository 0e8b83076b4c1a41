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

// One row, with the operations of a vector of rows that reading a group takes.
struct OneRow {
  using F = float;
  using I = std::uint32_t;
  static F set(float value) { return value; }
  static F add(F a, F b) { return a + b; }
  static F mul(F a, F b) { return a * b; }
  static F to_float(I x) { return static_cast<float>(x); }
  static F halves_to_float(I x) { return float_from_f16(static_cast<std::uint16_t>(x)); }
  static I and_words(I x, int mask) { return x & static_cast<I>(mask); }
  static I or_int(I a, I b) { return a | b; }
  static I xor_int(I a, I b) { return a ^ b; }
  static I shift_right(I x, int by) { return x >> by; }
  template <int By>
  static I shifted(I x) {
    if constexpr (By < 0) return x >> -By;
    else return x << By;
  }
};

// A group of one row as PackedGroup (coded_formats.h) has it for a vector of rows: `scale` of the block, the words, and header(before), the
// 32 / Groups bits of this group, and others above them, in a field with those of Groups; `before` is the field's place in the header.
struct RowGroup {
  const std::uint8_t* bytes;  // of the header, in the order in which they are packed
  const std::uint32_t* words;
  int group;
  float scale() const { return half_at(bytes); }
  std::uint32_t word(int index) const { return words[index]; }
  std::uint32_t field(int before) const {
    std::uint32_t value;
    std::memcpy(&value, bytes + before, 4);
    return value;
  }
  template <int Groups>
  std::uint32_t header(int before) const {
    return field(before + group / Groups * 4) >> 32 / Groups * (group % Groups);
  }
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

// Byte `index` of words.
template <class T>
MOEGRAFT_INLINE typename T::I byte_of(typename T::I words, int index) {
  return T::and_words(T::shift_right(words, 8 * index), 255);
}
// Moves the seven bits at `From` of words to the lower ones of a byte.
template <class T, int From, int Byte>
MOEGRAFT_INLINE typename T::I seven_bits(typename T::I words) {
  return T::and_words(T::template shifted<8 * Byte - From>(words), 127 << 8 * Byte);
}
// Bytes of seven signs, each with the eighth that makes the number of negative ones even.
template <class T>
MOEGRAFT_INLINE typename T::I with_even(typename T::I sevens) {
  using I = typename T::I;
  const I fours = T::xor_int(sevens, T::template shifted<-4>(sevens)), twos = T::xor_int(fours, T::template shifted<-2>(fours));
  const I odd = T::and_words(T::xor_int(twos, T::template shifted<-1>(twos)), 0x01010101);
  return T::or_int(sevens, T::template shifted<7>(odd));
}
template <class T>
MOEGRAFT_INLINE typename T::I four_sevens(typename T::I words) {
  const typename T::I low = T::or_int(seven_bits<T, 0, 0>(words), seven_bits<T, 7, 1>(words));
  return T::or_int(low, T::or_int(seven_bits<T, 14, 2>(words), seven_bits<T, 21, 3>(words)));
}
// All bits of a byte from its lowest, where the others are zero.
template <class T>
MOEGRAFT_INLINE typename T::I whole_bytes(typename T::I x) {
  x = T::or_int(x, T::template shifted<1>(x));
  x = T::or_int(x, T::template shifted<2>(x));
  return T::or_int(x, T::template shifted<4>(x));
}

// d * (0.5 + scale) * factor, of scales of 4 bits from `bit` on.
template <class T>
MOEGRAFT_INLINE typename T::F half_scale(typename T::F d, typename T::I words, int bit, float factor) {
  const typename T::F scale = T::to_float(T::and_words(T::shift_right(words, bit), 15));
  return T::mul(T::mul(d, T::add(T::set(0.5f), scale)), T::set(factor));
}
// d * (1 + 2 * scale) / 8, of scales of 3 bits from `bit` on.
template <class T>
MOEGRAFT_INLINE typename T::F odd_scale(typename T::F d, typename T::I words, int bit) {
  const typename T::F scale = T::to_float(T::and_words(T::shift_right(words, bit), 7));
  return T::mul(T::mul(d, T::add(T::add(scale, scale), T::set(1.0f))), T::set(0.125f));
}

constexpr std::uint8_t kIq2Levels[] = {8, 25, 43};

// Of IQ2_XS and IQ2_S: a byte of scales for a group, whose halves are those of 16 columns each.
template <class T, class Packed>
MOEGRAFT_INLINE void read_half_bytes(const Packed& packed, int before, typename T::F (&scales)[2]) {
  const typename T::I both = packed.template header<4>(before);
  for (int part = 0; part < 2; ++part) scales[part] = half_scale<T>(packed.scale(), both, 4 * part, 0.25f);
}

struct Iq2Xxs {
  static constexpr const char* kName = "iq2_xxs";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}};
  static constexpr int kColumns = 256, kFileBytes = 66, kLowBits = 2, kHighBits = 0, kParts = 1, kOffset = 43, kPointColumns = 8;
  static constexpr const auto& kPoints = kIq2XxsGrid;
  static constexpr const auto& kLevels = kIq2Levels;
  static constexpr GridBytes<256> kBytes = grid_bytes<8>(kPoints, kLevels);
  static constexpr GridForm kSearch = {32, kPointColumns, true, true};
  static constexpr int word_offset(int group, int word) { return 2 + 8 * group + 4 * word; }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I index(const Packed& packed, int i) {
    return byte_of<T>(packed.word(0), i);
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I signs(const Packed& packed) {
    return with_even<T>(four_sevens<T>(packed.word(1)));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE void scales(const Packed& packed, typename T::F (&scales)[2]) {
    scales[0] = half_scale<T>(packed.scale(), packed.word(1), 28, 0.25f);
  }
};

struct Iq2Xs {
  static constexpr const char* kName = "iq2_xs";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}, {66, 4}, {70, 4}};
  static constexpr int kColumns = 256, kFileBytes = 74, kLowBits = 2, kHighBits = 0, kParts = 2, kOffset = 43, kPointColumns = 8;
  static constexpr const auto& kPoints = kIq2XsGrid;
  static constexpr const auto& kLevels = kIq2Levels;
  static constexpr GridBytes<512> kBytes = grid_bytes<8>(kPoints, kLevels);
  static constexpr GridForm kSearch = {16, kPointColumns, true, true};
  static constexpr int word_offset(int group, int word) { return 2 + 8 * group + 4 * word; }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I index(const Packed& packed, int i) {
    return T::and_words(T::shift_right(packed.word(i / 2), 16 * (i % 2)), 511);
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I signs(const Packed& packed) {
    const typename T::I low = packed.word(0), high = packed.word(1);
    const typename T::I first = T::or_int(seven_bits<T, 9, 0>(low), seven_bits<T, 25, 1>(low));
    return with_even<T>(T::or_int(first, T::or_int(seven_bits<T, 9, 2>(high), seven_bits<T, 25, 3>(high))));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE void scales(const Packed& packed, typename T::F (&scales)[2]) {
    read_half_bytes<T>(packed, 2, scales);
  }
};

struct Iq2S {
  static constexpr const char* kName = "iq2_s";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}, {66, 4}, {70, 4}, {74, 4}, {78, 4}};
  static constexpr int kColumns = 256, kFileBytes = 82, kLowBits = 2, kHighBits = 0, kParts = 2, kOffset = 43, kPointColumns = 8;
  static constexpr const auto& kPoints = kIq2SGrid;
  static constexpr const auto& kLevels = kIq2Levels;
  static constexpr GridBytes<1024> kBytes = grid_bytes<8>(kPoints, kLevels);
  static constexpr GridForm kSearch = {16, kPointColumns, false, true};
  static constexpr int word_offset(int group, int word) { return 2 + 4 * group + 32 * word; }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I index(const Packed& packed, int i) {
    const typename T::I upper = T::shift_right(T::template shifted<8>(packed.template header<4>(2)), 2 * i);
    return T::or_int(byte_of<T>(packed.word(0), i), T::and_words(upper, 3 << 8));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I signs(const Packed& packed) {
    return packed.word(1);
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE void scales(const Packed& packed, typename T::F (&scales)[2]) {
    read_half_bytes<T>(packed, 10, scales);
  }
};

struct Iq3Xxs {
  static constexpr const char* kName = "iq3_xxs";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}};
  static constexpr int kColumns = 256, kFileBytes = 98, kLowBits = 3, kHighBits = 0, kParts = 1, kOffset = 62, kPointColumns = 4;
  static constexpr std::uint8_t kLevels[] = {4, 12, 20, 28, 36, 44, 52, 62};
  static constexpr const auto& kPoints = kIq3XxsGrid;
  static constexpr GridBytes<256> kBytes = grid_bytes<4>(kPoints, kLevels);
  static constexpr GridForm kSearch = {32, kPointColumns, true, true};
  static constexpr int word_offset(int group, int word) { return word < 2 ? 2 + 8 * group + 4 * word : 66 + 4 * group; }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I index(const Packed& packed, int i) {
    return byte_of<T>(packed.word(i / 4), i % 4);
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I signs(const Packed& packed) {
    return with_even<T>(four_sevens<T>(packed.word(2)));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE void scales(const Packed& packed, typename T::F (&scales)[2]) {
    scales[0] = half_scale<T>(packed.scale(), packed.word(2), 28, 0.5f);
  }
};

struct Iq3S {
  static constexpr const char* kName = "iq3_s";
  static constexpr bool kGrid = true, kMinimum = false;
  static constexpr Field kHeader[] = {{0, 2}, {66, 4}, {70, 4}, {106, 4}};
  static constexpr int kColumns = 256, kFileBytes = 110, kLowBits = 3, kHighBits = 0, kParts = 1, kOffset = 15, kPointColumns = 4;
  static constexpr std::uint8_t kLevels[] = {1, 3, 5, 7, 9, 11, 13, 15};
  static constexpr const auto& kPoints = kIq3SGrid;
  static constexpr GridBytes<512> kBytes = grid_bytes<4>(kPoints, kLevels);
  static constexpr GridForm kSearch = {32, kPointColumns, false, true};
  static constexpr int word_offset(int group, int word) { return word < 2 ? 2 + 8 * group + 4 * word : 74 + 4 * group; }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I index(const Packed& packed, int i) {
    const typename T::I upper = T::shift_right(T::template shifted<8>(packed.template header<4>(2)), i);
    return T::or_int(byte_of<T>(packed.word(i / 4), i % 4), T::and_words(upper, 1 << 8));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I signs(const Packed& packed) {
    return packed.word(2);
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE void scales(const Packed& packed, typename T::F (&scales)[2]) {
    const typename T::I four = T::and_words(packed.template header<8>(10), 15);
    const typename T::F half = T::add(T::to_float(four), T::set(0.5f));
    scales[0] = T::mul(packed.scale(), T::add(half, half));
  }
};

// Eight times -1, 0 or 1, plus or minus 1.
struct Iq1S {
  static constexpr const char* kName = "iq1_s";
  static constexpr bool kGrid = true, kMinimum = false, kShifted = true;
  static constexpr Field kHeader[] = {{0, 2}, {34, 4}, {38, 4}, {42, 4}, {46, 4}};
  static constexpr int kColumns = 256, kFileBytes = 50, kLowBits = 1, kHighBits = 0, kParts = 1, kOffset = 9, kPointColumns = 8;
  static constexpr std::uint8_t kLevels[] = {0, 8, 16};
  static constexpr const auto& kPoints = kIq1SGrid;
  static constexpr GridBytes<2048> kBytes = grid_bytes<8>(kPoints, kLevels);
  static constexpr GridForm kSearch = {32, kPointColumns, false, false};
  static constexpr int word_offset(int group, int) { return 2 + 4 * group; }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I index(const Packed& packed, int i) {
    const typename T::I upper = T::shift_right(T::template shifted<8>(packed.template header<2>(2)), 3 * i);
    return T::or_int(byte_of<T>(packed.word(0), i), T::and_words(upper, 7 << 8));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I signs(const Packed& packed) {
    typename T::I down = T::and_words(T::template shifted<-15>(packed.template header<2>(2)), 1);
    down = T::or_int(down, T::template shifted<8>(down));
    return whole_bytes<T>(T::or_int(down, T::template shifted<16>(down)));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE void scales(const Packed& packed, typename T::F (&scales)[2]) {
    scales[0] = odd_scale<T>(packed.scale(), packed.template header<2>(2), 12);
  }
};

// The same with scales for 16 columns and a sign for 8. The block's scale is in the upper bits of four numbers, above four scales of 3 bits
// each.
struct Iq1M {
  static constexpr const char* kName = "iq1_m";
  static constexpr bool kGrid = true, kMinimum = false, kShifted = true;
  static constexpr Field kHeader[] = {{48, 4}, {52, 4}, {32, 4}, {36, 4}, {40, 4}, {44, 4}};
  static constexpr int kColumns = 256, kFileBytes = 56, kLowBits = 1, kHighBits = 0, kParts = 2, kOffset = 9, kPointColumns = 8;
  static constexpr int kScaleNibbles = 48;
  static constexpr const auto& kBytes = Iq1S::kBytes;
  static constexpr int word_offset(int group, int) { return 4 * group; }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I index(const Packed& packed, int i) {
    const typename T::I upper = T::shift_right(T::template shifted<8>(packed.template header<2>(8)), 4 * i);
    return T::or_int(byte_of<T>(packed.word(0), i), T::and_words(upper, 7 << 8));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE typename T::I signs(const Packed& packed) {
    const typename T::I bits = packed.template header<2>(8);
    const typename T::I first =
        T::or_int(T::and_words(T::template shifted<-3>(bits), 1), T::and_words(T::template shifted<1>(bits), 1 << 8));
    const typename T::I last =
        T::or_int(T::and_words(T::template shifted<5>(bits), 1 << 16), T::and_words(T::template shifted<9>(bits), 1 << 24));
    return whole_bytes<T>(T::or_int(first, last));
  }
  template <class T, class Packed>
  static MOEGRAFT_INLINE void scales(const Packed& packed, typename T::F (&scales)[2]) {
    const auto part = [](typename T::I words, int bit, int mask) { return T::and_words(T::shift_right(words, bit), mask); };
    const typename T::I first = packed.field(0), last = packed.field(4);
    const typename T::I low = T::or_int(part(first, 12, 0xf), part(first, 24, 0xf0));
    const typename T::I high = T::or_int(part(last, 4, 0xf00), part(last, 16, 0xf000));
    const typename T::F d = T::halves_to_float(T::or_int(low, high));
    const int bit = 16 * (packed.group / 2 % 2) + 6 * (packed.group % 2);
    for (int i = 0; i < 2; ++i) scales[i] = odd_scale<T>(d, packed.group < 4 ? first : last, bit + 3 * i);
  }
};

}  // namespace
}  // namespace moegraft
