// NEON with products of int8 and of bfloat16: Neoverse V1, V2 and N2 (Graviton 3 and 4, Grace), Apple M2.
#include "simd/neon_matrix.h"
#include "simd/vector_kernels.h"

namespace moegraft {
namespace {

// From this number on, the instructions of the matrix kernel are fewer than those of the tiles by a count; not measured.
constexpr int kLeastTokens = 8;

struct PairProduct {
  static constexpr int kSteps = kGroup / 4;
  struct Weights {
    std::uint32_t pairs[kSteps][kRowPairs][4];
  };
  struct Tokens {
    std::uint32_t pairs[kSteps][kMatrixPairs][4];
  };

  static void expand(const std::byte* block, int group, Weights& weights) {
    const std::byte* line = block + static_cast<std::size_t>(group) * kGroup * kBlockRows * 2;
    for (int step = 0; step < kSteps; ++step, line += 2 * kWordsBytes) {
      std::uint32_t* target = weights.pairs[step][0];
      for (int row = 0; row < kBlockRows; row += Neon::kWidth, target += 2 * Neon::kWidth) {
        const Neon::I first = Neon::load_int(line + row * 4), second = Neon::load_int(line + kWordsBytes + row * 4);
        vst1q_u32(target, vzip1q_u32(first.low, second.low));
        vst1q_u32(target + 4, vzip2q_u32(first.low, second.low));
        vst1q_u32(target + 8, vzip1q_u32(first.high, second.high));
        vst1q_u32(target + 12, vzip2q_u32(first.high, second.high));
      }
    }
  }

  static void arrange(const std::uint32_t* records, int pairs, Tokens& tokens) {
    constexpr int kWords = words_per_group(Format::kBFloat16Dot);
    for (int pair = 0; pair < pairs; ++pair, records += 2 * kWords) {
      for (int step = 0; step < kSteps; step += 2) {
        const std::uint32_t* words = records + 2 * step;
        const uint64x2_t one = vreinterpretq_u64_u32(vld1q_u32(words)), other = vreinterpretq_u64_u32(vld1q_u32(words + kWords));
        vst1q_u32(tokens.pairs[step][pair], vreinterpretq_u32_u64(vzip1q_u64(one, other)));
        vst1q_u32(tokens.pairs[step + 1][pair], vreinterpretq_u32_u64(vzip2q_u64(one, other)));
      }
    }
  }

  // Eight rows at a time: 16 sums, 4 operands of tokens and 4 of weights.
  template <int Pairs>
  static void multiply(const Weights* weights, const Tokens* tokens, int groups, bool adds, float* out) {
    constexpr int kRows = 4;
    for (int row = 0; row < kRowPairs; row += kRows) {
      float32x4_t sums[Pairs][kRows] = {};
      if (adds) {
#pragma GCC unroll 4
        for (int p = 0; p < Pairs; ++p) {
          load_sums(out + 2 * p * kBlockRows + 2 * row, sums[p][0], sums[p][1]);
          load_sums(out + 2 * p * kBlockRows + 2 * row + 4, sums[p][2], sums[p][3]);
        }
      }
      for (int group = 0; group < groups; ++group) {
        for (int step = 0; step < kSteps; ++step) {
          bfloat16x8_t rows[kRows];
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) rows[r] = vreinterpretq_bf16_u32(vld1q_u32(weights[group].pairs[step][row + r]));
#pragma GCC unroll 4
          for (int p = 0; p < Pairs; ++p) {
            const bfloat16x8_t values = vreinterpretq_bf16_u32(vld1q_u32(tokens[group].pairs[step][p]));
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) sums[p][r] = vbfmmlaq_f32(sums[p][r], rows[r], values);
          }
        }
      }
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) {
        store_sums(out + 2 * p * kBlockRows + 2 * row, sums[p][0], sums[p][1]);
        store_sums(out + 2 * p * kBlockRows + 2 * row + 4, sums[p][2], sums[p][3]);
      }
    }
  }
};

Kernels make() {
  Kernels kernels = neon_i8mm_kernels();
  kernels.isa = "neon_bf16";
  add_pair_products<Neon>(kernels);
  kernels.matrix.least_tokens[static_cast<int>(Format::kBFloat16Dot)] = kLeastTokens;
  kernels.matrix.multiply[static_cast<int>(Format::kBFloat16Dot)] = matrix_pairs<PairProduct, Format::kBFloat16Dot>;
  return kernels;
}

}  // namespace

const Kernels& neon_bf16_kernels() {
  static const Kernels kernels = make();
  return kernels;
}

}  // namespace moegraft
