// The function table that every instruction set fills; jobs use it without knowing the width of a vector. simd/ holds the tables and their
// selection.
//
// Tables are immutable and filled once; a Runtime copies those that isa.h selects for its CPU. Kernels run on the calling worker, own no
// memory and share no state. scalar.cpp is built everywhere and is the oracle of the others. avx2.cpp to amx.cpp and neon*.cpp instantiate
// the templates of vector_*.h over a traits struct; each is compiled with the flags of its instruction set and called only on a CPU that
// supports it.
//
// Activations are stored as records of 32-bit words, a group of 32 columns at a time; the records of the n tokens of a tile are interleaved
// group by group (group g of token t begins at (g * n + t) * words), so that a kernel reads one stream at constant offsets.
//   float formats     and FP8: 32 words per group, one float each
//   kBFloat16Dot      16 words per group, two bfloat16 each
//   other coded ones  the scale (float); for each part of a group, where codes have an offset, the offset times the negated sum of the
//                     activations' codes (int32), or, where they have a minimum, the scale times that sum (float, the factor of the
//                     weights' minimum); then 32 int8 codes
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "experts/block_layout.h"
#include "formats/format_list.h"

namespace moegraft {

struct TileArgs {
  const std::byte* block;  // one block of 32 rows
  const std::uint32_t* records;  // `tokens` records, interleaved
  int groups;  // columns / 32
  int tokens;  // 1 to Kernels::max_tokens
  float* out;  // (tokens, 32)
  const std::byte* ahead;  // the bytes to read next, of which each group prefetches `ahead_lines` lines
  int ahead_lines;
  std::size_t ahead_stride;  // bytes from one group's burst to the next one's
};

// A worker's memory for expanded weights, and what is in it already: valid from one product to the next while weights do not change.
struct ExpandedWeights {
  alignas(64) std::byte memory[std::size_t{32} << 10];
  const std::byte* block = nullptr;  // whose first groups are expanded
  int passes = 0;  // of the product that they were expanded for
  int first = 0;  // where they begin, in the kernel's own units
};

// A block times all tokens of a segment.
struct MatrixArgs {
  const std::byte* block;  // one block of 32 rows, or a part of it that begins with a multiple of 256 columns
  const std::byte* next;  // the block of the next product with as many groups and tokens, or null
  const std::uint32_t* records;  // tiles, as described at MatrixKernels
  std::size_t tile_words;  // from a tile to the next
  int groups;  // columns / 32
  int tokens;
  bool adds;  // to `out`, instead of replacing what it holds
  float* out;  // (tiles * tile_tokens, 32)
  const std::byte* ahead;  // the bytes to read next, of which `ahead_lines` lines are prefetched meanwhile
  int ahead_lines;
  ExpandedWeights* expanded;
};

struct GateArgs {
  const GateSpec* spec;
  const float* rows;  // (tokens, 32): 16 gate rows then 16 up rows; 32 up rows when ungated
  const float* gate_bias;  // 16, or null
  const float* up_bias;  // 16 (32 when ungated), or null
  int tokens;
  bool gated;
  float* out;  // (tokens, 32): 16 values are written at `out` when gated, 32 when not
};

// A root-mean-square norm in the forms that models use: x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight).
struct NormForm {
  float epsilon;
  float weight_offset;  // 1 where weights are stored around 0
  bool rounds_first;  // rounds the quotient to the row's type before the product with the weight
};

struct NormRowArgs {
  const std::byte* x;  // (cols)
  const std::byte* weight;  // (cols), or null
  std::byte* out;  // (cols)
  ActivationType type;  // of x, weight and out
  int cols;
  NormForm form;
};

// The kernels of the sparse layout, by format. Weights are finite, so that a row may be multiplied with a coefficient of zero.
//
// Where several tokens share rows of down, two rows at a time are converted to items of 32-bit words, which every token then adds:
//   floats   an item is one row, and a word is one weight
//   pairs    an item is two rows, and a word is a bfloat16 weight of each; a coefficient is two bfloat16 values too (in_pairs)
// A tile of items holds 4 columns of each of 16 groups: (items, 4, 16) words.

constexpr int kMaxRows = 4;  // rows in one call of dot_rows or add_rows: scattered rows are read faster together (EPYC Zen 5)
constexpr int kTileColumns = 4;  // columns of each group in a tile of items
constexpr int kTileWords = kTileColumns * 16;
constexpr int kTiles = 8;  // tiles of a chunk

// Rows times tokens. The tokens' records are in lanes: word w of group 16 * chunk + lane is at (chunk * words + w) * 16 + lane.
struct RowDotsArgs {
  const std::byte* rows[kMaxRows];  // each begins with its scales
  int places[kMaxRows];  // index of each row's products in a token's `out`
  int row_count;
  int tokens;
  const std::uint32_t* const* lanes;  // one per token
  float* const* out;  // one per token
  std::size_t line_offset;  // from a row's start to its lines
  int chunks;
  const std::byte* const* ahead;  // (row_count) next rows, prefetched line by line meanwhile; or null
};

// sums += coefficients * rows, for one chunk. Column k of a line's groups goes to sums[k * 16 + lane].
struct RowAddArgs {
  const std::byte* scales[kMaxRows];
  const std::byte* lines[kMaxRows];
  float coefficients[kMaxRows];
  float* sums;
  const std::byte* ahead[kMaxRows];  // the chunk's lines of the next rows, prefetched meanwhile; or null
};

// One chunk of two rows, which become one item (pairs) or two (floats).
struct RowWidenArgs {
  const std::byte* scales[2];
  const std::byte* lines[2];
  std::uint32_t* items;  // in the first tile
  std::size_t tile_stride;  // words
};

// sums += coefficients * items, for some tokens and one tile; the sums are stored as in RowAddArgs.
struct ItemsAddArgs {
  const std::uint32_t* items;
  int item_count;
  int tokens;
  const std::uint32_t* const* coefficients;  // one array (items) per token
  float* const* sums;  // one array per token, with the tile's (4, 16) at sums_offset
  std::size_t sums_offset;
};

// sums += coefficients * items, for one token, selected items and all tiles.
struct ItemsPickArgs {
  const std::uint32_t* items;
  std::size_t tile_stride;
  const int* picked;  // the selected items, ascending
  int picked_count;
  const std::uint32_t* coefficients;  // (items)
  float* sums;  // (32, 16)
};

// Rows of up of 32 consecutive neurons, as a block of the dense layout.
struct UpBlockArgs {
  const std::byte* rows;  // the first one's scales
  std::size_t row_bytes;
  std::size_t line_offset;  // from a row's start to its lines
  int groups;  // columns / 32
  std::byte* block;
};

// Rows of down as blocks of the dense layout, whose rows are columns 2 * b and 2 * b + 1 of each of a chunk's 16 groups, for some b. Blocks
// of int8 and int4 are int8 blocks: the 32 neurons of a group, which have scales of their own, get one of each column, as in the dense
// layout, and their codes are rounded again. Those of int4 are then kInt4Steps times as large as the weights.
struct DownBlocksArgs {
  const std::byte* rows;  // of the first neuron
  std::size_t row_bytes;
  std::size_t scales;  // from a row's start to the chunk's scales
  std::size_t lines;  // and to the lines of the first block
  int groups;  // neurons / 32
  std::byte* blocks;  // down_blocks_at_once(format) of them
  std::size_t block_bytes;
};
constexpr int kInt4Steps = 16;  // between two codes of int4
constexpr Format format_of_down_blocks(Format format) { return is_coded(format) ? Format::kInt8 : format; }
// Of 768 neurons 200 KiB: a part of a 1 MiB L2 that leaves room for what is multiplied with them.
constexpr int down_blocks_at_once(Format format) { return is_coded(format) ? 8 : format == Format::kFloat32 ? 2 : 4; }

struct NeuronsArgs {
  const GateSpec* spec;
  float threshold;
  float weight;  // the expert's weight for the token
  const float* up;  // 32 values, ignored for inactive neurons; null where ungated
  const float* up_bias;  // 32, or null
  float* neurons;  // 32: act(gate)
};

constexpr int kDenseTokens = 8;
constexpr float kNeverDense = 2.0f;  // as the share

struct SparseKernels {
  int dot_rows_at_once;
  bool in_pairs[kFormats];
  // All are null for formats without a sparse layout. Products and sums of a token do not depend on the other tokens of the call.
  void (*dot_rows[kFormats])(const RowDotsArgs& args);
  void (*add_rows[kFormats])(const RowAddArgs& args);
  void (*widen_rows[kFormats])(const RowWidenArgs& args);
  void (*add_items[kFormats])(const ItemsAddArgs& args);
  void (*add_picked[kFormats])(const ItemsPickArgs& args);
  // Of segments in which few products can be left out: from kDenseTokens tokens on and above this share of needed products, all of them are
  // computed by the dense layout's kernels. The functions are null where this is never faster.
  float dense_share[kFormats];
  void (*up_block[kFormats])(const UpBlockArgs& args);
  void (*down_blocks[kFormats])(const DownBlocksArgs& args);
  // Bit i of the result: whether |acted[i]| of 32 values reaches the threshold. A NaN does, so that it reaches the output.
  std::uint32_t (*reached)(const float* acted, float threshold);
  // neurons = weight * neurons * (clamp(up + bias) + offset), or weight * neurons when ungated; zero where the threshold is not reached.
  void (*finish)(const NeuronsArgs& args);
};

// Kernels are compiled for 1, 2, 4 and further even numbers of rows or tokens. Where there is one less, the last is computed twice.
constexpr int fewer(int rows) { return rows > 2 ? rows - 2 : 1; }
constexpr int kTileStep = 2;  // hence, tokens of a tile are even where they can be

// Plain loops, compiled in the file of every instruction set.
namespace {

inline std::uint32_t reached_bits(const float* acted, float threshold) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<std::uint32_t>(!(__builtin_fabsf(acted[i]) < threshold)) << i;
  return bits;
}

inline void finish_neurons(const NeuronsArgs& args) {
  static constexpr float kNone[32] = {};
  const float limit = static_cast<float>(args.spec->up_limit), offset = static_cast<float>(args.spec->up_offset);
  const float* bias = args.up_bias ? args.up_bias : kNone;
  for (int i = 0; i < 32; ++i) {
    float factor = args.weight;
    if (args.up) {
      const float up = args.up[i] + bias[i];
      factor *= (up > limit ? limit : up < -limit ? -limit : up) + offset;
    }
    const float product = args.neurons[i] * factor;
    args.neurons[i] = __builtin_fabsf(args.neurons[i]) < args.threshold ? 0.0f : product;
  }
}

}  // namespace

constexpr int kAttentionRows = 8;  // maximum of `rows` in one call of the functions below

// What attention reads keys and values as: those of ActivationType, or codes of 8 bits, of which each row has a scale of its own.
enum class CacheType : int { kFloat32, kFloat16, kBFloat16, kInt8 };
constexpr int kCacheTypes = 4;
constexpr float kMostCode = 127.0f;

// What the codes of a row are multiplied with, NaN where a value is not finite, and their sum.
struct CodedRow {
  float scale;
  int sum;
};

constexpr int kFewCodedRows = 2;

// Queries as codes, and what is left of each row as codes again: together they have 15 bits. Behind both are zeros up to a multiple of 64.
struct CodedQueries {
  // Of up to kFewCodedRows rows: (rows, 2, columns). Of more: words of four columns, (columns / 4, kAttentionRows, 2).
  const std::byte* codes;
  std::ptrdiff_t part_bytes;  // from the codes of a row to those of its rest, and from these to the next row, where rows are few
  const CodedRow* rows;  // (rows, 2)
};

// scores[r][j] = query[r] . key j, for up to kAttentionRows rows and `count` keys in the cache's own layout.
struct ScoreArgs {
  const float* query;  // (rows, query_stride)
  const std::uint16_t* halves;  // query in bfloat16, (rows, query_stride); read only where keys are bfloat16
  int query_stride;
  int rows;
  const std::byte* keys;
  const std::byte* ahead;  // the key that is prefetched with the first one, 16 further on where there is one; the next ones follow
  std::ptrdiff_t key_bytes;  // from a key to the next
  int count;
  int dim;
  float* scores;  // (rows, score_stride)
  int score_stride;
  const std::byte* values = nullptr;  // of these keys; if given, score_pairs prefetches `dim` columns of them instead of keys
  std::ptrdiff_t value_bytes = 0;
  const float* scales = nullptr;  // (count), of keys that are codes
  CodedQueries codes{};  // the queries, for score_codes
};

// sums[r] += shares[r][j] * value j.
struct MixArgs {
  const float* shares;  // (rows, share_stride)
  int share_stride;
  int rows;
  const std::byte* values;
  std::ptrdiff_t value_bytes;
  int count;
  int dim;
  float* sums;  // (rows, sum_stride)
  int sum_stride;
  const std::byte* keys = nullptr;  // the next `count` keys; if given, mix_pairs prefetches `dim` columns of them
  std::ptrdiff_t key_bytes = 0;
  const float* scales = nullptr;  // (count), of values that are codes
};

// A step of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over a row whose earlier scores had `largest` and `sum`.
struct SoftmaxArgs {
  float* raw;  // the scores in groups of 32, which it may change; hidden ones are -infinity
  std::ptrdiff_t group_stride;  // from a group to the next
  float* shares;  // out: e^(scaled and capped score - largest), without gaps; may be `raw` where this has none
  int count;  // a multiple of 32
  float scale;  // above 0
  float softcap;  // 0 for none
  float largest;  // in and out
  float sum;  // in and out

  float* at(int index) const { return raw + index / kGroup * group_stride + index % kGroup; }
};

// The step of a row without a score above -infinity: a NaN makes the sums NaN, otherwise they do not change. `static` for the reason given
// in float_conversion.h.
static inline float no_visible_key(SoftmaxArgs& args) {
  for (int i = 0; i < args.count; ++i) {
    const float score = *args.at(i);
    if (score != score) args.largest = args.sum = score;
    args.shares[i] = 0.0f;
  }
  return 1.0f;
}

struct AttentionKernels {
  void (*score[kCacheTypes])(const ScoreArgs& args);  // by CacheType of the keys
  void (*mix[kCacheTypes])(const MixArgs& args);  // by CacheType of the values
  float (*softmax)(SoftmaxArgs& args);  // returns the factor for earlier sums
  // sums[r] = factors[r] * sums[r] + rows[r] for `count` rows of 32 columns; `stride` floats from a row of sums to the next.
  void (*fold)(float* sums, std::ptrdiff_t stride, const float* rows, const float* factors, int count);
  // Rounds a row to codes: 127 steps on each side of zero, to the largest magnitude. What is left of the values replaces them.
  CodedRow (*encode)(float* values, int count, std::int8_t* codes);
  // For several rows in bfloat16, a multiple of 32 columns and at most kPairKeys keys, with the shares rounded to bfloat16; null where an
  // instruction set has no products of pairs.
  void (*score_pairs)(const ScoreArgs& args) = nullptr;
  void (*mix_pairs)(const MixArgs& args) = nullptr;
  // The same for any number of rows, and keys and values that are codes, with shares rounded to 16 bits.
  void (*score_codes)(const ScoreArgs& args) = nullptr;
  void (*mix_codes)(const MixArgs& args) = nullptr;
};
constexpr int kPairKeys = 64;

const AttentionKernels& scalar_attention();

// Of the small operations of a step program. Comparisons and logic give 0 or 1; a number other than 0 is true.
enum class Elementwise : int {
  kCopy,
  kNeg,
  kAbs,
  kExp,
  kLog,
  kLog1p,
  kSin,
  kCos,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kSigmoid,
  kSilu,
  kGelu,
  kGeluTanh,
  kRelu,
  kTanh,
  kFloor,
  kSign,
  kNot,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMaximum,
  kMinimum,
  kPow,
  kFloorDiv,
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kAnd,
  kOr,
  kXor,
  kWhere,
  kSoftplus
};

struct ElementwiseArgs {
  Elementwise function;
  const float* a;
  const float* b;  // not read by functions of one argument
  const float* c;  // not read by functions of two
  float* out;
  int count;
};

// The kernels of prompts: weights of any format are expanded to one type in front of one product, some columns at a time, and every token
// of a segment is multiplied with them while they are in the first-level cache.
//
// Activations are records of the format records_of(format) in tiles of `tile_tokens` rows: group g of row r begins at word
// (g * tile_tokens + r) * words_per_group of its tile. Tokens are spread evenly over the tiles (Tiling); the other rows may hold anything.
// A token's result does not depend on the other tokens, but differs from that of `tile`: in the order of sums, and, unless own_records,
// because `tile` rounds activations to 8 bits where weights are integers.
struct MatrixKernels {
  Format records;  // for all formats, unless own_records
  int tile_tokens;
  std::size_t segment_bytes;  // of a segment's activations, which stay in a core's second-level cache
  int least_tokens[kFormats];  // of a segment, from which on it is faster than `tile`
  bool own_records;  // each format has the records of its tiles
  void (*multiply[kFormats])(const MatrixArgs& args);  // null where a format has none
  void (*begin)();  // on every thread, before its first product of a job
  void (*end)();  // and after its last

  Format records_of(Format format) const { return own_records ? format : records; }
  bool serves(Format format, int tokens) const {
    return multiply[static_cast<int>(format)] != nullptr && tokens >= least_tokens[static_cast<int>(format)];
  }
};
constexpr int kNeverMatrix = 1 << 30;  // as the least tokens

struct Kernels {
  const char* isa;
  int max_tokens[kFormats];
  // out = block times records, accumulated in float32; the result for a token does not depend on the other tokens of the tile.
  void (*tile[kFormats])(const TileArgs& args);
  // Writes the record of `groups` * 32 floats; group g begins at words[g * stride].
  void (*encode[kFormats])(const float* values, int groups, std::uint32_t* words, std::size_t stride);
  void (*gate)(const GateArgs& args);
  // out = min(act(min(rows + gate_bias, gate_limit)), act_limit) for 32 gate rows per token; a sparse layout compares it with its
  // threshold.
  void (*act)(const GateArgs& args);
  SparseKernels sparse;
  // sum[r] += weight * (rows[r] + bias[r]) for 32 rows; bias may be null.
  void (*accumulate)(float* sum, const float* rows, const float* bias, float weight);
  void (*widen)(ActivationType type, const void* source, float* target, int count);
  void (*narrow)(ActivationType type, const float* source, void* target, int count);
  void (*norm)(const NormRowArgs& args);
  void (*elementwise)(const ElementwiseArgs& args);
  AttentionKernels attention;
  MatrixKernels matrix;
};

// The oracle: plain loops, built everywhere.
const Kernels& scalar_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
// Replaces tiles by those that need AVX-VNNI.
void use_avx_vnni(Kernels& kernels);
const Kernels& avx512_kernels();
const Kernels& avx512_vnni_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
// Replaces kernels by those that need AVX-512 with VBMI.
void use_vbmi(Kernels& kernels);
// The matrix kernels of AVX-512 with BF16 and VBMI.
MatrixKernels avx512_bf16_vbmi_matrix();
#elif defined(__aarch64__)
const Kernels& neon_kernels();
const Kernels& neon_dotprod_kernels();
const Kernels& neon_i8mm_kernels();
const Kernels& neon_bf16_kernels();
#endif

}  // namespace moegraft
