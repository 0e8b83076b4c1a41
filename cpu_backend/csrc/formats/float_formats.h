// Formats whose codes are floats of 8 or 4 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "formats/format_parts.h"

namespace moegraft {
namespace {

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

// FP8 of safetensors checkpoints: E4M3 without infinities. The vector of a code has its bits in the place of a float's, and so is 2^120
// times too small, which the scale makes good.
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

}  // namespace
}  // namespace moegraft
