// All routed experts of one layer in the block layout: one contiguous, 64-byte aligned block of bytes per expert.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/machine.h"
#include "core/memory.h"
#include "core/types.h"
#include "experts/block_layout.h"
#include "experts/frames.h"

namespace moegraft {

// In the dense layout, rows that are computed together are adjacent; in the sparse layout, the rows of an inactive neuron can be skipped.
enum class LayoutKind : int { kDense, kSparse };

// Offsets within an expert.
// Dense: gate and up rows interleaved 16 by 16 (a block is 16 gate rows and 16 up rows, so one stream feeds both and a block ends in 16
// finished neurons), then down, then float32 biases.
// Sparse: gate in blocks (up in blocks where there is no gate), then the neurons' rows of up, then their columns of down as rows, then
// biases.
struct ExpertLayout {
  ExpertLayout() = default;
  // Throws std::invalid_argument if the types do not fit the shape or the kind.
  ExpertLayout(const ExpertsShape& shape, WeightTypes types, LayoutKind kind);

  int neurons = 0;         // intermediate size, padded to 32
  int gate_up_blocks = 0;
  int down_blocks = 0;
  std::size_t gate_up_block_bytes = 0;
  std::size_t down_block_bytes = 0;
  std::size_t neuron_bytes = 0;    // sparse: a neuron's row of up, and of down
  std::size_t up_offset = 0;       // sparse
  std::size_t down_offset = 0;
  std::size_t gate_bias_offset = 0;
  std::size_t up_bias_offset = 0;
  std::size_t down_bias_offset = 0;
  std::size_t expert_bytes = 0;
};

// Bytes of another owner, such as a mapped cache file.
struct ExternalBuffer {
  std::byte* data;
  std::size_t bytes;
  bool writable;
};

class PackedExperts {
 public:
  // Throws std::invalid_argument on sizes below one, std::bad_alloc.
  PackedExperts(const ExpertsShape& shape, const GateSpec& gate, WeightTypes types, LayoutKind kind = LayoutKind::kDense);
  // Over bytes that outlive this object; if they are read-only, everything counts as packed. Throws std::invalid_argument on a wrong
  // size or alignment.
  PackedExperts(const ExpertsShape& shape, const GateSpec& gate, WeightTypes types, LayoutKind kind, const ExternalBuffer& buffer);

  const ExpertsShape& shape() const { return shape_; }
  const GateSpec& gate() const { return gate_; }
  WeightTypes types() const { return types_; }
  WeightType type_of(Part part) const { return part == Part::kDown ? types_.down : types_.gate_up; }
  LayoutKind kind() const { return kind_; }
  const ExpertLayout& layout() const { return layout_; }
  // Before anything is packed: each matrix of an expert is divided over the nodes by rows, where the memory is this object's own and the
  // layout dense.
  void divide(const MemoryNodes& nodes);
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return layout_.expert_bytes * static_cast<std::size_t>(shape_.num_experts); }
  bool writable() const { return writable_; }

  // Different experts, or different parts of one, may be packed from several threads at once. All throw std::invalid_argument.
  void pack(int expert, Part part, const RowsView& rows);
  // Exact, except for down in a sparse layout, whose groups run along the other dimension, so that it is quantised again.
  void pack_quantized(int expert, Part part, const QuantizedRowsView& rows);
  void pack_blocks(int expert, Part part, const StoredRowsView& rows);  // exact
  void pack_bias(int expert, Part part, const float* values, int count);
  void unpack(int expert, Part part, float* rows_out) const;
  int rows_of(Part part) const { return part == Part::kDown ? shape_.hidden : shape_.intermediate; }
  int cols_of(Part part) const { return part == Part::kDown ? shape_.intermediate : shape_.hidden; }

  // Bit p: matrix of part p; bit 3 + p: its bias.
  std::uint8_t packed_mask(int expert) const { return packed_[static_cast<std::size_t>(expert)].load(std::memory_order_acquire); }
  bool complete(int expert) const { return (packed_mask(expert) & complete_mask_) == complete_mask_; }
  std::string missing_parts(int expert) const;

  // Blocks until the expert is in memory, where experts are in frames.
  const std::byte* expert(int index) const { return frames_ == nullptr ? at(index) : frames_->wait(layer_, index); }
  const std::byte* in_memory(int index) const { return frames_ == nullptr ? at(index) : frames_->peek(layer_, index); }  // null: not yet

  // From now on, experts are computed from frames, in which they are the `layer`; `data` is the mapped file.
  void use_frames(std::shared_ptr<ExpertFrames> frames, int layer) {
    frames_ = std::move(frames);
    layer_ = layer;
  }
  ExpertFrames* frames() const { return frames_.get(); }
  int layer() const { return layer_; }  // in the frames

 private:
  const std::byte* at(int index) const { return data_ + layout_.expert_bytes * static_cast<std::size_t>(index); }
  bool in_rows(Part part) const;  // whether the part is stored as sparse rows instead of blocks
  HalfBlock half_block(int expert, Part part, int chunk) const;
  std::byte* sparse_row(int expert, Part part, int neuron) const;
  void check(int expert, Part part, int rows, int cols) const;
  void place(int expert, Part part) const;
  void mark(int expert, int bit) { packed_[static_cast<std::size_t>(expert)].fetch_or(static_cast<std::uint8_t>(1 << bit)); }

  ExpertsShape shape_;
  GateSpec gate_;
  WeightTypes types_;
  LayoutKind kind_;
  ExpertLayout layout_;
  AlignedMemory memory_;
  std::byte* data_ = nullptr;
  bool writable_ = true;
  std::uint8_t complete_mask_ = 0;
  std::vector<std::atomic<std::uint8_t>> packed_;
  std::optional<MemoryNodes> nodes_;  // over which the memory is divided
  std::shared_ptr<ExpertFrames> frames_;  // null: all experts are in `data_`
  int layer_ = -1;
};

// One matrix of nn.Linear in the same layout, with an optional bias.
class PackedLinear {
 public:
  PackedLinear(int rows, int cols, WeightType type);  // throws std::invalid_argument, std::bad_alloc
  static std::size_t bytes_for(int rows, int cols, WeightType type);  // throws std::invalid_argument

  int rows() const { return rows_; }
  int cols() const { return cols_; }
  WeightType type() const { return type_; }
  int blocks() const { return round_up(rows_, kBlockRows) / kBlockRows; }
  const std::byte* block(int index) const { return memory_.data() + block_bytes(type_, cols_) * static_cast<std::size_t>(index); }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }
  std::size_t bytes() const { return block_bytes(type_, cols_) * static_cast<std::size_t>(blocks()) + bias_.size() * sizeof(float); }
  bool packed() const { return packed_; }

  // Before anything is packed: the rows are divided over the nodes.
  void divide(const MemoryNodes& nodes);
  void pack(const RowsView& rows);
  void pack_quantized(const QuantizedRowsView& rows);
  void pack_blocks(const StoredRowsView& rows);
  void pack_bytes(const std::byte* bytes, std::size_t count);  // those of `block` for all blocks, of another object
  void pack_bias(const float* values, int count);
  void unpack(float* rows_out) const;

 private:
  HalfBlock half_block(int chunk) const;
  void check(int rows, int cols) const;

  int rows_;
  int cols_;
  WeightType type_;
  AlignedMemory memory_;
  std::vector<float> bias_;
  bool packed_ = false;
};

}  // namespace moegraft
