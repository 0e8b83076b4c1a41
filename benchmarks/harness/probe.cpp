// Reads memory at its full bandwidth, which limits decode. Compiled by probe.py on the measured machine.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

volatile std::uint64_t sink;  // keeps the reads

// Prefetches in bursts, which is faster than the hardware's prefetcher alone.
void read_all(const std::uint64_t* words, std::size_t count) {
  constexpr std::size_t kBurst = 128, kAhead = 512;  // words: 1 KiB, 4 KiB
  std::uint64_t lanes[32] = {};
  for (std::size_t start = 0; start + kBurst <= count; start += kBurst) {
    for (std::size_t line = 0; line < kBurst; line += 8) __builtin_prefetch(words + start + kAhead + line, 0, 2);
    for (std::size_t i = start; i < start + kBurst; i += 32)
      for (int lane = 0; lane < 32; ++lane) lanes[lane] ^= words[i + lane];
  }
  std::uint64_t all = 0;
  for (const std::uint64_t lane : lanes) all ^= lane;
  sink = all;
}

// Pins each reader to a core of its own: two readers on one core would halve the bandwidth.
void pin(int reader) {
  cpu_set_t allowed, mine;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  int left = reader % CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || left-- > 0) continue;
    CPU_ZERO(&mine);
    CPU_SET(core, &mine);
    pthread_setaffinity_np(pthread_self(), sizeof mine, &mine);
    return;
  }
}

}  // namespace

// Allocates huge pages and touches them; returns null if there is no memory.
extern "C" void* probe_allocate(std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  void* mapping = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* data = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(mapping) + kHugePage - 1) & ~(kHugePage - 1));
  madvise(data, bytes, MADV_HUGEPAGE);
  for (std::size_t i = 0; i < bytes; i += 4096) data[i] = 1;
  return data;
}

// Returns the seconds in which `threads` running threads read `bytes`, each its part in order.
extern "C" double probe_read(const void* data, std::size_t bytes, int threads) {
  using Clock = std::chrono::steady_clock;
  const std::size_t words = bytes / 8 / static_cast<std::size_t>(threads);
  std::atomic<int> ready{0};
  std::vector<Clock::time_point> begins(static_cast<std::size_t>(threads)), ends(static_cast<std::size_t>(threads));
  std::vector<std::thread> readers;
  for (int t = 0; t < threads; ++t) {
    readers.emplace_back([&, t] {
      pin(t);
      ready.fetch_add(1);
      while (ready.load() < threads) std::this_thread::yield();
      begins[static_cast<std::size_t>(t)] = Clock::now();
      read_all(static_cast<const std::uint64_t*>(data) + words * static_cast<std::size_t>(t), words);
      ends[static_cast<std::size_t>(t)] = Clock::now();
    });
  }
  for (auto& reader : readers) reader.join();
  const auto begin = *std::min_element(begins.begin(), begins.end());
  return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - begin).count();
}
