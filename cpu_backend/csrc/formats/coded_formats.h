// The formats whose weights are codes of a few bits in blocks of a row, as files store them. A format is one struct, in integer_formats.h,
// float_formats.h or grid_formats.h, which format_parts.h describes: the sizes, names, packing, unpacking, records, tables and kernels of
// all other files derive from it and from its place in CodedFormats (format_list.h). This is what kernels derive.
//
// The files of several instruction sets include this, so that everything that generates code is `static` or in an anonymous namespace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "formats/float_formats.h"
#include "formats/format_list.h"
#include "formats/grid_formats.h"
#include "formats/integer_formats.h"

namespace moegraft {
namespace {

template <class Coded, class = void>
constexpr bool kIsGrid = false;
template <class Coded>
constexpr bool kIsGrid<Coded, std::void_t<decltype(Coded::kGrid)>> = true;

// Whether its codes are indexes into a grid; TQ1_0's are not.
template <class Coded, class = void>
constexpr bool kHasPoints = false;
template <class Coded>
constexpr bool kHasPoints<Coded, std::void_t<decltype(Coded::kBytes)>> = true;
// Whether the columns of an index are all by 1 up or down instead of having signs.
template <class Coded, class = void>
constexpr bool kIsShifted = false;
template <class Coded>
constexpr bool kIsShifted<Coded, std::void_t<decltype(Coded::kShifted)>> = true;

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

template <int Index, class List>
struct FormatAt;
template <int Index, class First, class... Rest>
struct FormatAt<Index, FormatList<First, Rest...>> : FormatAt<Index - 1, FormatList<Rest...>> {};
template <class First, class... Rest>
struct FormatAt<0, FormatList<First, Rest...>> {
  using Type = First;
};

// The description of a coded format.
template <Format Kind>
using CodedOf = typename FormatAt<static_cast<int>(Kind) - kFirstCoded, CodedFormats>::Type;
// For tables: entry i is that of static_cast<Format>(kFirstCoded + i).
using CodedIndexes = std::make_integer_sequence<int, kCodedFormats>;
constexpr Format coded(int index) { return static_cast<Format>(kFirstCoded + index); }

// What the records of activations depend on, and the numbers that codes mean.
struct RecordForm {
  int parts;
  bool float8, minimum;
  int offset;
};
struct RecordForms {
  RecordForm of[kCodedFormats];
};
template <class... Formats>
constexpr RecordForms record_forms(FormatList<Formats...>) {
  return {{{Formats::kParts, kIsFloat8<Formats>, Formats::kMinimum, Formats::kOffset}...}};
}
constexpr RecordForms kRecordForms = record_forms(CodedFormats());
constexpr const RecordForm& record_form(Format format) { return kRecordForms.of[static_cast<int>(format) - kFirstCoded]; }

// Whether activations are rounded to codes.
constexpr bool has_codes(Format format) { return is_coded(format) && !record_form(format).float8; }
constexpr int first_code_word(Format format) { return 1 + record_form(format).parts; }
constexpr int words_per_group(Format format) {
  return format == Format::kBFloat16Dot ? kGroup / 2 : has_codes(format) ? first_code_word(format) + kGroup / 4 : kGroup;
}

// The codes of a group are words [row]: as many for the low bits as a code has of them, then as many for the high bits. Byte i of a word
// has the bits of columns i, i + 4, ... of the word's, the first in the lowest bits; so 8 bits are [kk / 4][row][kk % 4] bytes.

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
inline float number_of(const RecordForm& form, int code) {
  return form.float8 ? float_from_e4m3(code) : static_cast<float>(code - form.offset);
}

// The scales of a group, and its unsigned codes, of a format that has points.
template <class Coded>
inline GroupScales signed_points(const RowGroup& packed, GroupCodes& codes) {
  const std::uint32_t signs = Coded::template signs<OneRow>(packed);
  for (int first = 0; first < kGroup; first += Coded::kPointColumns) {
    const std::uint64_t point = Coded::kBytes.bytes[Coded::template index<OneRow>(packed, first / Coded::kPointColumns)];
    for (int k = 0; k < Coded::kPointColumns; ++k) {
      const int value = static_cast<int>(point >> 8 * k & 255), negative = static_cast<int>(signs >> (first + k) & 1);
      codes[first + k] =
          static_cast<std::uint8_t>(kIsShifted<Coded> ? value + 2 - 2 * negative : Coded::kOffset + (negative ? -value : value));
    }
  }
  GroupScales scales{};
  Coded::template scales<OneRow>(packed, scales.scale);
  return scales;
}

// A group of a packed block, for a vector of rows from `row` on; RowGroup describes it.
template <class T, class Coded>
struct PackedGroup {
  const std::byte* block;
  int group, row;
  MOEGRAFT_INLINE typename T::F scale() const { return halves_of<T>(block, 0, row); }
  MOEGRAFT_INLINE typename T::I word(int index) const {
    return T::load_int(block + Derived<Coded>::kLinesOffset + group * Derived<Coded>::kLinesBytes + index * kWordsBytes + row * 4);
  }
  MOEGRAFT_INLINE typename T::I field(int before) const { return T::load_int(field_at<4>(block, before, row)); }
  template <int Groups>
  MOEGRAFT_INLINE typename T::I header(int before) const {
    return T::shift_right(field(before + group / Groups * 4), 32 / Groups * (group % Groups));
  }
};

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
      if constexpr (kHasPoints<Coded>) {
        return signed_points<Coded>({header, words, index}, codes);
      } else {
        Coded::codes(header, words, index, codes);
        return Coded::scales(header, words, index);
      }
    } else {
      for (int k = 0; k < kGroup; ++k) codes[k] = static_cast<std::uint8_t>(code_at<Coded>(of_group, row, k));
      return Coded::scales(header, index);
    }
  }
};

// How the codes of a group are packed. Formats with the same form share the functions that unpack and multiply them, which get the table,
// if there is one, as an argument: each function costs time to compile.
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
