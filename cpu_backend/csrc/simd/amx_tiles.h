// The tile registers of AMX, all of them 16 rows of 64 bytes: a product takes 16 cycles whatever the rows, so smaller shapes gain nothing.
// With MOEGRAFT_EMULATED_AMX they are memory and plain loops, so that the kernels run on machines without AMX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/float_conversion.h"

namespace moegraft {
namespace {

constexpr int kTileRegisters = 8;
constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr std::size_t kTileBytes = std::size_t{kTileRows} * kTileRowBytes;

#if defined(MOEGRAFT_EMULATED_AMX)

struct EmulatedTiles {
  bool configured = false;
  std::uint8_t registers[kTileRegisters][kTileRows][kTileRowBytes];
};
thread_local EmulatedTiles emulated;

// On the hardware, a tile instruction without a configuration is an invalid one.
inline EmulatedTiles& tiles() {
  if (!emulated.configured) std::abort();
  return emulated;
}

inline void configure_tiles() {
  emulated.configured = true;
  std::memset(emulated.registers, 0, sizeof emulated.registers);
}
inline void release_tiles() { emulated.configured = false; }
template <int Register>
inline void zero_tile() {
  std::memset(tiles().registers[Register], 0, kTileBytes);
}
template <int Register>
inline void load_tile(const void* source, std::size_t stride) {
  for (std::size_t row = 0; row < kTileRows; ++row)
    std::memcpy(tiles().registers[Register][row], static_cast<const char*>(source) + row * stride, kTileRowBytes);
}
template <int Register>
inline void load_tile_once(const void* source, std::size_t stride) {
  load_tile<Register>(source, stride);
}
template <int Register>
inline void store_tile_register(void* target, std::size_t stride) {
  for (std::size_t row = 0; row < kTileRows; ++row)
    std::memcpy(static_cast<char*>(target) + row * stride, tiles().registers[Register][row], kTileRowBytes);
}

// Subnormal operands and results count as zero.
inline float flushed(float x) { return x < 0x1p-126f && x > -0x1p-126f ? 0.0f : x; }

// As the instruction: even and odd columns are summed on their own, each product and addition rounded once, and then added to the sum.
template <int Sums, int Activations, int Weights>
inline void multiply_tiles() {
  EmulatedTiles& t = tiles();
  for (int m = 0; m < kTileRows; ++m) {
    for (int n = 0; n < kTileRowBytes / 4; ++n) {
      float part[2] = {0.0f, 0.0f};
      for (int k = 0; k < kTileRowBytes / 2; ++k) {
        std::uint16_t a, b;
        std::memcpy(&a, &t.registers[Activations][m][2 * k], 2);
        std::memcpy(&b, &t.registers[Weights][k / 2][4 * n + 2 * (k % 2)], 2);
        part[k % 2] = flushed(__builtin_fmaf(flushed(float_from_bf16(a)), flushed(float_from_bf16(b)), part[k % 2]));
      }
      float sum;
      std::memcpy(&sum, &t.registers[Sums][m][4 * n], 4);
      sum = flushed(flushed(sum) + flushed(part[0] + part[1]));
      std::memcpy(&t.registers[Sums][m][4 * n], &sum, 4);
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

inline void configure_tiles() {
  TileConfig config;
  for (int i = 0; i < kTileRegisters; ++i) {
    config.row_bytes[i] = kTileRowBytes;
    config.rows[i] = kTileRows;
  }
  // Instead of _tile_loadconfig: GCC 12 declares that it reads 8 bytes, and removes the stores to the others.
  asm volatile("ldtilecfg %0" : : "m"(config));
}
inline void release_tiles() { asm volatile("tilerelease"); }
// The compiler's macros accept only literal numbers of registers, and do not declare that a load reads memory.
template <int Register>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Register));
}
template <int Register>
inline void load_tile(const void* source, std::size_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(Register), "r"(source), "r"(stride) : "memory");
}
// For what will not be needed soon: it leaves the rest of L1 in place.
template <int Register>
inline void load_tile_once(const void* source, std::size_t stride) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(Register), "r"(source), "r"(stride) : "memory");
}
template <int Register>
inline void store_tile_register(void* target, std::size_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(Register), "r"(target), "r"(stride) : "memory");
}
template <int Sums, int Activations, int Weights>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Activations), "i"(Weights));
}

#endif

}  // namespace
}  // namespace moegraft
