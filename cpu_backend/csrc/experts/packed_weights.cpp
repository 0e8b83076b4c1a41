#include "experts/packed_weights.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "core/names.h"
#include "experts/block_layout.h"

namespace moegraft {
namespace {

[[noreturn]] void raise(const std::string& message) { throw std::invalid_argument(message); }

std::string pair_text(int rows, int cols) { return "(" + std::to_string(rows) + ", " + std::to_string(cols) + ")"; }

ExpertsShape checked(const ExpertsShape& shape) {
  if (shape.num_experts < 1 || shape.hidden < 1 || shape.intermediate < 1)
    raise("PackedExperts: num_experts, hidden and intermediate must be at least 1");
  return shape;
}

std::uint8_t mask_of(const ExpertsShape& shape) {
  const int matrices = shape.gated ? 0b111 : 0b110;
  return static_cast<std::uint8_t>(matrices | (shape.bias ? matrices << 3 : 0));
}

void check_cols(WeightType type, int cols) {
  if (is_stored(type) && cols % coded_format(type).columns != 0)
    raise(std::string(name_of(type)) + " needs a multiple of " + std::to_string(coded_format(type).columns) + " columns, found " +
          std::to_string(cols) + "; use int8");
}

WeightTypes checked(const ExpertsShape& shape, WeightTypes types, LayoutKind kind) {
  const bool one_plain = types.gate_up == types.down && !is_stored(types.gate_up);
  if (kind == LayoutKind::kSparse && !one_plain) raise("the sparse layout does not support " + name_of(types) + "; use int8");
  check_cols(types.gate_up, shape.hidden);
  check_cols(types.down, shape.intermediate);
  return types;
}

const char* packing_functions(WeightType type) {
  return is_stored(type) ? "pack_blocks" : is_quantized(type) ? "pack or pack_quantized" : "pack";
}

void check_floats(WeightType type) {
  if (is_stored(type)) raise(std::string("pack: the weights are ") + name_of(type) + "; use pack_blocks");
}

void check_stored(WeightType type) {
  if (!is_stored(type)) raise(std::string("pack_blocks: the weights are ") + name_of(type) + "; use " + packing_functions(type));
}

void check_quantizable(WeightType type, int cols) {
  if (!is_quantized(type)) raise(std::string("pack_quantized: the weights are ") + name_of(type) + "; use " + packing_functions(type));
  if (cols % kGroup != 0) raise("pack_quantized: expected a multiple of 32 columns, found " + std::to_string(cols) + "; use pack");
}

void check_codes(WeightType type, const QuantizedRowsView& rows) {
  if (type != WeightType::kInt4) return;
  const std::size_t count = static_cast<std::size_t>(rows.rows) * rows.cols;
  for (std::size_t i = 0; i < count; ++i)
    if (rows.codes[i] < -8 || rows.codes[i] > 7)
      raise("pack_quantized: code " + std::to_string(rows.codes[i]) + " is not an int4 (-8 to 7)");
}

}  // namespace

ExpertLayout::ExpertLayout(const ExpertsShape& shape, WeightTypes types, LayoutKind kind) {
  checked(shape, types, kind);
  const bool sparse = kind == LayoutKind::kSparse;
  neurons = round_up(shape.intermediate, kGroup);
  gate_up_blocks = neurons * (shape.gated && !sparse ? 2 : 1) / kBlockRows;
  down_blocks = round_up(shape.hidden, kBlockRows) / kBlockRows;
  gate_up_block_bytes = block_bytes(types.gate_up, shape.hidden);
  down_block_bytes = sparse ? 0 : block_bytes(types.down, shape.intermediate);
  neuron_bytes = sparse ? row_bytes(types.gate_up, shape.hidden) : 0;
  up_offset = gate_up_block_bytes * static_cast<std::size_t>(gate_up_blocks);
  const std::size_t rows = neuron_bytes * static_cast<std::size_t>(neurons);
  down_offset = up_offset + (shape.gated ? rows : 0);
  gate_bias_offset = down_offset + (sparse ? rows : down_block_bytes * static_cast<std::size_t>(down_blocks));
  up_bias_offset = gate_bias_offset + (shape.bias && shape.gated ? sizeof(float) * static_cast<std::size_t>(neurons) : 0);
  down_bias_offset = up_bias_offset + (shape.bias ? sizeof(float) * static_cast<std::size_t>(neurons) : 0);
  expert_bytes = down_bias_offset + (shape.bias ? sizeof(float) * static_cast<std::size_t>(down_blocks) * kBlockRows : 0);
}

PackedExperts::PackedExperts(const ExpertsShape& shape, const GateSpec& gate, WeightTypes types, LayoutKind kind)
    : shape_(checked(shape)),
      gate_(gate),
      types_(types),
      kind_(kind),
      layout_(shape, types, kind),
      complete_mask_(mask_of(shape)),
      packed_(static_cast<std::size_t>(shape.num_experts)) {
  memory_ = AlignedMemory(bytes());
  data_ = memory_.data();
}

PackedExperts::PackedExperts(const ExpertsShape& shape, const GateSpec& gate, WeightTypes types, LayoutKind kind,
                             const ExternalBuffer& buffer)
    : shape_(checked(shape)),
      gate_(gate),
      types_(types),
      kind_(kind),
      layout_(shape, types, kind),
      data_(buffer.data),
      writable_(buffer.writable),
      complete_mask_(mask_of(shape)),
      packed_(static_cast<std::size_t>(shape.num_experts)) {
  if (buffer.bytes != bytes())
    raise("PackedExperts: expected a buffer of " + std::to_string(bytes()) + " bytes, found " + std::to_string(buffer.bytes));
  if (reinterpret_cast<std::uintptr_t>(buffer.data) % 64 != 0) raise("PackedExperts: the buffer must start at a multiple of 64 bytes");
  if (!writable_)
    for (auto& mask : packed_) mask.store(complete_mask_);
}

void PackedExperts::divide(const MemoryNodes& nodes) {
  if (!nodes.have_memory() || memory_.data() == nullptr || kind_ == LayoutKind::kSparse) return;
  nodes_ = nodes;
  memory_.prepare_ranges(layout_.down_block_bytes * static_cast<std::size_t>(layout_.down_blocks / nodes.count()));
}

// Gate and up share blocks, of which the parts packed later find the pages placed.
void PackedExperts::place(int expert, Part part) const {
  if (!nodes_) return;
  std::byte* first = data_ + layout_.expert_bytes * static_cast<std::size_t>(expert);
  const int neuron_groups = layout_.neurons / kGroup;
  if (part == Part::kDown) nodes_->place(first + layout_.down_offset, layout_.down_blocks, layout_.down_block_bytes);
  else nodes_->place(first, neuron_groups, layout_.gate_up_block_bytes * static_cast<std::size_t>(layout_.gate_up_blocks / neuron_groups));
}

void PackedExperts::check(int expert, Part part, int rows, int cols) const {
  if (!writable_) raise("PackedExperts: the buffer is read-only; nothing can be packed into it");
  if (expert < 0 || expert >= shape_.num_experts)
    raise("expert " + std::to_string(expert) + " is out of range: there are " + std::to_string(shape_.num_experts));
  if (part == Part::kGate && !shape_.gated) raise("these experts are ungated: there is no part 'gate', use 'up'");
  if (rows != rows_of(part) || cols != cols_of(part))
    raise(std::string("part '") + name_of(part) + "': expected shape " + pair_text(rows_of(part), cols_of(part)) + ", found " +
          pair_text(rows, cols));
}

bool PackedExperts::in_rows(Part part) const {
  return kind_ == LayoutKind::kSparse && (part == Part::kDown || (part == Part::kUp && shape_.gated));
}

HalfBlock PackedExperts::half_block(int index, Part part, int chunk) const {
  std::byte* base = data_ + layout_.expert_bytes * static_cast<std::size_t>(index);
  if (part == Part::kDown) return {base + layout_.down_offset + layout_.down_block_bytes * static_cast<std::size_t>(chunk / 2), chunk % 2};
  if (!shape_.gated || kind_ == LayoutKind::kSparse)
    return {base + layout_.gate_up_block_bytes * static_cast<std::size_t>(chunk / 2), chunk % 2};
  return {base + layout_.gate_up_block_bytes * static_cast<std::size_t>(chunk), part == Part::kUp ? 1 : 0};
}

std::byte* PackedExperts::sparse_row(int index, Part part, int neuron) const {
  const std::size_t offset = part == Part::kDown ? layout_.down_offset : layout_.up_offset;
  return data_ + layout_.expert_bytes * static_cast<std::size_t>(index) + offset + layout_.neuron_bytes * static_cast<std::size_t>(neuron);
}

void PackedExperts::pack(int expert, Part part, const RowsView& rows) {
  check(expert, part, rows.rows, rows.cols);
  const WeightType type = type_of(part);
  check_floats(type);
  place(expert, part);
  if (in_rows(part)) {
    for (int neuron = 0; neuron < shape_.intermediate; ++neuron)
      pack_sparse_row(type, sparse_row(expert, part, neuron), rows, neuron, part == Part::kDown);
  } else {
    for (int first = 0; first < round_up(rows.rows, kBlockRows); first += kLanes)
      pack_half_block(type, half_block(expert, part, first / kLanes), rows, first);
  }
  mark(expert, static_cast<int>(part));
}

void PackedExperts::pack_quantized(int expert, Part part, const QuantizedRowsView& rows) {
  check(expert, part, rows.rows, rows.cols);
  const WeightType type = type_of(part);
  check_quantizable(type, rows.cols);
  check_codes(type, rows);
  place(expert, part);
  if (in_rows(part) && part == Part::kDown) {
    std::vector<float> matrix(static_cast<std::size_t>(rows.rows) * rows.cols);
    dequantize(rows, matrix.data());
    return pack(expert, part, {matrix.data(), WeightType::kFloat32, rows.rows, rows.cols});
  }
  if (in_rows(part)) {
    for (int neuron = 0; neuron < shape_.intermediate; ++neuron) pack_sparse_row(type, sparse_row(expert, part, neuron), rows, neuron);
  } else {
    for (int first = 0; first < round_up(rows.rows, kBlockRows); first += kLanes)
      pack_half_block(type, half_block(expert, part, first / kLanes), rows, first);
  }
  mark(expert, static_cast<int>(part));
}

void PackedExperts::pack_blocks(int expert, Part part, const StoredRowsView& rows) {
  check(expert, part, rows.rows, rows.cols);
  check_stored(type_of(part));
  place(expert, part);
  for (int first = 0; first < round_up(rows.rows, kBlockRows); first += kLanes)
    pack_half_block(type_of(part), half_block(expert, part, first / kLanes), rows, first);
  mark(expert, static_cast<int>(part));
}

void PackedExperts::pack_bias(int expert, Part part, const float* values, int count) {
  if (!shape_.bias) raise("pack_bias: these experts have no biases (ExpertsShape.bias is False)");
  check(expert, part, rows_of(part), cols_of(part));
  if (count != rows_of(part))
    raise(std::string("bias of part '") + name_of(part) + "': expected " + std::to_string(rows_of(part)) + " values, found " +
          std::to_string(count));
  const std::size_t offset = part == Part::kDown ? layout_.down_bias_offset
                             : part == Part::kUp ? layout_.up_bias_offset
                                                 : layout_.gate_bias_offset;
  std::memcpy(data_ + layout_.expert_bytes * static_cast<std::size_t>(expert) + offset, values,
              sizeof(float) * static_cast<std::size_t>(count));
  mark(expert, 3 + static_cast<int>(part));
}

void PackedExperts::unpack(int expert, Part part, float* rows_out) const {
  if (expert < 0 || expert >= shape_.num_experts)
    raise("expert " + std::to_string(expert) + " is out of range: there are " + std::to_string(shape_.num_experts));
  if (part == Part::kGate && !shape_.gated) raise("these experts are ungated: there is no part 'gate', use 'up'");
  if (!(packed_mask(expert) & (1 << static_cast<int>(part))))
    raise("part '" + std::string(name_of(part)) + "' of expert " + std::to_string(expert) + " was never packed");
  if (in_rows(part)) {
    const bool down = part == Part::kDown;
    for (int neuron = 0; neuron < shape_.intermediate; ++neuron)
      unpack_sparse_row(type_of(part), sparse_row(expert, part, neuron), shape_.hidden,
                        rows_out + (down ? static_cast<std::size_t>(neuron) : static_cast<std::size_t>(neuron) * shape_.hidden),
                        down ? static_cast<std::size_t>(shape_.intermediate) : 1);
    return;
  }
  for (int first = 0; first < rows_of(part); first += kLanes)
    unpack_half_block(type_of(part), half_block(expert, part, first / kLanes), rows_out, rows_of(part), cols_of(part), first);
}

std::string PackedExperts::missing_parts(int expert) const {
  static const char* const kNames[] = {"gate", "up", "down", "gate bias", "up bias", "down bias"};
  const int missing = complete_mask_ & ~packed_mask(expert);
  std::string names;
  for (int bit = 0; bit < 6; ++bit)
    if (missing & (1 << bit)) names += (names.empty() ? "" : ", ") + std::string(kNames[bit]);
  return names;
}

PackedLinear::PackedLinear(int rows, int cols, WeightType type) : rows_(rows), cols_(cols), type_(type) {
  if (rows < 1 || cols < 1) raise("PackedLinear: rows and cols must be at least 1");
  memory_ = AlignedMemory(bytes_for(rows, cols, type));
}

std::size_t PackedLinear::bytes_for(int rows, int cols, WeightType type) {
  check_cols(type, cols);
  return block_bytes(type, cols) * static_cast<std::size_t>(round_up(rows, kBlockRows) / kBlockRows);
}

void PackedLinear::divide(const MemoryNodes& nodes) {
  if (!nodes.have_memory()) return;
  const std::size_t bytes = block_bytes(type_, cols_);
  memory_.prepare_ranges(bytes * static_cast<std::size_t>(blocks() / nodes.count()));
  nodes.place(memory_.data(), blocks(), bytes);
}

HalfBlock PackedLinear::half_block(int chunk) const { return {const_cast<std::byte*>(block(chunk / 2)), chunk % 2}; }

void PackedLinear::check(int rows, int cols) const {
  if (rows != rows_ || cols != cols_) raise("PackedLinear: expected shape " + pair_text(rows_, cols_) + ", found " + pair_text(rows, cols));
}

void PackedLinear::pack(const RowsView& rows) {
  check(rows.rows, rows.cols);
  check_floats(type_);
  for (int chunk = 0; chunk < 2 * blocks(); ++chunk) pack_half_block(type_, half_block(chunk), rows, chunk * kLanes);
  packed_ = true;
}

void PackedLinear::pack_quantized(const QuantizedRowsView& rows) {
  check(rows.rows, rows.cols);
  check_quantizable(type_, rows.cols);
  check_codes(type_, rows);
  for (int chunk = 0; chunk < 2 * blocks(); ++chunk) pack_half_block(type_, half_block(chunk), rows, chunk * kLanes);
  packed_ = true;
}

void PackedLinear::pack_blocks(const StoredRowsView& rows) {
  check(rows.rows, rows.cols);
  check_stored(type_);
  for (int chunk = 0; chunk < 2 * blocks(); ++chunk) pack_half_block(type_, half_block(chunk), rows, chunk * kLanes);
  packed_ = true;
}

void PackedLinear::pack_bytes(const std::byte* bytes, std::size_t count) {
  const std::size_t expected = bytes_for(rows_, cols_, type_);
  if (count != expected) raise("PackedLinear: expected " + std::to_string(expected) + " packed bytes, found " + std::to_string(count));
  std::memcpy(memory_.data(), bytes, count);
  packed_ = true;
}

void PackedLinear::pack_bias(const float* values, int count) {
  if (count != rows_) raise("PackedLinear: expected a bias of " + std::to_string(rows_) + " values, found " + std::to_string(count));
  bias_.assign(values, values + count);
  bias_.resize(static_cast<std::size_t>(blocks()) * kBlockRows, 0.0f);
}

void PackedLinear::unpack(float* rows_out) const {
  if (!packed_) raise("PackedLinear: no weights were packed");
  for (int first = 0; first < rows_; first += kLanes) unpack_half_block(type_, half_block(first / kLanes), rows_out, rows_, cols_, first);
}

}  // namespace moegraft
