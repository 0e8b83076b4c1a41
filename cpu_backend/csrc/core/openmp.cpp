#include "core/openmp.h"

#include <string>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#endif

namespace moegraft {
namespace {

#if defined(__linux__)
bool is_openmp(const std::string& path) {
  const std::string name = path.substr(path.find_last_of('/') + 1);
  return name.rfind("libgomp", 0) == 0 || name.rfind("libiomp5", 0) == 0 || name.rfind("libomp", 0) == 0;
}

// Several libraries may have been loaded: the one in PyTorch's folders is preferred.
int visit(dl_phdr_info* info, std::size_t, void* found_path) {
  const std::string path = info->dlpi_name ? info->dlpi_name : "";
  auto& found = *static_cast<std::string*>(found_path);
  const bool is_torch = path.find("/torch") != std::string::npos;
  if (is_openmp(path) && (found.empty() || is_torch)) found = path;
  return 0;
}
constexpr int kPauseSoft = 1;  // omp_pause_soft; GCC's library ends its threads with any kind
bool threads_ended = false;    // before the fork that is under way
bool lost_in_fork = false;     // a region in this process would wait for threads that stayed in its parent

// Registered when the extension is loaded.
[[maybe_unused]] const int fork_handlers = pthread_atfork(
    [] {
      const OpenMp* openmp = OpenMp::find();
      threads_ended = !openmp || openmp->end_threads();
    },
    nullptr, [] { lost_in_fork = lost_in_fork || !threads_ended; });
#endif

}  // namespace

const OpenMp* OpenMp::find() {
#if defined(__linux__)
  if (lost_in_fork) return nullptr;
  std::string path;
  dl_iterate_phdr(&visit, &path);
  if (path.empty()) return nullptr;
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // never closed: the library must outlive its threads
  if (library == nullptr) return nullptr;
  static OpenMp openmp;
  openmp.parallel_ = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
  openmp.max_threads_ = reinterpret_cast<Query>(dlsym(library, "omp_get_max_threads"));
  openmp.in_parallel_ = reinterpret_cast<Query>(dlsym(library, "omp_in_parallel"));
  openmp.pause_ = reinterpret_cast<Pause>(dlsym(library, "omp_pause_resource_all"));
  return openmp.parallel_ && openmp.max_threads_ && openmp.in_parallel_ ? &openmp : nullptr;
#else
  return nullptr;
#endif
}

bool OpenMp::has_team_of(int threads) const { return max_threads_() == threads && in_parallel_() == 0; }

bool OpenMp::end_threads() const { return pause_ && pause_(kPauseSoft) == 0; }

void OpenMp::parallel(void (*function)(void*), void* argument, int threads) const {
  parallel_(function, argument, static_cast<unsigned>(threads), 0);
}

}  // namespace moegraft
