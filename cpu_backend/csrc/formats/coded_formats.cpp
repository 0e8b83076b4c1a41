// What other files than kernels get from the structs of formats: their descriptions, and the packing of files' blocks.
#include "formats/coded_formats.h"

#include <algorithm>
#include <iterator>

#include "experts/block_layout.h"

namespace moegraft {
namespace {

template <class Coded, class = void>
constexpr bool kIsSearched = false;
template <class Coded>
constexpr bool kIsSearched<Coded, std::void_t<decltype(Coded::kSearch)>> = true;

template <class Coded>
constexpr GridTable grid_table() {
  GridTable found{};
  if constexpr (kHasPoints<Coded>) {
    found.count = static_cast<int>(std::size(Coded::kBytes.bytes));
    found.bytes = Coded::kBytes.bytes;
  }
  if constexpr (kIsSearched<Coded>) {
    found.search = &Coded::kSearch;
    found.points = Coded::kPoints;
    found.levels = Coded::kLevels;
    found.level_count = static_cast<int>(std::size(Coded::kLevels));
  }
  return found;
}

struct CodedTable {
  CodedFormat formats[kCodedFormats];
};
template <class... Formats>
constexpr CodedTable table_of(FormatList<Formats...>) {
  return {{{Formats::kName, Formats::kColumns, Formats::kFileBytes, kZen4AheadOf<Formats>, grid_table<Formats>()}...}};
}
constexpr CodedTable kCodedTable = table_of(CodedFormats());

template <class Coded>
void pack_stored(HalfBlock target, const StoredRowsView& source, int first_row) {
  static constexpr std::uint8_t kZeros[Coded::kFileBytes] = {};
  const int blocks = source.cols / Coded::kColumns;
  for (int index = 0; index < blocks; ++index) {
    std::byte* block = target.block + static_cast<std::size_t>(Derived<Coded>::kBytes) * static_cast<std::size_t>(index);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = kLanes * target.half + lane;
      const std::size_t at =
          static_cast<std::size_t>(first_row + lane) * static_cast<std::size_t>(blocks) + static_cast<std::size_t>(index);
      const std::uint8_t* file = first_row + lane < source.rows ? source.blocks + at * Coded::kFileBytes : kZeros;
      std::byte* lines = block;
      for (const Field& field : Coded::kHeader) {
        std::memcpy(lines + row * field.bytes, file + field.offset, static_cast<std::size_t>(field.bytes));
        lines += field.bytes * kBlockRows;
      }
      for (int group = 0; group < Derived<Coded>::kGroups; ++group, lines += Derived<Coded>::kLinesBytes) {
        if constexpr (kIsGrid<Coded>) {
          for (int word = 0; word < Coded::kLowBits; ++word)
            std::memcpy(lines + word * kWordsBytes + row * 4, file + Coded::word_offset(group, word), 4);
        } else {
          GroupCodes codes;
          Coded::stored_codes(file, group, codes);
          store_codes<Coded>(codes, lines, row);
        }
      }
    }
  }
}

template <class Coded>
void decode(const std::byte* block, int row, GroupCodes* codes, GroupScales* scales) {
  static_assert(Derived<Coded>::kGroups <= kMostBlockGroups);
  const PackedRow<Coded> packed(block, row);
  for (int group = 0; group < Derived<Coded>::kGroups; ++group) scales[group] = packed.group(group, codes[group]);
}

template <class Coded, class = void>
constexpr int kScaleNibblesOf = -1;
template <class Coded>
constexpr int kScaleNibblesOf<Coded, std::void_t<decltype(Coded::kScaleNibbles)>> = Coded::kScaleNibbles;

// Replaces the scales in a file's block by small ones.
template <class Coded>
void make_small(std::uint8_t* block) {
  constexpr std::uint16_t kHalf = 0x0c00;  // 2^-12
  if constexpr (kScaleNibblesOf<Coded> >= 0) {
    std::uint8_t* high = block + kScaleNibblesOf<Coded> + 1;
    for (int i = 0; i < 4; ++i) high[2 * i] = static_cast<std::uint8_t>((high[2 * i] & 15) | (kHalf >> 4 * i & 15) << 4);
  }
  for (const Field& field : Coded::kHeader) {
    if (kIsFloat8<Coded> || (kRowsOfScale<Coded> > 1 && field.bytes == 1)) {
      std::memset(block + field.offset, 0x39, static_cast<std::size_t>(field.bytes));  // four of them are 0.00018
      continue;
    }
    if (field.bytes == 2) std::memcpy(block + field.offset, &kHalf, 2);
    if (field.bytes == 1) block[field.offset] = 127 - 12;
  }
}

struct StoredPacker {
  void (*pack)(HalfBlock target, const StoredRowsView& source, int first_row);
  void (*decode)(const std::byte* block, int row, GroupCodes* codes, GroupScales* scales);
  void (*make_small)(std::uint8_t* block);
};
struct StoredPackers {
  StoredPacker functions[kCodedFormats];
};
template <class... Formats>
constexpr StoredPackers packers_of(FormatList<Formats...>) {
  return {{{pack_stored<Formats>, decode<Formats>, make_small<Formats>}...}};
}
constexpr StoredPackers kStoredPackers = packers_of(CodedFormats());
const StoredPacker& packer_of(WeightType type) { return kStoredPackers.functions[static_cast<int>(type) - kFirstCoded]; }

}  // namespace

const CodedFormat& coded_format(WeightType type) { return kCodedTable.formats[static_cast<int>(type) - kFirstCoded]; }

int group_words(Format format) { return words_per_group(format); }

void pack_half_block(WeightType type, HalfBlock target, const StoredRowsView& source, int first_row) {
  packer_of(type).pack(target, source, first_row);
}

void unpack_stored(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row) {
  const CodedFormat& format = coded_format(type);
  const RecordForm& form = record_form(static_cast<Format>(type));
  for (int lane = 0; lane < std::min(kLanes, rows - first_row); ++lane) {
    float* values = rows_out + static_cast<std::size_t>(first_row + lane) * static_cast<std::size_t>(cols);
    const std::byte* block = source.block;
    for (int column = 0; column < cols; column += format.columns, block += format.file_bytes * kBlockRows) {
      GroupCodes codes[kMostBlockGroups];
      GroupScales scales[kMostBlockGroups];
      decode_row(type, block, kLanes * source.half + lane, codes, scales);
      for (int group = 0; group < format.columns / kGroup; ++group)
        for (int k = 0; k < kGroup; ++k, ++values) {
          const int part = k / (kGroup / form.parts);
          const float product = scales[group].scale[part] * number_of(form, codes[group][k]);
          *values = form.minimum ? product + scales[group].minimum[part] : product;
        }
    }
  }
}

void decode_row(WeightType type, const std::byte* block, int row, GroupCodes* codes, GroupScales* scales) {
  packer_of(type).decode(block, row, codes, scales);
}

void random_blocks(WeightType type, std::uint8_t* blocks, int rows, int cols, unsigned seed) {
  const std::size_t bytes = file_row_bytes(type, cols) * static_cast<std::size_t>(rows);
  for (std::size_t at = 0; at < bytes; ++at) {
    seed = seed * 1664525u + 1013904223u;
    blocks[at] = static_cast<std::uint8_t>(seed >> 24);
  }
  const auto step = static_cast<std::size_t>(coded_format(type).file_bytes);
  for (std::size_t at = 0; at < bytes; at += step) packer_of(type).make_small(blocks + at);
}

}  // namespace moegraft
