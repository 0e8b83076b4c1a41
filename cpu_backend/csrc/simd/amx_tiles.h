// Functions for the tile registers of AMX. With MOEGRAFT_EMULATED_AMX they are plain loops, so that the kernels can be tested on machines
// without AMX.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/float_conversion.h"

namespace moegraft {
namespace {

// Registers 0 and 1 hold sums, 2 activations, 3 and 4 weights.
struct TileShape {
  int tokens;  // rows of the sums and of the activations
  int depth_bytes;  // bytes of a row of activations
  int weight_rows;  // rows of the weights: depth_bytes / 4
};

#if defined(MOEGRAFT_EMULATED_AMX)

struct EmulatedTiles {
  TileShape shape;
  std::uint8_t registers[5][16][64];
};
thread_local EmulatedTiles tiles;

inline void configure(const TileShape& shape) { tiles.shape = shape; }
inline void release() {}
template <int Register>
inline void zero() {
  std::memset(tiles.registers[Register], 0, sizeof tiles.registers[Register]);
}
template <int Register>
inline void load(const void* source, std::size_t stride) {
  const int rows = Register == 2 ? tiles.shape.tokens : tiles.shape.weight_rows;
  const int bytes = Register == 2 ? tiles.shape.depth_bytes : 64;
  for (int row = 0; row < rows; ++row) std::memcpy(tiles.registers[Register][row], static_cast<const char*>(source) + row * stride, bytes);
}
template <int Register>
inline void store(void* target, std::size_t stride) {
  for (int row = 0; row < tiles.shape.tokens; ++row)
    std::memcpy(static_cast<char*>(target) + row * stride, tiles.registers[Register][row], 64);
}
// sums (tokens, 16) int32 += signed bytes times unsigned bytes
template <int Sums, int Weights>
inline void multiply_int8() {
  for (int m = 0; m < tiles.shape.tokens; ++m) {
    for (int n = 0; n < 16; ++n) {
      std::int32_t sum;
      std::memcpy(&sum, &tiles.registers[Sums][m][4 * n], 4);
      for (int k = 0; k < tiles.shape.depth_bytes; ++k)
        sum += static_cast<std::int8_t>(tiles.registers[2][m][k]) * static_cast<int>(tiles.registers[Weights][k / 4][4 * n + k % 4]);
      std::memcpy(&tiles.registers[Sums][m][4 * n], &sum, 4);
    }
  }
}
// sums (tokens, 16) float += pairs of bfloat16
template <int Sums, int Weights>
inline void multiply_bf16() {
  for (int m = 0; m < tiles.shape.tokens; ++m) {
    for (int n = 0; n < 16; ++n) {
      float sum;
      std::memcpy(&sum, &tiles.registers[Sums][m][4 * n], 4);
      for (int k = 0; k < tiles.shape.depth_bytes / 2; ++k) {
        std::uint16_t a, b;
        std::memcpy(&a, &tiles.registers[2][m][2 * k], 2);
        std::memcpy(&b, &tiles.registers[Weights][k / 2][4 * n + 2 * (k % 2)], 2);
        sum += float_from_bf16(a) * float_from_bf16(b);
      }
      std::memcpy(&tiles.registers[Sums][m][4 * n], &sum, 4);
    }
  }
}

#else

// The 64 bytes that the instruction reads.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

inline void configure(const TileShape& shape) {
  TileConfig config;
  for (int sums = 0; sums < 2; ++sums) {
    config.row_bytes[sums] = 64;
    config.rows[sums] = static_cast<std::uint8_t>(shape.tokens);
  }
  config.row_bytes[2] = static_cast<std::uint16_t>(shape.depth_bytes);
  config.rows[2] = static_cast<std::uint8_t>(shape.tokens);
  for (int weights = 3; weights < 5; ++weights) {
    config.row_bytes[weights] = 64;
    config.rows[weights] = static_cast<std::uint8_t>(shape.weight_rows);
  }
  // Instead of _tile_loadconfig: GCC 12 declares that it reads 8 bytes, and removes the stores to the others.
  asm volatile("ldtilecfg %0" : : "m"(config));
}
inline void release() { _tile_release(); }
// The compiler's macros accept only literal register numbers.
template <int Register>
inline void zero() {
  if constexpr (Register == 0) _tile_zero(0);
  else _tile_zero(1);
}
template <int Register>
inline void load(const void* source, std::size_t stride) {
  asm volatile("" ::: "memory");  // completes earlier stores: the compiler's macro does not declare that it reads memory
  if constexpr (Register == 2) _tile_loadd(2, source, stride);
  else if constexpr (Register == 3) _tile_loadd(3, source, stride);
  else _tile_loadd(4, source, stride);
}
template <int Register>
inline void store(void* target, std::size_t stride) {
  if constexpr (Register == 0) _tile_stored(0, target, stride);
  else _tile_stored(1, target, stride);
}
template <int Sums, int Weights>
inline void multiply_int8() {
  if constexpr (Sums == 0) _tile_dpbsud(0, 2, 3);
  else _tile_dpbsud(1, 2, 4);
}
template <int Sums, int Weights>
inline void multiply_bf16() {
  if constexpr (Sums == 0) _tile_dpbf16ps(0, 2, 3);
  else _tile_dpbf16ps(1, 2, 4);
}

#endif

}  // namespace
}  // namespace moegraft
