// The scalar kernels: the oracle of the vector versions, and the kernels of other architectures.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/float_conversion.h"
#include "core/types.h"
#include "experts/block_layout.h"
#include "formats/coded_formats.h"
#include "simd/elementwise.h"
#include "simd/kernels.h"

namespace moegraft {
namespace {

constexpr int kMaxTokens = 8;

const std::uint32_t* group_words(const TileArgs& args, Format format, int group, int token) {
  return args.records + (static_cast<std::size_t>(group) * args.tokens + token) * words_per_group(format);
}

// Returns one weight of a float block.
template <Format F>
float weight_at(const std::byte* block, int col, int row) {
  if constexpr (F == Format::kFloat32) return reinterpret_cast<const float*>(block)[col * kBlockRows + row];
  const auto* halves = reinterpret_cast<const std::uint16_t*>(block);
  if constexpr (F == Format::kFloat16) return float_from_f16(halves[col * kBlockRows + row]);
  return float_from_bf16(halves[(col / 2) * 64 + row * 2 + col % 2]);
}

template <Format F>
void tile_float(const TileArgs& args) {
  for (int token = 0; token < args.tokens; ++token) {
    float sums[kBlockRows] = {};
    for (int col = 0; col < args.groups * kGroup; ++col) {
      const std::uint32_t* words = group_words(args, F, col / kGroup, token);
      float value;
      if constexpr (F == Format::kBFloat16Dot) {
        const std::uint32_t pair = words[col % kGroup / 2];
        value = float_from_bf16(static_cast<std::uint16_t>(col % 2 ? pair >> 16 : pair & 0xffffu));
      } else {
        value = float_from_bits(words[col % kGroup]);
      }
      for (int row = 0; row < kBlockRows; ++row) sums[row] += weight_at<F>(args.block, col, row) * value;
    }
    std::memcpy(args.out + token * kBlockRows, sums, sizeof sums);
  }
}

void tile_codes(const TileArgs& args, Format format) {
  const WeightType type = weights_of(format);
  const CodedFormat& coded = coded_format(type);
  const RecordForm& form = record_form(format);
  const int groups = coded.columns / kGroup, columns = kGroup / form.parts;
  std::memset(args.out, 0, sizeof(float) * kBlockRows * args.tokens);
  const std::byte* block = args.block;
  for (int first = 0; first < args.groups; first += groups, block += coded.file_bytes * kBlockRows) {
    for (int row = 0; row < kBlockRows; ++row) {
      GroupCodes weights[kMostBlockGroups];
      GroupScales scales[kMostBlockGroups];
      decode_row(type, block, row, weights, scales);
      for (int index = 0; index < groups * args.tokens; ++index) {
        const int group = index / args.tokens, token = index % args.tokens;
        const std::uint32_t* words = group_words(args, format, first + group, token);
        float& sum = args.out[token * kBlockRows + row];
        if (form.float8) {
          for (int k = 0; k < kGroup; ++k) sum += number_of(form, weights[group][k]) * scales[group].scale[0] * float_from_bits(words[k]);
          continue;
        }
        const float share = float_from_bits(words[0]);
        std::int8_t codes[kGroup];
        std::memcpy(codes, words + first_code_word(format), kGroup);
        for (int part = 0; part < form.parts; ++part) {
          int dot = 0;
          for (int k = part * columns; k < (part + 1) * columns; ++k) dot += (weights[group][k] - form.offset) * codes[k];
          if (form.minimum) sum += scales[group].minimum[part] * float_from_bits(words[1 + part]);
          sum += static_cast<float>(dot) * (scales[group].scale[part] * share);
        }
      }
    }
  }
}

template <Format F>
void tile_coded(const TileArgs& args) {
  tile_codes(args, F);
}

void encode_float(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) std::memcpy(words, values, sizeof(float) * kGroup);
}

void encode_bf16(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) {
    for (int i = 0; i < kGroup / 2; ++i) {
      const std::uint32_t high = bf16_from_float(values[2 * i + 1]);
      words[i] = (high << 16) | bf16_from_float(values[2 * i]);
    }
  }
}

void encode_codes(const float* values, int groups, std::uint32_t* words, std::size_t stride, Format format) {
  const RecordForm& form = record_form(format);
  for (int group = 0; group < groups; ++group, values += kGroup, words += stride) {
    float largest = 0.0f;
    bool finite = true;
    for (int k = 0; k < kGroup; ++k) {
      largest = std::max(largest, std::fabs(values[k]));
      finite = finite && std::isfinite(values[k]);
    }
    // Below this magnitude the inverse would overflow, and the group is negligible. The scale of a group that is not finite is NaN.
    const bool codable = finite && largest > 1e-30f;
    const float inverse = codable ? 127.0f / largest : 0.0f;
    const float scale = codable ? largest / 127.0f : finite ? 0.0f : NAN;
    std::int8_t codes[kGroup];
    int sums[2] = {};  // of the codes of each part
    for (int k = 0; k < kGroup; ++k) {
      codes[k] = codable ? static_cast<std::int8_t>(std::nearbyintf(values[k] * inverse)) : std::int8_t{0};
      sums[k / (kGroup / form.parts)] += codes[k];
    }
    words[0] = bits_from_float(scale);
    for (int part = 0; part < form.parts; ++part)
      words[1 + part] =
          form.minimum ? bits_from_float(scale * static_cast<float>(sums[part])) : static_cast<std::uint32_t>(-form.offset * sums[part]);
    std::memcpy(words + first_code_word(format), codes, kGroup);
  }
}

template <Format F>
void encode_coded(const float* values, int groups, std::uint32_t* words, std::size_t stride) {
  encode_codes(values, groups, words, stride, F);
}

float activate(Activation activation, float alpha, float x) {
  switch (activation) {
    case Activation::kSilu: return x / (1.0f + std::exp(-alpha * x));
    case Activation::kGelu: return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f));
    case Activation::kGeluTanh: return 0.5f * x * (1.0f + std::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case Activation::kRelu: return x < 0.0f ? 0.0f : x;
    case Activation::kRelu2: return x < 0.0f ? 0.0f : x * x;
    case Activation::kIdentity: return x;
    case Activation::kSigmoid: return 1.0f / (1.0f + std::exp(-x));
    case Activation::kTanh: return std::tanh(x);
  }
  return x;
}

// The order of the comparisons lets a NaN through.
float at_most(float x, float limit) { return x > limit ? limit : x; }
float at_least(float x, float limit) { return x < limit ? limit : x; }

void gate(const GateArgs& args) {
  const GateSpec& spec = *args.spec;
  const int width = args.gated ? kLanes : kBlockRows;
  for (int token = 0; token < args.tokens; ++token) {
    const float* rows = args.rows + token * kBlockRows;
    for (int i = 0; i < width; ++i) {
      const float up = rows[args.gated ? kLanes + i : i] + (args.up_bias ? args.up_bias[i] : 0.0f);
      float& out = args.out[token * kBlockRows + i];
      if (!args.gated) {
        out = activate(spec.activation, spec.alpha, up);
        continue;
      }
      const float gate = at_most(rows[i] + (args.gate_bias ? args.gate_bias[i] : 0.0f), spec.gate_limit);
      const float acted = at_most(activate(spec.activation, spec.alpha, gate), spec.act_limit);
      out = acted * (at_least(at_most(up, spec.up_limit), -spec.up_limit) + spec.up_offset);
    }
  }
}

void act(const GateArgs& args) {
  const GateSpec& spec = *args.spec;
  for (int i = 0; i < args.tokens * kBlockRows; ++i) {
    const float gate = at_most(args.rows[i] + (args.gate_bias ? args.gate_bias[i % kBlockRows] : 0.0f), spec.gate_limit);
    args.out[i] = at_most(activate(spec.activation, spec.alpha, gate), spec.act_limit);
  }
}

void accumulate(float* sum, const float* rows, const float* bias, float weight) {
  for (int r = 0; r < kBlockRows; ++r) sum[r] += weight * (bias ? rows[r] + bias[r] : rows[r]);
}

void widen(ActivationType type, const void* source, float* target, int count) {
  const auto* halves = static_cast<const std::uint16_t*>(source);
  switch (type) {
    case ActivationType::kFloat32: std::memcpy(target, source, sizeof(float) * count); break;
    case ActivationType::kFloat16:
      for (int i = 0; i < count; ++i) target[i] = float_from_f16(halves[i]);
      break;
    case ActivationType::kBFloat16:
      for (int i = 0; i < count; ++i) target[i] = float_from_bf16(halves[i]);
      break;
  }
}

void narrow(ActivationType type, const float* source, void* target, int count) {
  auto* halves = static_cast<std::uint16_t*>(target);
  switch (type) {
    case ActivationType::kFloat32: std::memcpy(target, source, sizeof(float) * count); break;
    case ActivationType::kFloat16:
      for (int i = 0; i < count; ++i) halves[i] = f16_from_float(source[i]);
      break;
    case ActivationType::kBFloat16:
      for (int i = 0; i < count; ++i) halves[i] = bf16_from_float(source[i]);
      break;
  }
}

// The kernels of the sparse layout.

// Returns a weight of a chunk, or its code including the offset; a chunk has the lines of half a block, with groups as lanes.
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

template <Format F>
float dot_row(const std::byte* row, std::size_t line_offset, const std::uint32_t* lanes, int chunks) {
  constexpr int kWords = words_per_group(F);
  float sum = 0.0f;
  for (int chunk = 0; chunk < chunks; ++chunk, lanes += kWords * kLanes) {
    const std::byte* lines = row + line_offset + chunk * lines_per_chunk(weights_of(F)) * line_bytes(weights_of(F));
    for (int lane = 0; lane < kLanes; ++lane) {
      if constexpr (is_coded(F)) {
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

// Returns a dequantised weight of down.
template <Format F>
float down_weight(const std::byte* scales, const std::byte* lines, int k, int lane) {
  const float weight = sparse_weight<F>(lines, k, lane);
  if constexpr (!is_coded(F)) return weight;
  return (weight - (F == Format::kInt8 ? 128.0f : 8.0f)) * float_from_f16(reinterpret_cast<const std::uint16_t*>(scales)[lane]);
}

template <Format F>
void add_rows(const RowAddArgs& args) {
  for (int k = 0; k < kGroup; ++k)
    for (int lane = 0; lane < kLanes; ++lane)
      for (int row = 0; row < kMaxRows; ++row)
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
    for (int i = 0; i < args.item_count; ++i)
      add_item(args.items + i * kTileWords, args.coefficients[token][i], args.sums[token] + args.sums_offset);
}

void add_picked(const ItemsPickArgs& args) {
  for (int tile = 0; tile < kTiles; ++tile)
    for (int i = 0; i < args.picked_count; ++i)
      add_item(args.items + static_cast<std::size_t>(tile) * args.tile_stride + args.picked[i] * kTileWords,
               args.coefficients[args.picked[i]], args.sums + tile * kTileWords);
}

template <Format... Kinds>
SparseKernels sparse_kernels() {
  SparseKernels kernels{};
  kernels.dot_rows_at_once = kMaxRows;
  ((kernels.dot_rows[static_cast<int>(Kinds)] = dot_rows<Kinds>), ...);
  ((kernels.add_rows[static_cast<int>(Kinds)] = add_rows<Kinds>), ...);
  ((kernels.widen_rows[static_cast<int>(Kinds)] = widen_rows<Kinds>), ...);
  ((kernels.add_items[static_cast<int>(Kinds)] = add_items), ...);
  ((kernels.add_picked[static_cast<int>(Kinds)] = add_picked), ...);
  kernels.reached = reached_bits;
  kernels.finish = finish_neurons;
  return kernels;
}

}  // namespace

static inline float widened(ActivationType type, const std::byte* row, int index) {
  if (type == ActivationType::kFloat32) {
    float value;
    std::memcpy(&value, row + 4 * static_cast<std::ptrdiff_t>(index), sizeof value);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, row + 2 * static_cast<std::ptrdiff_t>(index), sizeof half);
  return type == ActivationType::kFloat16 ? float_from_f16(half) : float_from_bf16(half);
}

static inline float rounded_to(ActivationType type, float value) {
  if (type == ActivationType::kFloat32) return value;
  return type == ActivationType::kFloat16 ? float_from_f16(f16_from_float(value)) : float_from_bf16(bf16_from_float(value));
}

static inline void scalar_norm(const NormRowArgs& args) {
  float squares = 0.0f;
  for (int i = 0; i < args.cols; ++i) squares += widened(args.type, args.x, i) * widened(args.type, args.x, i);
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(args.cols) + args.form.epsilon);
  for (int i = 0; i < args.cols; ++i) {
    float value = widened(args.type, args.x, i) * factor;
    if (args.form.rounds_first) value = rounded_to(args.type, value);
    if (args.weight != nullptr) value *= args.form.weight_offset + widened(args.type, args.weight, i);
    scalar_kernels().narrow(args.type, &value, args.out + element_bytes(args.type) * static_cast<std::size_t>(i), 1);
  }
}

// Attention.

namespace {

template <CacheType Type>
float element(const std::byte* row, int index) {
  if constexpr (Type == CacheType::kFloat32) {
    float value;
    std::memcpy(&value, row + 4 * static_cast<std::ptrdiff_t>(index), sizeof value);
    return value;
  } else if constexpr (Type == CacheType::kInt8) {
    return static_cast<float>(static_cast<std::int8_t>(row[index]));
  } else {
    std::uint16_t half;
    std::memcpy(&half, row + 2 * static_cast<std::ptrdiff_t>(index), sizeof half);
    return Type == CacheType::kFloat16 ? float_from_f16(half) : float_from_bf16(half);
  }
}

template <CacheType Type>
void score(const ScoreArgs& args) {
  for (int r = 0; r < args.rows; ++r)
    for (int j = 0; j < args.count; ++j) {
      const std::byte* key = args.keys + j * args.key_bytes;
      float sum = 0.0f;
      for (int d = 0; d < args.dim; ++d) sum += args.query[r * args.query_stride + d] * element<Type>(key, d);
      args.scores[r * args.score_stride + j] = Type == CacheType::kInt8 ? sum * args.scales[j] : sum;
    }
}

template <CacheType Type>
void mix(const MixArgs& args) {
  for (int r = 0; r < args.rows; ++r)
    for (int j = 0; j < args.count; ++j) {
      const float share = args.shares[r * args.share_stride + j] * (Type == CacheType::kInt8 ? args.scales[j] : 1.0f);
      for (int d = 0; d < args.dim; ++d) args.sums[r * args.sum_stride + d] += share * element<Type>(args.values + j * args.value_bytes, d);
    }
}

CodedRow encode_row(float* values, int count, std::int8_t* codes) {
  float most = 0.0f;
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    most = std::fmax(most, std::fabs(values[i]));
    finite = finite && std::isfinite(values[i]);
  }
  const float scale = finite ? most / kMostCode : std::numeric_limits<float>::quiet_NaN();
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  int sum = 0;
  for (int i = 0; i < count; ++i) {
    codes[i] = static_cast<std::int8_t>(finite ? std::nearbyint(values[i] * inverse) : 0.0f);
    values[i] -= scale * static_cast<float>(codes[i]);
    sum += codes[i];
  }
  return {scale, sum};
}

float softmax(SoftmaxArgs& args) {
  float step = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < args.count; ++i) {
    float& score = *args.at(i);
    score *= args.scale;
    if (args.softcap > 0.0f) score = args.softcap * std::tanh(score / args.softcap);
    if (score > step) step = score;  // a NaN is handled below
  }
  const float largest = std::max(step, args.largest);
  if (largest == -std::numeric_limits<float>::infinity()) return no_visible_key(args);
  const float factor = std::exp(args.largest - largest);
  float sum = 0.0f;
  for (int i = 0; i < args.count; ++i) sum += args.shares[i] = std::exp(*args.at(i) - largest);
  args.sum = args.sum * factor + sum;
  args.largest = largest;
  return factor;
}

void fold(float* sums, std::ptrdiff_t stride, const float* rows, const float* factors, int count) {
  for (int row = 0; row < count; ++row, sums += stride, rows += kBlockRows)
    for (int i = 0; i < kBlockRows; ++i) sums[i] = factors[row] * sums[i] + rows[i];
}

}  // namespace

const AttentionKernels& scalar_attention() {
  static const AttentionKernels kernels = {
      {score<CacheType::kFloat32>, score<CacheType::kFloat16>, score<CacheType::kBFloat16>, score<CacheType::kInt8>},
      {mix<CacheType::kFloat32>, mix<CacheType::kFloat16>, mix<CacheType::kBFloat16>, mix<CacheType::kInt8>},
      softmax,
      fold,
      encode_row,
  };
  return kernels;
}

namespace {

template <Format... Kinds>
void add_floats(Kernels& kernels) {
  ((kernels.tile[static_cast<int>(Kinds)] = tile_float<Kinds>), ...);
  ((kernels.encode[static_cast<int>(Kinds)] = Kinds == Format::kBFloat16Dot ? encode_bf16 : encode_float), ...);
}

template <int... I>
void add_coded(Kernels& kernels, std::integer_sequence<int, I...>) {
  ((kernels.tile[kFirstCoded + I] = tile_coded<coded(I)>), ...);
  ((kernels.encode[kFirstCoded + I] = has_codes(coded(I)) ? encode_coded<coded(I)> : encode_float), ...);
}

Kernels make() {
  using K = Format;
  Kernels kernels{};
  kernels.isa = "scalar";
  for (int& tokens : kernels.max_tokens) tokens = kMaxTokens;
  add_floats<K::kFloat32, K::kFloat16, K::kBFloat16, K::kBFloat16Dot>(kernels);
  add_coded(kernels, CodedIndexes());
  kernels.gate = gate;
  kernels.act = act;
  kernels.sparse = sparse_kernels<K::kFloat32, K::kFloat16, K::kBFloat16, K::kBFloat16Dot, K::kInt8, K::kInt4>();
  kernels.accumulate = accumulate;
  kernels.widen = widen;
  kernels.narrow = narrow;
  kernels.norm = scalar_norm;
  kernels.elementwise = elementwise;
  kernels.attention = scalar_attention();
  return kernels;
}

}  // namespace

const Kernels& scalar_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
