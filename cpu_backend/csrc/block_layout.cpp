#include "block_layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numbers.h"

namespace moegraft {
namespace {

// 16 rows by 32 columns on their way into a block.
struct GroupTile {
  float values[kLanes][kGroup];
  std::int8_t codes[kLanes][kGroup];
  std::uint16_t scales[kLanes];
};

void load_values(GroupTile& tile, const RowsView& source, int first_row, int first_col) {
  std::memset(tile.values, 0, sizeof tile.values);
  const int rows = std::min(kLanes, source.rows - first_row);
  const int cols = std::min(kGroup, source.cols - first_col);
  for (int r = 0; r < rows; ++r) {
    const std::size_t start = static_cast<std::size_t>(first_row + r) * source.cols + first_col;
    for (int k = 0; k < cols; ++k) {
      switch (source.type) {
        case WeightType::kFloat32: tile.values[r][k] = static_cast<const float*>(source.data)[start + k]; break;
        case WeightType::kFloat16: tile.values[r][k] = float_from_f16(static_cast<const std::uint16_t*>(source.data)[start + k]); break;
        default: tile.values[r][k] = float_from_bf16(static_cast<const std::uint16_t*>(source.data)[start + k]); break;
      }
    }
  }
}

bool all_finite(const float* values) {
  for (int k = 0; k < kGroup; ++k)
    if (!std::isfinite(values[k])) return false;
  return true;
}

// GGUF's Q8_0: scale = max|w| / 127, codes rounded half away from zero with the unrounded scale.
std::uint16_t quantize_q8_0(const float* values, std::int8_t* codes) {
  float largest = 0.0f;
  for (int k = 0; k < kGroup; ++k) largest = std::max(largest, std::fabs(values[k]));
  const float scale = largest / 127.0f;
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (int k = 0; k < kGroup; ++k) codes[k] = static_cast<std::int8_t>(std::roundf(std::clamp(values[k] * inverse, -127.0f, 127.0f)));
  return f16_from_float(scale);
}

// GGUF's Q4_0: scale = (the value of largest magnitude, with its sign) / -8, so that value gets code -8.
std::uint16_t quantize_q4_0(const float* values, std::int8_t* codes) {
  float largest = 0.0f, extreme = 0.0f;
  for (int k = 0; k < kGroup; ++k) {
    if (std::fabs(values[k]) > largest) {
      largest = std::fabs(values[k]);
      extreme = values[k];
    }
  }
  const float scale = extreme / -8.0f;
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (int k = 0; k < kGroup; ++k) {
    const float shifted = std::clamp(values[k] * inverse + 8.5f, 0.0f, 15.5f);
    codes[k] = static_cast<std::int8_t>(std::min(15, static_cast<int>(shifted)) - 8);
  }
  return f16_from_float(scale);
}

void quantize(GroupTile& tile, WeightType type) {
  constexpr std::uint16_t kNan = 0x7e00;
  for (int r = 0; r < kLanes; ++r) {
    if (!all_finite(tile.values[r])) {  // no code can say NaN: the scale says it for the whole group
      std::memset(tile.codes[r], 0, kGroup);
      tile.scales[r] = kNan;
    } else {
      tile.scales[r] = type == WeightType::kInt8 ? quantize_q8_0(tile.values[r], tile.codes[r]) : quantize_q4_0(tile.values[r], tile.codes[r]);
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

void store_codes(const GroupTile& tile, WeightType type, HalfBlock target, int group) {
  const bool wide = type == WeightType::kInt8;
  std::byte* base = target.block + static_cast<std::size_t>(group) * (wide ? kInt8GroupBytes : kInt4GroupBytes);
  std::memcpy(base + target.half * kLanes * 2, tile.scales, sizeof tile.scales);
  auto* lines = reinterpret_cast<std::uint8_t*>(base + kScaleBytes + target.half * 64);
  const int step = wide ? 4 : 8;
  for (int k = 0; k < kGroup; k += step, lines += 128) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int low = tile.codes[lane][k + i];
        lines[lane * 4 + i] = wide ? static_cast<std::uint8_t>(low + 128)
                                   : static_cast<std::uint8_t>((low + 8) | ((tile.codes[lane][k + 4 + i] + 8) << 4));
      }
    }
  }
}

void store_values(const GroupTile& tile, WeightType type, HalfBlock target, int group) {
  const int first_row = target.half * kLanes;
  const std::size_t first_col = static_cast<std::size_t>(group) * kGroup;
  for (int k = 0; k < kGroup; ++k) {
    const std::size_t col = first_col + k;
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = tile.values[lane][k];
      if (type == WeightType::kFloat32) {
        reinterpret_cast<float*>(target.block)[col * kBlockRows + first_row + lane] = value;
      } else if (type == WeightType::kFloat16) {
        reinterpret_cast<std::uint16_t*>(target.block)[col * kBlockRows + first_row + lane] = f16_from_float(value);
      } else {
        reinterpret_cast<std::uint16_t*>(target.block)[(col / 2) * 64 + first_row * 2 + lane * 2 + col % 2] = bf16_from_float(value);
      }
    }
  }
}

void load_packed(GroupTile& tile, WeightType type, HalfBlock source, int group) {
  const int first_row = source.half * kLanes;
  const std::size_t first_col = static_cast<std::size_t>(group) * kGroup;
  const bool wide = type == WeightType::kInt8;
  const std::byte* base = source.block + static_cast<std::size_t>(group) * (wide ? kInt8GroupBytes : kInt4GroupBytes);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int k = 0; k < kGroup; ++k) {
      const std::size_t col = first_col + k;
      float& value = tile.values[lane][k];
      if (type == WeightType::kFloat32) {
        value = reinterpret_cast<const float*>(source.block)[col * kBlockRows + first_row + lane];
      } else if (type == WeightType::kFloat16) {
        value = float_from_f16(reinterpret_cast<const std::uint16_t*>(source.block)[col * kBlockRows + first_row + lane]);
      } else if (type == WeightType::kBFloat16) {
        value = float_from_bf16(reinterpret_cast<const std::uint16_t*>(source.block)[(col / 2) * 64 + first_row * 2 + lane * 2 + col % 2]);
      } else {
        const float scale = float_from_f16(reinterpret_cast<const std::uint16_t*>(base)[first_row + lane]);
        const auto* lines = reinterpret_cast<const std::uint8_t*>(base + kScaleBytes + source.half * 64 + lane * 4);
        const int code = wide ? lines[(k / 4) * 128 + k % 4] - 128 : ((lines[(k / 8) * 128 + k % 4] >> (k % 8 < 4 ? 0 : 4)) & 15) - 8;
        value = static_cast<float>(code) * scale;
      }
    }
  }
}

}  // namespace

void pack_half_block(WeightType type, HalfBlock target, const RowsView& source, int first_row) {
  GroupTile tile;
  for (int group = 0; group * kGroup < source.cols; ++group) {
    load_values(tile, source, first_row, group * kGroup);
    if (is_quantized(type)) {
      quantize(tile, type);
      store_codes(tile, type, target, group);
    } else {
      store_values(tile, type, target, group);
    }
  }
}

void pack_half_block(WeightType type, HalfBlock target, const QuantizedRowsView& source, int first_row) {
  GroupTile tile;
  for (int group = 0; group * kGroup < source.cols; ++group) {
    load_codes(tile, source, first_row, group * kGroup);
    store_codes(tile, type, target, group);
  }
}

void unpack_half_block(WeightType type, HalfBlock source, float* rows_out, int rows, int cols, int first_row) {
  GroupTile tile;
  const int present = std::min(kLanes, rows - first_row);
  for (int group = 0; group * kGroup < cols; ++group) {
    load_packed(tile, type, source, group);
    const int width = std::min(kGroup, cols - group * kGroup);
    for (int r = 0; r < present; ++r)
      std::memcpy(rows_out + static_cast<std::size_t>(first_row + r) * cols + group * kGroup, tile.values[r], sizeof(float) * width);
  }
}

}  // namespace moegraft
