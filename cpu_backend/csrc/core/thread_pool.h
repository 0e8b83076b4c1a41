// A persistent pool of workers, owned by one Runtime, and the phases in which a job's units are shared out.
//
// Who blocks: run() works as worker 0 and returns when the job is complete; workers spin for some tens of microseconds after a job,
// because the next layer of a model comes soon, and then sleep. Any worker that is awake joins the job: run() never waits for one that has
// not woken up, so a sleeping or descheduled worker costs its share of the work and nothing else. From keep_awake() to let_sleep() workers
// go on spinning, and yield their cores meanwhile: run() then hands work over without a system call.
//
// Cores: schedulers tend to wake a thread on the core of its waker, where it would wait for run() to end. So workers are kept off the core
// on which run() or keep_awake() was called and may use all others of the process. With several memory nodes, workers are shared out to the
// nodes in order and stay on their cores; a caller of run() on another node is moved to the first, where worker 0 belongs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/machine.h"
#include "core/openmp.h"

namespace moegraft {

// Long enough to cover the router between two layers, short enough that an idle pool costs nothing; tuned on EPYC Zen 5, 2 cores.
constexpr std::chrono::microseconds kSpin{50};
constexpr int kPausesPerLook = 32;  // between two readings of the clock
// Without work while kept awake: far more than a GPU takes between two layers, so that only a step that hangs reaches it. An estimate.
constexpr std::chrono::microseconds kSpinAwake{2000};

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// True as soon as `ready` is, false when it was not for `limit`.
template <class Ready>
bool spin_until(const Ready& ready, std::chrono::microseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (ready()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// As spin_until, for as long as `wanted` holds; other threads get the core in between.
template <class Ready, class Wanted>
bool yield_until(const Ready& ready, const Wanted& wanted, std::chrono::microseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (wanted() && std::chrono::steady_clock::now() < end) {
    if (spin_until(ready, std::chrono::microseconds{0})) return true;
    std::this_thread::yield();
  }
  return ready();
}

template <class Ready>
void wait_until(const Ready& ready) {
  if (ready() || spin_until(ready, kSpin)) return;
  while (!ready()) std::this_thread::yield();  // the awaited thread may have no core: give it this one
}

// Memory that a worker reads next, the beginning of which it prefetches while it waits.
class Upcoming {
 public:
  // Half of the L2 of most server cores. On EPYC Zen 4, 2 cores, a decode step in int4 takes 0.996 of the time with 128 KiB, 0.991 with
  // 512.
  static constexpr std::size_t kMostBytes = std::size_t{512} << 10;

  Upcoming() = default;
  Upcoming(const std::byte* first, std::size_t bytes) : next_(first), end_(first + (bytes < kMostBytes ? bytes : kMostBytes)) {}

  // False where nothing is left. A few lines at a time: the awaited event may have come meanwhile.
  bool prefetch() {
    if (next_ >= end_) return false;
    for (int line = 0; line < kLines && next_ < end_; ++line, next_ += 64) __builtin_prefetch(next_, 0, 2);
    return true;
  }

 private:
  static constexpr int kLines = 8;
  const std::byte* next_ = nullptr;
  const std::byte* end_ = nullptr;
};

template <class Ready, class... More>
void wait_until(const Ready& ready, Upcoming& upcoming, More&... more) {
  while (!ready() && (upcoming.prefetch() || (more.prefetch() || ...))) {
  }
  wait_until(ready);
}

class Job {
 public:
  // Called at most once by each worker, concurrently; must return when no work is left. Worker 0 is always called.
  virtual void run(int worker) noexcept = 0;

 protected:
  ~Job() = default;
};

class ThreadPool {
 public:
  ThreadPool(int threads, MemoryNodes nodes);  // throws std::system_error when threads cannot be started
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  int nodes() const { return nodes_.count(); }
  const MemoryNodes& memory_nodes() const { return nodes_; }
  // One caller at a time. With `shared`, on that library's threads, where it has a team of this size; this pool's own then stay asleep.
  void run(Job& job, const OpenMp* shared);
  // Around calls of run() that follow one another soon, from any thread; neither blocks. Each keep_awake() needs its own let_sleep().
  void keep_awake();
  void let_sleep() { awake_.fetch_sub(1); }

 private:
  void work(int worker);
  void stop();
  bool wait_for_job(unsigned seen);  // false: the pool stops
  void wake_sleepers();
  void leave_core_to_caller();
  void move_to_first_node();

  std::atomic<Job*> job_{nullptr};
  std::atomic<unsigned> epoch_{0};
  std::atomic<unsigned> gate_;  // number of workers inside the job, and a bit that is set while it is closed
  std::atomic<int> sleepers_{0};
  std::atomic<int> awake_{0};  // calls of keep_awake() without their let_sleep()
  std::atomic<unsigned> calls_{0};  // all calls of keep_awake(), which wake sleepers as a new epoch does
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  const MemoryNodes nodes_;
  const int cores_;  // that the process may use; 0 where threads cannot be kept off one
  std::mutex left_mutex_;
  int left_core_ = -1;  // guarded by left_mutex_
};

// Units 0 .. n-1 of one phase of a job: each worker has a contiguous range, so that it reads memory in order, and takes from the
// others' when its own is done, from those of its memory node first. Completion is counted in units, not in workers.
class Phase {
 public:
  explicit Phase(int workers, int nodes = 1) : cursors_(static_cast<std::size_t>(workers)), nodes_(nodes) {}
  void reset(int units);
  // The workers of each node share the units whose weights `node_of(unit)` states to be on it.
  template <class NodeOf>
  void reset_by_node(int units, const NodeOf& node_of) {
    if (nodes_ == 1) return reset(units);
    ends_.assign(static_cast<std::size_t>(nodes_), 0);
    units_nodes_.clear();
    for (int unit = 0; unit < units; ++unit) {
      units_nodes_.push_back(node_of(unit));
      ++ends_[static_cast<std::size_t>(units_nodes_.back())];
    }
    for (int node = 0, worker = 0, first = 0; node < nodes_; ++node) {
      const int count = ends_[static_cast<std::size_t>(node)], workers = first_worker(node + 1) - worker;
      for (int i = 0; i < workers; ++i, ++worker)
        share_out(worker, first + first_unit(count, i, workers), first + first_unit(count, i + 1, workers));
      ends_[static_cast<std::size_t>(node)] = first;
      first += count;
    }
    order_.resize(static_cast<std::size_t>(units));
    for (int unit = 0; unit < units; ++unit) {
      const int node = units_nodes_[static_cast<std::size_t>(unit)];
      order_[static_cast<std::size_t>(ends_[static_cast<std::size_t>(node)]++)] = unit;
    }
    begin(units);
  }
  int nodes() const { return nodes_; }
  int take(int worker);  // the next unit, or -1
  void finish(int units) {
    if (units > 0) done_.fetch_add(units, std::memory_order_acq_rel);
  }
  void wait() const;  // until every unit is finished: spins, then yields
  void wait(Upcoming& upcoming) const;
  // Where a worker begins that takes units of its own range.
  static int first_unit(int units, int worker, int workers) { return static_cast<int>(static_cast<long long>(units) * worker / workers); }
  int first_unit(int worker) const { return unit_at(cursors_[static_cast<std::size_t>(worker)].first); }  // of others where it has none

 private:
  struct alignas(64) Cursor {
    std::atomic<int> next{0};
    int first = 0, end = 0;
  };
  int first_worker(int node) const { return MemoryNodes::first_part(static_cast<int>(cursors_.size()), node, nodes_); }
  int unit_at(int place) const {
    return order_.empty() || place >= static_cast<int>(order_.size()) ? place : order_[static_cast<std::size_t>(place)];
  }
  void share_out(int worker, int first, int end);
  void begin(int units);
  int take_from(Cursor& cursor);

  std::vector<Cursor> cursors_;
  const int nodes_;
  std::vector<int> order_;  // of the units by node; empty: as they are
  std::vector<int> ends_, units_nodes_;  // while they are sorted
  std::atomic<int> done_{0};
  int units_ = 0;
};

}  // namespace moegraft
