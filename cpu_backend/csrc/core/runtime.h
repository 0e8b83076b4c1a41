// A runtime: everything one model owns to compute on the CPU. core/ holds it and what all folders share (types, memory, machine, OpenMP).
//
// A Runtime owns the selected kernels, a ThreadPool, an Engine with its scratch memory, and a queue of submitted work.
// - forward(), linear(), attention(), norm() and route() block their caller, which computes too; callers from several threads are
//   serialised by a mutex. They run on the OpenMP threads with which PyTorch computes the rest of the model, where those are as many
//   (openmp.h), and otherwise on the pool.
// - submit() returns at once. A queue thread, started by the first submit(), runs the work in order on the pool, because PyTorch does not
//   compute on that thread. wait() blocks until the work is done and rethrows its exception. Host calls run on a CUDA thread and the pool.
// - The destructor finishes the running work, drops what has not begun, and joins every thread.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/engine.h"
#include "simd/isa.h"

namespace moegraft {

class Runtime {
 public:
  // threads 0: default_threads(). matrix_tokens: see kernels_for. node_groups: groups of cores that count as memory nodes without memory
  // of their own; 0: those of MOEGRAFT_NODES, or else the system's nodes. Throws std::invalid_argument, std::system_error.
  Runtime(int threads, const std::string& isa, bool share_threads = true, std::optional<int> matrix_tokens = std::nullopt,
          int node_groups = 0);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  int threads() const { return threads_; }
  const MemoryNodes& nodes() const { return pool_->memory_nodes(); }
  const Kernels& kernels() const { return kernels_; }
  // Whether forward() on this thread would run on another library's threads.
  bool shares_threads() const { return openmp_ && openmp_->has_team_of(threads_); }

  // All throw std::runtime_error in a process forked from the one that made this runtime: its threads are not there.
  void forward(const ForwardArgs& args) { forward(args, openmp_); }
  void forward_on_own_threads(const ForwardArgs& args) { forward(args, nullptr); }
  void linear(const LinearArgs& args);
  void experts_gradient(const ExpertsGradientArgs& args);
  void linear_gradient(const LinearArgs& args);
  void attention(const AttentionArgs& args);
  void matmul(const MatmulArgs& args);
  void norm(const NormArgs& args);
  void route(const RouterArgs& args);
  // A job of the caller's own, `alone` on the calling thread; `prepare` runs first, when no other work of this runtime does.
  void run(Job& job, const std::function<void()>& prepare, bool alone = false);
  std::uint64_t submit(const ForwardArgs& args);
  // Returns the ms that the work took, from its submission or the end of the work before it. Throws std::invalid_argument when the ticket
  // is unknown or was waited for already.
  double wait(std::uint64_t ticket);
  // Around work that comes soon, in pieces: see ThreadPool.
  void keep_awake();
  void let_sleep() { pool_->let_sleep(); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Pending {
    ForwardArgs args;
    Clock::time_point submitted;
    double took_ms = 0;
    bool done = false;
    bool awaited = false;
    std::exception_ptr error;
  };

  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::uint64_t> waiting;
    std::map<std::uint64_t, Pending> pending;
    std::uint64_t next_ticket = 1;
    Clock::time_point last_end;
    bool stopping = false;
    std::thread server;
  };

  void forward(const ForwardArgs& args, const OpenMp* shared);
  void check_process() const;
  void serve();

  const Kernels kernels_;
  const int threads_;
  const pid_t owner_;
  std::unique_ptr<ThreadPool> pool_;
  const OpenMp* const openmp_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Queue> queue_;
  std::mutex engine_mutex_;
};

// One forward call with all its arguments, callable through a C function pointer such as cudaLaunchHostFunc takes: the function runs the
// call and never throws; what went wrong is kept for check().
class HostCall {
 public:
  HostCall(Runtime& runtime, const ForwardArgs& args) : runtime_(runtime), args_(args) {}
  static void run(void* host_call) noexcept;
  void check();  // rethrows the exception of the last run, once

 private:
  Runtime& runtime_;
  ForwardArgs args_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace moegraft
