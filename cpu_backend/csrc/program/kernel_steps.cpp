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
#include "ops/matmul.h"
#include "ops/router.h"
#include "program/program.h"
#include "recurrent/jobs.h"
#include "sparse/job.h"

namespace moegraft {
namespace {

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
        rows_(machine.workers, machine.nodes),
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
  void run(int worker, Upcoming& mine, Upcoming& after) noexcept override { job_.run(worker, mine, after); }
  Upcoming first_reads(int worker) const override { return job_.first_rows(worker); }

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
  ExpertsOperation(const ProgramMachine& machine, const PackedExperts& experts, const ExpertsSparsity& sparsity,
                   std::vector<Operand> operands)
      : KernelOperation(std::move(operands)),
        machine_(machine),
        experts_(experts),
        sparsity_(sparsity),
        encode_(machine.workers),
        neurons_(machine.workers, machine.nodes),
        rows_(machine.workers, machine.nodes),
        sums_(machine.workers) {
    if (operands_.size() != 4) refuse("experts have an output, hidden states, ids and weights");
    if (!(sparsity.threshold >= 0.0f)) refuse("the threshold of experts is not a number of at least 0");
    if (experts.kind() == LayoutKind::kSparse) return;
    if (sparsity.threshold > 0.0f || sparsity.counts != nullptr) refuse("dense experts have no threshold and count no neurons");
    dense_.emplace(machine.kernels, experts, activation_of(operands_[1].type), machine.workers, phases());
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
    if (!dense_)
      sparse_.emplace(machine_.kernels, experts_, activation_of(views_[1].type),
                      SparseArgs{sparsity_.threshold, sparsity_.counts, nullptr, top_k_}, machine_.workers, phases());
  }
  void prepare() override {
    Routing& routing = machine_.scratch.routing;
    routing.group({reinterpret_cast<const std::int64_t*>(views_[2].data), reinterpret_cast<const float*>(views_[3].data), tokens_, top_k_},
                  experts_.shape().num_experts, dense_ ? dense_->segment_pairs() : sparse_->segment_pairs(), 0);
    for (const Segment& segment : routing.segments())
      if (!experts_.complete(segment.expert)) refuse("expert " + std::to_string(segment.expert) + " is used before it was packed");
    if (experts_.frames() != nullptr)
      experts_.frames()->demand(
          experts_.layer(), routing,
          {views_[1].data, activation_of(views_[1].type), experts_.shape().hidden, tokens_, top_k_, machine_.workers});
    const ExpertsBatch batch = {views_[1].data, views_[0].data, tokens_, &routing};
    ProgramScratch& scratch = machine_.scratch;
    const ExpertsScratch memory = {&scratch.records, &scratch.lanes, &scratch.neurons, scratch.workers.data()};
    if (dense_) dense_->prepare(batch, memory);
    else sparse_->prepare(batch, memory);
  }
  void run(int worker, Upcoming&, Upcoming& after) noexcept override {
    if (dense_) dense_->run(worker, after);
    else sparse_->run(worker);
  }
  void finish() override {
    if (experts_.frames() != nullptr) experts_.frames()->check();
  }

 private:
  ExpertsPhases phases() { return {&encode_, &neurons_, &rows_, &sums_}; }

  const ProgramMachine& machine_;
  const PackedExperts& experts_;
  const ExpertsSparsity sparsity_;
  Phase encode_, neurons_, rows_, sums_;
  std::optional<ExpertsJob> dense_;
  std::optional<SparseJob> sparse_;  // of experts in the sparse layout
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
  void run(int worker, Upcoming&, Upcoming&) noexcept override { job_.run(worker); }
  Upcoming first_reads(int worker) const override { return job_.first_rows(worker); }
  void finish() override { job_.choose(machine_.scratch.selection); }

 private:
  const ProgramMachine& machine_;
  RouterArgs args_;
  Phase phase_;
  RouterJob job_;
};

class AttentionOperation : public KernelOperation {
 public:
  AttentionOperation(const ProgramMachine& machine, const AttentionNumbers& numbers, const AttentionOperands& has,
                     std::vector<Operand> operands)
      : KernelOperation(std::move(operands)), machine_(machine), has_(has), first_(machine.workers), second_(machine.workers) {
    if (operands_.size() != 4u + has.mask + has.sinks + has.key_tail) refuse("attention has another number of operands");
    set_numbers(numbers.scale, numbers.softcap);
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
    args_.tail_dim = 0;
    if (has_.key_tail) {
      const View& tail = views_.back();
      if (tail.dims != 4 || activation_of(tail.type) != args_.type || (tail.sizes[3] > 1 && tail.strides[3] != 1) ||
          tail.sizes[0] != key.sizes[0] || tail.sizes[1] != key.sizes[1] || tail.sizes[2] != key.sizes[2])
        refuse("the tail of the keys has another form than the kernel");
      args_.key_tail = heads_of(tail);
      args_.tail_dim = static_cast<int>(tail.sizes[3]);
    }
    const bool fits = key.sizes[0] == query.sizes[0] && value.sizes[0] == query.sizes[0] && key.sizes[1] == value.sizes[1] &&
                      key.sizes[2] == value.sizes[2] && key.sizes[3] + args_.tail_dim == query.sizes[3] && out.sizes[0] == query.sizes[0] &&
                      out.sizes[1] == query.sizes[2] && out.sizes[2] == query.sizes[1] && out.sizes[3] == value.sizes[3];
    if (!fits || args_.kv_heads < 1 || args_.heads % args_.kv_heads != 0) refuse("the operands of attention do not fit together");
    if (has_.mask) {
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
    if (has_.sinks) {
      const View& sinks = views_[4u + has_.mask];
      require_contiguous(sinks, "sinks");
      if (sinks.type != ElementType::kFloat32 || sinks.elements() != query.sizes[1]) refuse("sinks have another form than the kernel");
      args_.sinks = reinterpret_cast<const float*>(sinks.data);
    }
  }
  void prepare() override { prepare_job(); }
  void run(int worker, Upcoming&, Upcoming& after) noexcept override {
    if (rows_) rows_->run(worker, after);
    else tiles_->run(worker);
  }

 protected:
  AttentionOperation(const ProgramMachine& machine, std::vector<Operand> operands)
      : KernelOperation(std::move(operands)), machine_(machine), has_{}, first_(machine.workers), second_(machine.workers) {}
  void set_numbers(float scale, float softcap) {
    require_numbers(scale, softcap);
    args_.type = activation_of(operands_[1].type);
    args_.scale = scale;
    args_.softcap = softcap;
  }
  static HeadsView heads_of(const View& view) { return {view.data, view.strides[0], view.strides[1], view.strides[2]}; }
  void prepare_job() {
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
  AttentionArgs args_{};
  const ProgramMachine& machine_;

 private:
  const AttentionOperands has_;
  Phase first_, second_;
  std::optional<AttentionRowsJob> rows_;
  std::optional<AttentionTilesJob> tiles_;
};

class PagedAttentionOperation final : public AttentionOperation {
 public:
  PagedAttentionOperation(const ProgramMachine& machine, const PagedAttentionNumbers& numbers, std::vector<Operand> operands)
      : AttentionOperation(machine, std::move(operands)), numbers_(numbers) {
    if (operands_.size() != 7u + numbers.sinks) refuse("attention over pages has another number of operands");
    set_numbers(numbers.scale, numbers.softcap);
  }
  void resolved() override {
    const View &out = views_[0], &query = views_[1], &key = views_[2], &value = views_[3];
    const View &pool = views_[4], &table = views_[5], &held = views_[6];
    for (const View* view : {&out, &pool, &table, &held}) require_contiguous(*view, "an operand of attention over pages");
    for (const View* view : {&out, &query, &key, &value})
      if (view->dims != 4 || activation_of(view->type) != args_.type || (view->sizes[3] > 1 && view->strides[3] != 1))
        refuse("an operand of attention has another form than the kernel");
    const bool integers = table.type == ElementType::kInt64 && held.type == ElementType::kInt64;
    const bool coded = pool.type == ElementType::kInt8;
    if (!integers || pool.dims != 2 || (!coded && activation_of(pool.type) != args_.type) || table.dims != 2 || held.dims != 1 ||
        table.sizes[0] < query.sizes[0] || held.sizes[0] < query.sizes[0])
      refuse("the pages of attention have another form than the kernel");
    args_.query = heads_of(query);
    args_.out = out.data;
    args_.batch = static_cast<int>(query.sizes[0]);
    args_.heads = static_cast<int>(query.sizes[1]);
    args_.queries = static_cast<int>(query.sizes[2]);
    args_.dim = static_cast<int>(query.sizes[3]);
    args_.kv_heads = static_cast<int>(key.sizes[1]);
    args_.tail_dim = numbers_.latent ? static_cast<int>(value.sizes[3]) : 0;
    args_.value_dim = static_cast<int>(numbers_.latent ? key.sizes[3] : value.sizes[3]);
    bool fits = key.sizes[3] + args_.tail_dim == query.sizes[3] && out.sizes[0] == query.sizes[0] && out.sizes[1] == query.sizes[2] &&
                out.sizes[2] == query.sizes[1] && out.sizes[3] == args_.value_dim;
    for (int dim : {0, 1, 2}) {
      const std::int64_t expected = dim == 1 ? key.sizes[1] : query.sizes[static_cast<std::size_t>(dim)];
      fits = fits && key.sizes[static_cast<std::size_t>(dim)] == expected && value.sizes[static_cast<std::size_t>(dim)] == expected;
    }
    if (!fits || args_.kv_heads < 1 || args_.heads % args_.kv_heads != 0) refuse("the operands of attention do not fit together");
    args_.sinks = nullptr;
    if (numbers_.sinks) {
      const View& sinks = views_[7];
      require_contiguous(sinks, "sinks");
      if (sinks.type != ElementType::kFloat32 || sinks.elements() != query.sizes[1]) refuse("sinks have another form than the kernel");
      args_.sinks = reinterpret_cast<const float*>(sinks.data);
    }
    args_.pages = {reinterpret_cast<const std::int64_t*>(table.data),
                   reinterpret_cast<const std::int64_t*>(held.data),
                   table.sizes[1],
                   pool.sizes[0],
                   pool.sizes[1],
                   numbers_.page_tokens,
                   numbers_.window,
                   coded,
                   heads_of(key),
                   heads_of(value)};
  }
  void prepare() override {  // what is in the table and how many tokens are held differ from step to step
    use_pages(args_, views_[4].data, numbers_.starts, numbers_.latent);
    append_to_pages(machine_.kernels, args_);
    prepare_job();
  }

 private:
  const PagedAttentionNumbers numbers_;
};

class MatmulOperation final : public KernelOperation {
 public:
  MatmulOperation(const ProgramMachine& machine, std::vector<Operand> operands)
      : KernelOperation(std::move(operands)),
        machine_(machine),
        columns_(machine.workers),
        job_(machine.kernels, args_, machine.workers, columns_) {
    if (operands_.size() != 3 && operands_.size() != 4) refuse("a product has an output, two factors and perhaps a bias");
    args_.type = activation_of(operands_[0].type);
  }
  void resolved() override {
    const View &out = views_[0], &a = views_[1], &b = views_[2];
    for (const View& view : views_)
      if (activation_of(view.type) != args_.type) refuse("a factor of a product has another type");
    for (const View* view : {&out, &a, &b})
      if (view->dims != 3) refuse("a factor of a product has another form");
    args_.batch = out.sizes[0];
    args_.rows = out.sizes[1];
    args_.cols = out.sizes[2];
    args_.inner = a.sizes[2];
    if (a.sizes[0] != args_.batch || b.sizes[0] != args_.batch || a.sizes[1] != args_.rows || b.sizes[1] != args_.inner ||
        b.sizes[2] != args_.cols)
      refuse("the factors of a product do not fit together");
    args_.out = matrix_of(out);
    args_.a = matrix_of(a);
    args_.b = matrix_of(b);
    if (views_.size() == 4) {
      const View& bias = views_[3];
      const bool fits = bias.data != nullptr && (bias.dims == 0 || (bias.dims == 1 && (bias.sizes[0] == 1 || bias.sizes[0] == args_.cols)));
      if (!fits) refuse("the bias of a product has another form or type");
      args_.bias = bias.data;
      args_.bias_stride = bias.dims == 0 || bias.sizes[bias.dims - 1] == 1 ? 0 : bias.strides[bias.dims - 1];
    }
    args_.check();
  }
  void prepare() override { job_.prepare(machine_.scratch.records, machine_.scratch.workers.data()); }
  void run(int worker, Upcoming&, Upcoming&) noexcept override { job_.run(worker); }

 private:
  static MatrixView matrix_of(const View& view) { return {view.data, view.strides[0], view.strides[1], view.strides[2]}; }

  const ProgramMachine& machine_;
  Phase columns_;
  MatmulArgs args_{};
  MatmulJob job_;
};

class RecurrentOperation final : public KernelOperation {
 public:
  RecurrentOperation(const ProgramMachine& machine, const std::string& name, const std::vector<double>& numbers,
                     std::vector<Operand> operands)
      : KernelOperation(std::move(operands)), job_(machine.kernels, name, numbers, machine.workers) {}
  void resolved() override {
    std::vector<StridedView> views;
    for (const View& view : views_) {
      StridedView& strided = views.emplace_back();
      if (view.data == nullptr) continue;
      if (view.dims > static_cast<int>(strided.sizes.size())) refuse("an operand of a recurrent layer has too many dimensions");
      strided.data = view.data;
      strided.type = activation_of(view.type);
      strided.dims = view.dims;
      std::copy_n(view.sizes.begin(), view.dims, strided.sizes.begin());
      std::copy_n(view.strides.begin(), view.dims, strided.strides.begin());
    }
    // The past states follow the result.
    if (views.size() < job_.operands()) refuse("a recurrent layer has another number of operands");
    const auto first = views.begin() + 1, end = first + static_cast<std::ptrdiff_t>(views.size() - job_.operands());
    std::vector<StridedView> past(first, end);
    views.erase(first, end);
    job_.set(views, std::move(past));
  }
  void prepare() override { job_.prepare(); }
  void run(int worker, Upcoming&, Upcoming&) noexcept override { job_.run(worker); }

 private:
  RecurrentJob job_;
};

class NormOperation final : public SmallOperation {
 public:
  NormOperation(std::vector<Operand> operands, const NormForm& form, const NormGate& gating) : SmallOperation(std::move(operands)) {
    args_.form = form;
    args_.gating = gating;
  }
  void resolved() override {
    const bool gated = args_.gating.group != 0;
    if (gated ? views_.size() != 4 : views_.size() != 2 && views_.size() != 3)
      refuse("a norm has an output, an input and perhaps a weight; with a gate, all of them");
    const View &out = views_[0], &x = views_[1];
    for (const View& view : views_)
      if (view.data == nullptr || !view.contiguous() || view.type != x.type || is_integer(view.type) || view.dims < 1)
        refuse("a norm has another form");
    const std::int64_t cols = x.sizes[static_cast<std::size_t>(x.dims - 1)];
    if (out.elements() != x.elements() || cols < 1 || (views_.size() > 2 && views_[2].elements() != cols) ||
        (gated && (views_[3].elements() != x.elements() || cols % args_.gating.group != 0)))
      refuse("the operands of a norm do not fit together");
    args_.x = x.data;
    args_.weight = views_.size() > 2 ? views_[2].data : nullptr;
    args_.out = out.data;
    args_.gate = gated ? views_[3].data : nullptr;
    args_.type = activation_of(x.type);
    args_.rows = x.elements() / cols;
    args_.cols = static_cast<int>(cols);
  }
  void run(const Kernels& kernels) override {
    for (std::int64_t row = 0; row < args_.rows; ++row) norm_row(kernels, args_, row);
  }

 private:
  NormArgs args_{};
};

}  // namespace

std::unique_ptr<SmallOperation> make_norm(std::vector<Operand> operands, const NormForm& form, const NormGate& gating) {
  return std::make_unique<NormOperation>(std::move(operands), form, gating);
}
std::unique_ptr<KernelOperation> make_linears(const ProgramMachine& machine, std::vector<const PackedLinear*> linears,
                                              std::vector<Operand> operands) {
  return std::make_unique<LinearsOperation>(machine, std::move(linears), std::move(operands));
}
std::unique_ptr<KernelOperation> make_experts(const ProgramMachine& machine, const PackedExperts& experts, const ExpertsSparsity& sparsity,
                                              std::vector<Operand> operands) {
  return std::make_unique<ExpertsOperation>(machine, experts, sparsity, std::move(operands));
}
std::unique_ptr<KernelOperation> make_router(const ProgramMachine& machine, const RouterArgs& form, std::vector<Operand> operands) {
  return std::make_unique<RouterOperation>(machine, form, std::move(operands));
}
std::unique_ptr<KernelOperation> make_attention(const ProgramMachine& machine, const AttentionNumbers& numbers,
                                                const AttentionOperands& has, std::vector<Operand> operands) {
  return std::make_unique<AttentionOperation>(machine, numbers, has, std::move(operands));
}
std::unique_ptr<KernelOperation> make_paged_attention(const ProgramMachine& machine, const PagedAttentionNumbers& numbers,
                                                      std::vector<Operand> operands) {
  return std::make_unique<PagedAttentionOperation>(machine, numbers, std::move(operands));
}
std::unique_ptr<KernelOperation> make_matmul(const ProgramMachine& machine, std::vector<Operand> operands) {
  return std::make_unique<MatmulOperation>(machine, std::move(operands));
}
std::unique_ptr<KernelOperation> make_recurrent(const ProgramMachine& machine, const std::string& name, const std::vector<double>& numbers,
                                                std::vector<Operand> operands) {
  return std::make_unique<RecurrentOperation>(machine, name, numbers, std::move(operands));
}

}  // namespace moegraft
