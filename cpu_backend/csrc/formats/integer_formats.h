// Formats whose codes are integers, and those of GGUF whose 4 bits are indexes into 16 of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/format_parts.h"

namespace moegraft {
namespace {

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

// Of safetensors checkpoints (compressed-tensors, AWQ, GPTQ): one or two groups of columns with a float16 scale each, behind these a byte
// with a zero point of 4 bits for each, then nibbles in the order of Q4_0.
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

}  // namespace
}  // namespace moegraft
