// The AMX kernels over emulated tiles against the scalar ones, for every format and tile width that goes through the matrix unit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "simd/kernels.h"

using namespace moegraft;

namespace {

float value_at(unsigned index) { return static_cast<float>(static_cast<int>(index * 2654435761u >> 16) % 2001 - 1000) / 1000.0f; }

int compare(Format format, WeightType type, int groups, int tokens) {
  const int cols = groups * kGroup;
  std::vector<float> matrix(static_cast<std::size_t>(kBlockRows) * cols);
  for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = value_at(static_cast<unsigned>(i));
  auto* block = static_cast<std::byte*>(std::aligned_alloc(64, block_bytes(type, cols)));
  for (int half = 0; half < 2; ++half)
    pack_half_block(type, {block, half}, RowsView{matrix.data(), WeightType::kFloat32, kBlockRows, cols}, half * kLanes);
  const int words = words_per_group(format);
  std::vector<std::uint32_t> records(static_cast<std::size_t>(words) * groups * tokens);
  for (int token = 0; token < tokens; ++token) {
    std::vector<float> x(static_cast<std::size_t>(cols));
    for (int i = 0; i < cols; ++i) x[static_cast<std::size_t>(i)] = value_at(static_cast<unsigned>(7919 * token + i));
    scalar_kernels().encode[static_cast<int>(format)](x.data(), groups, records.data() + token * words,
                                                      static_cast<std::size_t>(words * tokens));
  }
  std::vector<float> out(static_cast<std::size_t>(tokens) * kBlockRows), expected(out.size());
  TileArgs args{block, records.data(), groups, tokens, out.data(), block, 1};
  amx_kernels().tile[static_cast<int>(format)](args);
  args.out = expected.data();
  scalar_kernels().tile[static_cast<int>(format)](args);
  int wrong = 0;
  for (std::size_t i = 0; i < out.size(); ++i) wrong += !(std::fabs(out[i] - expected[i]) <= 1e-4f * (1.0f + std::fabs(expected[i])));
  if (wrong > 0) std::fprintf(stderr, "format %d, %d groups, %d tokens: %d wrong\n", static_cast<int>(format), groups, tokens, wrong);
  std::free(block);
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
  for (const int tokens : {1, 4, 5, 11, 16}) {
    for (const int groups : {1, 3}) {
      wrong += compare(Format::kBFloat16Dot, WeightType::kBFloat16, groups, tokens);
      wrong += compare(Format::kInt8, WeightType::kInt8, groups, tokens);
      wrong += compare(Format::kInt4, WeightType::kInt4, groups, tokens);
    }
  }
  return wrong == 0 ? 0 : 1;
}
