// AVX-512 with VNNI and VBMI: Ice Lake, Zen 4 and later. The expansion of grids, which replaces the one of avx512_vnni.cpp.
//
// An index stands for 4 or 8 columns with a level of 2 or 3 bits each. Tables hold the lower 2 bits of four columns in a byte, and the third
// bits in the lower half of one; bytes of 64 indexes are looked up at once. A shift by a different count for every byte then moves the bits of
// each of four columns to the bottom of its own byte, the sign to the bit above them, and one more table has the code.
#include <math.h>

#include <type_traits>

#include "simd/avx512_traits.h"
#include "simd/vector_panels.h"

namespace moegraft {
namespace {

struct Avx512Vbmi : Avx512Base {
  static I dot_int8(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
  static I dot_small(I sum, I weights, I codes) { return _mm512_dpbusd_epi32(sum, weights, codes); }
};
using F = __m512;
using I = __m512i;

template <int Count>
struct BitTables {
  alignas(64) std::uint8_t lower[2][Count];  // of the first four columns, and of the last four
  alignas(64) std::uint8_t third[Count];
};
// Of eight columns with 3 levels.
template <int Count>
constexpr BitTables<Count> two_bit_tables(const std::uint16_t (&grid)[Count]) {
  BitTables<Count> found{};
  for (int i = 0; i < Count; ++i) {
    found.lower[0][i] = static_cast<std::uint8_t>(grid[i] & 255);
    found.lower[1][i] = static_cast<std::uint8_t>(grid[i] >> 8);
  }
  return found;
}
// Of four columns with 8 levels.
template <int Count>
constexpr BitTables<Count> three_bit_tables(const std::uint16_t (&grid)[Count]) {
  BitTables<Count> found{};
  for (int i = 0; i < Count; ++i) {
    for (int k = 0; k < 4; ++k) {
      const int level = grid[i] >> 3 * k & 7;
      found.lower[0][i] = static_cast<std::uint8_t>(found.lower[0][i] | (level & 3) << 2 * k);
      found.third[i] = static_cast<std::uint8_t>(found.third[i] | (level >> 2) << k);
    }
  }
  return found;
}

// The seven stored bits of eight signs, with the eighth.
struct SignBytes {
  alignas(64) std::uint8_t bytes[128];
};
constexpr SignBytes sign_bytes() {
  SignBytes found{};
  for (int i = 0; i < 128; ++i) {
    int odd = 0;
    for (int bit = 0; bit < 7; ++bit) odd ^= i >> bit & 1;
    found.bytes[i] = static_cast<std::uint8_t>(i | odd << 7);
  }
  return found;
}
constexpr SignBytes kSignBytes = sign_bytes();

// Codes by level, with the sign in the bit above it; repeated, so that other bits do not count.
struct CodeTable {
  alignas(64) std::uint8_t codes[64];
};
template <int Levels>
constexpr CodeTable code_table(const std::uint8_t (&levels)[Levels], int offset) {
  CodeTable found{};
  constexpr int kSign = Levels == 3 ? 4 : 8;
  for (int i = 0; i < 64; ++i) {
    const int level = i % kSign < Levels ? levels[i % kSign] : 0;
    found.codes[i] = static_cast<std::uint8_t>(i & kSign ? offset - level : offset + level);
  }
  return found;
}

// Counts for four columns of a word, whose bits are `Step` apart from `first` on, in each of the two words of 8 bytes.
template <int Step>
MOEGRAFT_INLINE I shift_counts(int first) {
  std::uint64_t counts = 0;
  for (int word = 0; word < 2; ++word)
    for (int k = 0; k < 4; ++k) counts |= static_cast<std::uint64_t>((32 * word + first + Step * k) & 63) << (32 * word + 8 * k);
  return _mm512_set1_epi64(static_cast<long long>(counts));
}
template <int Step>
MOEGRAFT_INLINE I to_bottom(I bits, int first) {
  return _mm512_multishift_epi64_epi8(shift_counts<Step>(first), bits);
}

// Bytes of a table of 256, 512 or 1024, whose indexes have the upper bits in the lowest bits of `upper`.
template <int Count>
MOEGRAFT_INLINE I look_up(const std::uint8_t (&table)[Count], I index, I upper) {
  const auto quarter = [&](int first) {
    const auto two = [&](int at) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table + at), index, _mm512_load_si512(table + at + 64));
    };
    return _mm512_mask_mov_epi8(two(first), _mm512_movepi8_mask(index), two(first + 128));
  };
  if constexpr (Count == 256) {
    return quarter(0);
  } else {
    const __mmask64 bit0 = _mm512_test_epi8_mask(upper, _mm512_set1_epi8(1));
    const I low = _mm512_mask_mov_epi8(quarter(0), bit0, quarter(256));
    if constexpr (Count == 512) return low;
    else {
      const __mmask64 bit1 = _mm512_test_epi8_mask(upper, _mm512_set1_epi8(2));
      return _mm512_mask_mov_epi8(low, bit1, _mm512_mask_mov_epi8(quarter(512), bit0, quarter(768)));
    }
  }
}

MOEGRAFT_INLINE I even_signs_of(I sevens) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(kSignBytes.bytes), sevens, _mm512_load_si512(kSignBytes.bytes + 64));
}
// Bits of `a` under the mask, others of `b`.
MOEGRAFT_INLINE I selected(I a, I b, int mask) { return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(mask)), a, b, 0xca); }

// 8 columns with 3 levels and signs (16 rows): word w has bits of index w / 2.
template <int Count>
MOEGRAFT_INLINE void store_two_bits(const BitTables<Count>& tables, I index, I upper, I signs, I codes, PanelGroup& out, int row) {
  const I lower[2] = {look_up(tables.lower[0], index, upper), look_up(tables.lower[1], index, upper)};
#pragma GCC unroll 8
  for (int word = 0; word < 8; ++word) {
    const I level = to_bottom<2>(lower[word % 2], 8 * (word / 2)), sign = to_bottom<1>(signs, 4 * word - 2);
    _mm512_store_si512(&out.codes[word][row], _mm512_permutexvar_epi8(selected(level, sign, 3), codes));
  }
}

// 16 columns with 8 levels and signs: word w of these has bits of index w.
template <int Count>
MOEGRAFT_INLINE void store_three_bits(const BitTables<Count>& tables, I index, I upper, I signs, I codes, PanelGroup& out, int first,
                                      int row) {
  const I lower = look_up(tables.lower[0], index, upper), third = look_up(tables.third, index, upper);
#pragma GCC unroll 4
  for (int word = 0; word < 4; ++word) {
    const I level = selected(to_bottom<2>(lower, 8 * word), to_bottom<1>(third, 8 * word - 2), 3);
    const I sign = to_bottom<1>(signs, 4 * (first + word) - 3);
    _mm512_store_si512(&out.codes[first + word][row], _mm512_permutexvar_epi8(selected(level, sign, 7), codes));
  }
}

template <class Coded>
struct Bits;
template <>
struct Bits<Iq2Xxs> {
  static constexpr BitTables<256> kTables = two_bit_tables(kIq2XxsGrid);
  static constexpr CodeTable kCodes = code_table(kIq2Levels, Iq2Xxs::kOffset);
};
template <>
struct Bits<Iq2Xs> {
  static constexpr BitTables<512> kTables = two_bit_tables(kIq2XsGrid);
  static constexpr CodeTable kCodes = code_table(kIq2Levels, Iq2Xs::kOffset);
};
template <>
struct Bits<Iq2S> {
  static constexpr BitTables<1024> kTables = two_bit_tables(kIq2SGrid);
  static constexpr CodeTable kCodes = code_table(kIq2Levels, Iq2S::kOffset);
};
template <>
struct Bits<Iq3Xxs> {
  static constexpr BitTables<256> kTables = three_bit_tables(kIq3XxsGrid);
  static constexpr CodeTable kCodes = code_table(Iq3Xxs::kLevels, Iq3Xxs::kOffset);
};
template <>
struct Bits<Iq3S> {
  static constexpr BitTables<512> kTables = three_bit_tables(kIq3SGrid);
  static constexpr CodeTable kCodes = code_table(Iq3S::kLevels, Iq3S::kOffset);
};

template <class Coded>
constexpr bool is_one_of() {
  return false;
}
template <class Coded, class First, class... Rest>
constexpr bool is_one_of() {
  return std::is_same_v<Coded, First> || is_one_of<Coded, Rest...>();
}

// d * (0.5 + scale) * factor, of scales of 4 bits from `bit` on.
MOEGRAFT_INLINE F half_scale(F d, I words, int bit, float factor) {
  const F scale = Avx512Base::to_float(Avx512Base::and_words(Avx512Base::shift_right(words, bit), 15));
  return _mm512_mul_ps(_mm512_mul_ps(d, _mm512_add_ps(_mm512_set1_ps(0.5f), scale)), _mm512_set1_ps(factor));
}

template <class Coded>
struct GridExpansion<Avx512Vbmi, Coded, std::enable_if_t<is_one_of<Coded, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S>()>> {
  static void expand(const std::byte* block, int first, int count, PanelGroup* out) {
    for (int row = 0; row < kBlockRows; row += kLanes)
      for (int group = 0; group < count; ++group) expand_rows(block, row, first + group, out[group]);
  }

  static MOEGRAFT_INLINE void expand_rows(const std::byte* block, int row, int group, PanelGroup& out) {
    using T = Avx512Base;
    const std::byte* lines = block + Derived<Coded>::kLinesOffset + group * Derived<Coded>::kLinesBytes + row * 4;
    const auto word = [&](int index) { return T::load_int(lines + index * kWordsBytes); };
    const auto header = [&](int before) { return T::load_int(field_at<4>(block, before + group / 4 * 4, row)); };
    const F d = halves_of<T>(block, 0, row);
    const I codes = _mm512_load_si512(Bits<Coded>::kCodes.codes);
    const auto& tables = Bits<Coded>::kTables;
    const int byte = 8 * (group % 4);
    if constexpr (std::is_same_v<Coded, Iq2Xxs>) {
      const I last = word(1), signs = even_signs_of(to_bottom<7>(last, 0));
      store_two_bits(tables, word(0), signs, signs, codes, out, row);
      T::store(&out.scale[0][row], half_scale(d, last, 28, 0.25f));
    } else if constexpr (std::is_same_v<Coded, Iq2Xs>) {
      const I four = words_of(0, 2, 64, 66), low = word(0), high = word(1);
      const I index = _mm512_permutex2var_epi8(low, four, high);
      const I upper = _mm512_permutex2var_epi8(low, _mm512_add_epi8(four, _mm512_set1_epi8(1)), high);
      store_two_bits(tables, index, upper, even_signs_of(_mm512_srli_epi16(upper, 1)), codes, out, row);
    } else if constexpr (std::is_same_v<Coded, Iq2S>) {
      const I upper = to_bottom<2>(T::shift_right(header(2), byte), 0);
      store_two_bits(tables, word(0), upper, word(1), codes, out, row);
    } else if constexpr (std::is_same_v<Coded, Iq3Xxs>) {
      const I last = word(2), signs = even_signs_of(to_bottom<7>(last, 0));
      store_three_bits(tables, word(0), signs, signs, codes, out, 0, row);
      store_three_bits(tables, word(1), signs, signs, codes, out, 4, row);
      T::store(&out.scale[0][row], half_scale(d, last, 28, 0.5f));
    } else {
      const I signs = word(2), upper = T::shift_right(header(2), byte);
      store_three_bits(tables, word(0), to_bottom<1>(upper, 0), signs, codes, out, 0, row);
      store_three_bits(tables, word(1), to_bottom<1>(upper, 4), signs, codes, out, 4, row);
      const I scales = T::load_int(field_at<4>(block, 10, row));
      const F odd = T::add(T::to_float(T::and_words(T::shift_right(scales, 4 * group), 15)), T::set(0.5f));
      T::store(&out.scale[0][row], T::mul(d, T::add(odd, odd)));
    }
    if constexpr (Coded::kParts == 2) {
      const I scales = header(std::is_same_v<Coded, Iq2S> ? 10 : 2);
      T::store(&out.scale[0][row], half_scale(d, scales, byte, 0.25f));
      T::store(&out.scale[1][row], half_scale(d, scales, byte + 4, 0.25f));
    }
  }

  // Four bytes of each of 16 words, of one vector (0 to 3) or of a second one (64 to 67).
  static MOEGRAFT_INLINE I words_of(int a, int b, int c, int e) {
    const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I starts = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x04040404));
    return _mm512_add_epi8(starts, _mm512_set1_epi32(a | b << 8 | c << 16 | e << 24));
  }
};

template <int... Index>
void replace(Kernels& kernels, std::integer_sequence<int, Index...>) {
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    if constexpr (is_one_of<CodedOf<kKind>, Iq2Xxs, Iq2Xs, Iq2S, Iq3Xxs, Iq3S>()) {
      kernels.tile[static_cast<int>(kKind)] = panel_tile<Avx512Vbmi, kKind>;
      kernels.panel[static_cast<int>(kKind)] = panel<Avx512Vbmi, kKind>;
    }
  };
  (add(std::integral_constant<int, Index>()), ...);
}

}  // namespace

void use_vbmi(Kernels& kernels) { replace(kernels, CodedIndexes()); }

}  // namespace moegraft
