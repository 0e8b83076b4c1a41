#include "core/thread_pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace moegraft {
namespace {

constexpr unsigned kClosed = 0x80000000u;
// Empty where there are fewer cores than threads or the system does not report them.
std::vector<int> usable_cores(int threads) {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < threads) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
#endif
  return cores;
}

}  // namespace

ThreadPool::ThreadPool(int threads) : gate_(kClosed), cores_(usable_cores(threads)) {
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
  const int core = cores_.empty() ? -1 : sched_getcpu();
  const std::lock_guard<std::mutex> lock(left_mutex_);
  if (core < 0 || core == left_core_) return;
  left_core_ = core;
  cpu_set_t others;
  CPU_ZERO(&others);
  for (const int other : cores_)
    if (other != core) CPU_SET(other, &others);
  // On failure the workers stay where they are, which costs speed alone.
  for (auto& worker : workers_) (void)pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
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
  // Each move of the caller would cost a system call for every worker. Workers that are awake have cores of their own already, and where the
  // process has more cores than threads, the caller wakes on a free one.
  const bool apart = awake_.load() > 0 && sleepers_.load() == 0 && static_cast<int>(cores_.size()) > threads();
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
  const int workers = static_cast<int>(cursors_.size());
  units_ = units;
  done_.store(0);
  for (int worker = 0; worker < workers; ++worker) {
    cursors_[worker].next.store(first_unit(units, worker, workers));
    cursors_[worker].end = first_unit(units, worker + 1, workers);
  }
}

int Phase::take(int worker) {
  const int workers = static_cast<int>(cursors_.size());
  for (int i = 0; i < workers; ++i) {
    Cursor& cursor = cursors_[(worker + i) % workers];
    if (cursor.next.load(std::memory_order_relaxed) >= cursor.end) continue;
    const int unit = cursor.next.fetch_add(1, std::memory_order_relaxed);
    if (unit < cursor.end) return unit;
  }
  return -1;
}

void Phase::wait() const {
  wait_until([this] { return done_.load(std::memory_order_acquire) >= units_; });
}

void Phase::wait(Upcoming& upcoming) const {
  wait_until([this] { return done_.load(std::memory_order_acquire) >= units_; }, upcoming);
}

}  // namespace moegraft
