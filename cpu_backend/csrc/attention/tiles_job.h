// Attention of many queries, by the register tiles of the linear layers: keys are packed as the rows of one weight matrix, values as the
// rows of another, transposed, and every tile of queries passes over both (FlashAttention's order: Dao et al. 2022, arXiv:2205.14135).
//
// Units: a chunk of keys of one KV head to pack; then some rows of one KV head to compute. A unit's result does not depend on who
// computes it.
#pragma once

#include "attention/attention.h"
#include "attention/rows_job.h"
#include "core/memory.h"
#include "core/thread_pool.h"
#include "simd/kernels.h"

namespace moegraft {

class AttentionTilesJob final : public Job {
 public:
  AttentionTilesJob(const Kernels& kernels, const AttentionArgs& args, const VisibleKeys& visible, int workers, const AttentionPhases& phases);

  void prepare(AlignedMemory& keys, AlignedMemory& values, AlignedMemory* workers);  // throws std::bad_alloc
  void run(int worker) noexcept override;

 private:
  struct Worker;
  struct Rows;  // the rows of a unit
  Worker worker_of(int worker) const;
  std::size_t worker_bytes() const;
  void pack(int unit);
  void pack_keys(int head, int chunk);
  void pack_values(int head, int chunk);
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
  const int chunks_;
  const std::size_t key_bytes_;    // of a packed chunk
  const std::size_t value_bytes_;
  std::byte* keys_ = nullptr;
  std::byte* values_ = nullptr;
  AlignedMemory* scratch_ = nullptr;
};

}  // namespace moegraft
