#include "core/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace moegraft {
namespace {

using Remainder = std::uint32_t (*)(std::uint32_t crc, const std::byte* data, std::size_t bytes);

// Eight bytes at a time.
class CrcTables {
 public:
  static std::uint32_t remainder(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
    static const CrcTables tables;
    const auto& t = tables.tables_;
    for (; bytes >= 8; bytes -= 8, data += 8) {
      std::uint32_t low, high;
      std::memcpy(&low, data, 4);
      std::memcpy(&high, data + 4, 4);
      low ^= crc;
      crc = t[7][low & 255] ^ t[6][(low >> 8) & 255] ^ t[5][(low >> 16) & 255] ^ t[4][low >> 24] ^ t[3][high & 255] ^
            t[2][(high >> 8) & 255] ^ t[1][(high >> 16) & 255] ^ t[0][high >> 24];
    }
    for (; bytes > 0; --bytes, ++data) crc = t[0][(crc ^ static_cast<std::uint32_t>(*data)) & 255] ^ (crc >> 8);
    return crc;
  }

 private:
  CrcTables() {
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0u);
      tables_[0][i] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
      for (std::size_t i = 0; i < 256; ++i) tables_[k][i] = tables_[0][tables_[k - 1][i] & 255] ^ (tables_[k - 1][i] >> 8);
  }
  std::array<std::array<std::uint32_t, 256>, 8> tables_{};
};

#if defined(__x86_64__)

// Multiplies both halves of 16 bytes by the powers of x that move them over the bytes up to `next`, modulo the polynomial.
__attribute__((target("pclmul"))) inline __m128i folded(__m128i value, __m128i powers, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(value, powers, 0x00), _mm_clmulepi64_si128(value, powers, 0x11)), next);
}

// Folds 64 bytes at a time (Gopal et al. 2009, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"), down to 16, whose
// remainder is that of all.
__attribute__((target("pclmul"))) std::uint32_t remainder_by_folding(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  constexpr std::size_t kLane = 16, kLanes = 4;
  if (bytes < kLanes * kLane) return CrcTables::remainder(crc, data, bytes);
  const auto load = [&data](std::size_t lane) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + lane * kLane)); };
  const __m128i over_lanes = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), over_one = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i lanes[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = load(lane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (data += kLanes * kLane, bytes -= kLanes * kLane; bytes >= kLanes * kLane; data += kLanes * kLane, bytes -= kLanes * kLane)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = folded(lanes[lane], over_lanes, load(lane));
  __m128i sum = lanes[0];
  for (std::size_t lane = 1; lane < kLanes; ++lane) sum = folded(sum, over_one, lanes[lane]);
  for (; bytes >= kLane; data += kLane, bytes -= kLane) sum = folded(sum, over_one, load(0));
  std::byte rest[kLane];
  std::memcpy(rest, &sum, kLane);
  return CrcTables::remainder(CrcTables::remainder(0, rest, kLane), data, bytes);
}

#elif defined(__aarch64__)

__attribute__((target("+crc"))) std::uint32_t remainder_by_instruction(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, data += 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    asm(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  }
  return CrcTables::remainder(crc, data, bytes);
}

#endif

Remainder fastest_remainder() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("pclmul")) return &remainder_by_folding;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kHasCrc32 = 1ul << 7;  // HWCAP_CRC32
  if (getauxval(AT_HWCAP) & kHasCrc32) return &remainder_by_instruction;
#elif defined(__aarch64__)
  return &remainder_by_instruction;  // all of Apple's CPUs have it
#endif
  return &CrcTables::remainder;
}

}  // namespace

std::uint32_t crc32(const std::byte* data, std::size_t bytes) {
  static const Remainder remainder = fastest_remainder();
  return ~remainder(0xffffffffu, data, bytes);
}

}  // namespace moegraft
