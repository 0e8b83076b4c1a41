#include "core/thread_pool.h"

#include <algorithm>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace moegraft {
namespace {

constexpr unsigned kClosed = 0x80000000u;

#if defined(__linux__)
cpu_set_t set_of(const std::vector<int>& cores, int without) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores)
    if (core != without) CPU_SET(core, &set);
  return set;
}
#endif

// Of all nodes; 0 where there are fewer than threads.
int cores_of(const MemoryNodes& nodes, int threads) {
  std::size_t cores = 0;
  for (int node = 0; node < nodes.count(); ++node) cores += nodes[node].cores.size();
  return static_cast<int>(cores) < threads ? 0 : static_cast<int>(cores);
}

}  // namespace

ThreadPool::ThreadPool(int threads, MemoryNodes nodes)
    : gate_(kClosed), nodes_(nodes.for_threads(threads)), cores_(cores_of(nodes_, threads)) {
  try {
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::leave_core_to_caller() {
#if defined(__linux__)
  const int core = cores_ == 0 ? -1 : sched_getcpu();
  const std::lock_guard<std::mutex> lock(left_mutex_);
  if (core < 0 || core == left_core_) return;
  left_core_ = core;
  // On failure the workers stay where they are, which costs speed alone.
  for (int node = 0; node < nodes(); ++node) {
    const cpu_set_t others = set_of(nodes_[node].cores, core);
    const int first = MemoryNodes::first_part(threads(), node, nodes()), end = MemoryNodes::first_part(threads(), node + 1, nodes());
    for (int worker = std::max(1, first); worker < end; ++worker)
      (void)pthread_setaffinity_np(workers_[static_cast<std::size_t>(worker - 1)].native_handle(), sizeof others, &others);
  }
#endif
}

// The thread may leave again when the scheduler wants it to: its affinity is the caller's own.
void ThreadPool::move_to_first_node() {
#if defined(__linux__)
  const int core = sched_getcpu();
  const std::vector<int>& cores = nodes_[0].cores;
  cpu_set_t allowed;
  if (std::binary_search(cores.begin(), cores.end(), core)) return;
  if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) return;
  const cpu_set_t first = set_of(cores, -1);
  if (pthread_setaffinity_np(pthread_self(), sizeof first, &first) == 0)
    (void)pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
#endif
}

namespace {

struct TeamRun {
  Job& job;
  std::atomic<int> next_worker{0};
};

void run_member(void* argument) {
  auto& run = *static_cast<TeamRun*>(argument);
  run.job.run(run.next_worker.fetch_add(1));
}

}  // namespace

void ThreadPool::run(Job& job, const OpenMp* shared) {
  if (workers_.empty()) return job.run(0);
  if (shared && shared->has_team_of(threads())) {
    TeamRun run{job};
    return shared->parallel(&run_member, &run, threads());
  }
  if (nodes() > 1) move_to_first_node();
  // Each move of the caller would cost a system call for every worker. Workers that are awake have cores of their own already, and where the
  // process has more cores than threads, the caller wakes on a free one.
  const bool apart = awake_.load() > 0 && sleepers_.load() == 0 && cores_ > threads();
  if (!apart) leave_core_to_caller();
  job_.store(&job);
  gate_.fetch_and(~kClosed);
  epoch_.fetch_add(1);
  wake_sleepers();
  job.run(0);
  gate_.fetch_or(kClosed);
  wait_until([this] { return (gate_.load() & ~kClosed) == 0; });
}

void ThreadPool::keep_awake() {
  leave_core_to_caller();
  awake_.fetch_add(1);
  calls_.fetch_add(1);
  wake_sleepers();
}

void ThreadPool::wake_sleepers() {
  if (sleepers_.load() == 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }  // a worker between its last check and its sleep must get the notification
  wake_.notify_all();
}

bool ThreadPool::wait_for_job(unsigned seen) {
  const auto ready = [&] { return epoch_.load() != seen || stopping_.load(); };
  while (true) {
    const unsigned calls = calls_.load();
    if (spin_until(ready, kSpin) || yield_until(ready, [this] { return awake_.load() > 0; }, kSpinAwake)) break;
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return ready() || calls_.load() != calls; });
    sleepers_.fetch_sub(1);
  }
  return !stopping_.load();
}

void ThreadPool::work(int worker) {
  unsigned seen = 0;
  while (wait_for_job(seen)) {
    seen = epoch_.load();
    if (!(gate_.fetch_add(1) & kClosed)) job_.load()->run(worker);
    gate_.fetch_sub(1);
  }
}

void Phase::reset(int units) {
  order_.clear();
  const int workers = static_cast<int>(cursors_.size());
  for (int worker = 0; worker < workers; ++worker)
    share_out(worker, first_unit(units, worker, workers), first_unit(units, worker + 1, workers));
  begin(units);
}

void Phase::share_out(int worker, int first, int end) {
  Cursor& cursor = cursors_[static_cast<std::size_t>(worker)];
  cursor.first = first;
  cursor.next.store(first);
  cursor.end = end;
}

void Phase::begin(int units) {
  units_ = units;
  done_.store(0);
}

int Phase::take_from(Cursor& cursor) {
  if (cursor.next.load(std::memory_order_relaxed) >= cursor.end) return -1;
  const int place = cursor.next.fetch_add(1, std::memory_order_relaxed);
  return place < cursor.end ? unit_at(place) : -1;
}

int Phase::take(int worker) {
  const int workers = static_cast<int>(cursors_.size());
  int first = 0, own = workers;
  if (nodes_ > 1) {
    const int node = MemoryNodes::node_of_part(worker, workers, nodes_);
    first = first_worker(node);
    own = first_worker(node + 1) - first;
  }
  for (int i = 0; i < own; ++i)
    if (const int unit = take_from(cursors_[static_cast<std::size_t>(first + (worker - first + i) % own)]); unit >= 0) return unit;
  for (int i = own; i < workers; ++i)  // of the nodes that follow
    if (const int unit = take_from(cursors_[static_cast<std::size_t>((first + i) % workers)]); unit >= 0) return unit;
  return -1;
}

void Phase::wait() const {
  wait_until([this] { return done_.load(std::memory_order_acquire) >= units_; });
}

void Phase::wait(Upcoming& upcoming) const {
  wait_until([this] { return done_.load(std::memory_order_acquire) >= units_; }, upcoming);
}

}  // namespace moegraft
