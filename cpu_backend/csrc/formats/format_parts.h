// What a format's struct has, and parts that several share. integer_formats.h, float_formats.h and grid_formats.h have the structs.
//
// 32 consecutive columns are a group; a block has one or several. Value of a column: scale * (code - kOffset), or scale * code + minimum. A
// struct has
//   kName                  as rule files and Python's FORMATS have it
//   kColumns, kFileBytes   of a block in the file, which packing keeps
//   kHeader                the fields of a block that are not codes, in the order in which they are packed; those of 2 bytes are float16,
//                          and one of 1 byte is the exponent of a power of two
//   kLowBits, kHighBits    of a stored code: 8, 4 or 2, and 0, 1 or 2 more, which are packed apart
//   kFloat8                true where codes are floats of 8 bits (E4M3), whose products are in float; absent elsewhere
//   kScaleRows             rows that share their scales, of which each holds a part of the header; absent where it is 1
//   kZen4Ahead             bytes by which a single tile prefetches ahead of its reads on EPYC Zen 4; absent where it is 8 KiB, or 4 of a
//                          grid
//   kScaleNibbles          the offset of four 16-bit numbers whose highest bits, 4 of each, are the scale of the block, a float16; absent
//                          elsewhere
//   kTable                 unsigned codes by stored code, 16 of them; absent where stored codes are the codes
//   kOffset                of unsigned codes where kMinimum is false
//   kParts                 of a group, 1 or 2, each with a scale and minimum of its own
//   stored_codes           of a group, from the bytes of a block in the file
//   scales                 of a group, from the packed order of the header's bytes; rounded as the package `gguf` does
//   Reader<T>              the same for a vector of rows: `block` begins a packed block, and `group` sets `scale` and `minimum`
//   kMostFactor            where the scales of a block's parts are whole numbers up to this times `of_scales`, and their products with
//                          codes fit 8 bits: `factors` of Reader<T> then sets `factor`, in 32-bit integers, and `minimum`. Absent elsewhere
//
// Formats whose codes are not bits of their own but indexes into a grid, or numbers of several columns, have instead of the last seven
//   kGrid                  true
//   kLowBits               32-bit words of a group, which are packed as they are; none where the header has all codes
//   kOffset, kParts        as above
//   word_offset            of a word in the file's block
//   codes, scales          of a group, from the packed order of the header's bytes and the words; where there is a grid instead, of a row
//                          or a vector of rows (RowGroup, PackedGroup):
//   index, signs, scales   the index of point i, a bit for each column, and the scales of a group's parts
//   kShifted               true where the bit of a column subtracts 1 and its absence adds 1; absent where the bit is the sign
//   kPoints, kLevels       the grid and the magnitudes of its digits, kPointColumns, and kBytes, the columns of each index
//   kSearch                how numbers are quantised to the grid; absent where they are not
// Their groups are expanded, to codes of 8 bits, in front of the products of several tokens.
//
// The files of several instruction sets include this, so that everything that generates code is `static` or in an anonymous namespace.
#pragma once
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/float_conversion.h"
#include "formats/format_list.h"

namespace moegraft {
namespace {

#define MOEGRAFT_INLINE inline __attribute__((always_inline))

struct Field {
  int offset;  // in a block of the file
  int bytes;  // 1, 2 or 4
};

inline float half_at(const std::uint8_t* bytes) {
  std::uint16_t half;
  std::memcpy(&half, bytes, 2);
  return float_from_f16(half);
}

inline float float_at(const std::uint8_t* bytes) {
  float value;
  std::memcpy(&value, bytes, 4);
  return value;
}

// Of 16 bytes whose low halves come first.
inline void nibbles_of(const std::uint8_t* bytes, GroupCodes& codes) {
  for (int k = 0; k < 16; ++k) {
    codes[k] = bytes[k] & 15;
    codes[k + 16] = bytes[k] >> 4;
  }
}
// Adds a fifth bit, of 4 bytes.
inline void add_fifth_bits(const std::uint8_t* bytes, GroupCodes& codes) {
  for (int k = 0; k < kGroup; ++k) codes[k] = static_cast<std::uint8_t>(codes[k] | (bytes[k / 8] >> k % 8 & 1) << 4);
}

// A field of a packed block, for rows from `row` on; `before` is the number of bytes in front of it in a row's header.
template <int Bytes>
MOEGRAFT_INLINE const std::byte* field_at(const std::byte* block, int before, int row) {
  return block + before * kBlockRows + row * Bytes;
}
template <class T>
MOEGRAFT_INLINE typename T::F halves_of(const std::byte* block, int before, int row) {
  return T::load_f16(reinterpret_cast<const std::uint16_t*>(field_at<2>(block, before, row)));
}
template <class T>
MOEGRAFT_INLINE typename T::F bytes_to_floats(typename T::I words) {
  return T::to_float(T::low_bytes(words));
}

struct OneScale {
  static constexpr Field kHeader[] = {{0, 2}};
  static constexpr int kParts = 1;
  static constexpr bool kMinimum = false;
  static GroupScales scales(const std::uint8_t* header, int) { return {{half_at(header)}, {}}; }
  template <class T>
  struct Reader {
    typename T::F scale[1], minimum[1];
    MOEGRAFT_INLINE void block(const std::byte* block, int row) { scale[0] = halves_of<T>(block, 0, row); }
    MOEGRAFT_INLINE void group(int) {}
  };
};

struct ScaleAndMinimum {
  static constexpr Field kHeader[] = {{0, 2}, {2, 2}};
  static constexpr int kParts = 1, kOffset = 0;
  static constexpr bool kMinimum = true;
  static GroupScales scales(const std::uint8_t* header, int) { return {{half_at(header)}, {half_at(header + 2)}}; }
  template <class T>
  struct Reader {
    typename T::F scale[1], minimum[1];
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      scale[0] = halves_of<T>(block, 0, row);
      minimum[0] = halves_of<T>(block, 2, row);
    }
    MOEGRAFT_INLINE void group(int) {}
  };
};

}  // namespace
}  // namespace moegraft
