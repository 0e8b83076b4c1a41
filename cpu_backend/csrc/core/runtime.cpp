#include "core/runtime.h"

#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "core/machine.h"

namespace moegraft {
namespace {

constexpr int kMostThreads = 1024;

int checked_threads(int threads) {
  if (threads < 0 || threads > kMostThreads)
    throw std::invalid_argument("threads is " + std::to_string(threads) + "; it must be 0 (one for each physical core) to " +
                                std::to_string(kMostThreads));
  return threads == 0 ? default_threads() : threads;
}

MemoryNodes checked_nodes(int groups) {
  if (groups < 0 || groups > kMostThreads)
    throw std::invalid_argument("node_groups is " + std::to_string(groups) + "; it must be 0 to " + std::to_string(kMostThreads));
  const char* given = groups == 0 ? std::getenv("MOEGRAFT_NODES") : nullptr;
  if (given != nullptr && *given != '\0') {
    char* end = nullptr;
    const long number = std::strtol(given, &end, 10);
    if (*end != '\0' || number < 1 || number > kMostThreads)
      throw std::invalid_argument("MOEGRAFT_NODES is '" + std::string(given) + "'; it must be a number of groups of cores, 1 to " +
                                  std::to_string(kMostThreads));
    groups = static_cast<int>(number);
  }
  return groups == 0 ? MemoryNodes::of_system() : MemoryNodes::groups(groups);
}

Kernels checked_kernels(const std::string& isa, std::optional<int> matrix_tokens) {
  if (matrix_tokens && *matrix_tokens < 0)
    throw std::invalid_argument("matrix_tokens is " + std::to_string(*matrix_tokens) + "; it must be at least 0");
  return kernels_for(isa, matrix_tokens);
}

}  // namespace

Runtime::Runtime(int threads, const std::string& isa, bool share_threads, std::optional<int> matrix_tokens, int node_groups)
    : kernels_(checked_kernels(isa, matrix_tokens)),
      threads_(checked_threads(threads)),
      owner_(getpid()),
      pool_(std::make_unique<ThreadPool>(threads_, checked_nodes(node_groups))),
      openmp_(share_threads && pool_->nodes() == 1 ? OpenMp::find() : nullptr),  // its threads are not kept on a node
      engine_(std::make_unique<Engine>(kernels_, *pool_)),
      queue_(std::make_unique<Queue>()) {
  keep_freed_memory();
}

Runtime::~Runtime() {
  if (getpid() != owner_) {
    // In a forked child the threads do not exist: they cannot be joined, and destroying the condition variables they wait on would block.
    // The memory is freed when the process ends.
    (void)pool_.release();
    (void)engine_.release();
    (void)queue_.release();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->stopping = true;
  }
  queue_->changed.notify_all();
  if (queue_->server.joinable()) queue_->server.join();
}

void Runtime::check_process() const {
  if (getpid() != owner_)
    throw std::runtime_error(
        "this Runtime was made before a fork and its threads stayed in the parent process; create a new Runtime, or load the model, in the "
        "child process, or start processes by spawn");
}

void Runtime::forward(const ForwardArgs& args, const OpenMp* shared) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  engine_->forward(args, shared);
}

void Runtime::linear(const LinearArgs& args) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  engine_->linear(args, openmp_);
}

void Runtime::linear_gradient(const LinearArgs& args) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  engine_->linear_gradient(args, openmp_);
}

void Runtime::experts_gradient(const ExpertsGradientArgs& args) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  engine_->experts_gradient(args, openmp_);
}

void Runtime::attention(const AttentionArgs& args) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  engine_->attention(args, openmp_);
}

void Runtime::matmul(const MatmulArgs& args) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  engine_->matmul(args, openmp_);
}

void Runtime::norm(const NormArgs& args) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  engine_->norm(args, openmp_);
}

void Runtime::route(const RouterArgs& args) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  engine_->route(args, openmp_);
}

void Runtime::run(Job& job, const std::function<void()>& prepare, bool alone) {
  check_process();
  const std::lock_guard<std::mutex> lock(engine_mutex_);
  prepare();
  if (alone) job.run(0);
  else pool_->run(job, openmp_);
}

std::uint64_t Runtime::submit(const ForwardArgs& args) {
  check_process();
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  if (!queue_->server.joinable()) queue_->server = std::thread([this] { serve(); });
  const std::uint64_t ticket = queue_->next_ticket++;
  Pending& pending = queue_->pending[ticket];
  pending.args = args;
  pending.submitted = Clock::now();
  queue_->waiting.push_back(ticket);
  queue_->changed.notify_all();
  return ticket;
}

double Runtime::wait(std::uint64_t ticket) {
  check_process();
  std::unique_lock<std::mutex> lock(queue_->mutex);
  const auto found = queue_->pending.find(ticket);
  if (found == queue_->pending.end() || found->second.awaited)
    throw std::invalid_argument("ticket " + std::to_string(ticket) + " is unknown or was waited for already");
  found->second.awaited = true;
  queue_->changed.wait(lock, [&] { return found->second.done; });
  const std::exception_ptr error = found->second.error;
  const double took_ms = found->second.took_ms;
  queue_->pending.erase(found);
  lock.unlock();
  if (error) std::rethrow_exception(error);
  return took_ms;
}

void Runtime::keep_awake() {
  check_process();
  pool_->keep_awake();
}

void Runtime::serve() {
  std::unique_lock<std::mutex> lock(queue_->mutex);
  while (true) {
    queue_->changed.wait(lock, [this] { return queue_->stopping || !queue_->waiting.empty(); });
    if (queue_->stopping) return;
    Pending& pending = queue_->pending.at(queue_->waiting.front());  // references to a map's elements stay valid
    queue_->waiting.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      forward_on_own_threads(pending.args);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    pending.error = std::move(error);
    const Clock::time_point start = std::max(pending.submitted, queue_->last_end);
    queue_->last_end = Clock::now();
    pending.took_ms = std::chrono::duration<double, std::milli>(queue_->last_end - start).count();
    pending.done = true;
    queue_->changed.notify_all();
  }
}

void HostCall::run(void* host_call) noexcept {
  auto& call = *static_cast<HostCall*>(host_call);
  std::exception_ptr error;
  try {
    call.runtime_.forward_on_own_threads(call.args_);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(call.mutex_);
  call.error_ = std::move(error);
}

void HostCall::check() {
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace moegraft
