// The scalar kernels of the sparse layout's rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/float_conversion.h"
#include "simd/kernels.h"

namespace moegraft {
namespace {

// A weight of a chunk, or an integer code with its offset: line k / step of the chunk, as in a block of 16 lanes.
template <Format F>
float sparse_weight(const std::byte* lines, int k, int lane) {
  if constexpr (F == Format::kFloat32) return reinterpret_cast<const float*>(lines)[k * kLanes + lane];
  const auto* halves = reinterpret_cast<const std::uint16_t*>(lines);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(lines);
  if constexpr (F == Format::kFloat16) return float_from_f16(halves[k * kLanes + lane]);
  if constexpr (F == Format::kBFloat16 || F == Format::kBFloat16Dot) return float_from_bf16(halves[(k / 2) * 32 + lane * 2 + k % 2]);
  if constexpr (F == Format::kInt8) return static_cast<float>(bytes[(k / 4) * 64 + lane * 4 + k % 4]);
  return static_cast<float>((bytes[(k / 8) * 64 + lane * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4)) & 15);
}

constexpr WeightType weights_of(Format format) {
  switch (format) {
    case Format::kFloat32: return WeightType::kFloat32;
    case Format::kFloat16: return WeightType::kFloat16;
    case Format::kInt8: return WeightType::kInt8;
    case Format::kInt4: return WeightType::kInt4;
    default: return WeightType::kBFloat16;
  }
}

constexpr bool has_codes(Format format) { return format == Format::kInt8 || format == Format::kInt4; }

template <Format F>
float dot_row(const std::byte* row, std::size_t line_offset, const std::uint32_t* lanes, int chunks) {
  constexpr int kWords = words_per_group(F);
  float sum = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk, lanes += kWords * kLanes) {
    const std::byte* lines = row + line_offset + chunk * lines_per_chunk(weights_of(F)) * line_bytes(weights_of(F));
    for (int lane = 0; lane < kLanes; ++lane) {
      if constexpr (has_codes(F)) {
        int dot = static_cast<std::int32_t>(lanes[kLanes + lane]);
        for (int k = 0; k < kGroup; ++k) {
          const auto code = static_cast<std::int8_t>(lanes[(2 + k / 4) * kLanes + lane] >> (8 * (k % 4)));
          dot += static_cast<int>(sparse_weight<F>(lines, k, lane)) * code;
        }
        const float scale = float_from_f16(reinterpret_cast<const std::uint16_t*>(row)[chunk * kLanes + lane]);
        sum += static_cast<float>(dot) * (scale * float_from_bits(lanes[lane]));
      } else {
        for (int k = 0; k < kGroup; ++k) {
          float value;
          if constexpr (F == Format::kBFloat16Dot) {
            const std::uint32_t pair = lanes[(k / 2) * kLanes + lane];
            value = float_from_bf16(static_cast<std::uint16_t>(k % 2 ? pair >> 16 : pair & 0xffffu));
          } else {
            value = float_from_bits(lanes[k * kLanes + lane]);
          }
          sum += sparse_weight<F>(lines, k, lane) * value;
        }
      }
    }
  }
  return sum;
}

template <Format F>
void dot_rows(const RowDotsArgs& args) {
  for (int row = 0; row < args.row_count; ++row)
    for (int token = 0; token < args.tokens; ++token)
      args.out[token][args.places[row]] = dot_row<F>(args.rows[row], args.line_offset, args.lanes[token], args.chunks);
}

// Of down: dequantised.
template <Format F>
float down_weight(const std::byte* scales, const std::byte* lines, int k, int lane) {
  const float weight = sparse_weight<F>(lines, k, lane);
  if constexpr (!has_codes(F)) return weight;
  return (weight - (F == Format::kInt8 ? 128.0f : 8.0f)) * float_from_f16(reinterpret_cast<const std::uint16_t*>(scales)[lane]);
}

template <Format F>
void add_rows(const RowAddArgs& args) {
  for (int k = 0; k < kGroup; ++k)
    for (int lane = 0; lane < kLanes; ++lane)
      for (int row = 0; row < kMostRows; ++row)
        args.sums[k * kLanes + lane] += args.coefficients[row] * down_weight<F>(args.scales[row], args.lines[row], k, lane);
}

template <Format F>
void widen_rows(const RowWidenArgs& args) {
  for (int row = 0; row < 2; ++row) {
    for (int k = 0; k < kGroup; ++k) {
      std::uint32_t* tile = args.items + static_cast<std::size_t>(k / kTileColumns) * args.tile_stride;
      std::uint32_t* target = tile + row * kTileWords + k % kTileColumns * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) target[lane] = bits_from_float(down_weight<F>(args.scales[row], args.lines[row], k, lane));
    }
  }
}

void add_item(const std::uint32_t* item, std::uint32_t coefficient, float* sums) {
  for (int word = 0; word < kTileWords; ++word) sums[word] += float_from_bits(item[word]) * float_from_bits(coefficient);
}

void add_items(const ItemsAddArgs& args) {
  for (int token = 0; token < args.tokens; ++token)
    for (int i = 0; i < args.item_count; ++i) add_item(args.items + i * kTileWords, args.coefficients[token][i], args.sums[token] + args.sums_offset);
}

void add_picked(const ItemsPickArgs& args) {
  for (int tile = 0; tile < kTiles; ++tile)
    for (int i = 0; i < args.picked_count; ++i)
      add_item(args.items + static_cast<std::size_t>(tile) * args.tile_stride + args.picked[i] * kTileWords, args.coefficients[args.picked[i]],
               args.sums + tile * kTileWords);
}

RowKernels scalar_rows() {
  using K = Format;
  return {
      kMostRows,
      {},
      {dot_rows<K::kFloat32>, dot_rows<K::kFloat16>, dot_rows<K::kBFloat16>, dot_rows<K::kBFloat16Dot>, dot_rows<K::kInt8>, dot_rows<K::kInt4>,
       nullptr, nullptr},
      {add_rows<K::kFloat32>, add_rows<K::kFloat16>, add_rows<K::kBFloat16>, add_rows<K::kBFloat16Dot>, add_rows<K::kInt8>, add_rows<K::kInt4>,
       nullptr, nullptr},
      {widen_rows<K::kFloat32>, widen_rows<K::kFloat16>, widen_rows<K::kBFloat16>, widen_rows<K::kBFloat16Dot>, widen_rows<K::kInt8>,
       widen_rows<K::kInt4>, nullptr, nullptr},
      {add_items, add_items, add_items, add_items, add_items, add_items, nullptr, nullptr},
      {add_picked, add_picked, add_picked, add_picked, add_picked, add_picked, nullptr, nullptr},
      reached_bits,
      finish_neurons,
  };
}

}  // namespace
}  // namespace moegraft
