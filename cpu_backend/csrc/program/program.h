// A decode step of a whole model as one list of operations over memory that stays in place. program/ holds the list and its execution
// (program.cpp), the kernels as steps of it (kernel_steps.cpp) and the small operations between them (small_ops.cpp). What is recorded, and
// how it becomes this list, is Python's part (operators/step_program).
//
// A program is a list of stages: small operations, then at most one kernel. Program::run() runs some of them as one job of the pool: the
// small operations of a stage, which take microseconds, on the first worker that arrives, its kernel on all workers. Workers wait for each
// other by spinning, in which they prefetch weights that they read next, and yield when that takes long. A worker that comes late finds the
// finished stages done and joins the current one.
//
// The program owns its scratch memory and no tensor: buffers are bound to the caller's memory, which must stay as long as it is bound.
// All sizes, strides and offsets are linear in the position of the step and in the room of the cache. Every operand is
// checked against its buffer by check(), for every position in a range, before run() touches it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "core/runtime.h"
#include "core/thread_pool.h"
#include "ops/norm.h"

namespace moegraft {

enum class ElementType : int { kFloat32, kFloat16, kBFloat16, kInt64, kInt32, kBool, kInt8 };  // the last of pages alone
std::size_t bytes_of(ElementType type);
inline bool is_integer(ElementType type) {
  return type == ElementType::kInt64 || type == ElementType::kInt32 || type == ElementType::kBool;
}
ActivationType activation_of(ElementType type);  // throws std::invalid_argument for other types than floating-point ones
ElementType parse_element(const std::string& name);  // throws std::invalid_argument
[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

struct Linear {
  std::int64_t base = 0;
  std::int64_t slope = 0;  // for each position
  std::int64_t capacity = 0;  // for each token that a buffer of the cache has room for
  std::int64_t at(std::int64_t position, std::int64_t room) const { return base + slope * position + capacity * room; }
};

constexpr int kMaxDims = 6;

// A tensor in a buffer, in elements of its type; or, where `buffer` is -1, a number for all elements.
struct Operand {
  int buffer = -1;
  ElementType type = ElementType::kFloat32;
  Linear offset;
  int dims = 0;
  std::array<Linear, kMaxDims> sizes{};
  std::array<Linear, kMaxDims> strides{};
  double number = 0.0;
  double number_slope = 0.0;  // for each position

  bool is_fixed() const;
  // Whether it is within its buffer at all positions in a range if it is so at both ends. Not so where nothing is read at an end, and where
  // a size and its stride both depend on the position.
  bool ends_suffice(std::int64_t first, std::int64_t last, std::int64_t room) const;
};

// An operand at one position.
struct View {
  std::byte* data = nullptr;  // null: `number`
  ElementType type = ElementType::kFloat32;
  int dims = 0;
  std::array<std::int64_t, kMaxDims> sizes{};
  std::array<std::int64_t, kMaxDims> strides{};
  double number = 0.0;

  std::int64_t elements() const;
  bool contiguous() const;
};

class Program;

// One operation. `views` are its operands at the current position.
class Operation {
 public:
  explicit Operation(std::vector<Operand> operands);
  virtual ~Operation() = default;
  const std::vector<Operand>& operands() const { return operands_; }
  bool is_fixed() const { return fixed_; }
  std::vector<View>& views() { return views_; }
  virtual void resolved() {}  // after `views` changed; throws std::invalid_argument

 protected:
  std::vector<Operand> operands_;
  std::vector<View> views_;
  bool fixed_;
};

class SmallOperation : public Operation {
 public:
  using Operation::Operation;
  virtual void run(const Kernels& kernels) = 0;  // on one thread; throws std::invalid_argument
};

// `name` is an elementwise function (small_ops.cpp), or: softmax, sum, mean, amax, topk, gather, scatter, embedding, arange, cumsum,
// rotary. The first operands are the results; operations over a dimension work on the last one. Throws std::invalid_argument.
std::unique_ptr<SmallOperation> make_small_operation(const std::string& name, std::vector<Operand> operands, std::vector<double> numbers);
std::unique_ptr<SmallOperation> make_norm(std::vector<Operand> operands, const NormForm& form,
                                          const NormGate& gating);  // out, x and, if there are, weight and gate

// Scratch memory of all kernels of a program; one runs at a time.
struct ProgramScratch {
  AlignedMemory records;
  AlignedMemory lanes;
  AlignedMemory neurons;
  std::vector<AlignedMemory> workers;
  Routing routing;
  VisibleKeys visible;
  SelectionScratch selection;
};

struct ProgramMachine {
  const Kernels& kernels;
  const int workers;
  const int nodes;  // of memory
  ProgramScratch& scratch;
};

class KernelOperation : public Operation {
 public:
  using Operation::Operation;
  virtual void prepare() = 0;  // on one thread, before run(); throws std::invalid_argument, std::bad_alloc
  // On every worker; returns when all units are finished. Of `mine` and, when nothing is left to do, of `after`, as much is prefetched as
  // there is time while the worker waits.
  virtual void run(int worker, Upcoming& mine, Upcoming& after) noexcept = 0;
  virtual Upcoming first_reads(int) const { return {}; }  // weights that a worker will read first, where they are known before prepare()
  virtual void finish() {}  // on one thread, after run()
};

// Which neurons of experts in the sparse layout are left out.
struct ExpertsSparsity {
  float threshold;  // of |act(gate)|
  std::int64_t* counts;  // (2): incremented by the neurons that reached the threshold, and by all neurons; or null
};

struct AttentionNumbers {
  float scale;
  float softcap;
  bool causal;
};

struct AttentionOperands {
  bool mask, sinks, key_tail;
};

// Operands: out, then the inputs in the order of the Runtime's methods. All throw std::invalid_argument.
std::unique_ptr<KernelOperation> make_linears(const ProgramMachine& machine, std::vector<const PackedLinear*> linears,
                                              std::vector<Operand> operands);  // x, then one out for each
std::unique_ptr<KernelOperation> make_experts(const ProgramMachine& machine, const PackedExperts& experts, const ExpertsSparsity& sparsity,
                                              std::vector<Operand> operands);
std::unique_ptr<KernelOperation> make_router(const ProgramMachine& machine, const RouterArgs& form, std::vector<Operand> operands);
// out, query, key, value and those of the others that it has, in their order
std::unique_ptr<KernelOperation> make_attention(const ProgramMachine& machine, const AttentionNumbers& numbers,
                                                const AttentionOperands& has, std::vector<Operand> operands);
// out, query, new keys, new values, pool, table, held and, if there are any, sinks
struct PagedAttentionNumbers {
  float scale;
  float softcap;
  int page_tokens;
  int window;
  bool latent, sinks;
  PageStarts starts;
};
std::unique_ptr<KernelOperation> make_paged_attention(const ProgramMachine& machine, const PagedAttentionNumbers& numbers,
                                                      std::vector<Operand> operands);
// out (B, M, N) = a (B, M, K) b (B, K, N) [+ bias (N)], rounded once
std::unique_ptr<KernelOperation> make_matmul(const ProgramMachine& machine, std::vector<Operand> operands);
// name, numbers and operands of RecurrentJob, past states after the first of them; absent operands are numbers
std::unique_ptr<KernelOperation> make_recurrent(const ProgramMachine& machine, const std::string& name, const std::vector<double>& numbers,
                                                std::vector<Operand> operands);

// Decides whether the next run of a program is shared out among the workers or computed by the calling thread alone. Beside busy processes
// a run on all threads lasts until the scheduler has resumed each of them, some milliseconds, in which one thread may compute many runs of
// a small model. So while runs take longer than one undisturbed thread could need, one thread computes as a trial, and goes on if that is
// faster; all threads are tried again at intervals. Results do not depend on it.
class Pace {
 public:
  explicit Pace(int workers);
  bool alone() const { return alone_; }
  void took(std::int64_t ns);  // the run that alone() was asked for

 private:
  const int workers_;
  bool alone_ = false;
  bool trial_ = false;  // of one thread
  std::int64_t total_ns_ = 0, runs_ = 0;  // of the current window of runs
  std::int64_t shared_ns_ = 0;  // mean of the last window on all threads
  std::int64_t fastest_ns_ = INT64_MAX, fastest_before_ns_ = INT64_MAX;  // of the current block of runs on all threads, of the one before
  int block_runs_ = 0;
  std::int64_t interval_ns_;  // between two trials, or two attempts with all threads
  std::int64_t until_next_ns_ = 0;
};

class Program final : public Job {
 public:
  explicit Program(Runtime& runtime);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const ProgramMachine& machine() const { return machine_; }
  void add(std::unique_ptr<SmallOperation> operation);
  void add(std::unique_ptr<KernelOperation> operation);
  // Ends the stage, so that the caller can do something between two runs; returns the number of stages so far.
  int end_stage();
  int stages() const { return static_cast<int>(stages_.size()); }

  // Offset 0 of the buffer is at `origin`; operands may reach from `first` to `end` bytes relative to it.
  void bind(int buffer, std::byte* origin, std::int64_t first, std::int64_t end);
  // Throws std::invalid_argument where an operand leaves its buffer at a position in [first, last]; `room`: tokens in a buffer of the
  // cache.
  void check(std::int64_t first, std::int64_t last, std::int64_t room);
  // Stages [first, end) of the step at `position`, within the checked range. Throws what an operation throws.
  void run(std::int64_t position, int first, int end);

  // The loop of decoding, over all stages: logits (R, V) of some of the tokens that are fed, these tokens (T), and what counts positions,
  // the latter two int64; or, with `hidden`, the states of the tokens before these operands. Throws std::invalid_argument.
  void set_loop(std::vector<Operand> operands, bool hidden);
  std::int64_t loop_tokens() const;
  std::int64_t loop_logits() const;  // their number, R V
  std::int64_t loop_vocabulary() const;  // V
  std::int64_t loop_hidden_bytes() const;
  // Feeds tokens at `position`, and adds to what counts positions by as many as it is after that of the last run; `logits` is (R, V),
  // widened.
  void follow(std::int64_t position, const std::int64_t* tokens, float* logits);
  // Of one sequence: feeds a token, the likeliest one after it, and so on, for at most `limits.count` positions; returns the likeliest
  // after each.
  struct Limits {
    std::int64_t count;
    std::vector<std::int64_t> ends;  // tokens after which no other follows
    std::int64_t longest_ns;  // after which no step begins
    std::byte* hidden;  // receives the states of each step, if not null
  };
  std::vector<std::int64_t> greedy(std::int64_t position, std::int64_t token, const Limits& limits);
  const std::vector<std::int64_t>& step_ns() const { return step_ns_; }  // what each token of the latest call of `greedy` took
  std::int64_t fed() const { return fed_; }  // tokens so far

  void run(int worker) noexcept override;

  // When the kernel of a stage began and ended in the last run of that stage, on whatever worker came first, in ns of the steady clock;
  // both are 0 for a stage without a kernel.
  struct Span {
    std::int64_t began = 0, ended = 0;
  };
  std::vector<Span> spans() const;
  std::int64_t kernel_ns() const { return kernel_ns_; }  // of all spans of all runs

 private:
  struct Stage {
    explicit Stage(int workers) : pace(workers) {}
    Pace pace;  // of runs that begin here
    Span span;  // its ends are written by the workers that claim and that finish the stage first
    std::vector<std::unique_ptr<SmallOperation>> small;
    std::unique_ptr<KernelOperation> kernel;
    std::atomic<bool> claimed{false};
    std::atomic<bool> ready{false};
    std::atomic<bool> done{false};
  };
  struct Buffer {
    std::byte* origin = nullptr;
    std::int64_t first = 0;
    std::int64_t end = 0;
  };

  template <class Function>
  void for_operations(const Function& function);
  void resolve(Operation& operation, std::int64_t position) const;
  void check_operand(const Operand& operand, std::int64_t position) const;
  void run_small(Stage& stage, Stage* before);
  const View& loop_view(int place) const;  // of the logits, the tokens, then what counts positions
  void feed(std::int64_t position, const std::int64_t* tokens);
  std::int64_t likeliest() const;

  Runtime& runtime_;
  ProgramScratch scratch_;
  const ProgramMachine machine_;
  std::vector<std::unique_ptr<Stage>> stages_;
  std::unique_ptr<Operation> loop_;
  bool loop_hidden_ = false;  // whether its first operand is of hidden states
  std::int64_t fed_ = 0;
  std::vector<std::int64_t> step_ns_;
  bool open_ = false;  // the last stage takes more operations
  std::vector<Buffer> buffers_;
  std::int64_t checked_first_ = 0, checked_last_ = -1, room_ = 0, position_ = -1;
  int first_ = 0, end_ = 0;
  std::int64_t kernel_ns_ = 0;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace moegraft
