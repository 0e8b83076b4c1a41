#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace moegraft {
namespace {

// Both are chosen by size, not tuned: a chunk's keys and values (64 KiB at 128 columns in 16 bits) stay in L2 for all tiles of a unit.
constexpr int kChunkKeys = 128;
constexpr int kUnitTiles = 8;
constexpr int kMatrixTiles = 2;  // of the matrix kernel, in one tile of rows: as many as share its expanded weights in one pass

WeightType weights_for(ActivationType type) {
  return type == ActivationType::kFloat32   ? WeightType::kFloat32
         : type == ActivationType::kFloat16 ? WeightType::kFloat16
                                            : WeightType::kBFloat16;
}

// Transposes `count` rows to lanes: consecutive elements of a row (float32, float16), or pairs of elements (bfloat16), are 32 lanes apart.
template <class Word>
void pack_rows(const std::byte* source, std::ptrdiff_t stride_bytes, int rows, int words, Word* target) {
  for (int row = 0; row < rows; ++row, source += stride_bytes)
    for (int word = 0; word < words; ++word)
      std::memcpy(target + static_cast<std::ptrdiff_t>(word) * kBlockRows + row, source + sizeof(Word) * static_cast<std::size_t>(word),
                  sizeof(Word));
}

}  // namespace

struct AttentionTilesJob::Worker {
  float* widened;           // (padded dim or chunk keys,): one row at a time, of queries, keys or shares
  std::uint32_t* queries;   // records of the unit's rows, tile by tile
  std::uint32_t* shares;    // records of a tile's softmax over a chunk
  float* scores;            // (chunk keys / 32, tile rows, 32)
  float* sums;              // (unit rows, padded value_dim)
  float* largest;           // (unit rows,)
  float* sum;               // (unit rows,)
  float* tile;              // (tile rows, 32)
  float* factors;           // (tile rows,) for the sums of earlier chunks
  std::byte* rows;          // (32, padded dim) of the queries' type
  ExpandedWeights* expanded;
};

struct AttentionTilesJob::Chunk {
  int batch;
  int kv_head;
  int first;  // key
  int count;
};

// Rows of the cache in the queries' type.
struct AttentionTilesJob::CacheRows {
  const std::byte* first;
  std::ptrdiff_t bytes;  // from a row to the next
};

struct AttentionTilesJob::Rows {
  int batch;
  int kv_head;
  int first;
  int count;
};

AttentionTilesJob::AttentionTilesJob(const Kernels& kernels, const AttentionArgs& args, const VisibleKeys& visible, int workers,
                                     const AttentionPhases& phases)
    : kernels_(kernels),
      args_(args),
      visible_(visible),
      workers_(workers),
      phases_(phases),
      weights_(weights_for(args.type)),
      format_(format_of(weights_, args.type)),
      tile_rows_(kernels.matrix.serves(format_, kMatrixTiles * kernels.matrix.tile_tokens) ? kMatrixTiles * kernels.matrix.tile_tokens
                                                                                           : kernels.max_tokens[static_cast<int>(format_)]),
      unit_rows_(tile_rows_ * (kernels.matrix.serves(format_, tile_rows_) ? kUnitTiles / 2 : kUnitTiles)),
      query_words_(static_cast<std::size_t>(args.padded_dim())),
      key_bytes_(block_bytes(weights_, args.dim) * (kChunkKeys / kBlockRows)),
      value_bytes_(block_bytes(weights_, kChunkKeys) * static_cast<std::size_t>(args.padded_value_dim() / kBlockRows)) {}

std::size_t AttentionTilesJob::worker_bytes() const {
  const auto query_words = static_cast<std::size_t>(unit_rows_) * static_cast<std::size_t>(args_.padded_dim());
  const auto tile_floats = static_cast<std::size_t>(tile_rows_) * (2 * kChunkKeys + kBlockRows + 1);
  const auto sums = static_cast<std::size_t>(unit_rows_) * static_cast<std::size_t>(args_.padded_value_dim() + 2);
  const auto rows = args_.coded() ? static_cast<std::size_t>(kBlockRows) * static_cast<std::size_t>(widest()) : 0;
  return sizeof(float) * (static_cast<std::size_t>(std::max(widest(), kChunkKeys)) + query_words + tile_floats + sums + rows);
}

SegmentProduct AttentionTilesJob::product_of(int columns, int rows) const { return {kernels_, weights_, format_, columns / kGroup, rows}; }

AttentionTilesJob::Worker AttentionTilesJob::worker_of(int worker) const {
  auto* floats = reinterpret_cast<float*>(scratch_[worker].data());
  const auto take = [&floats](std::size_t count) {
    float* taken = floats;
    floats += count;
    return taken;
  };
  const auto rows = static_cast<std::size_t>(unit_rows_), tile = static_cast<std::size_t>(tile_rows_);
  Worker mine{};
  mine.widened = take(static_cast<std::size_t>(std::max(widest(), kChunkKeys)));
  mine.queries = reinterpret_cast<std::uint32_t*>(take(rows * static_cast<std::size_t>(args_.padded_dim())));
  mine.shares = reinterpret_cast<std::uint32_t*>(take(tile * kChunkKeys));
  mine.scores = take(tile * kChunkKeys);
  mine.tile = take(tile * kBlockRows);
  mine.factors = take(tile);
  mine.sums = take(rows * static_cast<std::size_t>(args_.padded_value_dim()));
  mine.largest = take(rows);
  mine.sum = take(rows);
  mine.rows = reinterpret_cast<std::byte*>(floats);
  return mine;
}

void AttentionTilesJob::prepare(AlignedMemory& keys, AlignedMemory& values, AlignedMemory* workers) {
  first_chunks_.assign(1, 0);
  for (int batch = 0; batch < args_.batch; ++batch)
    first_chunks_.push_back(first_chunks_.back() + args_.kv_heads * ((args_.keys_of(batch) + kChunkKeys - 1) / kChunkKeys));
  const auto chunks = static_cast<std::size_t>(first_chunks_.back());
  keys.reserve(chunks * key_bytes_);
  values.reserve(chunks * value_bytes_);
  keys_ = keys.data();
  values_ = values.data();
  scratch_ = workers;
  for (int worker = 0; worker < workers_; ++worker) workers[worker].reserve(worker_bytes());
  phases_.first->reset(static_cast<int>(chunks));
  phases_.second->reset(args_.batch * args_.kv_heads * ((args_.rows() + unit_rows_ - 1) / unit_rows_));
}

void AttentionTilesJob::run(int worker) noexcept {
  Worker mine = worker_of(worker);
  ExpandedWeights expanded;
  mine.expanded = &expanded;
  const MatrixUse use(kernels_, kernels_.matrix.serves(format_, tile_rows_));
  int count = 0;
  for (int unit = phases_.first->take(worker); unit >= 0; unit = phases_.first->take(worker), ++count) pack(unit, mine);
  phases_.first->finish(count);
  phases_.first->wait();
  count = 0;
  for (int unit = phases_.second->take(worker); unit >= 0; unit = phases_.second->take(worker), ++count) attend(unit, mine);
  phases_.second->finish(count);
  phases_.second->wait();
}

int AttentionTilesJob::chunks_of(int batch) const {
  return (first_chunks_[static_cast<std::size_t>(batch) + 1] - first_chunks_[static_cast<std::size_t>(batch)]) / args_.kv_heads;
}

AttentionTilesJob::Chunk AttentionTilesJob::chunk_of(int unit) const {
  const auto after = std::upper_bound(first_chunks_.begin(), first_chunks_.end(), unit);
  const int batch = static_cast<int>(after - first_chunks_.begin()) - 1, chunks = chunks_of(batch), place = unit - *(after - 1);
  const int first = place % chunks * kChunkKeys;
  return {batch, place / chunks, first, std::min(kChunkKeys, args_.keys_of(batch) - first)};
}

void AttentionTilesJob::pack(int unit, Worker& mine) {
  const Chunk chunk = chunk_of(unit);
  pack_keys(chunk, mine, keys_ + key_bytes_ * static_cast<std::size_t>(unit));
  pack_values(chunk, mine, values_ + value_bytes_ * static_cast<std::size_t>(unit));
}

// Rows of one page, from a token on. Codes are expanded, so that they stay until the next call.
AttentionTilesJob::CacheRows AttentionTilesJob::rows_in(const HeadsView& view, const Chunk& chunk, int token, int rows, int columns,
                                                        Worker& mine) const {
  const std::byte* first = token_of(args_, view, chunk.batch, chunk.kv_head, token);
  const float* scales = scales_of(args_, view, chunk.batch, chunk.kv_head, token);
  if (scales == nullptr) return {first, args_.cache_bytes() * view.row_stride};
  const std::ptrdiff_t bytes = static_cast<std::ptrdiff_t>(element_bytes(args_.type)) * columns;
  for (int row = 0; row < rows; ++row) {
    const auto* codes = reinterpret_cast<const std::int8_t*>(first) + row * view.row_stride;
    for (int column = 0; column < columns; ++column) mine.widened[column] = scales[row] * static_cast<float>(codes[column]);
    kernels_.narrow(args_.type, mine.widened, mine.rows + row * bytes, columns);
  }
  return {mine.rows, bytes};
}

void AttentionTilesJob::pack_keys(const Chunk& chunk, Worker& mine, std::byte* target) {
  std::memset(target, 0, key_bytes_);
  const int key_dim = args_.dim - args_.tail_dim;
  for (int block = 0; block < chunk.count; block += kBlockRows, target += block_bytes(weights_, args_.dim)) {
    const int rows = std::min(kBlockRows, chunk.count - block);
    for (int row = 0, run; row < rows; row += run) {
      const int token = chunk.first + block + row;
      run = run_of(args_, token, rows - row);
      pack_columns(rows_in(args_.key, chunk, token, run, key_dim, mine), run, 0, key_dim, target, row);
      if (args_.tail_dim > 0)
        pack_columns(rows_in(args_.key_tail, chunk, token, run, args_.tail_dim, mine), run, key_dim, args_.tail_dim, target, row);
    }
  }
}

// Packs columns of rows, which become columns [first, first + columns) of a block's rows from `first_row` on.
void AttentionTilesJob::pack_columns(const CacheRows& from, int rows, int first, int columns, std::byte* target, int first_row) const {
  const auto [source, stride] = from;
  const std::ptrdiff_t start = static_cast<std::ptrdiff_t>(first) * kBlockRows + first_row;
  if (weights_ == WeightType::kFloat32) {
    pack_rows(source, stride, rows, columns, reinterpret_cast<std::uint32_t*>(target) + start);
  } else if (weights_ == WeightType::kFloat16) {
    pack_rows(source, stride, rows, columns, reinterpret_cast<std::uint16_t*>(target) + start);
  } else {
    // Half a block of pairs is 16 rows: pair p of row r is at (2 p + r / 16) * 16 + r % 16, which is p * 32 + r.
    const int pairs = first % 2 == 0 ? columns / 2 : 0;
    if (pairs > 0)
      pack_rows(source, stride, rows, pairs,
                reinterpret_cast<std::uint32_t*>(target) + static_cast<std::ptrdiff_t>(first / 2) * kBlockRows + first_row);
    auto* elements = reinterpret_cast<std::uint16_t*>(target);
    for (int column = 2 * pairs; column < columns; ++column) {
      const int place = first + column;
      for (int row = 0; row < rows; ++row)
        std::memcpy(elements + static_cast<std::ptrdiff_t>(2) * (place / 2 * kBlockRows + first_row + row) + place % 2,
                    source + row * stride + 2 * static_cast<std::ptrdiff_t>(column), 2);
    }
  }
}

void AttentionTilesJob::pack_values(const Chunk& chunk, Worker& mine, std::byte* target) {
  std::memset(target, 0, value_bytes_);
  const std::size_t block = block_bytes(weights_, kChunkKeys);
  for (int k = 0; k < chunk.count; ++k) {
    const std::byte* source = rows_in(args_.value, chunk, chunk.first + k, 1, args_.value_dim, mine).first;
    for (int d = 0; d < args_.value_dim; d += kBlockRows) {
      std::byte* rows = target + block * static_cast<std::size_t>(d / kBlockRows);
      const int present = std::min(kBlockRows, args_.value_dim - d);
      if (weights_ == WeightType::kBFloat16) {
        auto* pairs = reinterpret_cast<std::uint16_t*>(rows) + static_cast<std::ptrdiff_t>(k / 2) * kBlockRows * 2 + k % 2;
        for (int r = 0; r < present; ++r) std::memcpy(pairs + 2 * r, source + 2 * static_cast<std::ptrdiff_t>(d + r), 2);
      } else {
        const std::size_t bytes = element_bytes(args_.type);
        std::memcpy(rows + bytes * static_cast<std::size_t>(k * kBlockRows), source + bytes * static_cast<std::size_t>(d),
                    bytes * static_cast<std::size_t>(present));
      }
    }
  }
}

void AttentionTilesJob::attend(int unit, Worker& mine) {
  const int units = (args_.rows() + unit_rows_ - 1) / unit_rows_;
  // The last rows attend to the most keys, so they come first for balance.
  const int position = units - 1 - unit % units;
  const int first = position * unit_rows_;
  const Rows rows = {unit / units / args_.kv_heads, unit / units % args_.kv_heads, first, std::min(unit_rows_, args_.rows() - first)};
  std::fill_n(mine.largest, rows.count, kMinusInfinity);
  std::fill_n(mine.sum, rows.count, 0.0f);
  std::fill_n(mine.sums, static_cast<std::ptrdiff_t>(rows.count) * args_.padded_value_dim(), 0.0f);
  encode_queries(rows, mine);
  const KeySpan seen = visible_.seen_by(args_, rows.batch, rows.kv_head, rows.first, rows.first + rows.count);
  if (seen.count > 0) {
    const int last = (seen.first + seen.count - 1) / kChunkKeys;
    for (int chunk = seen.first / kChunkKeys; chunk <= last; ++chunk)
      for (int tile = 0; tile < rows.count; tile += tile_rows_) step(rows, chunk, tile, std::min(tile_rows_, rows.count - tile), mine);
  }
  write(rows, mine);
}

void AttentionTilesJob::encode_queries(const Rows& rows, Worker& mine) {
  const int dim = args_.padded_dim(), groups = dim / kGroup;
  for (int first = 0; first < rows.count; first += tile_rows_) {
    const SegmentProduct product = product_of(dim, std::min(tile_rows_, rows.count - first));
    std::uint32_t* records = mine.queries + static_cast<std::size_t>(first) * query_words_;
    for (int index = 0; index < product.tiling().count(); ++index) {
      const Tile tile = product.tiling()[index];
      for (int i = 0; i < tile.tokens; ++i) {
        const QueryRow where = query_row(args_, rows.batch, rows.kv_head, rows.first + first + tile.first + i);
        kernels_.widen(args_.type, row_of(args_.query, args_.type, where.batch, where.head, where.query), mine.widened, args_.dim);
        std::fill(mine.widened + args_.dim, mine.widened + dim, 0.0f);
        kernels_.encode[static_cast<int>(product.records())](
            mine.widened, groups, records + product.tile_start(index) + product.group_words() * static_cast<std::size_t>(i),
            product.group_stride(index));
      }
    }
  }
}

// Multiplies a tile of `count` rows from `first` on with one chunk.
void AttentionTilesJob::step(const Rows& rows, int chunk, int first, int count, Worker& mine) {
  const auto place =
      static_cast<std::size_t>(first_chunks_[static_cast<std::size_t>(rows.batch)] + rows.kv_head * chunks_of(rows.batch) + chunk);
  const KeySpan seen = visible_.seen_by(args_, rows.batch, rows.kv_head, rows.first + first, rows.first + first + count);
  const int start = chunk * kChunkKeys, end = std::min({start + kChunkKeys, args_.keys_of(rows.batch), seen.first + seen.count});
  // In front of the first visible key and behind the last, whole groups are left out.
  const int before = std::max(0, seen.first - start) / kGroup * kGroup;
  const KeySpan keys = {start + before, end - start - before};
  if (seen.count == 0 || keys.count <= 0) return;
  const int groups = (keys.count + kGroup - 1) / kGroup;
  const SegmentProduct scores = product_of(args_.padded_dim(), count), mix = product_of(groups * kGroup, count);
  const std::size_t block_floats = static_cast<std::size_t>(tile_rows_) * kBlockRows;
  const std::byte* block = keys_ + key_bytes_ * place + block_bytes(weights_, args_.dim) * static_cast<std::size_t>(before / kBlockRows);
  for (int group = 0; group < groups; ++group, block += block_bytes(weights_, args_.dim))
    scores.multiply(block, block, false, mine.queries + static_cast<std::size_t>(first) * query_words_,
                    mine.scores + block_floats * static_cast<std::size_t>(group), *mine.expanded);
  const int value_dim = args_.padded_value_dim();
  for (int index = 0; index < mix.tiling().count(); ++index) {
    const Tile tile = mix.tiling()[index];
    for (int i = 0; i < tile.tokens; ++i) {
      const int row = tile.first + i, unit_row = first + row;
      float* raw = mine.scores + static_cast<std::ptrdiff_t>(scores.first_row(index) + i) * kBlockRows;
      SoftmaxArgs softmax{raw,
                          static_cast<std::ptrdiff_t>(block_floats),
                          mine.widened,
                          groups * kGroup,
                          1.0f,
                          0.0f,
                          mine.largest[unit_row],
                          mine.sum[unit_row]};
      mine.factors[row] =
          visible_.softmax(kernels_.attention, args_, query_row(args_, rows.batch, rows.kv_head, rows.first + unit_row), keys, softmax);
      mine.largest[unit_row] = softmax.largest;
      mine.sum[unit_row] = softmax.sum;
      kernels_.encode[static_cast<int>(mix.records())](
          mine.widened, groups, mine.shares + mix.tile_start(index) + mix.group_words() * static_cast<std::size_t>(i),
          mix.group_stride(index));
    }
  }
  block = values_ + value_bytes_ * place + block_bytes(weights_, before);
  for (int d = 0; d < value_dim; d += kBlockRows, block += block_bytes(weights_, kChunkKeys)) {
    mix.multiply(block, block, false, mine.shares, mine.tile, *mine.expanded);
    for (int index = 0; index < mix.tiling().count(); ++index) {
      const Tile tile = mix.tiling()[index];
      kernels_.attention.fold(mine.sums + static_cast<std::ptrdiff_t>(first + tile.first) * value_dim + d, value_dim,
                              mine.tile + static_cast<std::ptrdiff_t>(mix.first_row(index)) * kBlockRows, mine.factors + tile.first,
                              tile.tokens);
    }
  }
}

void AttentionTilesJob::write(const Rows& rows, Worker& mine) {
  const int value_dim = args_.padded_value_dim();
  for (int row = 0; row < rows.count; ++row) {
    const QueryRow where = query_row(args_, rows.batch, rows.kv_head, rows.first + row);
    float* sums = mine.sums + static_cast<std::ptrdiff_t>(row) * value_dim;
    float sum = mine.sum[row], share = 1.0f;
    if (args_.sinks) {
      const float sink = args_.sinks[where.head], largest = std::fmax(sink, mine.largest[row]);
      share = mine.largest[row] == kMinusInfinity ? 0.0f : std::exp(mine.largest[row] - largest);
      sum = share * sum + std::exp(sink - largest);
    }
    // The output of a query without visible keys is zero, as in PyTorch.
    const float inverse = sum == 0.0f ? 0.0f : share / sum;
    for (int d = 0; d < value_dim; ++d) sums[d] *= inverse;
    const std::size_t index =
        (static_cast<std::size_t>(rows.batch) * static_cast<std::size_t>(args_.queries) + static_cast<std::size_t>(where.query)) *
            static_cast<std::size_t>(args_.heads) +
        static_cast<std::size_t>(where.head);
    kernels_.narrow(args_.type, sums, args_.out + element_bytes(args_.type) * index * static_cast<std::size_t>(args_.value_dim),
                    args_.value_dim);
  }
}

}  // namespace moegraft
