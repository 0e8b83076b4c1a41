// AVX-512 with VNNI and VBMI: Ice Lake, Zen 4 and later. The expansion of grids, which replaces the one of avx512_vnni.cpp.
//
// An index stands for 4 or 8 columns with a level of 2 or 3 bits each. Tables hold the lower 2 bits of four columns in a byte, and the
// third bits in the lower half of one; bytes of 64 indexes are looked up at once. A shift by a different count for every byte then moves
// the bits of each of four columns to bits 2 and 3 of its own byte, another one a sign and what is four bits behind it to bits 0 and 4: the
// sign of the next four columns, or a third bit that was stored in front of the signs. One more table has the code. Codes of IQ1_S and
// IQ1_M have no signs: they are the levels times 8, plus 0 or 2.
#include <type_traits>

#include "simd/avx512_traits.h"
#include "simd/vector_grids.h"

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

// Codes by the bits of an index: 2 and 3 are the lower bits of the level, 0 its third one where there are eight levels, and `sign` the
// sign. Other bits do not count.
constexpr int kLevelBits = 0x0c;
struct CodeTable {
  alignas(64) std::uint8_t codes[64];
};
template <int Levels>
constexpr CodeTable code_table(const std::uint8_t (&levels)[Levels], int offset, int sign) {
  CodeTable found{};
  for (int i = 0; i < 64; ++i) {
    const int index = (i >> 2 & 3) | (Levels == 8 ? (i & 1) << 2 : 0), level = index < Levels ? levels[index] : 0;
    found.codes[i] = static_cast<std::uint8_t>(i >> sign & 1 ? offset - level : offset + level);
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

// The bytes that two tables have at indexes: `upper` are the indexes without their lower 7 bits.
template <int Count, int V>
MOEGRAFT_INLINE void look_up(const std::uint8_t (&first)[Count], const std::uint8_t (&second)[Count], const I (&index)[V],
                             const I (&upper)[V], I (&a)[V], I (&b)[V]) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) a[v] = b[v] = index[v];
  I part = _mm512_setzero_si512();
#pragma GCC unroll 1
  for (int at = 0; at < Count; at += 128, part = _mm512_add_epi8(part, _mm512_set1_epi8(1))) {
    const I first_low = _mm512_load_si512(first + at), first_high = _mm512_load_si512(first + at + 64);
    const I second_low = _mm512_load_si512(second + at), second_high = _mm512_load_si512(second + at + 64);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {  // others keep their index, or what another part has replaced it by
      const __mmask64 here = _mm512_cmpeq_epi8_mask(upper[v], part);
      a[v] = _mm512_mask2_permutex2var_epi8(first_low, a[v], here, first_high);
      b[v] = _mm512_mask2_permutex2var_epi8(second_low, b[v], here, second_high);
    }
  }
}

// Bits of `a` under the mask, others of `b`.
MOEGRAFT_INLINE I selected(I a, I b, int mask) { return _mm512_ternarylogic_epi32(_mm512_set1_epi8(static_cast<char>(mask)), a, b, 0xca); }

// Indexes without their lower 7 bits, from the lower 8 bits and from those above them, which begin at bit 1 of a byte.
template <int Count>
MOEGRAFT_INLINE I upper_bits(I index, I above) {
  return Avx512Base::and_bytes(selected(above, _mm512_srli_epi16(index, 7), 0xfe), Count / 128 - 1);
}

MOEGRAFT_INLINE I even_signs_of(I sevens) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(kSignBytes.bytes), sevens, _mm512_load_si512(kSignBytes.bytes + 64));
}

template <class Coded>
struct Bits;
template <>
struct Bits<Iq2Xxs> {
  static constexpr BitTables<256> kTables = two_bit_tables(kIq2XxsGrid);
  static constexpr CodeTable kCodes[] = {code_table(kIq2Levels, Iq2Xxs::kOffset, 0), code_table(kIq2Levels, Iq2Xxs::kOffset, 4)};
};
template <>
struct Bits<Iq2Xs> {
  static constexpr BitTables<512> kTables = two_bit_tables(kIq2XsGrid);
  static constexpr CodeTable kCodes[] = {code_table(kIq2Levels, Iq2Xs::kOffset, 0), code_table(kIq2Levels, Iq2Xs::kOffset, 4)};
};
template <>
struct Bits<Iq2S> {
  static constexpr BitTables<1024> kTables = two_bit_tables(kIq2SGrid);
  static constexpr CodeTable kCodes[] = {code_table(kIq2Levels, Iq2S::kOffset, 0), code_table(kIq2Levels, Iq2S::kOffset, 4)};
};
template <>
struct Bits<Iq3Xxs> {
  static constexpr BitTables<256> kTables = three_bit_tables(kIq3XxsGrid);
  static constexpr CodeTable kCodes = code_table(Iq3Xxs::kLevels, Iq3Xxs::kOffset, 4);
};
template <>
struct Bits<Iq3S> {
  static constexpr BitTables<512> kTables = three_bit_tables(kIq3SGrid);
  static constexpr CodeTable kCodes = code_table(Iq3S::kLevels, Iq3S::kOffset, 4);
};
template <>
struct Bits<Iq1S> {
  static constexpr BitTables<2048> kTables = two_bit_tables(kIq1SGrid);
};
template <>
struct Bits<Iq1M> : Bits<Iq1S> {};

template <class Coded, class... Others>
constexpr bool is_one_of() {
  return (std::is_same_v<Coded, Others> || ...);
}
template <class Coded>
constexpr bool kHasThreeLevels = is_one_of<Coded, Iq2Xxs, Iq2Xs, Iq2S, Iq1S, Iq1M>();
template <class Coded>
constexpr bool kHasEightLevels = is_one_of<Coded, Iq3Xxs, Iq3S>();

// Four bytes of each of 16 words, of one vector (0 to 3) or of a second one (64 to 67).
MOEGRAFT_INLINE I words_of(int a, int b, int c, int e) {
  const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const I starts = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x04040404));
  return _mm512_add_epi8(starts, _mm512_set1_epi32(a | b << 8 | c << 16 | e << 24));
}

// Of half the rows.
template <class Coded>
using Packed = PackedGroup<Avx512Base, Coded>;

template <class Coded, class Out>
MOEGRAFT_INLINE void read_scales(const Packed<Coded>& packed, Out& out) {
  F scales[2];
  Coded::template scales<Avx512Base>(packed, scales);
#pragma GCC unroll 2
  for (int part = 0; part < Coded::kParts; ++part) out.scale(part, packed.row / kLanes, scales[part]);
}

// Four indexes of each row: their lower 8 bits, those above them from bit 1 of a byte on, and the signs of a byte's eight columns. Of
// shifted formats the signs are 2, or 0 where columns are shifted down.
struct Indexes {
  I index, above, signs;
};

MOEGRAFT_INLINE Indexes read(const Packed<Iq2Xxs>& packed) {
  return {packed.word(0), Avx512Base::zero_int(), even_signs_of(to_bottom<7>(packed.word(1), 0))};
}

MOEGRAFT_INLINE Indexes read(const Packed<Iq2Xs>& packed) {
  const I four = words_of(0, 2, 64, 66), low = packed.word(0), high = packed.word(1);
  const I second = _mm512_permutex2var_epi8(low, _mm512_add_epi8(four, _mm512_set1_epi8(1)), high);
  return {_mm512_permutex2var_epi8(low, four, high), _mm512_add_epi8(second, second), even_signs_of(_mm512_srli_epi16(second, 1))};
}

MOEGRAFT_INLINE Indexes read(const Packed<Iq2S>& packed) { return {packed.word(0), to_bottom<2>(packed.header<4>(2), -1), packed.word(1)}; }

MOEGRAFT_INLINE Indexes read(const Packed<Iq1S>& packed) {
  const I bits = packed.header<2>(2);
  const I up = _mm512_andnot_si512(_mm512_multishift_epi64_epi8(shift_counts<0>(14), bits), _mm512_set1_epi8(2));
  return {packed.word(0), to_bottom<3>(bits, -1), up};
}

MOEGRAFT_INLINE Indexes read(const Packed<Iq1M>& packed) {
  const I bits = packed.header<2>(8);
  return {packed.word(0), to_bottom<4>(bits, -1), _mm512_andnot_si512(to_bottom<4>(bits, 2), _mm512_set1_epi8(2))};
}

// The signs of an index's columns at the bottom of a word's bytes; of shifted formats, its shift in all of them.
template <class Coded>
MOEGRAFT_INLINE I signs_at(I signs, int index) {
  if constexpr (!kIsShifted<Coded>) return to_bottom<1>(signs, 8 * index);
  else if constexpr (Coded::kParts == 1) return signs;  // all columns of a group have one shift
  else return _mm512_shuffle_epi8(signs, words_of(index, index, index, index));
}

constexpr int kTogether = 2;  // groups: four vectors of indexes hide how long a look-up takes, and share the loads of its tables

// Gives the codes of some groups to their `out` in 16 vectors each, and their scales.
template <class Coded, class Out>
MOEGRAFT_INLINE std::enable_if_t<kHasThreeLevels<Coded>> expand(const std::byte* block, int first, Out (&outs)[kTogether]) {
  constexpr auto& kTables = Bits<Coded>::kTables;
  constexpr int kCount = sizeof kTables.lower[0];
  I indexes[4], upper[4], signs[4];  // [group and half]
#pragma GCC unroll 4
  for (int at = 0; at < 4; ++at) {
    const Packed<Coded> packed{block, first + at / 2, at % 2 * kLanes};
    const Indexes found = read(packed);
    read_scales(packed, outs[at / 2]);
    indexes[at] = found.index;
    signs[at] = found.signs;
    upper[at] = upper_bits<kCount>(found.index, found.above);
  }
  I lower[2][4];  // of the first four columns of an index, and of the last four
  look_up(kTables.lower[0], kTables.lower[1], indexes, upper, lower[0], lower[1]);
#pragma GCC unroll 8
  for (int byte = 0; byte < 4 * kTogether; ++byte) {
    const int group = byte / 4, bit = byte % 4 * 8;
    I two_signs[2];  // of both words
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) two_signs[half] = signs_at<Coded>(signs[2 * group + half], byte % 4);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int word = byte % 4 * 2 + i;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const I four = lower[i][2 * group + half];
        if constexpr (kIsShifted<Coded>) {
          const I eights = to_bottom<2>(four, bit - 3);
          outs[group].codes(word, half, _mm512_ternarylogic_epi32(eights, _mm512_set1_epi8(24), two_signs[half], 0xea));
        } else {
          const I code = selected(to_bottom<2>(four, bit - 2), two_signs[half], kLevelBits);
          outs[group].codes(word, half, _mm512_permutexvar_epi8(code, _mm512_load_si512(Bits<Coded>::kCodes[i].codes)));
        }
      }
    }
  }
}

template <class Coded, class Out>
MOEGRAFT_INLINE void expand_one(const std::byte* block, int group, Out& out) {
  constexpr auto& kTables = Bits<Coded>::kTables;
  constexpr int kCount = sizeof kTables.third;
  I signs[2], index[4], upper[4], lower[4], third[4];  // [half and 16 columns]
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const Packed<Coded> packed{block, group, half * kLanes};
    read_scales(packed, out);
    signs[half] = packed.word(2);
    I above[2] = {};
    if constexpr (std::is_same_v<Coded, Iq3Xxs>) {
      signs[half] = even_signs_of(to_bottom<7>(signs[half], 0));
    } else {
      const I bits = packed.template header<4>(2);
      above[0] = to_bottom<1>(bits, -1);
      above[1] = to_bottom<1>(bits, 3);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      index[2 * half + i] = packed.word(i);
      upper[2 * half + i] = upper_bits<kCount>(index[2 * half + i], above[i]);
    }
  }
  look_up(kTables.lower[0], kTables.third, index, upper, lower, third);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) third[i] = selected(to_bottom<4>(signs[i / 2], 16 * (i % 2) - 4), third[i], 0xf0);
#pragma GCC unroll 8
  for (int word = 0; word < 8; ++word) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * half + word / 4, first = 8 * (word % 4);
      const I code = selected(to_bottom<2>(lower[i], first - 2), to_bottom<1>(third[i], first), kLevelBits);
      out.codes(word, half, _mm512_permutexvar_epi8(code, _mm512_load_si512(Bits<Coded>::kCodes.codes)));
    }
  }
}

template <class Coded, class Out>
MOEGRAFT_INLINE std::enable_if_t<kHasEightLevels<Coded>> expand(const std::byte* block, int first, Out (&outs)[kTogether]) {
#pragma GCC unroll 2
  for (int group = 0; group < kTogether; ++group) expand_one<Coded>(block, first + group, outs[group]);
}

struct ToMemory {
  ExpandedGroup& group;
  MOEGRAFT_INLINE void codes(int word, int half, I codes) const { _mm512_store_si512(&group.codes[word][half * kLanes], codes); }
  MOEGRAFT_INLINE void scale(int part, int half, F scale) const { _mm512_storeu_ps(&group.scale[part][half * kLanes], scale); }
};

template <class Coded>
struct GridExpansion<Avx512Vbmi, Coded, std::enable_if_t<kHasThreeLevels<Coded> || kHasEightLevels<Coded>>> {
  static void expand(const std::byte* block, ExpandedGroup* out) {
    static_assert(kGridGroups % kTogether == 0);
    for (int group = 0; group < kGridGroups; group += kTogether) {
      ToMemory to[kTogether] = {{out[group]}, {out[group + 1]}};
      moegraft::expand<Coded>(block, group, to);
    }
  }
};

// A tile of one token multiplies codes where they are expanded: to store and load them would take longer than the products.
template <Format Kind>
struct ToDots {
  const std::uint32_t* words;  // a record's, of this group
  I dots[2][2];  // [part][half]
  F scales[2][2];
  MOEGRAFT_INLINE explicit ToDots(const std::uint32_t* words) : words(words) {
    for (int part = 0; part < CodedOf<Kind>::kParts; ++part) dots[part][0] = dots[part][1] = Avx512Base::broadcast_int(words + 1 + part);
  }
  MOEGRAFT_INLINE void codes(int word, int half, I codes) {
    I& sum = dots[word / (kGroup / 4 / CodedOf<Kind>::kParts)][half];
    sum = Avx512Vbmi::dot_int8(sum, codes, Avx512Base::broadcast_int(words + first_code_word(Kind) + word));
  }
  MOEGRAFT_INLINE void scale(int part, int half, F scale) { scales[part][half] = scale; }
};

template <Format Kind>
void grid_tile(const TileArgs& args) {
  using Coded = CodedOf<Kind>;
  using T = Avx512Base;
  if (args.tokens > 1) return tile_grid<Avx512Vbmi, Kind>(args);
  F sums[1][2] = {};
  for (int group = 0; group < args.groups; group += kTogether) {
    const std::byte* block = args.block + static_cast<std::size_t>(group / Derived<Coded>::kGroups) * Derived<Coded>::kBytes;
    for (int i = 0; i < kTogether; ++i) prefetch_ahead(args, group + i);
    const std::uint32_t* words = args.records + group * words_per_group(Kind);
    ToDots<Kind> both[kTogether] = {ToDots<Kind>(words), ToDots<Kind>(words + words_per_group(Kind))};
    expand<Coded>(block, group % Derived<Coded>::kGroups, both);
    for (const ToDots<Kind>& to : both) {
      const F share = T::broadcast_float(to.words);
      for (int half = 0; half < 2; ++half) {
        const F first = T::to_float(to.dots[0][half]);
        if constexpr (Coded::kParts == 2) {
          const F parts = T::fma(T::to_float(to.dots[1][half]), to.scales[1][half], T::mul(first, to.scales[0][half]));
          sums[0][half] = T::fma(parts, share, sums[0][half]);
        } else {
          sums[0][half] = T::fma(first, T::mul(to.scales[0][half], share), sums[0][half]);
        }
      }
    }
  }
  store_tile<T, 2, 1>(sums, args.out, 0);
}

template <int... Index>
void replace(Kernels& kernels, std::integer_sequence<int, Index...>) {
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    if constexpr (kHasThreeLevels<CodedOf<kKind>> || kHasEightLevels<CodedOf<kKind>>) {
      kernels.tile[static_cast<int>(kKind)] = grid_tile<kKind>;
    }
  };
  (add(std::integral_constant<int, Index>()), ...);
}

}  // namespace

void use_vbmi(Kernels& kernels) { replace(kernels, CodedIndexes()); }

}  // namespace moegraft
