// AMX, since Sapphire Rapids: the matrix kernel of prompts in tile registers. Everything else runs as with AVX-512 and BF16.
//
// One to three tiles of 16 tokens are multiplied with both halves of a block, and their sums stay in registers through all columns: 1x2,
// 2x2 (four sums, two tiles of activations, two of weights) or 3x2 (six sums, one and one). A group (32 columns) is expanded a few groups
// ahead into a ring while the matrix unit multiplies; vector and tile instructions overlap only where they alternate in program order, so
// steps of the expansion stand between the products. What is expanded ahead carries over from block to block.
//
// With more tokens, columns are taken in panels: several passes of 2x2 multiply the same expanded panel, share the expansion of the next
// one, and keep their sums in memory in between, which changes no bit.
//
// Constants were tuned on Emerald Rapids (family 6, model 207), 2026-11, in a study of this design. On a Xeon of family 6, model 167, with
// 19 to 26 GB/s for 2 cores, 512 tokens of a layer take 0.61 (int4), 0.86 (int8) and 0.43 (bfloat16) of the time of the fastest other
// instruction set; bfloat16 is then as fast as that memory (benchmarks/results/cpu_experts.csv, 2026-11).
#include "simd/amx_tiles.h"
#include "simd/expansion.h"

namespace moegraft {
namespace {

constexpr int kPassTiles = 2;  // of one of several passes
constexpr int kAheadGroups = 3;  // in one pass; not 2: 4 KiB apart, a load waits for an unrelated store
constexpr int kRingGroups = 8;  // short, so that it stays in L1
constexpr int kExpandedPanelGroups = 8;  // what is multiplied and what is expanded meanwhile stay in L1
constexpr int kPlainPanelGroups = 16;  // where nothing is expanded
// Blocks of bfloat16 are read too fast to be prefetched as a whole while few tokens are multiplied: prefetches occupy the buffers that tile
// loads need, and those that find the queue full are dropped. So the first pass over a panel prefetches, a little ahead of itself and
// between the products (128 tokens from memory: 0.7 of the time), and whole blocks are prefetched from so many tiles on.
constexpr std::size_t kPlainAhead = 4096;
constexpr int kPlainWholeTiles = 12;
constexpr std::size_t kOutRow = kBlockRows * sizeof(float);

static_assert(kTileRows == kLanes && kRingGroups * kExpandedGroupBytes <= sizeof ExpandedWeights::memory &&
              2 * kExpandedPanelGroups * kExpandedGroupBytes <= sizeof ExpandedWeights::memory);

// Registers: sums 2 * tile + half; the others hold activations and weights.
template <int Tiles>
MOEGRAFT_INLINE void start_sums(const float* out, bool adds) {
  if (!adds) {
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (Tiles > 1) zero_tile<2>(), zero_tile<3>();
    if constexpr (Tiles > 2) zero_tile<4>(), zero_tile<5>();
    return;
  }
  constexpr int kTile = kTileRows * kBlockRows;
  load_tile<0>(out, kOutRow);
  load_tile<1>(out + kLanes, kOutRow);
  if constexpr (Tiles > 1) load_tile<2>(out + kTile, kOutRow), load_tile<3>(out + kTile + kLanes, kOutRow);
  if constexpr (Tiles > 2) load_tile<4>(out + 2 * kTile, kOutRow), load_tile<5>(out + 2 * kTile + kLanes, kOutRow);
}
template <int Tiles>
MOEGRAFT_INLINE void store_sums(float* out) {
  constexpr int kTile = kTileRows * kBlockRows;
  store_tile_register<0>(out, kOutRow);
  store_tile_register<1>(out + kLanes, kOutRow);
  if constexpr (Tiles > 1) store_tile_register<2>(out + kTile, kOutRow), store_tile_register<3>(out + kTile + kLanes, kOutRow);
  if constexpr (Tiles > 2) store_tile_register<4>(out + 2 * kTile, kOutRow), store_tile_register<5>(out + 2 * kTile + kLanes, kOutRow);
}

template <class Form, int Step, int End>
MOEGRAFT_INLINE void expand_steps(const Expander<Form>& expander, std::byte* target) {
  if constexpr (Step < End) {
    expander.template step<Step>(target);
    expand_steps<Form, Step + 1, End>(expander, target);
  }
}

// One group: products of 1 to 3 tiles of tokens with both halves, and `Count` steps, from `First` on, of the expansion of another group,
// spread over the places before the products.
template <class Form, int Tiles, int First, int Count>
MOEGRAFT_INLINE void multiply_group(const std::byte* a, std::size_t a_tile, const std::byte* b, const Expander<Form>& expander,
                                    std::byte* target) {
  constexpr int kPlaces = 2 * Tiles;
#define MOEGRAFT_EXPAND(place) expand_steps<Form, First + Count*(place) / kPlaces, First + Count*((place) + 1) / kPlaces>(expander, target)
  if constexpr (Tiles == 1) {
    load_tile<6>(b, kLineStride);
    load_tile_once<4>(a, kTileRowBytes);
    MOEGRAFT_EXPAND(0);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(b + 64, kLineStride);
    MOEGRAFT_EXPAND(1);
    multiply_tiles<1, 4, 7>();
  } else if constexpr (Tiles == 2) {
    load_tile<6>(b, kLineStride);
    MOEGRAFT_EXPAND(0);
    load_tile_once<4>(a, kTileRowBytes);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(b + 64, kLineStride);
    MOEGRAFT_EXPAND(1);
    multiply_tiles<1, 4, 7>();
    load_tile_once<5>(a + a_tile, kTileRowBytes);
    MOEGRAFT_EXPAND(2);
    multiply_tiles<2, 5, 6>();
    MOEGRAFT_EXPAND(3);
    multiply_tiles<3, 5, 7>();
  } else {  // one register for activations, which are loaded to and fro
    load_tile<7>(b, kLineStride);
    load_tile<6>(a, kTileRowBytes);
    MOEGRAFT_EXPAND(0);
    multiply_tiles<0, 6, 7>();
    load_tile<6>(a + a_tile, kTileRowBytes);
    MOEGRAFT_EXPAND(1);
    multiply_tiles<2, 6, 7>();
    load_tile_once<6>(a + 2 * a_tile, kTileRowBytes);
    MOEGRAFT_EXPAND(2);
    multiply_tiles<4, 6, 7>();
    load_tile<7>(b + 64, kLineStride);
    MOEGRAFT_EXPAND(3);
    multiply_tiles<5, 6, 7>();
    load_tile_once<6>(a + a_tile, kTileRowBytes);
    MOEGRAFT_EXPAND(4);
    multiply_tiles<3, 6, 7>();
    load_tile_once<6>(a, kTileRowBytes);
    MOEGRAFT_EXPAND(5);
    multiply_tiles<1, 6, 7>();
  }
#undef MOEGRAFT_EXPAND
}

// One pass over blocks of bfloat16, which prefetches them.
template <int Tiles>
void multiply_near(const std::byte* a, std::size_t a_tile, const std::byte* b, int groups) {
  for (; groups > 0; --groups, a += kTileBytes, b += kExpandedGroupBytes)
    multiply_group<NearForm, Tiles, 0, kExpansionSteps>(a, a_tile, b, {b + kPlainAhead}, nullptr);
}

template <class Form, int Tiles>
void one_pass(const MatrixArgs& args, const ExpandedFormat& format) {
  const auto* a = reinterpret_cast<const std::byte*>(args.records);
  const std::size_t a_tile = args.tile_words * 4;
  start_sums<Tiles>(args.out, args.adds);
  if constexpr (std::is_same_v<Form, PlainForm>) {
    multiply_near<Tiles>(a, a_tile, args.block, args.groups);
  } else {
    SpreadPrefetch prefetch(args.ahead, args.ahead_lines, args.groups);
    ScaleReader reader(format, args.groups);
    Expander<Form> expander(format);
    ExpandedWeights& ring = *args.expanded;
    if (ring.block != args.block || ring.passes != 1) {
      ring.first = 0;
      for (int group = 0; group < kAheadGroups && group < args.groups; ++group)
        expand_group<Form>(format, args.block, group, ring.memory + group * kExpandedGroupBytes);
    }
    const auto slot = [&ring](int group) { return ring.memory + (ring.first + group) % kRingGroups * kExpandedGroupBytes; };
    // First the groups of this block that are not expanded yet, then the first ones of the next block.
    const std::byte* const next = args.groups >= kAheadGroups ? args.next : nullptr;
    const std::byte* source = args.block;
    int group = 0, ahead = kAheadGroups;
    for (int part = 0; part < 2 && source != nullptr; ++part) {
      for (const int end = part == 0 ? args.groups - kAheadGroups : args.groups; group < end; ++group, a += kTileBytes) {
        prefetch.step();
        expander.begin(reader, source, group + ahead);
        multiply_group<Form, Tiles, 0, kExpansionSteps>(a, a_tile, slot(group), expander, slot(group + kAheadGroups));
      }
      source = next;
      ahead = kAheadGroups - args.groups;
    }
    for (; group < args.groups; ++group, a += kTileBytes) {
      prefetch.step();
      multiply_group<Form, Tiles, 0, 0>(a, a_tile, slot(group), expander, nullptr);
    }
    ring.first = (ring.first + args.groups) % kRingGroups;
    ring.block = next;
    ring.passes = 1;
  }
  store_sums<Tiles>(args.out);
}

// Groups that are expanded while others are multiplied.
template <class Form>
struct Ahead {
  Expander<Form> expander;
  const std::byte* source = nullptr;
  int group = 0;
  int end = 0;
  std::byte* target = nullptr;
};

// One pass over the columns of a panel.
template <int Tiles>
void multiply_expanded(const std::byte* a, std::size_t a_tile, const std::byte* b, int groups, SpreadPrefetch& prefetch) {
  for (const Expander<PlainForm> none(kNoFormat); groups > 0; --groups, a += kTileBytes, b += kExpandedGroupBytes) {
    prefetch.step();
    multiply_group<PlainForm, Tiles, 0, 0>(a, a_tile, b, none, nullptr);
  }
}

// The same for two tiles, with `Share` steps of an expansion in each group.
template <class Form, int Share>
MOEGRAFT_INLINE void multiply_panel(const std::byte* a, std::size_t a_tile, const std::byte* b, int groups, Ahead<Form>& ahead,
                                    ScaleReader& reader, SpreadPrefetch& prefetch) {
  constexpr int kGroupsPerExpansion = kExpansionSteps / Share;
  int group = 0;
  for (; group + kGroupsPerExpansion <= groups && ahead.group < ahead.end; group += kGroupsPerExpansion) {
    ahead.expander.begin(reader, ahead.source, ahead.group);
    prefetch.step();
    multiply_group<Form, kPassTiles, 0, Share>(a, a_tile, b, ahead.expander, ahead.target);
    prefetch.step();
    multiply_group<Form, kPassTiles, Share, Share>(a + kTileBytes, a_tile, b + kExpandedGroupBytes, ahead.expander, ahead.target);
    if constexpr (kGroupsPerExpansion == 4) {
      prefetch.step();
      multiply_group<Form, kPassTiles, 2 * Share, Share>(a + 2 * kTileBytes, a_tile, b + 2 * kExpandedGroupBytes, ahead.expander,
                                                         ahead.target);
      prefetch.step();
      multiply_group<Form, kPassTiles, 3 * Share, Share>(a + 3 * kTileBytes, a_tile, b + 3 * kExpandedGroupBytes, ahead.expander,
                                                         ahead.target);
    }
    a += kGroupsPerExpansion * kTileBytes;
    b += kGroupsPerExpansion * kExpandedGroupBytes;
    ++ahead.group;
    ahead.target += kExpandedGroupBytes;
  }
  multiply_expanded<kPassTiles>(a, a_tile, b, groups - group, prefetch);
}

template <class Form>
void several_passes(const MatrixArgs& args, const ExpandedFormat& format, int tiles) {
  constexpr bool kExpands = !std::is_same_v<Form, PlainForm>;
  constexpr int kPanel = kExpands ? kExpandedPanelGroups : kPlainPanelGroups;
  const std::size_t a_tile = args.tile_words * 4;
  const int passes = (tiles + kPassTiles - 1) / kPassTiles;
  const bool near = !kExpands && tiles < kPlainWholeTiles;
  SpreadPrefetch prefetch(args.ahead, near ? 0 : args.ahead_lines, passes * args.groups);
  Ahead<Form> ahead{Expander<Form>(format)};
  ScaleReader reader(format, args.groups);
  ExpandedWeights& panels = *args.expanded;
  const auto panel = [&panels](int index) {
    return panels.memory + static_cast<std::size_t>(index % 2) * kExpandedPanelGroups * kExpandedGroupBytes;
  };
  if (kExpands && (panels.block != args.block || panels.passes != passes)) {
    panels.first = 0;
    for (int group = 0; group < kPanel && group < args.groups; ++group)
      expand_group<Form>(format, args.block, group, panel(0) + group * kExpandedGroupBytes);
  }
  int index = panels.first;
  for (int first = 0; first < args.groups; first += kPanel, ++index) {
    const int end = first + kPanel < args.groups ? first + kPanel : args.groups;
    if (kExpands) {  // the next panel, which may be the first one of the next block
      const bool ends = end == args.groups;
      ahead.source = ends ? args.next : args.block;
      ahead.group = ends ? 0 : end;
      ahead.end = ahead.group + kPanel < args.groups ? ahead.group + kPanel : args.groups;
      if (ahead.source == nullptr) ahead.end = ahead.group;
      ahead.target = panel(index + 1);
    }
    const std::byte* b = kExpands ? panel(index) : args.block + static_cast<std::size_t>(first) * kExpandedGroupBytes;
    const auto* a = reinterpret_cast<const std::byte*>(args.records) + static_cast<std::size_t>(first) * kTileBytes;
    float* out = args.out;
    const bool adds = args.adds || first > 0;
    for (int tile = 0; tile < tiles; tile += kPassTiles, a += kPassTiles * a_tile, out += kPassTiles * kTileRows * kBlockRows) {
      if (tile + 1 == tiles) {  // the passes before it have expanded the next panel
        start_sums<1>(out, adds);
        multiply_expanded<1>(a, a_tile, b, end - first, prefetch);
        store_sums<1>(out);
        break;
      }
      start_sums<kPassTiles>(out, adds);
      if constexpr (!kExpands) {
        if (near && tile == 0) multiply_near<kPassTiles>(a, a_tile, b, end - first);
        else multiply_expanded<kPassTiles>(a, a_tile, b, end - first, prefetch);
      } else if (tiles < 4 * kPassTiles) multiply_panel<Form, kExpansionSteps / 2>(a, a_tile, b, end - first, ahead, reader, prefetch);
      else multiply_panel<Form, kExpansionSteps / 4>(a, a_tile, b, end - first, ahead, reader, prefetch);
      store_sums<kPassTiles>(out);
    }
    if constexpr (kExpands)
      for (; ahead.group < ahead.end; ++ahead.group, ahead.target += kExpandedGroupBytes)
        expand_group<Form>(format, ahead.source, ahead.group, ahead.target);
  }
  if (!kExpands) return;
  panels.first = index % 2;
  panels.block = args.next;
  panels.passes = passes;
}

template <class Form>
void multiply_blocks(const MatrixArgs& args, const ExpandedFormat& format) {
  const int tiles = (args.tokens + kTileRows - 1) / kTileRows;
  if (tiles == 1) one_pass<Form, 1>(args, format);
  else if (tiles == 2) one_pass<Form, 2>(args, format);
  else if (tiles == 3) one_pass<Form, 3>(args, format);
  else several_passes<Form>(args, format, tiles);
}

template <class Coded>
void multiply(const MatrixArgs& args) {
  multiply_blocks<ExpansionForm<Coded>>(args, kExpandedFormat<Coded>);
}
void multiply_plain(const MatrixArgs& args) { multiply_blocks<PlainForm>(args, kNoFormat); }

// The tokens from which on this is faster than the tiles: where the two are equally fast with weights from memory.
template <int... I>
void add_coded(MatrixKernels& matrix, std::integer_sequence<int, I...>) {
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    if constexpr (!kIsGrid<CodedOf<kKind>>) {
      matrix.least_tokens[static_cast<int>(kKind)] = Derived<CodedOf<kKind>>::kGroups == 1 ? 12 : 10;
      matrix.multiply[static_cast<int>(kKind)] = multiply<CodedOf<kKind>>;
    }
  };
  (add(std::integral_constant<int, I>()), ...);
}

Kernels make_amx() {
  Kernels kernels = avx512_bf16_kernels();
  kernels.isa = "amx";
  MatrixKernels& matrix = kernels.matrix;
  matrix = {};
  matrix.records = Format::kBFloat16Dot;
  matrix.tile_tokens = kTileRows;
  matrix.segment_bytes = std::size_t{1} << 20;  // of the 2 MiB L2: 256 tokens at 2048 columns
  for (int& least : matrix.least_tokens) least = kNeverMatrix;
  matrix.least_tokens[static_cast<int>(Format::kBFloat16Dot)] = 2;
  matrix.multiply[static_cast<int>(Format::kBFloat16Dot)] = multiply_plain;
  add_coded(matrix, CodedIndexes());
  matrix.begin = configure_tiles;
  matrix.end = release_tiles;
  return kernels;
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = make_amx();
  return kernels;
}

}  // namespace moegraft
