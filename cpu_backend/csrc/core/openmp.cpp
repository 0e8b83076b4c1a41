#include "core/openmp.h"

#include <string>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
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
#endif

}  // namespace

const OpenMp* OpenMp::find() {
#if defined(__linux__)
  std::string path;
  dl_iterate_phdr(&visit, &path);
  if (path.empty()) return nullptr;
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // never closed: the library must outlive its threads
  if (library == nullptr) return nullptr;
  static OpenMp openmp;
  openmp.parallel_ = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
  openmp.max_threads_ = reinterpret_cast<Query>(dlsym(library, "omp_get_max_threads"));
  openmp.in_parallel_ = reinterpret_cast<Query>(dlsym(library, "omp_in_parallel"));
  return openmp.parallel_ && openmp.max_threads_ && openmp.in_parallel_ ? &openmp : nullptr;
#else
  return nullptr;
#endif
}

bool OpenMp::has_team_of(int threads) const { return max_threads_() == threads && in_parallel_() == 0; }

void OpenMp::parallel(void (*function)(void*), void* argument, int threads) const {
  parallel_(function, argument, static_cast<unsigned>(threads), 0);
}

}  // namespace moegraft
