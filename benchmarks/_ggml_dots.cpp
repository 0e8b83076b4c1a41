// Times ggml's dot products of one type over rows that are read from memory. Compiled by gguf_types.py on the measured machine.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

// As ggml-cpu.h declares them.
struct Traits {
  void (*from_float)(const float* x, void* y, std::int64_t count);
  void (*vec_dot)(int count, float* sum, std::size_t, const void* x, std::size_t, const void* y, std::size_t, int rows);
  int dot_type;
  std::int64_t rows;
};
using GetTraits = const Traits* (*)(int type);

void pin(int worker) {
  cpu_set_t allowed, mine;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  int left = worker % CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || left-- > 0) continue;
    CPU_ZERO(&mine);
    CPU_SET(core, &mine);
    pthread_setaffinity_np(pthread_self(), sizeof mine, &mine);
    return;
  }
}

}  // namespace

// Returns the function that finds a type's kernels in libggml-cpu.so, or null.
extern "C" void* ggml_open(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) return nullptr;
  if (void* init = dlsym(handle, "ggml_cpu_init")) reinterpret_cast<void (*)()>(init)();
  return dlsym(handle, "ggml_get_type_traits_cpu");
}

// Writes the dot products of `rows` rows with x (cols), which is converted to the type's own form before, to `out`. Returns the seconds in
// which `threads` running threads computed them, each its part in order; a negative number where ggml has no kernel.
extern "C" double ggml_dots(void* found, int type, const std::uint8_t* data, std::size_t row_bytes, int rows, int cols, const float* x,
                            float* out, int threads) {
  using Clock = std::chrono::steady_clock;
  const auto get = reinterpret_cast<GetTraits>(found);
  const Traits* traits = get(type);
  if (traits == nullptr || traits->vec_dot == nullptr || get(traits->dot_type)->from_float == nullptr) return -1.0;
  std::vector<std::uint64_t> codes(static_cast<std::size_t>(cols));  // more bytes than any form needs
  get(traits->dot_type)->from_float(x, codes.data(), cols);
  std::atomic<int> ready{0};
  std::vector<Clock::time_point> begins(static_cast<std::size_t>(threads)), ends(static_cast<std::size_t>(threads));
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      pin(t);
      const int first = rows / threads * t, end = t + 1 == threads ? rows : rows / threads * (t + 1);
      ready.fetch_add(1);
      while (ready.load() < threads) std::this_thread::yield();
      begins[static_cast<std::size_t>(t)] = Clock::now();
      for (int row = first; row < end; ++row)
        traits->vec_dot(cols, out + row, 0, data + row_bytes * static_cast<std::size_t>(row), 0, codes.data(), 0, 1);
      ends[static_cast<std::size_t>(t)] = Clock::now();
    });
  }
  for (auto& worker : workers) worker.join();
  const auto begin = *std::min_element(begins.begin(), begins.end());
  return std::chrono::duration<double>(*std::max_element(ends.begin(), ends.end()) - begin).count();
}
