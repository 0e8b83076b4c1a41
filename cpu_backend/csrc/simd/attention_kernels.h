// What an instruction set does for attention, beside the tiles of kernels.h. Part of its function table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moegraft {

constexpr int kAttentionRows = 8;  // that the functions below take at once

// scores[r][j] = query[r] . key j, for up to kAttentionRows rows and `count` keys that lie as the cache has them.
struct ScoreArgs {
  const float* query;            // (rows, query_stride)
  const std::uint16_t* halves;   // the same in bfloat16, (rows, query_stride); read where keys are bfloat16 alone
  int query_stride;
  int rows;
  const std::byte* keys;
  std::ptrdiff_t key_bytes;      // from a key to the next
  int count;
  int dim;
  float* scores;                 // (rows, score_stride)
  int score_stride;
};

// sums[r] += shares[r][j] * value j.
struct MixArgs {
  const float* shares;           // (rows, share_stride)
  int share_stride;
  int rows;
  const std::byte* values;
  std::ptrdiff_t value_bytes;
  int count;
  int dim;
  float* sums;                   // (rows, sum_stride)
  int sum_stride;
};

// A step of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over a row whose earlier scores had `largest` and `sum`.
struct SoftmaxArgs {
  float* scores;                 // becomes e^(score - largest), of scores that were scaled and capped
  int count;                     // a multiple of 16; what is hidden is -infinity
  float scale;
  float softcap;                 // 0: none
  float largest;                 // in and out
  float sum;                     // in and out
};

// The step of a row of which no score is a number above -infinity: NaN makes it NaN, else nothing changes. `static`, as numbers.h has it.
static inline float nothing_seen(SoftmaxArgs& args) {
  for (int i = 0; i < args.count; ++i) {
    if (args.scores[i] != args.scores[i]) args.largest = args.sum = args.scores[i];
    args.scores[i] = 0.0f;
  }
  return 1.0f;
}

struct AttentionKernels {
  void (*score[3])(const ScoreArgs& args);   // by ActivationType of the keys
  void (*mix[3])(const MixArgs& args);       // by ActivationType of the values
  float (*softmax)(SoftmaxArgs& args);       // returns what earlier sums are to be multiplied with
};

const AttentionKernels& scalar_attention();

}  // namespace moegraft
