#include "program/program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace moegraft {

namespace {

// Of Pace. A window covers several time slices of common schedulers (3 to 4 ms), and a block several windows.
constexpr std::int64_t kWindowNs = 16'000'000;
constexpr std::int64_t kWindowRuns = 2;
constexpr int kBlockRuns = 64;
constexpr std::int64_t kIntervalNs = 160'000'000, kLongestIntervalNs = 640'000'000;

// What a loop reads and writes: contiguous, with at least one element.
class Loop final : public Operation {
 public:
  Loop(std::vector<Operand> operands, int first) : Operation(std::move(operands)) {
    if (static_cast<int>(operands_.size()) < first + 2) throw std::invalid_argument("a loop has logits, tokens and what counts positions");
    for (int i = 0; i < static_cast<int>(operands_.size()); ++i) {
      if (operands_[i].buffer < 0 || (i > first && operands_[i].type != ElementType::kInt64))
        throw std::invalid_argument("a loop's tokens and positions are not int64");
    }
    activation_of(operands_[first].type);
  }
  void resolved() override {
    for (const View& view : views_)
      if (!view.contiguous() || view.elements() < 1) throw std::invalid_argument("the operands of a loop are contiguous");
  }
};

constexpr int kSearchLanes = 16;
constexpr std::int64_t kLogitsStrip = 1024;  // logits that are widened at a time

// The first of the largest values, or the first NaN, as PyTorch's argmax.
struct Largest {
  float value = -INFINITY;
  std::int64_t index = 0;
  bool nan = false;

  void see(const float* values, std::int64_t count, std::int64_t first) {
    if (nan) return;
    float largest[kSearchLanes];
    std::int32_t ordered[kSearchLanes];
    for (int lane = 0; lane < kSearchLanes; ++lane) largest[lane] = -INFINITY, ordered[lane] = 1;
    std::int64_t i = 0;
    for (; i + kSearchLanes <= count; i += kSearchLanes)
      for (int lane = 0; lane < kSearchLanes; ++lane) {
        const float each = values[i + lane];
        largest[lane] = each > largest[lane] ? each : largest[lane];
        ordered[lane] &= each == each;
      }
    for (int lane = 0; i < count; ++i, ++lane) {
      largest[lane] = values[i] > largest[lane] ? values[i] : largest[lane];
      ordered[lane] &= values[i] == values[i];
    }
    const float most = *std::max_element(largest, largest + kSearchLanes);
    nan = *std::min_element(ordered, ordered + kSearchLanes) == 0;
    if (!nan && most <= value) return;
    const float* const at =
        nan ? std::find_if(values, values + count, [](float each) { return each != each; }) : std::find(values, values + count, most);
    value = most;
    index = first + (at - values);
  }
};

}  // namespace

std::size_t bytes_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
    case ElementType::kInt32: return 4;
    case ElementType::kInt64: return 8;
    case ElementType::kBool:
    case ElementType::kInt8: return 1;
    default: return 2;
  }
}

ActivationType activation_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat32: return ActivationType::kFloat32;
    case ElementType::kFloat16: return ActivationType::kFloat16;
    case ElementType::kBFloat16: return ActivationType::kBFloat16;
    default: throw std::invalid_argument("a kernel's operand is not of a floating-point type");
  }
}

ElementType parse_element(const std::string& name) {
  static constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "int64", "int32", "bool", "int8"};
  for (int i = 0; i < 7; ++i)
    if (name == kNames[i]) return static_cast<ElementType>(i);
  throw std::invalid_argument("unknown element type '" + name + "'");
}

bool Operand::is_fixed() const {
  bool fixed = offset.slope == 0 && number_slope == 0.0;
  for (int dim = 0; dim < dims; ++dim) fixed = fixed && sizes[dim].slope == 0 && strides[dim].slope == 0;
  return fixed;
}

bool Operand::ends_suffice(std::int64_t first, std::int64_t last, std::int64_t room) const {
  for (int dim = 0; dim < dims; ++dim) {
    const bool bent = sizes[dim].slope != 0 && strides[dim].slope != 0;
    if (bent || sizes[dim].at(first, room) == 0 || sizes[dim].at(last, room) == 0) return false;
  }
  return true;
}

std::int64_t View::elements() const {
  std::int64_t count = 1;
  for (int dim = 0; dim < dims; ++dim) count *= sizes[dim];
  return count;
}

bool View::contiguous() const {
  std::int64_t stride = 1;
  for (int dim = dims - 1; dim >= 0; --dim) {
    if (sizes[dim] != 1 && strides[dim] != stride) return false;
    stride *= sizes[dim];
  }
  return true;
}

Operation::Operation(std::vector<Operand> operands) : operands_(std::move(operands)), views_(operands_.size()), fixed_(true) {
  for (const Operand& operand : operands_) fixed_ = fixed_ && operand.is_fixed();
}

Pace::Pace(int workers) : workers_(workers), interval_ns_(kIntervalNs) {}

void Pace::took(std::int64_t ns) {
  if (workers_ == 1) return;
  if (!alone_) {
    fastest_ns_ = std::min(fastest_ns_, ns);
    if (++block_runs_ == kBlockRuns) {
      fastest_before_ns_ = std::exchange(fastest_ns_, INT64_MAX);
      block_runs_ = 0;
    }
  }
  total_ns_ += ns;
  ++runs_;
  if (total_ns_ < kWindowNs || runs_ < kWindowRuns) return;
  const std::int64_t mean_ns = total_ns_ / runs_;
  until_next_ns_ -= total_ns_;
  total_ns_ = runs_ = 0;
  if (alone_) {
    const bool slower = trial_ && mean_ns >= shared_ns_;
    if (slower || until_next_ns_ <= 0) {
      alone_ = false;
      until_next_ns_ = slower ? interval_ns_ : 0;
      interval_ns_ = std::min(2 * interval_ns_, kLongestIntervalNs);
    }
    trial_ = false;
    return;
  }
  shared_ns_ = mean_ns;
  if (mean_ns <= workers_ * std::min(fastest_ns_, fastest_before_ns_)) {
    interval_ns_ = kIntervalNs;
  } else if (until_next_ns_ <= 0) {
    alone_ = trial_ = true;
    until_next_ns_ = interval_ns_;
  }
}

Program::Program(Runtime& runtime) : runtime_(runtime), machine_{runtime.kernels(), runtime.threads(), runtime.nodes().count(), scratch_} {
  scratch_.workers.resize(static_cast<std::size_t>(runtime.threads()));
}

void Program::add(std::unique_ptr<SmallOperation> operation) {
  if (!open_) stages_.push_back(std::make_unique<Stage>(machine_.workers));
  open_ = true;
  stages_.back()->small.push_back(std::move(operation));
  checked_last_ = checked_first_ - 1;
}

void Program::add(std::unique_ptr<KernelOperation> operation) {
  if (!open_) stages_.push_back(std::make_unique<Stage>(machine_.workers));
  open_ = false;
  stages_.back()->kernel = std::move(operation);
  checked_last_ = checked_first_ - 1;
}

int Program::end_stage() {
  // A stage without a kernel is the last of a run: it finishes the kernel before it.
  if (!open_) stages_.push_back(std::make_unique<Stage>(machine_.workers));
  open_ = false;
  return stages();
}

template <class Function>
void Program::for_operations(const Function& function) {
  for (const auto& stage : stages_) {
    for (const auto& operation : stage->small) function(*operation);
    if (stage->kernel) function(*stage->kernel);
  }
  if (loop_) function(*loop_);
}

void Program::bind(int buffer, std::byte* origin, std::int64_t first, std::int64_t end) {
  if (buffer < 0 || buffer > 1 << 20) throw std::invalid_argument("buffer " + std::to_string(buffer) + " is out of range");
  if (static_cast<std::size_t>(buffer) >= buffers_.size()) buffers_.resize(static_cast<std::size_t>(buffer) + 1);
  static std::byte nothing;  // an empty tensor has no address
  buffers_[static_cast<std::size_t>(buffer)] = {origin == nullptr && first == end ? &nothing : origin, first, end};
  checked_last_ = checked_first_ - 1;
}

void Program::check_operand(const Operand& operand, std::int64_t position) const {
  if (operand.buffer < 0) return;
  if (static_cast<std::size_t>(operand.buffer) >= buffers_.size() || buffers_[static_cast<std::size_t>(operand.buffer)].origin == nullptr)
    throw std::invalid_argument("buffer " + std::to_string(operand.buffer) + " is not bound");
  const Buffer& buffer = buffers_[static_cast<std::size_t>(operand.buffer)];
  std::int64_t low = operand.offset.at(position, room_), high = low;
  for (int dim = 0; dim < operand.dims; ++dim) {
    const std::int64_t size = operand.sizes[dim].at(position, room_), stride = operand.strides[dim].at(position, room_);
    if (size < 0) throw std::invalid_argument("an operand has a negative size at position " + std::to_string(position));
    if (size == 0) return;
    (stride < 0 ? low : high) += (size - 1) * stride;
  }
  const auto bytes = static_cast<std::int64_t>(bytes_of(operand.type));
  if (low * bytes < buffer.first || (high + 1) * bytes > buffer.end)
    throw std::invalid_argument("an operand leaves buffer " + std::to_string(operand.buffer) + " at position " + std::to_string(position));
}

void Program::check(std::int64_t first, std::int64_t last, std::int64_t room) {
  room_ = room;
  checked_last_ = first - 1;
  if (first < 0 || last < first) throw std::invalid_argument("no position to check");
  for_operations([&](Operation& operation) {
    for (const Operand& operand : operation.operands()) {
      check_operand(operand, first);
      check_operand(operand, last);
      if (operand.ends_suffice(first, last, room)) continue;
      for (std::int64_t position = first + 1; position < last; ++position) check_operand(operand, position);
    }
    if (operation.is_fixed()) resolve(operation, first);
  });
  checked_first_ = first;
  checked_last_ = last;
}

void Program::resolve(Operation& operation, std::int64_t position) const {
  std::vector<View>& views = operation.views();
  for (std::size_t i = 0; i < views.size(); ++i) {
    const Operand& operand = operation.operands()[i];
    View& view = views[i];
    view.type = operand.type;
    view.dims = operand.dims;
    for (int dim = 0; dim < operand.dims; ++dim) {
      view.sizes[dim] = operand.sizes[dim].at(position, room_);
      view.strides[dim] = operand.strides[dim].at(position, room_);
    }
    if (operand.buffer < 0) view.number = operand.number + operand.number_slope * static_cast<double>(position);
    else
      view.data = buffers_[static_cast<std::size_t>(operand.buffer)].origin +
                  operand.offset.at(position, room_) * static_cast<std::int64_t>(bytes_of(operand.type));
  }
  operation.resolved();
}

void Program::run(std::int64_t position, int first, int end) {
  if (position < checked_first_ || position > checked_last_)
    throw std::invalid_argument("position " + std::to_string(position) + " was not checked");
  if (first < 0 || end > stages() || first > end) throw std::invalid_argument("there are no such stages");
  const auto prepare = [&] {
    for (int i = first; i < end; ++i) {
      Stage& stage = *stages_[static_cast<std::size_t>(i)];
      stage.claimed.store(false, std::memory_order_relaxed);
      stage.ready.store(false, std::memory_order_relaxed);
      stage.done.store(false, std::memory_order_relaxed);
      stage.span = {};
    }
    position_ = position;
    first_ = first;
    end_ = end;
    failed_.store(false);
    error_ = nullptr;
  };
  Pace* const pace = first < end ? &stages_[static_cast<std::size_t>(first)]->pace : nullptr;
  const std::int64_t began_ns = now_ns();
  runtime_.run(*this, prepare, pace != nullptr && pace->alone());
  if (pace != nullptr) pace->took(now_ns() - began_ns);
  for (int i = first; i < end; ++i) {
    const Span& span = stages_[static_cast<std::size_t>(i)]->span;
    kernel_ns_ += span.ended > span.began ? span.ended - span.began : 0;
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Program::set_loop(std::vector<Operand> operands, bool hidden) {
  loop_ = std::make_unique<Loop>(std::move(operands), hidden ? 1 : 0);
  loop_hidden_ = hidden;
  checked_last_ = checked_first_ - 1;
}

const View& Program::loop_view(int place) const { return loop_->views()[static_cast<std::size_t>(place + (loop_hidden_ ? 1 : 0))]; }

std::int64_t Program::loop_tokens() const { return loop_ ? loop_view(1).elements() : 0; }

std::int64_t Program::loop_logits() const { return loop_ ? loop_view(0).elements() : 0; }

std::int64_t Program::loop_vocabulary() const {
  const int dims = loop_ ? loop_view(0).dims : 0;
  return dims == 0 ? 1 : loop_view(0).sizes[static_cast<std::size_t>(dims) - 1];
}

std::int64_t Program::loop_hidden_bytes() const {
  if (!loop_ || !loop_hidden_) return 0;
  const View& states = loop_->views()[0];
  return states.elements() * static_cast<std::int64_t>(bytes_of(states.type));
}

void Program::feed(std::int64_t position, const std::int64_t* tokens) {
  if (!loop_) throw std::invalid_argument("the program has no loop");
  if (position < checked_first_ || position > checked_last_)
    throw std::invalid_argument("position " + std::to_string(position) + " was not checked");
  if (!loop_->is_fixed()) resolve(*loop_, position);
  const std::int64_t moved = position - position_;
  for (int i = 1; i < static_cast<int>(loop_->views().size()) - (loop_hidden_ ? 1 : 0); ++i) {
    const View& view = loop_view(i);
    auto* const numbers = reinterpret_cast<std::int64_t*>(view.data);
    for (std::int64_t k = 0; k < view.elements(); ++k) numbers[k] = i == 1 ? tokens[k] : numbers[k] + moved;
  }
  position_ = position;  // what `moved` is relative to, whether or not the run succeeds
  run(position, 0, stages());
  ++fed_;
}

void Program::follow(std::int64_t position, const std::int64_t* tokens, float* logits) {
  feed(position, tokens);
  const View& found = loop_view(0);
  machine_.kernels.widen(activation_of(found.type), found.data, logits, static_cast<int>(found.elements()));
}

std::int64_t Program::likeliest() const {
  const View& found = loop_view(0);
  const std::int64_t count = found.elements();
  Largest largest;
  alignas(64) float strip[kLogitsStrip];
  for (std::int64_t first = 0; first < count; first += kLogitsStrip) {
    const std::int64_t values = std::min(kLogitsStrip, count - first);
    machine_.kernels.widen(activation_of(found.type), found.data + first * static_cast<std::int64_t>(bytes_of(found.type)), strip,
                           static_cast<int>(values));
    largest.see(strip, values, first);
  }
  return largest.index;
}

std::vector<std::int64_t> Program::greedy(std::int64_t position, std::int64_t token, const Limits& limits) {
  if (loop_tokens() > 1) throw std::invalid_argument("greedy decoding is of one sequence");
  std::int64_t began_ns = now_ns();
  const std::int64_t last_ns = began_ns + limits.longest_ns;
  std::vector<std::int64_t> tokens;
  step_ns_.clear();
  while (static_cast<std::int64_t>(tokens.size()) < limits.count && (tokens.empty() || began_ns < last_ns)) {
    feed(position++, &token);
    if (limits.hidden != nullptr)
      std::memcpy(limits.hidden + static_cast<std::int64_t>(tokens.size()) * loop_hidden_bytes(), loop_->views()[0].data,
                  static_cast<std::size_t>(loop_hidden_bytes()));
    tokens.push_back(token = likeliest());
    const std::int64_t ended_ns = now_ns();
    step_ns_.push_back(ended_ns - began_ns);
    began_ns = ended_ns;
    if (std::find(limits.ends.begin(), limits.ends.end(), token) != limits.ends.end()) break;
  }
  return tokens;
}

void Program::run(int worker) noexcept {
  const auto first_reads = [&](int i) {  // of a kernel whose operands another worker does not resolve meanwhile
    const KernelOperation* kernel = i < end_ ? stages_[static_cast<std::size_t>(i)]->kernel.get() : nullptr;
    return kernel != nullptr && kernel->is_fixed() ? kernel->first_reads(worker) : Upcoming();
  };
  Upcoming after = first_reads(first_);
  for (int i = first_; i < end_; ++i) {
    Stage& stage = *stages_[static_cast<std::size_t>(i)];
    Upcoming mine = std::exchange(after, first_reads(i + 1));
    if (stage.done.load(std::memory_order_acquire)) continue;
    if (!stage.claimed.exchange(true, std::memory_order_acq_rel)) {
      run_small(stage, i > first_ ? stages_[static_cast<std::size_t>(i) - 1].get() : nullptr);
      if (stage.kernel) stage.span.began = now_ns();
      stage.ready.store(true, std::memory_order_release);
    } else {
      wait_until([&] { return stage.ready.load(std::memory_order_acquire); }, mine, after);
    }
    if (failed_.load(std::memory_order_acquire)) return;
    if (stage.kernel) stage.kernel->run(worker, mine, after);
    if (!stage.done.exchange(true, std::memory_order_acq_rel) && stage.kernel) stage.span.ended = now_ns();
  }
}

std::vector<Program::Span> Program::spans() const {
  std::vector<Span> found;
  for (const auto& stage : stages_) found.push_back(stage->span);
  return found;
}

void Program::run_small(Stage& stage, Stage* before) {
  try {
    if (before != nullptr && before->kernel) before->kernel->finish();
    for (const auto& operation : stage.small) {
      if (!operation->is_fixed()) resolve(*operation, position_);
      operation->run(machine_.kernels);
    }
    if (!stage.kernel) return;
    if (!stage.kernel->is_fixed()) resolve(*stage.kernel, position_);
    stage.kernel->prepare();
  } catch (...) {
    error_ = std::current_exception();
    failed_.store(true, std::memory_order_release);
  }
}

}  // namespace moegraft
