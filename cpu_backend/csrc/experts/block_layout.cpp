#include "experts/block_layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float_conversion.h"

namespace moegraft {
namespace {

// 16 rows by 32 columns before they are stored into a block.
struct GroupTile {
  float values[kLanes][kGroup];
  std::int8_t codes[kLanes][kGroup];
  std::uint16_t scales[kLanes];
};

void load_values(GroupTile& tile, const RowsView& source, int first_row, int first_col) {
  const int rows = std::min(kLanes, source.rows - first_row);
  const int cols = std::min(kGroup, source.cols - first_col);
  if (rows < kLanes || cols < kGroup) std::memset(tile.values, 0, sizeof tile.values);
  for (int r = 0; r < rows; ++r) {
    const std::size_t start = static_cast<std::size_t>(first_row + r) * source.cols + first_col;
    float* values = tile.values[r];
    if (source.type == WeightType::kFloat32) {
      std::memcpy(values, static_cast<const float*>(source.data) + start, sizeof(float) * static_cast<std::size_t>(cols));
      continue;
    }
    const auto* halves = static_cast<const std::uint16_t*>(source.data) + start;
    if (source.type == WeightType::kBFloat16) {
      for (int k = 0; k < cols; ++k) values[k] = float_from_bf16(halves[k]);
    } else {
      for (int k = 0; k < cols; ++k) values[k] = float_from_f16(halves[k]);
    }
  }
}

// The bits of the largest magnitude, whose order is that of the magnitudes; at least kInfinityBits if a value is not finite.
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
std::int32_t largest_bits(const float* values) {
  std::int32_t largest = 0;
  for (int k = 0; k < kGroup; ++k) {
    const auto bits = static_cast<std::int32_t>(bits_from_float(values[k]) & 0x7fffffffu);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// GGUF's Q8_0: scale = max|w| / 127, codes rounded half away from zero with the unrounded scale.
std::uint16_t quantize_q8_0(const float* values, float largest, std::int8_t* codes) {
  const float scale = largest / 127.0f;
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (int k = 0; k < kGroup; ++k) {
    // Adding the float below 0.5 rounds without a branch or roundf, so that the compiler vectorises the loop.
    const float scaled = values[k] * inverse;
    const float away = scaled + std::copysign(0x1.fffffep-2f, scaled);
    codes[k] = static_cast<std::int8_t>(static_cast<int>(std::min(127.0f, std::max(-127.0f, away))));
  }
  return f16_from_float(scale);
}

// GGUF's Q4_0: scale = (the value of largest magnitude, with its sign) / -8, so that value gets code -8.
std::uint16_t quantize_q4_0(const float* values, float largest, std::int8_t* codes) {
  float extreme = 0.0f;
  for (int k = kGroup - 1; k >= 0; --k) extreme = std::fabs(values[k]) == largest ? values[k] : extreme;  // the first of equals
  const float scale = extreme / -8.0f;
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (int k = 0; k < kGroup; ++k) {
    const float shifted = std::min(15.5f, std::max(0.0f, values[k] * inverse + 8.5f));
    codes[k] = static_cast<std::int8_t>(static_cast<int>(shifted) - 8);
  }
  return f16_from_float(scale);
}

void quantize(GroupTile& tile, WeightType type) {
  constexpr std::uint16_t kNan = 0x7e00;
  for (int r = 0; r < kLanes; ++r) {
    const auto bits = static_cast<std::uint32_t>(largest_bits(tile.values[r]));
    const float largest = float_from_bits(bits);
    if (bits >= kInfinityBits) {  // codes cannot represent NaN, so the group's scale becomes NaN
      std::memset(tile.codes[r], 0, kGroup);
      tile.scales[r] = kNan;
    } else if (type == WeightType::kInt8) {
      tile.scales[r] = quantize_q8_0(tile.values[r], largest, tile.codes[r]);
    } else {
      tile.scales[r] = quantize_q4_0(tile.values[r], largest, tile.codes[r]);
    }
  }
}

void load_codes(GroupTile& tile, const QuantizedRowsView& source, int first_row, int first_col) {
  std::memset(tile.codes, 0, sizeof tile.codes);
  std::memset(tile.scales, 0, sizeof tile.scales);
  const int rows = std::min(kLanes, source.rows - first_row);
  for (int r = 0; r < rows; ++r) {
    const std::size_t row = static_cast<std::size_t>(first_row + r);
    std::memcpy(tile.codes[r], source.codes + row * source.cols + first_col, kGroup);
    tile.scales[r] = source.scales[row * (source.cols / kGroup) + first_col / kGroup];
  }
}

// Stores the 16 lanes of one group; line j is at lines + j * stride.
struct Place {
  std::byte* scales;
  std::byte* lines;
  std::size_t stride;
};

Place place_in_block(WeightType type, HalfBlock half, int group) {
  const std::size_t bytes = static_cast<std::size_t>(line_bytes(type));
  std::byte* base = half.block + block_bytes(type, kGroup) * static_cast<std::size_t>(group);
  return {base + half.half * kLanes * 2, base + (is_quantized(type) ? kScaleBytes : 0) + bytes * static_cast<std::size_t>(half.half),
          2 * bytes};
}

Place place_in_row(WeightType type, std::byte* row, int cols, int chunk) {
  const std::size_t bytes = static_cast<std::size_t>(line_bytes(type));
  return {row + chunk * kLanes * 2, row + row_scale_bytes(type, cols) + bytes * static_cast<std::size_t>(lines_per_chunk(type) * chunk),
          bytes};
}

void store_line(const GroupTile& tile, WeightType type, int k, std::byte* line) {
  auto* words = reinterpret_cast<std::uint32_t*>(line);
  auto* halves = reinterpret_cast<std::uint16_t*>(line);
  const auto four = [&](int lane, int first) {
    std::uint32_t codes;
    std::memcpy(&codes, tile.codes[lane] + first, 4);
    return codes;
  };
  switch (type) {
    case WeightType::kFloat32:
      for (int lane = 0; lane < kLanes; ++lane) words[lane] = bits_from_float(tile.values[lane][k]);
      break;
    case WeightType::kFloat16:
      for (int lane = 0; lane < kLanes; ++lane) halves[lane] = f16_from_float(tile.values[lane][k]);
      break;
    case WeightType::kBFloat16:
      for (int lane = 0; lane < kLanes; ++lane)
        words[lane] = bf16_from_float(tile.values[lane][k]) | static_cast<std::uint32_t>(bf16_from_float(tile.values[lane][k + 1])) << 16;
      break;
    case WeightType::kInt8:  // adding 128 flips the sign bit
      for (int lane = 0; lane < kLanes; ++lane) words[lane] = four(lane, k) ^ 0x80808080u;
      break;
    case WeightType::kInt4:  // adding 8 flips the sign bit of the low nibble
      for (int lane = 0; lane < kLanes; ++lane)
        words[lane] = ((four(lane, k) ^ 0x08080808u) & 0x0f0f0f0fu) | (((four(lane, k + 4) ^ 0x08080808u) & 0x0f0f0f0fu) << 4);
      break;
    default: break;  // formats of files are packed separately
  }
}

void store(const GroupTile& tile, WeightType type, Place place) {
  if (is_quantized(type)) std::memcpy(place.scales, tile.scales, sizeof tile.scales);
  const int step = kGroup / lines_per_chunk(type);  // columns per line
  for (int k = 0; k < kGroup; k += step, place.lines += place.stride) store_line(tile, type, k, place.lines);
}

// Dequantises the values.
void load(GroupTile& tile, WeightType type, Place place) {
  const int step = kGroup / lines_per_chunk(type);
  for (int k = 0; k < kGroup; k += step, place.lines += place.stride) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(place.lines);
    const auto* halves = reinterpret_cast<const std::uint16_t*>(place.lines);
    for (int lane = 0; lane < kLanes; ++lane) {
      float* values = tile.values[lane] + k;
      const float scale = is_quantized(type) ? float_from_f16(reinterpret_cast<const std::uint16_t*>(place.scales)[lane]) : 1.0f;
      switch (type) {
        case WeightType::kFloat32: values[0] = reinterpret_cast<const float*>(place.lines)[lane]; break;
        case WeightType::kFloat16: values[0] = float_from_f16(halves[lane]); break;
        case WeightType::kBFloat16:
          values[0] = float_from_bf16(halves[2 * lane]);
          values[1] = float_from_bf16(halves[2 * lane + 1]);
          break;
        case WeightType::kInt8:
          for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(bytes[4 * lane + i] - 128) * scale;
          break;
        case WeightType::kInt4:
          for (int i = 0; i < 4; ++i) {
            values[i] = static_cast<float>((bytes[4 * lane + i] & 15) - 8) * scale;
            values[i + 4] = static_cast<float>((bytes[4 * lane + i] >> 4) - 8) * scale;
          }
          break;
        default: break;
      }
    }
  }
}

float element(const RowsView& source, int row, int col) {
  const std::size_t index = static_cast<std::size_t>(row) * source.cols + col;
  if (source.type == WeightType::kFloat32) return static_cast<const float*>(source.data)[index];
  const std::uint16_t half = static_cast<const std::uint16_t*>(source.data)[index];
  return source.type == WeightType::kFloat16 ? float_from_f16(half) : float_from_bf16(half);
}

}  // namespace

std::size_t block_bytes(WeightType type, int cols) {
  if (!is_coded(type)) return static_cast<std::size_t>(round_up(cols, kGroup)) * kBlockRows * (type == WeightType::kFloat32 ? 4 : 2);
  const CodedFormat& format = coded_format(type);
  const auto blocks = static_cast<std::size_t>(round_up(cols, format.columns) / format.columns);
  return (blocks * static_cast<std::size_t>(format.file_bytes * kBlockRows) + 63) / 64 * 64;
}

std::size_t file_row_bytes(WeightType type, int cols) {
  return static_cast<std::size_t>(cols / coded_format(type).columns) * static_cast<std::size_t>(coded_format(type).file_bytes);
}

void pack_half_block(WeightType type, HalfBlock target, const RowsView& source, int first_row) {
  GroupTile tile;
  for (int group = 0; group * kGroup < source.cols; ++group) {
    load_values(tile, source, first_row, group * kGroup);
    if (is_quantized(type)) quantize(tile, type);
    store(tile, type, place_in_block(type, target, group));
  }
}

void pack_half_block(WeightType type, HalfBlock target, const QuantizedRowsView& source, int first_row) {
  GroupTile tile;
  for (int group = 0; group * kGroup < source.cols; ++group) {
    load_codes(tile, source, first_row, group * kGroup);
    store(tile, type, place_in_block(type, target, group));
  }
}

void unpack_half_block(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row) {
  if (is_stored(type)) return unpack_stored(type, source, rows_out, rows, cols, first_row);
  GroupTile tile;
  const int present = std::min(kLanes, rows - first_row);
  for (int group = 0; group * kGroup < cols; ++group) {
    load(tile, type, place_in_block(type, source, group));
    const int width = std::min(kGroup, cols - group * kGroup);
    for (int r = 0; r < present; ++r)
      std::memcpy(rows_out + static_cast<std::size_t>(first_row + r) * cols + group * kGroup, tile.values[r], sizeof(float) * width);
  }
}

void pack_sparse_row(WeightType type, std::byte* target, const RowsView& source, int index, bool transposed) {
  GroupTile tile;
  const int cols = transposed ? source.rows : source.cols;
  for (int chunk = 0; chunk < chunks_of(cols); ++chunk) {
    for (int i = 0; i < kChunk; ++i) {
      const int col = chunk * kChunk + i;
      tile.values[i / kGroup][i % kGroup] = col >= cols ? 0.0f : transposed ? element(source, col, index) : element(source, index, col);
    }
    if (is_quantized(type)) quantize(tile, type);
    store(tile, type, place_in_row(type, target, cols, chunk));
  }
}

void pack_sparse_row(WeightType type, std::byte* target, const QuantizedRowsView& source, int row) {
  GroupTile tile;
  const int groups = source.cols / kGroup;
  for (int chunk = 0; chunk < chunks_of(source.cols); ++chunk) {
    std::memset(tile.codes, 0, sizeof tile.codes);
    std::memset(tile.scales, 0, sizeof tile.scales);
    for (int lane = 0; lane < std::min(kLanes, groups - chunk * kLanes); ++lane) {
      const std::size_t group = static_cast<std::size_t>(row) * groups + chunk * kLanes + lane;
      std::memcpy(tile.codes[lane], source.codes + group * kGroup, kGroup);
      tile.scales[lane] = source.scales[group];
    }
    store(tile, type, place_in_row(type, target, source.cols, chunk));
  }
}

void unpack_sparse_row(WeightType type, const std::byte* source, int cols, float* values, std::size_t stride) {
  GroupTile tile;
  for (int chunk = 0; chunk < chunks_of(cols); ++chunk) {
    load(tile, type, place_in_row(type, const_cast<std::byte*>(source), cols, chunk));
    for (int i = 0; i < std::min(kChunk, cols - chunk * kChunk); ++i)
      values[(static_cast<std::size_t>(chunk) * kChunk + i) * stride] = tile.values[i / kGroup][i % kGroup];
  }
}

void dequantize(const QuantizedRowsView& source, float* rows_out) {
  const std::size_t groups = static_cast<std::size_t>(source.rows) * source.cols / kGroup;
  for (std::size_t group = 0; group < groups; ++group) {
    const float scale = float_from_f16(source.scales[group]);
    for (int k = 0; k < kGroup; ++k) rows_out[group * kGroup + k] = static_cast<float>(source.codes[group * kGroup + k]) * scale;
  }
}

}  // namespace moegraft
