// Scaled dot-product attention over a KV cache, in the cache's own layout and dtype.
//
// The caller owns query, key, value, mask and out, and must not change them during the call; the Engine owns the VisibleKeys and the
// scratch memory. Engine::attention chooses AttentionRowsJob for few queries, which reads the cache in place, and AttentionTilesJob for
// many, which packs the cache first. Every worker of the pool runs both phases of a job, and waits for the others between them:
//   rows   attend to a range of keys of one KV head; then combine the ranges of one KV head
//   tiles  pack a chunk of keys of one KV head; then attend with some rows of one KV head
// A unit's result does not depend on the worker. visible_keys.cpp evaluates masks; rows_job.cpp and tiles_job.cpp hold the two jobs.
//
// Sequences of different lengths keep their keys and values in pages of one pool (PagedAttention: Kwon et al. 2023, arXiv:2309.06180).
// A sequence's result depends on its own length only, and neither on the other sequences nor on the pages that it has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/memory.h"
#include "core/thread_pool.h"
#include "core/types.h"
#include "experts/segment_product.h"
#include "simd/kernels.h"

namespace moegraft {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int kFewRows = 40;  // of a KV head: up to these, reading the cache in place is faster than packing it (measured on EPYC Zen 5)

// A (batch, heads, rows, columns) tensor; strides in elements, columns contiguous.
struct HeadsView {
  const std::byte* data;
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t row_stride;
};

enum class MaskKind : int { kNone, kCausal, kBool, kAdded };

// Keys and values in pages: (pages, page_elements) of the queries' type. A page holds `page_tokens` tokens; the keys of a KV head are
// (page_tokens, columns) of it. The call appends new tokens, then query t of a sequence attends to its keys up to that of token held + t.
//
// Pages of codes have bytes instead: behind the codes of a KV head's keys or values, (page_tokens, columns) int8, are the scales of their
// rows, (page_tokens) float32. A row is rounded to 127 steps on each side of zero, the last of which is its largest magnitude.
struct Pages {
  const std::int64_t* table;  // (batch, table_width): the pages of each sequence in order; null: keys are not in pages
  const std::int64_t* held;   // (batch): tokens of each sequence before the call
  std::int64_t table_width;
  std::int64_t count;         // of the pool
  std::int64_t page_elements;
  int page_tokens;            // a power of two
  int window;                 // keys that a query attends to, its own included; 0: all
  bool coded;
  HeadsView new_keys;         // (batch, kv_heads, queries, dim - tail_dim)
  HeadsView new_values;       // (batch, kv_heads, queries, value_dim), or with a tail (batch, kv_heads, queries, tail_dim)
};

// A mask (batch, 1 or heads, queries, keys). kBool: whether a query attends to a key. kAdded: values added to the scores, in the queries'
// type; the type's lowest number and -infinity hide a key.
struct MaskView {
  MaskKind kind;
  const std::byte* data;
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t row_stride;
  int heads;
};

// out[b, t, h] = softmax(softcap(scale * q[b, h, t] . k[b, h / group, :]) + mask) . v[b, h / group, :], where `sinks` (heads, float32, or
// null) are logits of a key that has no value. The last columns of the keys may be in a tensor of their own, as the rotary part is in the
// cache of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): all heads share one latent, which is key and value.
struct AttentionArgs {
  ActivationType type;  // of query, key, value and out; keys and values in pages may be codes
  HeadsView query;  // (batch, heads, queries, dim)
  HeadsView key;  // (batch, kv_heads, keys, dim - tail_dim)
  HeadsView value;  // (batch, kv_heads, keys, value_dim)
  std::byte* out;  // (batch, queries, heads, value_dim), contiguous
  MaskView mask;
  const float* sinks;
  int batch;
  int heads;
  int kv_heads;
  int queries;
  int keys;
  int dim;
  int value_dim;
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0 for none
  int tail_dim = 0;  // 0: none
  HeadsView key_tail{};  // (batch, kv_heads, keys, tail_dim)
  Pages pages{};  // if given, `keys` is the most keys of a sequence, and key, value and key_tail are (pages, kv_heads, page_tokens, ...)

  int keys_of(int sequence) const { return pages.table ? static_cast<int>(pages.held[sequence]) + queries : keys; }
  bool coded() const { return pages.table && pages.coded; }
  CacheType cache_type() const { return coded() ? CacheType::kInt8 : static_cast<CacheType>(type); }
  std::ptrdiff_t cache_bytes() const { return coded() ? 1 : static_cast<std::ptrdiff_t>(element_bytes(type)); }  // of an element
  int group() const { return heads / kv_heads; }
  int rows() const { return queries * group(); }  // of one KV head: row t * group + g is query t of head kv_head * group + g
  int padded_dim() const { return round_up(dim, 32); }
  int padded_value_dim() const { return round_up(value_dim, 32); }
};

inline const std::byte* row_of(const HeadsView& view, ActivationType type, int batch, int head, int row) {
  return view.data +
         static_cast<std::ptrdiff_t>(element_bytes(type)) * (batch * view.batch_stride + head * view.head_stride + row * view.row_stride);
}

// Key, value or tail number `token` of a sequence.
inline const std::byte* token_of(const AttentionArgs& args, const HeadsView& view, int batch, int head, int token) {
  const Pages& pages = args.pages;
  if (!pages.table) return row_of(view, args.type, batch, head, token);
  const std::int64_t page = pages.table[batch * pages.table_width + (token >> __builtin_ctz(static_cast<unsigned>(pages.page_tokens)))];
  return view.data +
         args.cache_bytes() * (page * view.batch_stride + head * view.head_stride + (token & (pages.page_tokens - 1)) * view.row_stride);
}

// The scales of that token and of those behind it in its page; null where keys and values are no codes.
inline const float* scales_of(const AttentionArgs& args, const HeadsView& view, int batch, int head, int token) {
  if (!args.coded()) return nullptr;
  const int place = token & (args.pages.page_tokens - 1);
  const std::byte* first = token_of(args, view, batch, head, token - place);
  return reinterpret_cast<const float*>(first + args.pages.page_tokens * view.row_stride) + place;
}

// How many of `count` tokens from `token` on are rows of one stride.
inline int run_of(const AttentionArgs& args, int token, int count) {
  return args.pages.table ? std::min(count, args.pages.page_tokens - (token & (args.pages.page_tokens - 1))) : count;
}

// Where the keys of a layer, and its values or tails, begin in each page.
struct PageStarts {
  std::int64_t keys, values;
};

// Throws std::invalid_argument where the scale or the softcap is none that attention computes.
void require_numbers(float scale, float softcap);
// Sets key, value, key_tail and keys from `pages`, whose other members are set. `latent`: values are the keys' leading columns and new
// values their tail. Throws std::invalid_argument where a page is not in the pool, or too small for the layer.
void use_pages(AttentionArgs& args, std::byte* pool, const PageStarts& starts, bool latent);
// Writes the new keys and values to the pool, as codes if it has these.
void append_to_pages(const Kernels& kernels, const AttentionArgs& args);

struct QueryRow {
  int batch;
  int head;
  int query;
};

struct KeySpan {
  int first;
  int count;
};

inline QueryRow query_row(const AttentionArgs& args, int batch, int kv_head, int row) {
  return {batch, kv_head * args.group() + row % args.group(), row / args.group()};
}

// The keys that each query attends to, determined once per call: nearly all masks are one range of keys, which makes the mask unnecessary.
class VisibleKeys {
 public:
  struct Range {
    int first;
    int end;
    bool whole;  // whether every key of the range is visible and the mask adds nothing
  };

  void find(const AttentionArgs& args);
  const Range& of(const QueryRow& row) const {
    return ranges_[static_cast<std::size_t>((row.batch * heads_ + (heads_ == 1 ? 0 : row.head)) * queries_ + row.query)];
  }
  // The range of keys that includes all keys visible to a KV head's rows [first_row, end_row).
  KeySpan seen_by(const AttentionArgs& args, int batch, int kv_head, int first_row, int end_row) const;
  // Runs one step of a query's online softmax over raw scores of `keys`, padded to a multiple of 32, without masked keys. Returns the
  // factor for earlier sums.
  float softmax(const AttentionKernels& kernels, const AttentionArgs& args, const QueryRow& row, KeySpan keys, SoftmaxArgs& softmax) const;

 private:
  void hide(const AttentionArgs& args, const QueryRow& row, KeySpan keys, const SoftmaxArgs& softmax) const;

  int heads_ = 1;
  int queries_ = 0;
  std::vector<Range> ranges_;
};

// Attention of few queries, which reads the cache in place, once for all query heads that share it.

struct AttentionPhases {
  Phase* first;
  Phase* second;
};

class AttentionRowsJob final : public Job {
 public:
  AttentionRowsJob(const Kernels& kernels, const AttentionArgs& args, const VisibleKeys& visible, int workers,
                   const AttentionPhases& phases);

  void prepare(AlignedMemory& parts, AlignedMemory* workers);  // throws std::bad_alloc
  void run(int worker) noexcept override;
  void run(int worker, Upcoming& after) noexcept;  // prefetches what a worker reads after the job while it waits

 private:
  struct Sums;  // the partial results of a unit's rows
  struct Unit;
  Sums sums_of(int unit) const;
  Unit unit_of(int unit) const;
  void attend(int unit, std::byte* scratch);
  void prefetch_values(int batch, int kv_head, int token, int count) const;
  void combine(int unit, std::byte* scratch);

  const Kernels& kernels_;
  const AttentionArgs& args_;
  const VisibleKeys& visible_;
  const int workers_;
  const AttentionPhases phases_;
  bool by_codes_;  // by integers alone
  bool by_pairs_;  // or of bfloat16
  int narrow_bytes_;  // of a row's query in 16 bits, or as codes
  void (*score_)(const ScoreArgs& args);
  void (*mix_)(const MixArgs& args);
  std::vector<int> first_units_;  // of each sequence, and the number of all
  std::size_t part_floats_ = 0;
  std::byte* parts_ = nullptr;
  AlignedMemory* scratch_ = nullptr;
};

// Attention of many queries, by the products of the linear layers (segment_product.h). Keys are packed as the rows of one weight matrix,
// transposed values as the rows of another, and every tile of queries passes over both (the order of FlashAttention: Dao et al. 2022,
// arXiv:2205.14135).

class AttentionTilesJob final : public Job {
 public:
  AttentionTilesJob(const Kernels& kernels, const AttentionArgs& args, const VisibleKeys& visible, int workers,
                    const AttentionPhases& phases);

  void prepare(AlignedMemory& keys, AlignedMemory& values, AlignedMemory* workers);  // throws std::bad_alloc
  void run(int worker) noexcept override;

 private:
  struct Worker;
  struct Rows;  // the rows of a unit
  SegmentProduct product_of(int columns, int rows) const;
  Worker worker_of(int worker) const;
  std::size_t worker_bytes() const;
  int widest() const { return std::max(args_.padded_dim(), args_.padded_value_dim()); }  // row
  void pack(int unit, Worker& mine);
  struct Chunk;  // of the keys of one KV head
  Chunk chunk_of(int unit) const;
  int chunks_of(int batch) const;
  struct CacheRows;
  CacheRows rows_in(const HeadsView& view, const Chunk& chunk, int token, int rows, int columns, Worker& mine) const;
  void pack_keys(const Chunk& chunk, Worker& mine, std::byte* target);
  void pack_columns(const CacheRows& from, int rows, int first, int columns, std::byte* target, int first_row) const;
  void pack_values(const Chunk& chunk, Worker& mine, std::byte* target);
  void attend(int unit, Worker& mine);
  void encode_queries(const Rows& rows, Worker& mine);
  void step(const Rows& rows, int chunk, int first, int count, Worker& mine);
  void write(const Rows& rows, Worker& mine);

  const Kernels& kernels_;
  const AttentionArgs& args_;
  const VisibleKeys& visible_;
  const int workers_;
  const AttentionPhases phases_;
  const WeightType weights_;
  const Format format_;
  const int tile_rows_;
  const int unit_rows_;
  const std::size_t query_words_;  // of a row's record at most
  std::vector<int> first_chunks_;  // of each sequence, over its KV heads, and the number of all
  const std::size_t key_bytes_;  // of a packed chunk
  const std::size_t value_bytes_;
  std::byte* keys_ = nullptr;
  std::byte* values_ = nullptr;
  AlignedMemory* scratch_ = nullptr;
};

}  // namespace moegraft
