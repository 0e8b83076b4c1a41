// The traits of NEON (Advanced SIMD), which every 64-bit Arm CPU has. Products of integers and of bfloat16 are those that the flags of the
// including file allow.
//
// A vector is a pair of 128-bit registers. The 32 registers then hold as much as the 16 of AVX2, and the sizes of tiles are AVX2's. No
// constant here was tuned: the kernels have run under emulation only.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "simd/kernels.h"

namespace moegraft {
namespace {

struct NeonFloats {
  float32x4_t low, high;
};
struct NeonWords {
  uint32x4_t low, high;
};

struct Neon {
  using F = NeonFloats;
  using I = NeonWords;
  static constexpr int kWidth = 8;
  static constexpr int kVectors = 4;
  static constexpr int kFloatTokens = 6;    // for half a block: 24 sums, 4 weights and a broadcast in 32 registers
  static constexpr bool kSignedBytes = false, kAddsShorts = false;
  static constexpr int kFewTokens = 1, kUnrolledByteTokens = 1, kUnrolledTokens = 1;
  static constexpr int kWholeTokens = 1;    // a single token reads each line once, in order
  static constexpr int kDotRows = 2;        // by 4 tokens, for half the lanes
  static constexpr int kDotTokens = 4;
  static constexpr int kAddTokens = 2;  // by 4 columns, for half the lanes
  static constexpr float kDenseFloats = kNeverDense;
  static constexpr float kDenseDots = kNeverDense;

  static F set(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
  static F zero() { return set(0.0f); }
  static F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static void store(float* p, F x) {
    vst1q_f32(p, x.low);
    vst1q_f32(p + 4, x.high);
  }
  static F add(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
  static F sub(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
  static F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static F div(F a, F b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
  static F fma(F a, F b, F c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
  // The second argument where either is NaN, as on x86; vminq and vmaxq return the NaN.
  static F min(F a, F b) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
  }
  static F max(F a, F b) {
    return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
  }
  static F abs(F x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
  static F round(F x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
  // Scales in two steps, because 2^n alone may overflow or be subnormal where the product is not.
  static F scale_by_power(F x, F n) {
    const auto scaled = [](float32x4_t value, float32x4_t power) {
      const int32x4_t exponent = vcvtnq_s32_f32(power), half = vshrq_n_s32(exponent, 1);
      return vmulq_f32(vmulq_f32(value, power_of_two(half)), power_of_two(vsubq_s32(exponent, half)));
    };
    return {scaled(x.low, n.low), scaled(x.high, n.high)};
  }
  static float32x4_t power_of_two(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
  static bool all_finite(F magnitude) {
    const float32x4_t most = vdupq_n_f32(__FLT_MAX__);
    return vminvq_u32(vandq_u32(vcleq_f32(magnitude.low, most), vcleq_f32(magnitude.high, most))) != 0;
  }
  static float reduce_max(F x) { return vmaxvq_f32(vmaxq_f32(x.low, x.high)); }
  static float reduce_add_float(F x) { return vaddvq_f32(vaddq_f32(x.low, x.high)); }
  static void store_four_sums(float* p, F a, F b, F c, F d) {
    const auto halves = [](F x) { return vaddq_f32(x.low, x.high); };
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(halves(a), halves(b)), vpaddq_f32(halves(c), halves(d))));
  }

  static I all_words(std::uint32_t x) { return {vdupq_n_u32(x), vdupq_n_u32(x)}; }
  static I zero_int() { return all_words(0); }
  static I load_int(const void* p) {
    const auto* bytes = static_cast<const std::uint8_t*>(p);
    return {vreinterpretq_u32_u8(vld1q_u8(bytes)), vreinterpretq_u32_u8(vld1q_u8(bytes + 16))};
  }
  static void store_int(void* p, I x) {
    auto* bytes = static_cast<std::uint8_t*>(p);
    vst1q_u8(bytes, vreinterpretq_u8_u32(x.low));
    vst1q_u8(bytes + 16, vreinterpretq_u8_u32(x.high));
  }
  static I add_int(I a, I b) { return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)}; }
  static I mul_int(I a, I b) { return {vmulq_u32(a.low, b.low), vmulq_u32(a.high, b.high)}; }
  static I mul_shorts(I a, I b) {
    return {vreinterpretq_u32_u16(vmulq_u16(vreinterpretq_u16_u32(a.low), vreinterpretq_u16_u32(b.low))),
            vreinterpretq_u32_u16(vmulq_u16(vreinterpretq_u16_u32(a.high), vreinterpretq_u16_u32(b.high)))};
  }
  static I and_int(I a, I b) { return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }
  static I or_int(I a, I b) { return {vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)}; }
  static I xor_int(I a, I b) { return {veorq_u32(a.low, b.low), veorq_u32(a.high, b.high)}; }
  static int reduce_add(I x) { return static_cast<int>(vaddvq_u32(vaddq_u32(x.low, x.high))); }
  static F to_float(I x) { return {vcvtq_f32_s32(vreinterpretq_s32_u32(x.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(x.high))}; }
  static I round_to_int(F x) { return {vreinterpretq_u32_s32(vcvtnq_s32_f32(x.low)), vreinterpretq_u32_s32(vcvtnq_s32_f32(x.high))}; }
  static void store_int8(std::int8_t* p, I x) {
    vst1_u8(reinterpret_cast<std::uint8_t*>(p), vmovn_u16(vcombine_u16(vmovn_u32(x.low), vmovn_u32(x.high))));
  }

  // Shifts words to the left, or to the right where `By` is negative.
  template <int By>
  static I shifted(I x) {
    if constexpr (By > 0) return {vshlq_n_u32(x.low, By), vshlq_n_u32(x.high, By)};
    else if constexpr (By < 0) return {vshrq_n_u32(x.low, -By), vshrq_n_u32(x.high, -By)};
    else return x;
  }
  static I shift_right(I x, int by) { return {vshlq_u32(x.low, vdupq_n_s32(-by)), vshlq_u32(x.high, vdupq_n_s32(-by))}; }
  static I next_bytes(I x) { return shifted<-8>(x); }
  static I and_words(I x, int mask) { return and_int(x, all_words(static_cast<std::uint32_t>(mask))); }
  static I and_bytes(I x, int mask) { return and_int(x, all_words(static_cast<std::uint32_t>(mask) * 0x01010101u)); }
  static I low_bytes(I x) { return and_words(x, 255); }
  static I signed_low_bytes(I x) {
    const auto extended = [](uint32x4_t words) {
      return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(vshlq_n_u32(words, 24)), 24));
    };
    return {extended(x.low), extended(x.high)};
  }
  static I low_nibbles(I x) { return and_bytes(x, 15); }
  static I high_nibbles(I x) {
    return {vreinterpretq_u32_u8(vshrq_n_u8(vreinterpretq_u8_u32(x.low), 4)),
            vreinterpretq_u32_u8(vshrq_n_u8(vreinterpretq_u8_u32(x.high), 4))};
  }
  // Moves byte `Index` of each word to its upper byte and clears the rest: the signed byte times 2^24.
  template <int Index>
  static I top_byte(I x) {
    return and_words(shifted<24 - 8 * Index>(x), static_cast<int>(0xff000000u));
  }
  static I minus_bytes(I x, int value) {
    const uint8x16_t subtrahend = vdupq_n_u8(static_cast<std::uint8_t>(value));
    return {vreinterpretq_u32_u8(vsubq_u8(vreinterpretq_u8_u32(x.low), subtrahend)),
            vreinterpretq_u32_u8(vsubq_u8(vreinterpretq_u8_u32(x.high), subtrahend))};
  }
  static I add_bytes(I a, I b) {
    return {vreinterpretq_u32_u8(vaddq_u8(vreinterpretq_u8_u32(a.low), vreinterpretq_u8_u32(b.low))),
            vreinterpretq_u32_u8(vaddq_u8(vreinterpretq_u8_u32(a.high), vreinterpretq_u8_u32(b.high)))};
  }
  // The integer part of 3 / 256 times each byte.
  static I first_digits(I x) {
    const auto digits = [](uint32x4_t words) {
      const uint8x16_t bytes = vreinterpretq_u8_u32(words);
      const uint8x16_t one = vshrq_n_u8(vcgeq_u8(bytes, vdupq_n_u8(86)), 7), two = vshrq_n_u8(vcgeq_u8(bytes, vdupq_n_u8(171)), 7);
      return vreinterpretq_u32_u8(vaddq_u8(one, two));
    };
    return {digits(x.low), digits(x.high)};
  }
  // Shifts signed halves of words by 4 to the right.
  static I shift_shorts(I x) {
    const auto shift = [](uint32x4_t words) { return vreinterpretq_u32_s16(vshrq_n_s16(vreinterpretq_s16_u32(words), 4)); };
    return {shift(x.low), shift(x.high)};
  }
  // Byte `Index` of each word, an E4M3 float, as a float that is 2^120 times as small.
  template <int Index>
  static F small_float8(I x) {
    const I moved = shifted<24 - 8 * Index>(x);
    const auto spread = [](uint32x4_t words) { return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(words), 4)); };
    return as_floats(and_words({spread(moved.low), spread(moved.high)}, static_cast<int>(0x87f00000u)));
  }
  static F as_floats(I x) { return {vreinterpretq_f32_u32(x.low), vreinterpretq_f32_u32(x.high)}; }
  // Each float four times.
  static F load_quarters(const std::byte* p) {
    const auto* floats = reinterpret_cast<const float*>(p);
    return {vld1q_dup_f32(floats), vld1q_dup_f32(floats + 1)};
  }
  static I from_shorts(uint16x8_t x) { return {vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x)}; }
  static I load_bytes(const std::byte* p) { return from_shorts(vmovl_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(p)))); }
  static I load_signed_bytes(const std::byte* p) {
    const int16x8_t shorts = vmovl_s8(vld1_s8(reinterpret_cast<const std::int8_t*>(p)));
    return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(shorts))), vreinterpretq_u32_s32(vmovl_high_s16(shorts))};
  }
  static I load_shorts(const std::byte* p) { return from_shorts(vld1q_u16(reinterpret_cast<const std::uint16_t*>(p))); }
  // A table of 16 bytes, and its bytes at the indexes in the bytes of x.
  static I table(const std::uint8_t* p) {
    const uint32x4_t bytes = vreinterpretq_u32_u8(vld1q_u8(p));
    return {bytes, bytes};
  }
  static I lookup(I table, I x) {
    const uint8x16_t bytes = vreinterpretq_u8_u32(table.low);
    return {vreinterpretq_u32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_u32(x.low))),
            vreinterpretq_u32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_u32(x.high)))};
  }

  // The eight bytes of each index as two words, and the lower four of them.
  static void load_points(const std::uint64_t* points, I index, I& first, I& second) {
    const auto four = [points](uint32x4_t at, uint32x4_t& even, uint32x4_t& odd) {
      const auto two = [points](std::uint32_t a, std::uint32_t b) {
        return vreinterpretq_u32_u64(vcombine_u64(vld1_u64(points + a), vld1_u64(points + b)));
      };
      const uint32x4_t low = two(vgetq_lane_u32(at, 0), vgetq_lane_u32(at, 1)), high = two(vgetq_lane_u32(at, 2), vgetq_lane_u32(at, 3));
      even = vuzp1q_u32(low, high);
      odd = vuzp2q_u32(low, high);
    };
    four(index.low, first.low, second.low);
    four(index.high, first.high, second.high);
  }
  static I load_half_points(const std::uint64_t* points, I index) {
    I first, second;
    load_points(points, index, first, second);
    return first;
  }
  // Bits 4 * index to 4 * index + 3 of each word, each as a byte of ones or zeros.
  static I spread_bits(I x, int index) {
    const uint8x16_t bits = vreinterpretq_u8_u32(vdupq_n_u32(index % 2 == 0 ? 0x08040201u : 0x80402010u));
    const auto spread = [&](uint32x4_t words) {
      const uint32x4_t byte = vandq_u32(vshlq_u32(words, vdupq_n_s32(-8 * (index / 2))), vdupq_n_u32(255));
      return vreinterpretq_u32_u8(vtstq_u8(vreinterpretq_u8_u32(vmulq_n_u32(byte, 0x01010101u)), bits));
    };
    return {spread(x.low), spread(x.high)};
  }
  // With the other sign where a mask has ones.
  static I negated(I bytes, I mask) {
    const auto each = [](uint32x4_t x, uint32x4_t ones) {
      return vreinterpretq_u32_u8(vsubq_u8(vreinterpretq_u8_u32(veorq_u32(x, ones)), vreinterpretq_u8_u32(ones)));
    };
    return {each(bytes.low, mask.low), each(bytes.high, mask.high)};
  }
  static F halves_to_float(I x) {
    const auto each = [](uint32x4_t words) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(words))); };
    return {each(x.low), each(x.high)};
  }

  static I broadcast_int(const std::uint32_t* p) { return all_words(*p); }
  static F broadcast_float(const std::uint32_t* p) { return as_floats(broadcast_int(p)); }

  static F load_f16(const std::uint16_t* p) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static void store_f16(std::uint16_t* p, F x) { vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high))); }
  static F load_bf16(const std::uint16_t* p) {
    const uint16x8_t halves = vld1q_u16(p), zeros = vdupq_n_u16(0);
    return as_floats({vreinterpretq_u32_u16(vzip1q_u16(zeros, halves)), vreinterpretq_u32_u16(vzip2q_u16(zeros, halves))});
  }
  static F low_bf16(I x) { return as_floats(shifted<16>(x)); }
  static F high_bf16(I x) { return as_floats(and_words(x, static_cast<int>(0xffff0000u))); }
  static void store_bf16(std::uint16_t* p, F x) {
    const auto rounded = [](float32x4_t value) {
      const uint32x4_t bits = vreinterpretq_u32_f32(value), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t nearest = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
      return vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), nearest, vorrq_u32(bits, vdupq_n_u32(0x00400000))), 16);
    };
    vst1q_u16(p, vcombine_u16(rounded(x.low), rounded(x.high)));
  }

  // Sums of four products of a byte of `weights` and a signed byte of `codes`, which is not -128. dot_small is for weights below 128, which
  // are the same with a sign.
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static I dot_int8(I sum, I weights, I codes) {
    return each(sum, weights, codes, [](int32x4_t s, uint32x4_t w, int8x16_t c) { return vusdotq_s32(s, vreinterpretq_u8_u32(w), c); });
  }
  static I dot_small(I sum, I weights, I codes) { return dot_int8(sum, weights, codes); }
#elif defined(__ARM_FEATURE_DOTPROD)
  static I dot_small(I sum, I weights, I codes) {
    return each(sum, weights, codes, [](int32x4_t s, uint32x4_t w, int8x16_t c) { return vdotq_s32(s, vreinterpretq_s8_u32(w), c); });
  }
  // (weight - 128) * code + (-128) * (-code)
  static I dot_int8(I sum, I weights, I codes) {
    return each(sum, weights, codes, [](int32x4_t s, uint32x4_t w, int8x16_t c) {
      return vdotq_s32(vdotq_s32(s, less_128(w), c), vdupq_n_s8(-128), vnegq_s8(c));
    });
  }
#else
  static I dot_small(I sum, I weights, I codes) {
    return each(sum, weights, codes, [](int32x4_t s, uint32x4_t w, int8x16_t c) { return dot_signed(s, vreinterpretq_s8_u32(w), c); });
  }
  // (weight - 128) * code + 128 * code
  static I dot_int8(I sum, I weights, I codes) {
    return each(sum, weights, codes, [](int32x4_t s, uint32x4_t w, int8x16_t c) {
      return dot_signed(vaddq_s32(s, vshlq_n_s32(vpaddlq_s16(vpaddlq_s8(c)), 7)), less_128(w), c);
    });
  }
  // The sum of two products fits 16 bits.
  static int32x4_t dot_signed(int32x4_t sum, int8x16_t weights, int8x16_t codes) {
    const int16x8_t first = vmull_s8(vget_low_s8(weights), vget_low_s8(codes)), second = vmull_high_s8(weights, codes);
    return vpadalq_s16(sum, vpaddq_s16(first, second));
  }
#endif
  static int8x16_t less_128(uint32x4_t weights) { return vreinterpretq_s8_u32(veorq_u32(weights, vdupq_n_u32(0x80808080u))); }
  template <class Dot>
  static I each(I sum, I weights, I codes, Dot dot) {
    const auto half = [&](uint32x4_t s, uint32x4_t w, uint32x4_t c) {
      return vreinterpretq_u32_s32(dot(vreinterpretq_s32_u32(s), w, vreinterpretq_s8_u32(c)));
    };
    return {half(sum.low, weights.low, codes.low), half(sum.high, weights.high, codes.high)};
  }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static constexpr bool kHasBf16 = true;
  static F dot_bf16(F sum, I weights, I values) {
    return {vbfdotq_f32(sum.low, vreinterpretq_bf16_u32(weights.low), vreinterpretq_bf16_u32(values.low)),
            vbfdotq_f32(sum.high, vreinterpretq_bf16_u32(weights.high), vreinterpretq_bf16_u32(values.high))};
  }
  // Stores `low` in the lower half of each word and `high` in the upper half; values are finite and rounded half up.
  static void store_pairs(std::uint32_t* p, F low, F high) {
    const auto rounded = [](float32x4_t x) { return vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000)); };
    vst1q_u32(p, vsriq_n_u32(rounded(high.low), rounded(low.low), 16));
    vst1q_u32(p + 4, vsriq_n_u32(rounded(high.high), rounded(low.high), 16));
  }
#else
  static constexpr bool kHasBf16 = false;
#endif
};

}  // namespace
}  // namespace moegraft
