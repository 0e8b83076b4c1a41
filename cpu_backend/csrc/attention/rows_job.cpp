#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace moegraft {
namespace {

constexpr int kKeys = kPairKeys;      // keys per step: with their values, they stay in L1 for all rows; chosen by size, not tuned
// The number of keys of a unit does not depend on the number of threads, so that results do not. A unit has at least kSplitKeys, and in long
// sequences more, because each unit widens or encodes all queries first.
constexpr int kSplitKeys = 256;
constexpr int kMostUnits = 128;  // of a sequence
constexpr int kPairRows = 4;  // with 4, products of pairs take 0.8 of the time in L2 (EPYC Zen 4); fewer were not measured

constexpr int coded_columns(int columns) { return round_up(columns, 64); }  // of a query

// Writes the words of a row and of its rest, `bytes` each, side by side in front of those of kAttentionRows - 1 other rows.
void join_words(const std::byte* row, int bytes, std::byte* target) {
  for (int byte = 0; byte < bytes; byte += 4, target += 8 * kAttentionRows) {
    std::memcpy(target, row + byte, 4);
    std::memcpy(target + 4, row + bytes + byte, 4);
  }
}

}  // namespace

struct AttentionRowsJob::Sums {
  float* largest;  // (rows,)
  float* sum;  // (rows,)
  float* values;  // (rows, padded value_dim)
};

AttentionRowsJob::AttentionRowsJob(const Kernels& kernels, const AttentionArgs& args, const VisibleKeys& visible, int workers,
                                   const AttentionPhases& phases)
    : kernels_(kernels), args_(args), visible_(visible), workers_(workers), phases_(phases) {
  const AttentionKernels& attention = kernels.attention;
  const int type = static_cast<int>(args.cache_type()), columns = (args.dim - args.tail_dim) | args.tail_dim | args.value_dim;
  by_codes_ = args.coded() && args.type != ActivationType::kFloat32 && attention.score_codes && columns % 32 == 0;
  by_pairs_ =
      by_codes_ || (args.cache_type() == CacheType::kBFloat16 && attention.score_pairs && args.rows() >= kPairRows && columns % 32 == 0);
  score_ = by_codes_ ? attention.score_codes : by_pairs_ ? attention.score_pairs : attention.score[type];
  narrow_bytes_ = by_codes_ ? 2 * (coded_columns(args.dim - args.tail_dim) + coded_columns(args.tail_dim)) : 2 * args.padded_dim();
  mix_ = by_codes_ ? attention.mix_codes : by_pairs_ ? attention.mix_pairs : attention.mix[type];
}

// A range of the keys of one KV head: number `split` of `splits`.
struct AttentionRowsJob::Unit {
  int batch;
  int kv_head;
  int split;
  int splits;
};

void AttentionRowsJob::prepare(AlignedMemory& parts, AlignedMemory* workers) {
  first_units_.assign(1, 0);
  for (int batch = 0; batch < args_.batch; ++batch) {
    const int most = std::max(1, kMostUnits / args_.kv_heads);
    first_units_.push_back(first_units_.back() +
                           args_.kv_heads * std::clamp((args_.keys_of(batch) + kSplitKeys - 1) / kSplitKeys, 1, most));
  }
  part_floats_ = static_cast<std::size_t>(args_.rows()) * static_cast<std::size_t>(2 + args_.padded_value_dim());
  parts.reserve(sizeof(float) * part_floats_ * static_cast<std::size_t>(first_units_.back()));
  parts_ = parts.data();
  scratch_ = workers;
  // Each row needs its query in float32 and the scores of a step; those of the keys' tails follow. Queries in 16 bits or as codes have room
  // for whole calls of `score_`, and one row more.
  const std::size_t row_bytes = sizeof(float) * static_cast<std::size_t>(args_.padded_dim() + kKeys) + 4 * sizeof(CodedRow);
  const auto narrow_rows = static_cast<std::size_t>(round_up(args_.rows(), kAttentionRows) + 1);
  for (int worker = 0; worker < workers_; ++worker)
    workers[worker].reserve(std::max(row_bytes * static_cast<std::size_t>(args_.rows()) + sizeof(float) * kKeys * kAttentionRows +
                                         narrow_rows * static_cast<std::size_t>(narrow_bytes_),
                                     sizeof(float) * static_cast<std::size_t>(args_.padded_value_dim())));
  phases_.first->reset(first_units_.back());
  phases_.second->reset(args_.batch * args_.kv_heads);
}

AttentionRowsJob::Unit AttentionRowsJob::unit_of(int unit) const {
  const auto after = std::upper_bound(first_units_.begin(), first_units_.end(), unit);
  const int splits = (*after - *(after - 1)) / args_.kv_heads, place = unit - *(after - 1);
  return {static_cast<int>(after - first_units_.begin()) - 1, place / splits, place % splits, splits};
}

void AttentionRowsJob::run(int worker) noexcept {
  Upcoming none;
  run(worker, none);
}

void AttentionRowsJob::run(int worker, Upcoming& after) noexcept {
  std::byte* scratch = scratch_[worker].data();
  int count = 0;
  for (int unit = phases_.first->take(worker); unit >= 0; unit = phases_.first->take(worker), ++count) attend(unit, scratch);
  phases_.first->finish(count);
  phases_.first->wait(after);
  count = 0;
  for (int unit = phases_.second->take(worker); unit >= 0; unit = phases_.second->take(worker), ++count) combine(unit, scratch);
  phases_.second->finish(count);
  phases_.second->wait(after);
}

AttentionRowsJob::Sums AttentionRowsJob::sums_of(int unit) const {
  auto* floats = reinterpret_cast<float*>(parts_) + part_floats_ * static_cast<std::size_t>(unit);
  return {floats, floats + args_.rows(), floats + 2 * args_.rows()};
}

// Values are in pages of their own, which no hardware prefetcher expects; those of a step are read after its keys. Products of pairs
// prefetch a few lines at a time instead, values while they read keys and the next keys while they read values: more at once would have to
// wait for each other.
void AttentionRowsJob::prefetch_values(int batch, int kv_head, int token, int count) const {
  const std::ptrdiff_t bytes = args_.cache_bytes();
  const std::byte* value = token_of(args_, args_.value, batch, kv_head, token);
  for (int row = 0; row < count; ++row, value += bytes * args_.value.row_stride)
    for (std::ptrdiff_t byte = 0; byte < bytes * args_.value_dim; byte += 64) __builtin_prefetch(value + byte, 0, 3);
}

void AttentionRowsJob::attend(int unit, std::byte* scratch) {
  const int rows = args_.rows(), dim = args_.padded_dim(), value_dim = args_.padded_value_dim();
  const auto [batch, kv_head, split, splits] = unit_of(unit);
  auto* query = reinterpret_cast<float*>(scratch);
  float* scores = query + static_cast<std::ptrdiff_t>(rows) * dim;
  auto* narrow = reinterpret_cast<std::byte*>(scores + static_cast<std::ptrdiff_t>(rows) * kKeys);
  std::byte* const single = narrow + static_cast<std::ptrdiff_t>(round_up(rows, kAttentionRows)) * narrow_bytes_;
  auto* coded_rows = reinterpret_cast<CodedRow*>(single + narrow_bytes_);
  CodedRow* coded_tails = coded_rows + static_cast<std::ptrdiff_t>(2) * rows;
  auto* tails = reinterpret_cast<float*>(coded_tails + static_cast<std::ptrdiff_t>(2) * rows);
  const int tail_dim = args_.tail_dim, key_dim = args_.dim - tail_dim;
  const Sums sums = sums_of(unit);
  std::fill_n(sums.largest, rows, kMinusInfinity);
  std::fill_n(sums.sum, rows, 0.0f);
  std::fill_n(sums.values, static_cast<std::ptrdiff_t>(rows) * value_dim, 0.0f);
  for (int row = 0; row < rows; ++row) {
    const QueryRow where = query_row(args_, batch, kv_head, row);
    const std::byte* source = row_of(args_.query, args_.type, batch, where.head, where.query);
    float* widened = query + static_cast<std::ptrdiff_t>(row) * dim;
    kernels_.widen(args_.type, source, widened, args_.dim);
    if (by_codes_) {
      const int first = row / kAttentionRows * kAttentionRows;  // of those in one call of `score_`
      const bool few = rows - first <= kFewCodedRows;
      std::byte* const target = few ? narrow + static_cast<std::ptrdiff_t>(row) * narrow_bytes_ : single;
      auto* codes = reinterpret_cast<std::int8_t*>(target);
      std::memset(codes, 0, static_cast<std::size_t>(narrow_bytes_));
      for (int rest = 0; rest < 2; ++rest, codes += narrow_bytes_ / 2) {
        coded_rows[2 * row + rest] = kernels_.attention.encode(widened, key_dim, codes);
        if (tail_dim > 0)
          coded_tails[2 * row + rest] = kernels_.attention.encode(widened + key_dim, tail_dim, codes + coded_columns(key_dim));
      }
      if (!few) join_words(single, narrow_bytes_ / 2, narrow + static_cast<std::ptrdiff_t>(first) * narrow_bytes_ + 8 * (row - first));
    } else if (args_.type != ActivationType::kFloat32) {
      std::memcpy(narrow + static_cast<std::ptrdiff_t>(row) * narrow_bytes_, source, 2 * static_cast<std::size_t>(args_.dim));
    }
  }
  const KeySpan seen = visible_.seen_by(args_, batch, kv_head, 0, rows);
  const int steps = (seen.count + kKeys - 1) / kKeys;
  const bool latent = args_.value.data == args_.key.data;  // the values are the keys
  const std::ptrdiff_t bytes = args_.cache_bytes();
  for (int step = steps * split / splits; step < steps * (split + 1) / splits; ++step) {
    const KeySpan keys = {seen.first + step * kKeys, std::min(kKeys, seen.count - step * kKeys)};
    for (int row = 0; row < rows; row += kAttentionRows) {
      const int some = std::min(kAttentionRows, rows - row);
      const float* queries = query + static_cast<std::ptrdiff_t>(row) * dim;
      const std::byte* codes = narrow + static_cast<std::ptrdiff_t>(row) * narrow_bytes_;
      const std::ptrdiff_t coded_tail = coded_columns(key_dim) * (some <= kFewCodedRows ? 1 : 2 * kAttentionRows);
      const auto* halves = reinterpret_cast<const std::uint16_t*>(codes);
      for (int at = 0, run; at < keys.count; at += run) {
        run = run_of(args_, keys.first + at, keys.count - at);
        const int token = keys.first + at;
        const std::byte* key = token_of(args_, args_.key, batch, kv_head, token);
        const std::byte* ahead = key + 16 * bytes * args_.key.row_stride;
        if (args_.pages.table) {
          ahead = token_of(args_, args_.key, batch, kv_head, std::min(token + 16, seen.first + seen.count - 1));
          if (row == 0 && !by_pairs_) prefetch_values(batch, kv_head, token, run);
        }
        const std::byte* values = by_pairs_ && row == 0 && !latent ? token_of(args_, args_.value, batch, kv_head, token) : nullptr;
        score_({queries,
                halves,
                dim,
                some,
                key,
                ahead,
                bytes * args_.key.row_stride,
                run,
                key_dim,
                scores + at,
                kKeys,
                values,
                bytes * args_.value.row_stride,
                scales_of(args_, args_.key, batch, kv_head, token),
                {codes, narrow_bytes_ / 2, coded_rows + static_cast<std::ptrdiff_t>(2) * row}});
        if (tail_dim == 0) continue;
        const std::byte* tail = token_of(args_, args_.key_tail, batch, kv_head, keys.first + at);
        score_({queries + key_dim,
                halves + key_dim,
                dim,
                some,
                tail,
                tail + 16 * bytes * args_.key_tail.row_stride,
                bytes * args_.key_tail.row_stride,
                run,
                tail_dim,
                tails + at,
                kKeys,
                nullptr,
                0,
                scales_of(args_, args_.key_tail, batch, kv_head, token),
                {codes + coded_tail, narrow_bytes_ / 2, coded_tails + static_cast<std::ptrdiff_t>(2) * row}});
      }
      if (tail_dim > 0)
        for (int r = 0; r < some; ++r)
          for (int i = r * kKeys; i < r * kKeys + keys.count; ++i) scores[i] += tails[i];
      for (int r = row; r < row + some; ++r) {
        float* of_row = scores + (r - row) * kKeys;
        SoftmaxArgs softmax{of_row, kGroup, of_row, round_up(keys.count, kGroup), 1.0f, 0.0f, sums.largest[r], sums.sum[r]};
        const float factor = visible_.softmax(kernels_.attention, args_, query_row(args_, batch, kv_head, r), keys, softmax);
        sums.largest[r] = softmax.largest;
        sums.sum[r] = softmax.sum;
        float* values = sums.values + static_cast<std::ptrdiff_t>(r) * value_dim;
        if (factor != 1.0f)
          for (int d = 0; d < value_dim; ++d) values[d] *= factor;
      }
      for (int at = 0, run; at < keys.count; at += run) {
        run = run_of(args_, keys.first + at, keys.count - at);
        const int token = keys.first + at, next = token + kKeys;
        const std::byte* value = token_of(args_, args_.value, batch, kv_head, token);
        const bool reads_on = by_pairs_ && row == 0 && next < seen.first + seen.count;
        const std::byte* next_keys = reads_on ? token_of(args_, args_.key, batch, kv_head, next) : nullptr;
        mix_({scores + at, kKeys, some, value, bytes * args_.value.row_stride, run, args_.value_dim,
              sums.values + static_cast<std::ptrdiff_t>(row) * value_dim, value_dim, next_keys, bytes * args_.key.row_stride,
              scales_of(args_, args_.value, batch, kv_head, token)});
      }
    }
  }
}

void AttentionRowsJob::combine(int unit, std::byte* scratch) {
  const int value_dim = args_.padded_value_dim();
  const int batch = unit / args_.kv_heads, kv_head = unit % args_.kv_heads;
  const int splits = (first_units_[static_cast<std::size_t>(batch) + 1] - first_units_[static_cast<std::size_t>(batch)]) / args_.kv_heads;
  const int first = first_units_[static_cast<std::size_t>(batch)] + kv_head * splits;
  auto* combined = reinterpret_cast<float*>(scratch);
  for (int row = 0; row < args_.rows(); ++row) {
    const QueryRow where = query_row(args_, batch, kv_head, row);
    float largest = args_.sinks ? args_.sinks[where.head] : kMinusInfinity;
    for (int split = 0; split < splits; ++split) largest = std::fmax(largest, sums_of(first + split).largest[row]);
    float sum = args_.sinks ? std::exp(args_.sinks[where.head] - largest) : 0.0f;
    std::fill_n(combined, value_dim, 0.0f);
    for (int split = 0; split < splits; ++split) {
      const Sums part = sums_of(first + split);
      if (part.largest[row] == kMinusInfinity) continue;
      const float share = std::exp(part.largest[row] - largest);
      sum += share * part.sum[row];
      const float* values = part.values + static_cast<std::ptrdiff_t>(row) * value_dim;
      for (int d = 0; d < value_dim; ++d) combined[d] += share * values[d];
    }
    // The output of a query without visible keys is zero, as in PyTorch.
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int d = 0; d < value_dim; ++d) combined[d] *= inverse;
    const std::size_t index =
        (static_cast<std::size_t>(batch) * static_cast<std::size_t>(args_.queries) + static_cast<std::size_t>(where.query)) *
            static_cast<std::size_t>(args_.heads) +
        static_cast<std::size_t>(where.head);
    kernels_.narrow(args_.type, combined, args_.out + element_bytes(args_.type) * index * static_cast<std::size_t>(args_.value_dim),
                    args_.value_dim);
  }
}

}  // namespace moegraft
