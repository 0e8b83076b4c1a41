// The kernels as operations of a program: each holds the job of its kernel with phases of its own, because a worker that comes late may
// still look at the phases of an operation that the others have finished.
#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "attention/attention.h"
#include "experts/job.h"
#include "ops/linear.h"
#include "ops/router.h"
#include "program/program.h"

namespace moegraft {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

ActivationType activation_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32: return ActivationType::kFloat32;
    case ElementType::kFloat16: return ActivationType::kFloat16;
    case ElementType::kBFloat16: return ActivationType::kBFloat16;
    default: refuse("a kernel's operand is not of a floating-point type");
  }
}

void require_contiguous(const View& view, const char* name) {
  if (view.data == nullptr || !view.contiguous()) refuse(std::string(name) + " is not contiguous");
}

std::int64_t rows_of(const View& view, std::int64_t cols, const char* name) {
  if (view.dims < 1 || view.sizes[view.dims - 1] != cols) refuse(std::string(name) + " has rows of another size than the kernel");
  return view.elements() / std::max<std::int64_t>(cols, 1);
}

class LinearsOperation final : public KernelOperation {
 public:
  LinearsOperation(const ProgramMachine& machine, std::vector<const PackedLinear*> linears, std::vector<Operand> operands)
      : KernelOperation(std::move(operands)),
        machine_(machine),
        linears_(std::move(linears)),
        encode_(machine.workers),
        rows_(machine.workers),
        job_(machine.kernels, linears_, activation_of(operands_.at(0).type), machine.workers, {&encode_, &rows_}),
        outs_(linears_.size()) {
    if (linears_.empty() || operands_.size() != linears_.size() + 1) refuse("linear layers need an input and one output each");
    for (const PackedLinear* linear : linears_) {
      if (!linear->packed()) refuse("a linear layer is used before its weights were packed");
      if (linear->cols() != linears_[0]->cols() || linear->type() != linears_[0]->type()) refuse("the linear layers differ in form");
    }
  }
  void resolved() override {
    require_contiguous(views_[0], "a linear layer's input");
    const std::int64_t tokens = rows_of(views_[0], linears_[0]->cols(), "a linear layer's input");
    for (std::size_t i = 0; i < linears_.size(); ++i) {
      const View& out = views_[i + 1];
      require_contiguous(out, "a linear layer's output");
      if (out.type != views_[0].type || rows_of(out, linears_[i]->rows(), "a linear layer's output") != tokens)
        refuse("a linear layer's output has another type or number of rows than its input");
      outs_[i] = out.data;
    }
    tokens_ = static_cast<int>(tokens);
  }
  void prepare() override {
    job_.prepare({views_[0].data, outs_.data(), tokens_}, {&machine_.scratch.records, machine_.scratch.workers.data()});
  }
  void run(int worker) noexcept override { job_.run(worker); }

 private:
  const ProgramMachine& machine_;
  const std::vector<const PackedLinear*> linears_;
  Phase encode_, rows_;
  LinearJob job_;
  std::vector<std::byte*> outs_;
  int tokens_ = 0;
};

class ExpertsOperation final : public KernelOperation {
 public:
  ExpertsOperation(const ProgramMachine& machine, const PackedExperts& experts, std::vector<Operand> operands)
      : KernelOperation(std::move(operands)),
        machine_(machine),
        experts_(experts),
        encode_(machine.workers),
        neurons_(machine.workers),
        rows_(machine.workers),
        sums_(machine.workers),
        job_(machine.kernels, experts, activation_of(operands_.at(1).type), machine.workers, {&encode_, &neurons_, &rows_, &sums_}) {
    if (operands_.size() != 4) refuse("experts have an output, hidden states, ids and weights");
    if (experts.kind() == LayoutKind::kSparse) refuse("experts in the sparse layout have no operation in a program");
  }
  void resolved() override {
    static constexpr const char* kNames[] = {"the experts' output", "hidden states", "ids of experts", "weights of experts"};
    for (int i = 0; i < 4; ++i) require_contiguous(views_[static_cast<std::size_t>(i)], kNames[i]);
    const std::int64_t tokens = rows_of(views_[1], experts_.shape().hidden, kNames[1]);
    const View& ids = views_[2];
    const bool fits = ids.dims == 2 && ids.sizes[0] == tokens && views_[3].dims == 2 && views_[3].sizes == ids.sizes &&
                      ids.type == ElementType::kInt64 && views_[3].type == ElementType::kFloat32 && views_[0].type == views_[1].type;
    if (!fits || rows_of(views_[0], experts_.shape().hidden, kNames[0]) != tokens) refuse("the operands of experts do not fit together");
    tokens_ = static_cast<int>(tokens);
    top_k_ = static_cast<int>(ids.sizes[1]);
  }
  void prepare() override {
    Routing& routing = machine_.scratch.routing;
    routing.group({reinterpret_cast<const std::int64_t*>(views_[2].data), reinterpret_cast<const float*>(views_[3].data), tokens_, top_k_},
                  experts_.shape().num_experts, job_.segment_pairs(), 0);
    for (const Segment& segment : routing.segments())
      if (!experts_.complete(segment.expert)) refuse("expert " + std::to_string(segment.expert) + " is used before it was packed");
    job_.prepare({views_[1].data, views_[0].data, tokens_, &routing},
                 {&machine_.scratch.records, &machine_.scratch.lanes, &machine_.scratch.neurons, machine_.scratch.workers.data()});
  }
  void run(int worker) noexcept override { job_.run(worker); }

 private:
  const ProgramMachine& machine_;
  const PackedExperts& experts_;
  Phase encode_, neurons_, rows_, sums_;
  ExpertsJob job_;
  int tokens_ = 0, top_k_ = 0;
};

class RouterOperation final : public KernelOperation {
 public:
  RouterOperation(const ProgramMachine& machine, const RouterArgs& form, std::vector<Operand> operands)
      : KernelOperation(std::move(operands)),
        machine_(machine),
        args_(form),
        phase_(machine.workers),
        job_(machine.kernels, args_, machine.workers, phase_) {
    if (operands_.size() != 5) refuse("a router has logits, weights, ids, hidden states and a weight");
  }
  void resolved() override {
    static constexpr const char* kNames[] = {"a router's logits", "a router's weights", "a router's ids", "a router's input",
                                             "a router's weight"};
    const ActivationType types[] = {args_.logits_type, args_.weights_type, args_.type, args_.type, args_.type};
    for (int i = 0; i < 5; ++i) {
      const View& view = views_[static_cast<std::size_t>(i)];
      require_contiguous(view, kNames[i]);
      if (i == 2 ? view.type != ElementType::kInt64 : activation_of(view.type) != types[i])
        refuse(std::string(kNames[i]) + " has another type");
    }
    args_.tokens = rows_of(views_[3], args_.hidden, kNames[3]);
    const Selection& selection = args_.selection;
    if (args_.tokens > kAttentionRows) refuse("a router of more tokens than the kernel takes at once");
    if (rows_of(views_[0], selection.experts, kNames[0]) != args_.tokens ||
        rows_of(views_[1], selection.top_k, kNames[1]) != args_.tokens || rows_of(views_[2], selection.top_k, kNames[2]) != args_.tokens ||
        rows_of(views_[4], args_.hidden, kNames[4]) != selection.experts)
      refuse("the operands of a router do not fit together");
    args_.logits = views_[0].data;
    args_.weights = views_[1].data;
    args_.index = reinterpret_cast<std::int64_t*>(views_[2].data);
    args_.x = views_[3].data;
    args_.weight = views_[4].data;
  }
  void prepare() override { job_.prepare(0, static_cast<int>(args_.tokens), machine_.scratch.records); }
  void run(int worker) noexcept override { job_.run(worker); }
  void finish() override { job_.choose(machine_.scratch.selection); }

 private:
  const ProgramMachine& machine_;
  RouterArgs args_;
  Phase phase_;
  RouterJob job_;
};

class AttentionOperation final : public KernelOperation {
 public:
  AttentionOperation(const ProgramMachine& machine, const AttentionNumbers& numbers, bool has_mask, bool has_sinks,
                     std::vector<Operand> operands)
      : KernelOperation(std::move(operands)),
        machine_(machine),
        has_mask_(has_mask),
        has_sinks_(has_sinks),
        first_(machine.workers),
        second_(machine.workers) {
    if (operands_.size() != 4u + has_mask + has_sinks) refuse("attention has another number of operands");
    args_.type = activation_of(operands_[1].type);
    args_.scale = numbers.scale;
    args_.softcap = numbers.softcap;
    args_.mask.kind = numbers.causal ? MaskKind::kCausal : MaskKind::kNone;
  }
  void resolved() override {
    const View &out = views_[0], &query = views_[1], &key = views_[2], &value = views_[3];
    require_contiguous(out, "the output of attention");
    for (const View* view : {&out, &query, &key, &value})
      if (view->dims != 4 || activation_of(view->type) != args_.type || (view->sizes[3] > 1 && view->strides[3] != 1))
        refuse("an operand of attention has another form than the kernel");
    args_.query = heads_of(query);
    args_.key = heads_of(key);
    args_.value = heads_of(value);
    args_.out = out.data;
    args_.batch = static_cast<int>(query.sizes[0]);
    args_.heads = static_cast<int>(query.sizes[1]);
    args_.queries = static_cast<int>(query.sizes[2]);
    args_.dim = static_cast<int>(query.sizes[3]);
    args_.kv_heads = static_cast<int>(key.sizes[1]);
    args_.keys = static_cast<int>(key.sizes[2]);
    args_.value_dim = static_cast<int>(value.sizes[3]);
    const bool fits = key.sizes[0] == query.sizes[0] && value.sizes[0] == query.sizes[0] && key.sizes[1] == value.sizes[1] &&
                      key.sizes[2] == value.sizes[2] && key.sizes[3] == query.sizes[3] && out.sizes[0] == query.sizes[0] &&
                      out.sizes[1] == query.sizes[2] && out.sizes[2] == query.sizes[1] && out.sizes[3] == value.sizes[3];
    if (!fits || args_.kv_heads < 1 || args_.heads % args_.kv_heads != 0) refuse("the operands of attention do not fit together");
    if (has_mask_) {
      const View& mask = views_[4];
      const bool shown = mask.type == ElementType::kBool;
      if (mask.dims != 4 || (!shown && activation_of(mask.type) != args_.type) || (mask.sizes[3] > 1 && mask.strides[3] != 1) ||
          mask.sizes[2] != query.sizes[2] || mask.sizes[3] != key.sizes[2] || (mask.sizes[0] != 1 && mask.sizes[0] != query.sizes[0]) ||
          (mask.sizes[1] != 1 && mask.sizes[1] != query.sizes[1]))
        refuse("the mask of attention has another form than the kernel");
      args_.mask = {shown ? MaskKind::kBool : MaskKind::kAdded,
                    mask.data,
                    mask.sizes[0] == 1 ? 0 : mask.strides[0],
                    mask.strides[1],
                    mask.strides[2],
                    static_cast<int>(mask.sizes[1])};
    }
    args_.sinks = nullptr;
    if (has_sinks_) {
      const View& sinks = views_.back();
      require_contiguous(sinks, "sinks");
      if (sinks.type != ElementType::kFloat32 || sinks.elements() != query.sizes[1]) refuse("sinks have another form than the kernel");
      args_.sinks = reinterpret_cast<const float*>(sinks.data);
    }
  }
  void prepare() override {
    ProgramScratch& scratch = machine_.scratch;
    scratch.visible.find(args_);
    tiles_.reset();
    rows_.reset();
    if (args_.rows() <= kFewRows || args_.keys == 0) {
      rows_.emplace(machine_.kernels, args_, scratch.visible, machine_.workers, AttentionPhases{&first_, &second_});
      rows_->prepare(scratch.neurons, scratch.workers.data());
    } else {
      tiles_.emplace(machine_.kernels, args_, scratch.visible, machine_.workers, AttentionPhases{&first_, &second_});
      tiles_->prepare(scratch.records, scratch.lanes, scratch.workers.data());
    }
  }
  void run(int worker) noexcept override {
    if (rows_) rows_->run(worker);
    else tiles_->run(worker);
  }

 private:
  static HeadsView heads_of(const View& view) { return {view.data, view.strides[0], view.strides[1], view.strides[2]}; }

  const ProgramMachine& machine_;
  const bool has_mask_, has_sinks_;
  Phase first_, second_;
  AttentionArgs args_{};
  std::optional<AttentionRowsJob> rows_;
  std::optional<AttentionTilesJob> tiles_;
};

// A product with weights that are not packed: small gates, routers and projections of a family's own. The rows of `a` are few.
class MatmulOperation final : public KernelOperation {
 public:
  MatmulOperation(const ProgramMachine& machine, std::vector<Operand> operands)
      : KernelOperation(std::move(operands)), machine_(machine), phase_(machine.workers) {
    if (operands_.size() != 3 && operands_.size() != 4) refuse("a product has an output, two factors and perhaps a bias");
    type_ = activation_of(operands_[0].type);
  }
  void resolved() override {
    const View &out = views_[0], &a = views_[1], &b = views_[2];
    for (const View* view : {&out, &a, &b})
      if (view->dims != 3 || activation_of(view->type) != type_) refuse("a factor of a product has another form or type");
    batch_ = out.sizes[0];
    rows_ = out.sizes[1];
    cols_ = out.sizes[2];
    inner_ = a.sizes[2];
    if (a.sizes[0] != batch_ || b.sizes[0] != batch_ || a.sizes[1] != rows_ || b.sizes[1] != inner_ || b.sizes[2] != cols_)
      refuse("the factors of a product do not fit together");
    if ((cols_ > 1 && out.strides[2] != 1) || (inner_ > 1 && a.strides[2] != 1)) refuse("a factor of a product is not contiguous");
    if (views_.size() == 4) {
      const View& bias = views_[3];
      const bool fits = bias.data != nullptr && (bias.dims == 0 || (bias.dims == 1 && (bias.sizes[0] == 1 || bias.sizes[0] == cols_)));
      if (!fits || activation_of(bias.type) != type_) refuse("the bias of a product has another form or type");
    }
    dots_ = inner_ <= 1 || b.strides[1] == 1;
    if (!dots_ && cols_ > 1 && b.strides[2] != 1) refuse("a factor of a product is contiguous in no dimension");
  }
  void prepare() override {
    padded_ = static_cast<std::size_t>(round_up(static_cast<int>(inner_), 32));
    const std::size_t floats = padded_ * static_cast<std::size_t>(batch_ * rows_);
    machine_.scratch.records.reserve(floats * sizeof(float));
    auto* widened = reinterpret_cast<float*>(machine_.scratch.records.data());
    const View& a = views_[1];
    for (std::int64_t i = 0; i < batch_; ++i)
      for (std::int64_t row = 0; row < rows_; ++row)
        machine_.kernels.widen(type_, a.data + bytes() * (i * a.strides[0] + row * a.strides[1]),
                               widened + padded_ * static_cast<std::size_t>(i * rows_ + row), static_cast<int>(inner_));
    const std::int64_t wanted = std::max<std::int64_t>(1, machine_.workers * kUnitsPerWorker / std::max<std::int64_t>(batch_, 1));
    unit_cols_ = std::max<std::int64_t>(kLeastCols, (cols_ + wanted - 1) / wanted);
    units_per_batch_ = (cols_ + unit_cols_ - 1) / unit_cols_;
    for (AlignedMemory& memory : machine_.scratch.workers)
      memory.reserve(sizeof(float) * kAttentionRows * static_cast<std::size_t>(round_up(static_cast<int>(unit_cols_), 32)));
    phase_.reset(static_cast<int>(batch_ * units_per_batch_));
  }
  void run(int worker) noexcept override {
    auto* sums = reinterpret_cast<float*>(machine_.scratch.workers[static_cast<std::size_t>(worker)].data());
    int count = 0;
    for (int unit = phase_.take(worker); unit >= 0; unit = phase_.take(worker), ++count) compute(unit, sums);
    phase_.finish(count);
    phase_.wait();
  }

 private:
  static constexpr int kUnitsPerWorker = 4;
  static constexpr std::int64_t kLeastCols = 8;

  std::ptrdiff_t bytes() const { return static_cast<std::ptrdiff_t>(element_bytes(type_)); }

  void compute(int unit, float* sums) const {
    const View &out = views_[0], &a = views_[1], &b = views_[2];
    const std::int64_t batch = unit / units_per_batch_, first = unit % units_per_batch_ * unit_cols_;
    const int cols = static_cast<int>(std::min(unit_cols_, cols_ - first)), stride = round_up(cols, 32);
    const auto* widened =
        reinterpret_cast<const float*>(machine_.scratch.records.data()) + padded_ * static_cast<std::size_t>(batch * rows_);
    const std::byte* columns = b.data + bytes() * (batch * b.strides[0] + first * b.strides[2]);
    for (std::int64_t row = 0; row < rows_; row += kAttentionRows) {
      const int rows = static_cast<int>(std::min<std::int64_t>(kAttentionRows, rows_ - row));
      const float* query = widened + padded_ * static_cast<std::size_t>(row);
      if (dots_) {
        // Halves are read with bfloat16 alone, whose rows are `a`'s own.
        const std::byte* halves = a.data + bytes() * (batch * a.strides[0] + row * a.strides[1]);
        for (int r = 0; r < rows; ++r)
          machine_.kernels.attention.score[static_cast<int>(type_)](
              {query + padded_ * static_cast<std::size_t>(r), reinterpret_cast<const std::uint16_t*>(halves + bytes() * r * a.strides[1]),
               static_cast<int>(padded_), 1, columns, bytes() * b.strides[2], cols, static_cast<int>(inner_), sums + r * stride, stride});
      } else {
        std::fill_n(sums, static_cast<std::ptrdiff_t>(rows) * stride, 0.0f);
        machine_.kernels.attention.mix[static_cast<int>(type_)](
            {query, static_cast<int>(padded_), rows, columns, bytes() * b.strides[1], static_cast<int>(inner_), cols, sums, stride});
      }
      for (int r = 0; r < rows; ++r) {
        float* sum = sums + static_cast<std::ptrdiff_t>(r) * stride;
        if (views_.size() == 4) add_bias(views_[3], first, cols, sum);
        machine_.kernels.narrow(type_, sum, out.data + bytes() * (batch * out.strides[0] + (row + r) * out.strides[1] + first), cols);
      }
    }
  }

  void add_bias(const View& bias, std::int64_t first, int cols, float* sums) const {
    const std::int64_t stride = bias.dims == 0 || bias.sizes[bias.dims - 1] == 1 ? 0 : bias.strides[bias.dims - 1];
    for (int i = 0; i < cols; ++i) {
      float value;
      machine_.kernels.widen(activation_of(bias.type), bias.data + bytes() * (first + i) * stride, &value, 1);
      sums[i] += value;
    }
  }

  const ProgramMachine& machine_;
  Phase phase_;
  ActivationType type_;
  std::int64_t batch_ = 0, rows_ = 0, cols_ = 0, inner_ = 0, unit_cols_ = 1, units_per_batch_ = 1;
  std::size_t padded_ = 0;
  bool dots_ = false;  // the columns of b are contiguous
};

}  // namespace

std::unique_ptr<KernelOperation> make_linears(const ProgramMachine& machine, std::vector<const PackedLinear*> linears,
                                              std::vector<Operand> operands) {
  return std::make_unique<LinearsOperation>(machine, std::move(linears), std::move(operands));
}
std::unique_ptr<KernelOperation> make_experts(const ProgramMachine& machine, const PackedExperts& experts, std::vector<Operand> operands) {
  return std::make_unique<ExpertsOperation>(machine, experts, std::move(operands));
}
std::unique_ptr<KernelOperation> make_router(const ProgramMachine& machine, const RouterArgs& form, std::vector<Operand> operands) {
  return std::make_unique<RouterOperation>(machine, form, std::move(operands));
}
std::unique_ptr<KernelOperation> make_attention(const ProgramMachine& machine, const AttentionNumbers& numbers, bool has_mask,
                                                bool has_sinks, std::vector<Operand> operands) {
  return std::make_unique<AttentionOperation>(machine, numbers, has_mask, has_sinks, std::move(operands));
}
std::unique_ptr<KernelOperation> make_matmul(const ProgramMachine& machine, std::vector<Operand> operands) {
  return std::make_unique<MatmulOperation>(machine, std::move(operands));
}

}  // namespace moegraft
