// What a model owns to compute on the CPU: kernels, a pool of threads, and a queue of submitted work.
//
// Threads: forward() and linear() block their caller, which works too; calls from several threads take turns. They run on the OpenMP
// threads that PyTorch computes the rest of the model with, where there are as many (openmp.h), else on the runtime's own. Submitted work
// and host calls come from threads that PyTorch does not compute on, and run on the runtime's own. submit() returns at once: a queue thread, started by the first submit, runs the work in order. wait() blocks until that work is done and rethrows its
// exception. The destructor finishes the running work, drops what has not begun, and joins every thread.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/engine.h"
#include "simd/isa.h"

namespace moegraft {

class Runtime {
 public:
  // threads 0: default_threads(). Throws std::invalid_argument, std::system_error.
  Runtime(int threads, const std::string& isa, bool share_threads = true);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  int threads() const { return threads_; }
  const SelectedKernels& selected() const { return selected_; }
  // Whether forward() on this thread would run on another library's threads.
  bool shares_threads() const { return openmp_ && openmp_->has_team_of(threads_); }
  const Kernels& kernels() const { return selected_.table; }

  // All throw std::runtime_error in a process forked from the one that made this runtime: its threads are not there.
  void forward(const ForwardArgs& args) { forward(args, openmp_); }
  void forward_on_own_threads(const ForwardArgs& args) { forward(args, nullptr); }
  void linear(const LinearArgs& args);
  void attention(const AttentionArgs& args);
  void norm(const NormArgs& args);
  void route(const RouterArgs& args);
  std::uint64_t submit(const ForwardArgs& args);
  void wait(std::uint64_t ticket);  // throws std::invalid_argument when the ticket is unknown or was waited for already

 private:
  struct Pending {
    ForwardArgs args;
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
    bool stopping = false;
    std::thread server;
  };

  void forward(const ForwardArgs& args, const OpenMp* shared);
  void check_process() const;
  void serve();

  const SelectedKernels selected_;
  const int threads_;
  const pid_t owner_;
  const OpenMp* const openmp_;
  std::unique_ptr<ThreadPool> pool_;
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
