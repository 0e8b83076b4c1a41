// Products of bytes in 256 bits (AVX-VNNI): Alder Lake and later, which have no AVX-512. Tiles of one and two tokens gain nothing. Those of
// grids would take 0.69 to 0.89 of the time (512 tokens of a layer) and stay those of avx2.cpp, as their expansion takes long to compile.
#include "simd/avx2_traits.h"
#include "simd/vector_tiles.h"

namespace moegraft {
namespace {

struct AvxVnni : Avx2 {
  static constexpr bool kSignedBytes = false, kAddsShorts = false;
  static I dot_int8(I sum, I weights, I codes) { return _mm256_dpbusd_epi32(sum, weights, codes); }
  static I dot_small(I sum, I weights, I codes) { return _mm256_dpbusd_epi32(sum, weights, codes); }
};

using Tile = void (*)(const TileArgs&);
Tile small_tiles[kFormats];

template <Format Kind>
void tile(const TileArgs& args) {
  if (args.tokens <= 2) return small_tiles[static_cast<int>(Kind)](args);
  tile_many<AvxVnni, Kind>(args);
}

template <int... Index>
void replace(Kernels& kernels, std::integer_sequence<int, Index...>) {
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    if constexpr (has_codes(kKind) && !kIsGrid<CodedOf<kKind>>) {
      small_tiles[static_cast<int>(kKind)] = kernels.tile[static_cast<int>(kKind)];
      kernels.tile[static_cast<int>(kKind)] = tile<kKind>;
    }
  };
  (add(std::integral_constant<int, Index>()), ...);
}

}  // namespace

void use_avx_vnni(Kernels& kernels) { replace(kernels, CodedIndexes()); }

}  // namespace moegraft
