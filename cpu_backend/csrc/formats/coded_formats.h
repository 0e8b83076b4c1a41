// The formats whose weights are codes of a few bits in blocks of a row, as files store them. A format is one struct here: the sizes, names,
// packing, unpacking, records, tables and kernels of all other files derive from it and from its place in CodedFormats.
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
//   kZen4Ahead             bytes by which a single tile prefetches ahead of its reads on EPYC Zen 4; absent where it is 8 KiB, or 4 of a grid
//   kTable                 unsigned codes by stored code, 16 of them; absent where stored codes are the codes
//   kOffset                of unsigned codes where kMinimum is false
//   kParts                 of a group, 1 or 2, each with a scale and minimum of its own
//   stored_codes           of a group, from the bytes of a block in the file
//   scales                 of a group, from the packed order of the header's bytes; rounded as the package `gguf` does
//   Reader<T>              the same for a vector of rows: `block` begins a packed block, and `group` sets `scale` and `minimum`
//   kMostFactor            where the scales of a block's parts are whole numbers up to this times `of_scales`, and their products with codes
//                          fit 8 bits: `factors` of Reader<T> then sets `factor`, in 32-bit integers, and `minimum`. Absent elsewhere
//
// Formats whose codes are not bits of their own but indexes into a grid, or numbers of several columns, have instead of the last seven
//   kGrid                  true
//   kLowBits               32-bit words of a group, which are packed as they are; none where the header has all codes
//   kOffset, kParts        as above
//   word_offset            of a word in the file's block
//   codes, scales          of a group, from the packed order of the header's bytes and the words
//   kPoints, kLevels       the grid and the magnitudes of its digits, and kBytes, the columns of each index; absent where there is no grid
//   kSearch                how numbers are quantised to the grid; absent where they are not
// Their groups are expanded, to codes of 8 bits, in front of every product.
//
// The files of several instruction sets include this, so that everything that generates code is `static` or in an anonymous namespace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/float_conversion.h"
#include "formats/grid_points.h"
#include "core/types.h"

namespace moegraft {

constexpr int kLanes = 16;  // output rows in a 64-byte line
constexpr int kBlockRows = 2 * kLanes;  // two lines per step: two accumulators per token
constexpr int kGroup = 32;
constexpr int kWordsBytes = kBlockRows * 4;  // one 32-bit word of every row

// How ops/grid_search.h quantises to a grid's format.
struct GridForm {
  int group;  // columns with one scale: 32 or 16
  int columns;  // of a point of the grid: 4 or 8
  bool even_signs;  // the number of negative ones among eight columns is even
  bool has_signs;  // points are magnitudes
};

namespace {

#define MOEGRAFT_INLINE inline __attribute__((always_inline))

struct Field {
  int offset;  // in a block of the file
  int bytes;  // 1, 2 or 4
};

struct GroupScales {
  float scale[2];
  float minimum[2];
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

using GroupCodes = std::uint8_t[kGroup];

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

// Of Q4_K and Q5_K: d, dmin, and 8 scales and 8 minima of 6 bits in 12 bytes. The first four groups have their 6 bits in the bytes of words
// 0 and 1; the others have 4 bits in word 2 and 2 in the upper bits of the first four groups' bytes.
struct SixBitScales {
  static constexpr Field kHeader[] = {{0, 2}, {2, 2}, {4, 4}, {8, 4}, {12, 4}};
  static constexpr int kColumns = 256, kParts = 1, kOffset = 0;
  static constexpr bool kMinimum = true;
  static GroupScales scales(const std::uint8_t* header, int group) {
    const std::uint8_t *first = header + 4 + group % 4, *second = first + 4, *lower = second + 4;
    const int scale = group < 4 ? *first & 63 : (*lower & 15) | *first >> 6 << 4;
    const int minimum = group < 4 ? *second & 63 : *lower >> 4 | *second >> 6 << 4;
    return {{half_at(header) * static_cast<float>(scale)}, {-(half_at(header + 2) * static_cast<float>(minimum))}};
  }
  template <class T>
  struct Reader {
    using I = typename T::I;
    typename T::F scale[1], minimum[1], of_scales, of_minima;
    const std::byte* words;
    I scales, minima;  // of a group and those that follow it in its half, in the bytes of a word
    int last;
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      of_scales = halves_of<T>(block, 0, row);
      of_minima = T::sub(T::zero(), halves_of<T>(block, 2, row));
      words = field_at<4>(block, 4, row);
      scales = minima = T::zero_int();
      last = -1;
    }
    MOEGRAFT_INLINE void group(int index) {
      if (index % 4 != 0 && index == last + 1) {
        scales = T::next_bytes(scales);
        minima = T::next_bytes(minima);
      } else {
        const I first = T::load_int(words), second = T::load_int(words + kWordsBytes), lower = T::load_int(words + 2 * kWordsBytes);
        const auto joined = [](I low, I high) { return T::or_int(low, T::and_bytes(T::template shifted<-2>(high), 48)); };
        scales = T::shift_right(index < 4 ? T::and_bytes(first, 63) : joined(T::low_nibbles(lower), first), 8 * (index % 4));
        minima = T::shift_right(index < 4 ? T::and_bytes(second, 63) : joined(T::high_nibbles(lower), second), 8 * (index % 4));
      }
      last = index;
      scale[0] = T::mul(of_scales, bytes_to_floats<T>(scales));
      minimum[0] = T::mul(of_minima, bytes_to_floats<T>(minima));
    }
  };
};

// GGUF's Q8_0.
struct Int8 : OneScale {
  static constexpr const char* kName = "int8";
  static constexpr int kColumns = 32, kFileBytes = 34, kLowBits = 8, kHighBits = 0, kOffset = 128;
  // In a layer of experts, 8 KiB take 1.07 to 1.14 of the time.
  static constexpr int kZen4Ahead = 4096;
  static void stored_codes(const std::uint8_t* block, int, GroupCodes& codes) {
    for (int k = 0; k < kGroup; ++k) codes[k] = block[2 + k] ^ 128;
  }
};

// GGUF's Q4_0.
struct Int4 : OneScale {
  static constexpr const char* kName = "int4";
  static constexpr int kColumns = 32, kFileBytes = 18, kLowBits = 4, kHighBits = 0, kOffset = 8;
  // In a layer of experts, 0.89 to 0.95 of the time with 4 KiB, and 0.94 to 0.99 with 8.
  static constexpr int kZen4Ahead = 6144;
  static void stored_codes(const std::uint8_t* block, int, GroupCodes& codes) { nibbles_of(block + 2, codes); }
};

struct Q4K : SixBitScales {
  static constexpr const char* kName = "q4_k";
  static constexpr int kFileBytes = 144, kLowBits = 4, kHighBits = 0;
  static constexpr int kZen4Ahead = 6144;  // as INT4
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    const std::uint8_t* pairs = block + 16 + group / 2 * kGroup;  // two groups share 32 bytes
    for (int k = 0; k < kGroup; ++k) codes[k] = pairs[k] >> 4 * (group % 2) & 15;
  }
};

struct Q5K : SixBitScales {
  static constexpr const char* kName = "q5_k";
  static constexpr int kFileBytes = 176, kLowBits = 4, kHighBits = 1;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    const std::uint8_t *pairs = block + 48 + group / 2 * kGroup, *upper = block + 16;
    for (int k = 0; k < kGroup; ++k)
      codes[k] = static_cast<std::uint8_t>((pairs[k] >> 4 * (group % 2) & 15) | (upper[k] >> group & 1) << 4);
  }
};

struct Q6K {
  static constexpr const char* kName = "q6_k";
  static constexpr Field kHeader[] = {{208, 2}, {192, 4}, {196, 4}, {200, 4}, {204, 4}};
  static constexpr int kColumns = 256, kFileBytes = 210, kLowBits = 4, kHighBits = 2, kParts = 2, kOffset = 32;
  static constexpr bool kMinimum = false;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    const int half = group / 4, quarter = group % 4;  // of 128 columns, which share 64 bytes of nibbles and 32 of upper bits
    const std::uint8_t *low = block + 64 * half + 32 * (quarter % 2), *upper = block + 128 + 32 * half;
    for (int k = 0; k < kGroup; ++k)
      codes[k] = static_cast<std::uint8_t>((low[k] >> 4 * (quarter / 2) & 15) | (upper[k] >> 2 * quarter & 3) << 4);
  }
  static GroupScales scales(const std::uint8_t* header, int group) {
    const auto scale = [&](int part) {
      return half_at(header) * static_cast<float>(static_cast<std::int8_t>(header[2 + 2 * group + part]));
    };
    return {{scale(0), scale(1)}, {}};
  }
  template <class T>
  struct Reader {
    typename T::F scale[2], minimum[2], of_scales;
    const std::byte* words;
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      of_scales = halves_of<T>(block, 0, row);
      words = field_at<4>(block, 2, row);
    }
    MOEGRAFT_INLINE void group(int index) {
      const typename T::I two = T::shift_right(T::load_int(words + index / 2 * kWordsBytes), 16 * (index % 2));
      scale[0] = T::mul(of_scales, T::to_float(T::signed_low_bytes(two)));
      scale[1] = T::mul(of_scales, T::to_float(T::signed_low_bytes(T::next_bytes(two))));
    }
  };
};

// OCP's MXFP4: the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, and a power of two for 32 of them. Codes are the values doubled.
struct Mxfp4 {
  static constexpr const char* kName = "mxfp4";
  static constexpr Field kHeader[] = {{0, 1}};
  static constexpr int kColumns = 32, kFileBytes = 17, kLowBits = 4, kHighBits = 0, kParts = 1, kOffset = 12;
  static constexpr bool kMinimum = false;
  static constexpr std::uint8_t kTable[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  static void stored_codes(const std::uint8_t* block, int, GroupCodes& codes) { nibbles_of(block + 1, codes); }
  static GroupScales scales(const std::uint8_t* header, int) {  // 2^(exponent - 127), halved; the two smallest are subnormal
    const std::uint32_t bits = header[0] < 2 ? 0x00200000u << header[0] : static_cast<std::uint32_t>(header[0] - 1) << 23;
    return {{float_from_bits(bits)}, {}};
  }
  template <class T>
  struct Reader {
    typename T::F scale[1], minimum[1];
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      scale[0] = T::scale_by_power(T::set(1.0f), T::sub(T::to_float(T::load_bytes(block + row)), T::set(128.0f)));
    }
    MOEGRAFT_INLINE void group(int) {}
  };
};

// The values of IQ4_NL and IQ4_XS, with 127 added.
struct NonLinearNibbles {
  static constexpr std::uint8_t kTable[] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
  static constexpr int kLowBits = 4, kHighBits = 0, kOffset = 127;
};

struct Iq4Nl : OneScale, NonLinearNibbles {
  static constexpr const char* kName = "iq4_nl";
  static constexpr int kColumns = 32, kFileBytes = 18;
  static void stored_codes(const std::uint8_t* block, int, GroupCodes& codes) { nibbles_of(block + 2, codes); }
};

struct Iq4Xs : NonLinearNibbles {
  static constexpr const char* kName = "iq4_xs";
  // The second is the upper 2 bits of 8 scales and not a float16, the third the lower 4 bits.
  static constexpr Field kHeader[] = {{0, 2}, {2, 2}, {4, 4}};
  static constexpr int kColumns = 256, kFileBytes = 136, kParts = 1;
  static constexpr bool kMinimum = false;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) { nibbles_of(block + 8 + 16 * group, codes); }
  static GroupScales scales(const std::uint8_t* header, int group) {
    const int upper = header[2 + group / 4] >> 2 * (group % 4) & 3, lower = header[4 + group / 2] >> 4 * (group % 2) & 15;
    return {{half_at(header) * static_cast<float>((lower | upper << 4) - 32)}, {}};
  }
  template <class T>
  struct Reader {
    using I = typename T::I;
    typename T::F scale[1], minimum[1], of_scales;
    I upper, lower;
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      of_scales = halves_of<T>(block, 0, row);
      upper = T::load_shorts(field_at<2>(block, 2, row));
      lower = T::load_int(field_at<4>(block, 4, row));
    }
    MOEGRAFT_INLINE void group(int index) {
      const I low = T::and_words(T::shift_right(lower, 4 * index), 15), high = T::and_words(T::shift_right(upper, 2 * index), 3);
      scale[0] = T::mul(of_scales, T::sub(T::to_float(T::or_int(low, T::template shifted<4>(high))), T::set(32.0f)));
    }
  };
};

struct Q41 : ScaleAndMinimum {
  static constexpr const char* kName = "q4_1";
  static constexpr int kColumns = 32, kFileBytes = 20, kLowBits = 4, kHighBits = 0;
  static void stored_codes(const std::uint8_t* block, int, GroupCodes& codes) { nibbles_of(block + 4, codes); }
};

struct Q50 : OneScale {
  static constexpr const char* kName = "q5_0";
  static constexpr int kColumns = 32, kFileBytes = 22, kLowBits = 4, kHighBits = 1, kOffset = 16;
  static void stored_codes(const std::uint8_t* block, int, GroupCodes& codes) {
    nibbles_of(block + 6, codes);
    add_fifth_bits(block + 2, codes);
  }
};

struct Q51 : ScaleAndMinimum {
  static constexpr const char* kName = "q5_1";
  static constexpr int kColumns = 32, kFileBytes = 24, kLowBits = 4, kHighBits = 1;
  static void stored_codes(const std::uint8_t* block, int, GroupCodes& codes) {
    nibbles_of(block + 8, codes);
    add_fifth_bits(block + 4, codes);
  }
};

struct Q3K {
  static constexpr const char* kName = "q3_k";
  // d, the lower 4 bits of 16 scales, and their upper 2 bits.
  static constexpr Field kHeader[] = {{108, 2}, {96, 4}, {100, 4}, {104, 4}};
  static constexpr int kColumns = 256, kFileBytes = 110, kLowBits = 2, kHighBits = 1, kParts = 2, kOffset = 4;
  static constexpr bool kMinimum = false;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    const std::uint8_t* four = block + 32 + group / 4 * kGroup;  // four groups share 32 bytes
    for (int k = 0; k < kGroup; ++k) codes[k] = static_cast<std::uint8_t>((four[k] >> 2 * (group % 4) & 3) | (block[k] >> group & 1) << 2);
  }
  static GroupScales scales(const std::uint8_t* header, int group) {
    const auto scale = [&](int part) {
      const int index = 2 * group + part;
      const int lower = header[2 + index % 8] >> (index < 8 ? 0 : 4) & 15, upper = header[10 + index % 4] >> 2 * (index / 4) & 3;
      return half_at(header) * static_cast<float>((lower | upper << 4) - 32);
    };
    return {{scale(0), scale(1)}, {}};
  }
  template <class T>
  struct Reader {
    using I = typename T::I;
    typename T::F scale[2], minimum[2], of_scales;
    const std::byte* words;
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      of_scales = halves_of<T>(block, 0, row);
      words = field_at<4>(block, 2, row);
    }
    MOEGRAFT_INLINE void group(int index) {
      const int byte = 16 * (index % 2);
      const I lower = T::shift_right(T::load_int(words + index % 4 / 2 * kWordsBytes), byte + 4 * (index / 4));
      const I upper = T::shift_right(T::load_int(words + 2 * kWordsBytes), byte + 2 * (index / 2));
      const I both = T::or_int(T::and_bytes(lower, 15), T::template shifted<4>(T::and_bytes(upper, 3)));
      scale[0] = T::mul(of_scales, T::sub(bytes_to_floats<T>(both), T::set(32.0f)));
      scale[1] = T::mul(of_scales, T::sub(bytes_to_floats<T>(T::next_bytes(both)), T::set(32.0f)));
    }
  };
};

struct Q2K {
  static constexpr const char* kName = "q2_k";
  // d, dmin, and 16 bytes with a scale and a minimum of 4 bits.
  static constexpr Field kHeader[] = {{80, 2}, {82, 2}, {0, 4}, {4, 4}, {8, 4}, {12, 4}};
  static constexpr int kColumns = 256, kFileBytes = 84, kLowBits = 2, kHighBits = 0, kParts = 2, kOffset = 0, kMostFactor = 15;
  static constexpr bool kMinimum = true;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    const std::uint8_t* four = block + 16 + group / 4 * kGroup;
    for (int k = 0; k < kGroup; ++k) codes[k] = four[k] >> 2 * (group % 4) & 3;
  }
  static GroupScales scales(const std::uint8_t* header, int group) {
    GroupScales found;
    for (int part = 0; part < 2; ++part) {
      const int both = header[4 + 2 * group + part];
      found.scale[part] = half_at(header) * static_cast<float>(both & 15);
      found.minimum[part] = -(half_at(header + 2) * static_cast<float>(both >> 4));
    }
    return found;
  }
  template <class T>
  struct Reader {
    using I = typename T::I;
    typename T::F scale[2], minimum[2], of_scales, of_minima;
    I factor[2];
    const std::byte* words;
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      of_scales = halves_of<T>(block, 0, row);
      of_minima = T::sub(T::zero(), halves_of<T>(block, 2, row));
      words = field_at<4>(block, 4, row);
    }
    MOEGRAFT_INLINE void group(int index) {
      factors(index);
      scale[0] = T::mul(of_scales, T::to_float(factor[0]));
      scale[1] = T::mul(of_scales, T::to_float(factor[1]));
    }
    MOEGRAFT_INLINE void factors(int index) {
      const I two = T::shift_right(T::load_int(words + index / 2 * kWordsBytes), 16 * (index % 2));
      factor[0] = T::and_words(two, 15);
      factor[1] = T::and_words(T::template shifted<-8>(two), 15);
      minimum[0] = T::mul(of_minima, T::to_float(T::and_words(T::template shifted<-4>(two), 15)));
      minimum[1] = T::mul(of_minima, T::to_float(T::and_words(T::template shifted<-12>(two), 15)));
    }
  };
};

// Of safetensors checkpoints (compressed-tensors, AWQ, GPTQ): one or two groups of columns with a float16 scale each, behind these a byte with
// a zero point of 4 bits for each, then nibbles in the order of Q4_0.
template <int Columns, int Scales>
struct GroupedNibbles {
  static constexpr int kColumns = Columns * Scales, kFileBytes = 2 * Scales + 1 + kColumns / 2, kLowBits = 4, kHighBits = 0, kParts = 1;
  static constexpr int kOffset = 0;
  static constexpr bool kMinimum = true;
  static constexpr int kScaleGroups = Columns / kGroup;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    nibbles_of(block + 2 * Scales + 1 + kGroup / 2 * group, codes);
  }
  static GroupScales scales(const std::uint8_t* header, int group) {
    const int index = group / kScaleGroups;
    const float scale = half_at(header + 2 * index);
    return {{scale}, {-(scale * static_cast<float>(header[2 * Scales] >> 4 * index & 15))}};
  }
  template <class T>
  struct Reader {
    typename T::F scale[1], minimum[1], scales[Scales], minima[Scales];
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      const typename T::I zeros = T::load_bytes(field_at<1>(block, 2 * Scales, row));
      for (int index = 0; index < Scales; ++index) {
        scales[index] = halves_of<T>(block, 2 * index, row);
        const typename T::I zero = T::and_words(T::shift_right(zeros, 4 * index), 15);
        minima[index] = T::sub(T::zero(), T::mul(scales[index], T::to_float(zero)));
      }
    }
    MOEGRAFT_INLINE void group(int index) {
      scale[0] = scales[index / kScaleGroups];
      minimum[0] = minima[index / kScaleGroups];
    }
  };
};
struct Int4Of32 : GroupedNibbles<32, 2> {
  static constexpr const char* kName = "int4_g32";
  static constexpr Field kHeader[] = {{0, 2}, {2, 2}, {4, 1}};
};
struct Int4Of64 : GroupedNibbles<64, 2> {
  static constexpr const char* kName = "int4_g64";
  static constexpr Field kHeader[] = {{0, 2}, {2, 2}, {4, 1}};
};
struct Int4Of128 : GroupedNibbles<128, 1> {
  static constexpr const char* kName = "int4_g128";
  static constexpr Field kHeader[] = {{0, 2}, {2, 1}};
};

// Of safetensors checkpoints whose scales are those of rows: 256 columns of nibbles without zero points, with a float16 scale.
struct Int4Of256 : OneScale {
  static constexpr const char* kName = "int4_g256";
  static constexpr int kColumns = 256, kFileBytes = 130, kLowBits = 4, kHighBits = 0, kOffset = 8;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) { nibbles_of(block + 2 + kGroup / 2 * group, codes); }
};

// Of safetensors checkpoints: 128 columns of int8 with a float16 scale.
struct Int8Of128 : OneScale {
  static constexpr const char* kName = "int8_g128";
  static constexpr int kColumns = 128, kFileBytes = 130, kLowBits = 8, kHighBits = 0, kOffset = 128;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    for (int k = 0; k < kGroup; ++k) codes[k] = block[2 + kGroup * group + k] ^ 128;
  }
};

// FP8 of safetensors checkpoints: E4M3 without infinities. The vector of a code has its bits in the place of a float's, and so is 2^120 times
// too small, which the scale makes good.
struct Float8Codes {
  static constexpr int kLowBits = 8, kHighBits = 0, kParts = 1, kOffset = 0;
  static constexpr bool kMinimum = false, kFloat8 = true;
};
inline float float_from_e4m3(int code) {
  return float_from_bits(static_cast<std::uint32_t>(code & 128) << 24 | static_cast<std::uint32_t>(code & 127) << 20) * 0x1p120f;
}

// A float32 scale for 128 columns of four rows, of which each holds a byte: checkpoints have scales of 128 rows.
struct Fp8 : Float8Codes {
  static constexpr const char* kName = "fp8";
  static constexpr Field kHeader[] = {{0, 1}};
  static constexpr int kColumns = 128, kFileBytes = 129, kScaleRows = 4;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    std::memcpy(codes, block + 1 + kGroup * group, kGroup);
  }
  static GroupScales scales(const std::uint8_t* header, int) { return {{float_at(header)}, {}}; }
  template <class T>
  struct Reader {
    typename T::F scale[1], minimum[1];
    MOEGRAFT_INLINE void block(const std::byte* block, int row) { scale[0] = T::load_quarters(block + row); }
    MOEGRAFT_INLINE void group(int) {}
  };
};

// A float32 scale for 256 columns of a row.
struct Fp8Rows : Float8Codes {
  static constexpr const char* kName = "fp8_rows";
  static constexpr Field kHeader[] = {{0, 4}};
  static constexpr int kColumns = 256, kFileBytes = 260;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    std::memcpy(codes, block + 4 + kGroup * group, kGroup);
  }
  static GroupScales scales(const std::uint8_t* header, int) { return {{float_at(header)}, {}}; }
  template <class T>
  struct Reader {
    typename T::F scale[1], minimum[1];
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      scale[0] = T::load(reinterpret_cast<const float*>(field_at<4>(block, 0, row)));
    }
    MOEGRAFT_INLINE void group(int) {}
  };
};

// NVIDIA's NVFP4 of safetensors checkpoints: the values of MXFP4, an E4M3 scale for 16 of them, and a float32 scale of the tensor, of which
// each of four rows holds a byte for 128 columns. A scale of 127 or 255 counts as 480.
struct Nvfp4 {
  static constexpr const char* kName = "nvfp4";
  static constexpr Field kHeader[] = {{0, 1}, {1, 4}, {5, 4}};
  static constexpr int kColumns = 128, kFileBytes = 73, kLowBits = 4, kHighBits = 0, kParts = 2, kOffset = 12, kScaleRows = 4;
  static constexpr bool kMinimum = false;
  static constexpr std::uint8_t kTable[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) { nibbles_of(block + 9 + 16 * group, codes); }
  static GroupScales scales(const std::uint8_t* header, int group) {
    const auto scale = [&](int part) { return float_from_e4m3(header[4 + 2 * group + part]) * float_at(header) * 0.5f; };
    return {{scale(0), scale(1)}, {}};
  }
  template <class T>
  struct Reader {
    typename T::F scale[2], minimum[2], of_tensor;
    const std::byte* words;
    MOEGRAFT_INLINE void block(const std::byte* block, int row) {
      of_tensor = T::load_quarters(block + row);
      words = field_at<4>(block, 1, row);
    }
    MOEGRAFT_INLINE void group(int index) {
      const typename T::I two = T::shift_right(T::load_int(words + index / 2 * kWordsBytes), 16 * (index % 2));
      const typename T::F enlarge = T::set(0x1p119f);  // and halve
      scale[0] = T::mul(T::mul(T::template small_float8<0>(two), enlarge), of_tensor);
      scale[1] = T::mul(T::mul(T::template small_float8<1>(two), enlarge), of_tensor);
    }
  };
};

// GGUF's TQ2_0: -1, 0 and 1.
struct Tq20 {
  static constexpr const char* kName = "tq2_0";
  static constexpr Field kHeader[] = {{64, 2}};
  static constexpr int kColumns = 256, kFileBytes = 66, kLowBits = 2, kHighBits = 0, kParts = 1, kOffset = 1;
  static constexpr bool kMinimum = false;
  static void stored_codes(const std::uint8_t* block, int group, GroupCodes& codes) {
    const std::uint8_t* four = block + group / 4 * kGroup;
    for (int k = 0; k < kGroup; ++k) codes[k] = four[k] >> 2 * (group % 4) & 3;
  }
  static GroupScales scales(const std::uint8_t* header, int) { return {{half_at(header)}, {}}; }
  template <class T>
  struct Reader : OneScale::Reader<T> {};
};

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

template <class Coded, class = void>
constexpr bool kIsGrid = false;
template <class Coded>
constexpr bool kIsGrid<Coded, std::void_t<decltype(Coded::kGrid)>> = true;

template <class Coded, class = void>
constexpr bool kIsFloat8 = false;
template <class Coded>
constexpr bool kIsFloat8<Coded, std::void_t<decltype(Coded::kFloat8)>> = true;

template <class Coded, class = void>
constexpr int kRowsOfScale = 1;
template <class Coded>
constexpr int kRowsOfScale<Coded, std::void_t<decltype(Coded::kScaleRows)>> = Coded::kScaleRows;

template <class Coded, class = void>
constexpr bool kHasFactors = false;
template <class Coded>
constexpr bool kHasFactors<Coded, std::void_t<decltype(Coded::kMostFactor)>> = true;

template <class Coded, class = void>
constexpr bool kHasTable = false;
template <class Coded>
constexpr bool kHasTable<Coded, std::void_t<decltype(Coded::kTable)>> = true;

template <class Coded, class = void>
constexpr int kZen4AheadOf = kIsGrid<Coded> ? 4096 : 8192;
template <class Coded>
constexpr int kZen4AheadOf<Coded, std::void_t<decltype(Coded::kZen4Ahead)>> = Coded::kZen4Ahead;

template <class... Formats>
struct FormatList {};

// The order is that of WeightType, from kInt8 on.
using CodedFormats = FormatList<Int8, Int4, Q4K, Q6K, Mxfp4, Iq4Nl, Iq4Xs, Q41, Q50, Q51, Q5K, Q3K, Q2K, Int4Of32, Int4Of64, Int4Of128,
                                Int4Of256, Int8Of128, Fp8, Fp8Rows, Nvfp4, Iq3S, Iq3Xxs, Iq2S, Iq2Xs, Iq2Xxs, Iq1S, Iq1M, Tq20, Tq10>;

// What derives from a format's description.
template <class Coded>
struct Derived {
  static constexpr int header_bytes() {
    int sum = 0;
    for (const Field& field : Coded::kHeader) sum += field.bytes;
    return sum;
  }
  static constexpr int kHeaderBytes = header_bytes();  // of a row
  static constexpr int kGroups = Coded::kColumns / kGroup;
  static constexpr int kGroupBytes = kGroup / 8 * (Coded::kLowBits + Coded::kHighBits);  // of a row
  static constexpr int most_code() {
    if constexpr (kIsGrid<Coded>) return 2 * Coded::kOffset;
    int most = (1 << (Coded::kLowBits + Coded::kHighBits)) - 1;
    if constexpr (kHasTable<Coded>) {
      most = 0;
      for (const int code : Coded::kTable) most = code > most ? code : most;
    }
    return most;
  }
  static constexpr int kMostCode = most_code();
  static_assert(kHeaderBytes + kGroups * kGroupBytes == Coded::kFileBytes, "packing keeps the bytes of the file");

  // Of a packed block of 32 rows.
  static constexpr int kBytes = Coded::kFileBytes * kBlockRows;
  static constexpr int kLinesOffset = kHeaderBytes * kBlockRows;  // where the codes begin
  static constexpr int kLinesBytes = kGroupBytes * kBlockRows;  // of a group
};
}  // namespace

// A format without its type.
struct CodedFormat {
  const char* name;
  int columns;
  int file_bytes;
  int parts;
  bool float8;
  bool grid;
  bool split;  // has bits that are packed apart
  int zen4_ahead;
};

namespace {

template <class... Formats>
constexpr int count_of(FormatList<Formats...>) {
  return sizeof...(Formats);
}
constexpr int kCodedFormats = count_of(CodedFormats());
constexpr int kFirstCoded = static_cast<int>(WeightType::kInt8);
constexpr int kWeightTypes = kFirstCoded + kCodedFormats;

struct CodedTable {
  CodedFormat formats[kCodedFormats];
};
template <class... Formats>
constexpr CodedTable table_of(FormatList<Formats...>) {
  return {{{Formats::kName, Formats::kColumns, Formats::kFileBytes, Formats::kParts, kIsFloat8<Formats>, kIsGrid<Formats>,
            (Formats::kHighBits > 0), kZen4AheadOf<Formats>}...}};
}
constexpr CodedTable kCodedTable = table_of(CodedFormats());

constexpr bool is_coded(WeightType type) { return static_cast<int>(type) >= kFirstCoded; }
constexpr const CodedFormat& coded_format(WeightType type) { return kCodedTable.formats[static_cast<int>(type) - kFirstCoded]; }
// Whether weights come in blocks of a file alone: the kernels do not quantise to such a type.
constexpr bool is_stored(WeightType type) { return static_cast<int>(type) > static_cast<int>(WeightType::kInt4); }

template <int Index, class List>
struct FormatAt;
template <int Index, class First, class... Rest>
struct FormatAt<Index, FormatList<First, Rest...>> : FormatAt<Index - 1, FormatList<Rest...>> {};
template <class First, class... Rest>
struct FormatAt<0, FormatList<First, Rest...>> {
  using Type = First;
};

// The codes of a group are words [row]: as many for the low bits as a code has of them, then as many for the high bits. Byte i of a word has
// the bits of columns i, i + 4, ... of the word's, the first in the lowest bits; so 8 bits are [kk / 4][row][kk % 4] bytes.

// Bits `Below` to `Below + Bits` of all codes, four at a time.
template <int Bits, int Below>
MOEGRAFT_INLINE void store_bits(const GroupCodes& codes, std::byte* lines, int row) {
  constexpr std::uint32_t kMask = ((1u << Bits) - 1) * 0x01010101u;
  for (int word = 0; word < Bits; ++word) {
    std::uint32_t joined = 0;
    for (int j = 0; j < 8 / Bits; ++j) {
      std::uint32_t four;
      std::memcpy(&four, codes + 4 * (8 / Bits * word + j), 4);
      joined |= (four >> Below & kMask) << Bits * j;
    }
    std::memcpy(lines + word * kWordsBytes + row * 4, &joined, 4);
  }
}

template <class Coded>
inline void store_codes(const GroupCodes& codes, std::byte* lines, int row) {
  constexpr int kLow = Coded::kLowBits;
  store_bits<kLow, 0>(codes, lines, row);
  if constexpr (Coded::kHighBits > 0) store_bits<Coded::kHighBits, kLow>(codes, lines + kLow * kWordsBytes, row);
}

// The unsigned code of a column of a group.
template <class Coded>
inline int code_at(const std::byte* lines, int row, int kk) {
  const auto bits_of = [&](int first_word, int bits) {
    const int columns = kGroup / bits;  // in a word
    const std::byte* word = lines + (first_word + kk / columns) * kWordsBytes + row * 4;
    return static_cast<int>(word[kk % 4]) >> kk % columns / 4 * bits & ((1 << bits) - 1);
  };
  int code = bits_of(0, Coded::kLowBits);
  if constexpr (Coded::kHighBits > 0) code |= bits_of(Coded::kLowBits, Coded::kHighBits) << Coded::kLowBits;
  if constexpr (kHasTable<Coded>) code = Coded::kTable[code];
  return code;
}

// The number that an unsigned code means, before the scale.
template <class Coded>
inline float number_of(int code) {
  if constexpr (kIsFloat8<Coded>) return float_from_e4m3(code);
  else return static_cast<float>(code - Coded::kOffset);
}

// A row's part of a packed block.
template <class Coded>
struct PackedRow {
  static constexpr int kRows = kRowsOfScale<Coded>;
  std::uint8_t header[Derived<Coded>::kHeaderBytes + 3];  // with the four bytes of a field that rows share
  const std::byte* lines;
  int row;
  PackedRow(const std::byte* block, int row) : row(row) {
    std::uint8_t* to = header;
    for (const Field& field : Coded::kHeader) {
      const bool shared = kRows > 1 && field.bytes == 1;
      const int bytes = shared ? kRows : field.bytes;
      std::memcpy(to, block + (shared ? row / kRows * kRows : row * field.bytes), static_cast<std::size_t>(bytes));
      to += bytes;
      block += field.bytes * kBlockRows;
    }
    lines = block;
  }

  // The scales of a group, and its unsigned codes.
  GroupScales group(int index, GroupCodes& codes) const {
    const std::byte* of_group = lines + index * Derived<Coded>::kLinesBytes;
    if constexpr (kIsGrid<Coded>) {
      std::uint32_t words[Coded::kLowBits + 1];
      for (int word = 0; word < Coded::kLowBits; ++word) std::memcpy(&words[word], of_group + word * kWordsBytes + row * 4, 4);
      Coded::codes(header, words, index, codes);
      return Coded::scales(header, words, index);
    } else {
      for (int k = 0; k < kGroup; ++k) codes[k] = static_cast<std::uint8_t>(code_at<Coded>(of_group, row, k));
      return Coded::scales(header, index);
    }
  }
};

// How the codes of a group are packed. Formats with the same form share the functions that unpack and multiply them, which get the table, if
// there is one, as an argument: each function costs time to compile.
template <int LowBits, int HighBits, int Parts, bool Table>
struct CodeForm {
  static constexpr int kLowBits = LowBits, kHighBits = HighBits, kParts = Parts;
  static constexpr bool kHasTable = Table;
};
template <class Coded>
using CodeFormOf = CodeForm<Coded::kLowBits, Coded::kHighBits, Coded::kParts, kHasTable<Coded>>;

// The unsigned codes of columns 8 * Step + 0 to 3, and of the next four, of a vector of rows that begins at `lines`.
template <class T, class Form, int Step>
MOEGRAFT_INLINE void load_codes(const std::byte* lines, typename T::I table, typename T::I& first, typename T::I& second) {
  using I = typename T::I;
  constexpr int kLow = Form::kLowBits, kTwo = 2 * (Step % 2) * 2;  // the first of two bits in a word of 16 columns
  if constexpr (kLow == 8) {
    first = T::load_int(lines + 2 * Step * kWordsBytes);
    second = T::load_int(lines + (2 * Step + 1) * kWordsBytes);
  } else if constexpr (kLow == 4) {
    const I pairs = T::load_int(lines + Step * kWordsBytes);
    first = T::low_nibbles(pairs);
    second = T::high_nibbles(pairs);
  } else {
    const I four = T::load_int(lines + Step / 2 * kWordsBytes);
    first = T::and_bytes(T::template shifted<-kTwo>(four), 3);
    second = T::and_bytes(T::template shifted<-(kTwo + 2)>(four), 3);
  }
  const std::byte* high = lines + kLow * kWordsBytes;
  if constexpr (Form::kHighBits == 2) {
    const I four = T::load_int(high + Step / 2 * kWordsBytes);
    first = T::or_int(first, T::and_bytes(T::template shifted<kLow - kTwo>(four), 3 << kLow));
    second = T::or_int(second, T::and_bytes(T::template shifted<kLow - kTwo - 2>(four), 3 << kLow));
  }
  if constexpr (Form::kHighBits == 1) {
    const I eight = T::load_int(high);
    first = T::or_int(first, T::and_bytes(T::template shifted<kLow - 2 * Step>(eight), 1 << kLow));
    second = T::or_int(second, T::and_bytes(T::template shifted<kLow - 2 * Step - 1>(eight), 1 << kLow));
  }
  if constexpr (Form::kHasTable) {
    first = T::lookup(table, first);
    second = T::lookup(table, second);
  }
}

}  // namespace

}  // namespace moegraft
