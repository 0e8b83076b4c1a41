// NEON with dot products of signed and unsigned int8 and products of 2x2 blocks of them. CPUs have them together with bfloat16 in general:
// Neoverse V1 and later (Graviton 3 and 4, Grace), Apple M2.
//
// The matrix kernel takes the records of the tiles and sums in the same order, so that its results have the same bits. Expansion to
// bfloat16 would take as many instructions for the products, and more for the weights: 8 products of a 2x2 block for 32 columns, instead of
// 4 and their conversion, scale and addition.
#include "simd/neon_matrix.h"
#include "simd/vector_kernels.h"

namespace moegraft {
namespace {

// From this number on, the instructions of the matrix kernel are fewer than those of the tiles by a count; not measured.
constexpr int kLeastTokens = 8;

template <Format Kind>
struct CodedProduct {
  using Coded = CodedOf<Kind>;
  static constexpr int kParts = Coded::kParts;
  static constexpr int kSteps = kGroup / 8;
  // Unsigned codes, and each scale and minimum for both tokens of a pair.
  struct Weights {
    std::uint8_t codes[kSteps][kRowPairs][16];
    float scale[kParts][kRowPairs][4];
    float minimum[Coded::kMinimum ? kParts : 1][kRowPairs][4];
  };
  // Signed codes; the scale, and what the sums of a part start with (a word of the record), for both rows of a pair.
  struct Tokens {
    std::int8_t codes[kSteps][kMatrixPairs][16];
    float scale[kMatrixPairs][4];
    std::uint32_t start[kParts][kMatrixPairs][4];
  };

  template <int Step>
  static MOEGRAFT_INLINE void expand_step(const std::byte* lines, int vector, Weights& weights) {
    Neon::I first, second;
    load_codes<Neon, CodeFormOf<Coded>, Step>(lines, table_of<Neon, Coded>(), first, second);
    std::uint8_t* target = weights.codes[Step][vector * Neon::kWidth / 2];
    const auto store = [&](uint32x4_t words) {
      vst1q_u8(target, vreinterpretq_u8_u32(words));
      target += 16;
    };
    store(vzip1q_u32(first.low, second.low));
    store(vzip2q_u32(first.low, second.low));
    store(vzip1q_u32(first.high, second.high));
    store(vzip2q_u32(first.high, second.high));
  }

  static MOEGRAFT_INLINE void store_twice(float (*target)[4], Neon::F x) {
    vst1q_f32(target[0], vzip1q_f32(x.low, x.low));
    vst1q_f32(target[1], vzip2q_f32(x.low, x.low));
    vst1q_f32(target[2], vzip1q_f32(x.high, x.high));
    vst1q_f32(target[3], vzip2q_f32(x.high, x.high));
  }

  static void expand(const std::byte* block, int group, Weights& weights) {
    const std::byte* base = block + static_cast<std::size_t>(group / Derived<Coded>::kGroups) * Derived<Coded>::kBytes;
    const int index = group % Derived<Coded>::kGroups;
    for (int vector = 0; vector < Neon::kVectors; ++vector) {
      typename Coded::template Reader<Neon> reader;
      reader.block(base, vector * Neon::kWidth);
      reader.group(index);
      for (int part = 0; part < kParts; ++part) {
        store_twice(weights.scale[part] + vector * Neon::kWidth / 2, reader.scale[part]);
        if constexpr (Coded::kMinimum) store_twice(weights.minimum[part] + vector * Neon::kWidth / 2, reader.minimum[part]);
      }
      const std::byte* lines = base + Derived<Coded>::kLinesOffset + index * Derived<Coded>::kLinesBytes + vector * Neon::kWidth * 4;
      expand_step<0>(lines, vector, weights);
      expand_step<1>(lines, vector, weights);
      expand_step<2>(lines, vector, weights);
      expand_step<3>(lines, vector, weights);
    }
  }

  static void arrange(const std::uint32_t* records, int pairs, Tokens& tokens) {
    constexpr int kWords = words_per_group(Kind);
    for (int pair = 0; pair < pairs; ++pair, records += 2 * kWords) {
      const auto both = [&](int word) {  // of the one token and of the other
        const std::uint32_t words[2] = {records[word], records[kWords + word]};
        const uint32x2_t loaded = vld1_u32(words);
        return vcombine_u32(loaded, loaded);
      };
      vst1q_f32(tokens.scale[pair], vreinterpretq_f32_u32(both(0)));
      for (int part = 0; part < kParts; ++part) vst1q_u32(tokens.start[part][pair], both(1 + part));
      for (int step = 0; step < kSteps; step += 2) {
        const std::uint32_t* codes = records + first_code_word(Kind) + 2 * step;
        const uint64x2_t one = vreinterpretq_u64_u32(vld1q_u32(codes)), other = vreinterpretq_u64_u32(vld1q_u32(codes + kWords));
        vst1q_s8(tokens.codes[step][pair], vreinterpretq_s8_u64(vzip1q_u64(one, other)));
        vst1q_s8(tokens.codes[step + 1][pair], vreinterpretq_s8_u64(vzip2q_u64(one, other)));
      }
    }
  }

  // Four rows at a time: 8 sums in float, 8 in integers, 4 operands of tokens and 2 of weights.
  template <int Pairs>
  static void multiply(const Weights* weights, const Tokens* tokens, int groups, bool adds, float* out) {
    for (int row = 0; row < kRowPairs; row += 2) {
      float32x4_t sums[Pairs][2] = {};
      if (adds) {
#pragma GCC unroll 4
        for (int p = 0; p < Pairs; ++p) load_sums(out + 2 * p * kBlockRows + 2 * row, sums[p][0], sums[p][1]);
      }
      for (int group = 0; group < groups; ++group) {
        [[maybe_unused]] float32x4_t partial[Pairs][2];  // of the first of two parts
        add_group<0, Pairs>(weights[group], tokens[group], row, partial, sums);
      }
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) store_sums(out + 2 * p * kBlockRows + 2 * row, sums[p][0], sums[p][1]);
    }
  }

  template <int Part, int Pairs>
  static MOEGRAFT_INLINE void add_group(const Weights& weights, const Tokens& tokens, int row, float32x4_t (&partial)[Pairs][2],
                                        float32x4_t (&sums)[Pairs][2]) {
    int32x4_t dots[Pairs][2];
#pragma GCC unroll 4
    for (int p = 0; p < Pairs; ++p)
      dots[p][0] = dots[p][1] = Coded::kMinimum ? vdupq_n_s32(0) : vreinterpretq_s32_u32(vld1q_u32(tokens.start[Part][p]));
#pragma GCC unroll 4
    for (int i = 0; i < kSteps / kParts; ++i) {
      const int step = Part * (kSteps / kParts) + i;
      const uint8x16_t one = vld1q_u8(weights.codes[step][row]), other = vld1q_u8(weights.codes[step][row + 1]);
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) {
        const int8x16_t codes = vld1q_s8(tokens.codes[step][p]);
        dots[p][0] = vusmmlaq_s32(dots[p][0], one, codes);
        dots[p][1] = vusmmlaq_s32(dots[p][1], other, codes);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      const float32x4_t scale = vld1q_f32(weights.scale[Part][row + r]);
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) {
        if constexpr (Coded::kMinimum)
          sums[p][r] =
              vfmaq_f32(sums[p][r], vld1q_f32(weights.minimum[Part][row + r]), vreinterpretq_f32_u32(vld1q_u32(tokens.start[Part][p])));
        const float32x4_t sum = vcvtq_f32_s32(dots[p][r]), share = vld1q_f32(tokens.scale[p]);
        if constexpr (kParts == 1) sums[p][r] = vfmaq_f32(sums[p][r], sum, vmulq_f32(scale, share));
        else if constexpr (Part == 0) partial[p][r] = vmulq_f32(sum, scale);
        else sums[p][r] = vfmaq_f32(sums[p][r], vfmaq_f32(partial[p][r], sum, scale), share);
      }
    }
    if constexpr (Part + 1 < kParts) add_group<Part + 1, Pairs>(weights, tokens, row, partial, sums);
  }
};

// Not of formats with factors, whose tiles apply a scale once for a block.
template <int... I>
void add_products(MatrixKernels& matrix, std::integer_sequence<int, I...>) {
  const auto add = [&](auto index) {
    constexpr Format kKind = coded(decltype(index)::value);
    if constexpr (has_codes(kKind) && !kIsGrid<CodedOf<kKind>> && !kHasFactors<CodedOf<kKind>>) {
      matrix.least_tokens[static_cast<int>(kKind)] = kLeastTokens;
      matrix.multiply[static_cast<int>(kKind)] = matrix_pairs<CodedProduct<kKind>, kKind>;
    }
  };
  (add(std::integral_constant<int, I>()), ...);
}

Kernels make() {
  Kernels kernels = neon_dotprod_kernels();
  kernels.isa = "neon_i8mm";
  add_integer_products<Neon>(kernels);
  kernels.matrix = pair_kernels();
  add_products(kernels.matrix, CodedIndexes());
  return kernels;
}

}  // namespace

const Kernels& neon_i8mm_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
