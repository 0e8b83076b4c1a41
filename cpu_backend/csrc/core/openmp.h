// The OpenMP threads that another library of this process computes with, such as PyTorch's.
//
// A layer's own operations (attention, norms, the router) run on that library's threads, which spin for milliseconds after each parallel
// region. A second pool beside them shares its cores with those spinning threads, hundreds of times a token. Work that is run on the very
// threads that spin finds them awake, and takes a core from nobody. The library is found at run time: nothing here links to OpenMP.
#pragma once

namespace moegraft {

class OpenMp {
 public:
  // The library's entry points, or null where none is loaded or it is not known. PyTorch's is preferred to others.
  static const OpenMp* find();

  // Whether a region of `threads` started here would run on that library's standing threads: a region of another size would make it end
  // threads and start new ones, and one inside another region would have one thread.
  bool has_team_of(int threads) const;
  void parallel(void (*function)(void*), void* argument, int threads) const;

 private:
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, which LLVM's and Intel's libraries have too
  using Query = int (*)();

  Parallel parallel_ = nullptr;
  Query max_threads_ = nullptr;
  Query in_parallel_ = nullptr;
};

}  // namespace moegraft
