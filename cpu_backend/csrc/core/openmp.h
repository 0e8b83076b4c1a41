// The OpenMP threads that another library of this process computes with, such as PyTorch's.
//
// A layer's own operations (attention, norms, the router) run on that library's threads, which spin for milliseconds after each parallel
// region. A second pool would compete for cores with the spinning threads hundreds of times per token, whereas work on the spinning threads
// themselves finds them awake. The library is found at run time: nothing here links to OpenMP.
//
// A forked process has its parent's record of these threads but not the threads, and GCC's library would wait for them for ever. So the
// forking thread's team is ended before each fork, and starts again with the next region, in the parent and in the child.
#pragma once

namespace moegraft {

class OpenMp {
 public:
  // The library's entry points, or null where no known one is loaded, or its threads stayed in a process from which this one was forked.
  // PyTorch's is preferred.
  static const OpenMp* find();

  // Whether a region of `threads` started here would run on that library's standing threads: a region of another size would make it end
  // threads and start new ones, and a nested region would have one thread.
  bool has_team_of(int threads) const;
  // Ends the calling thread's team. False where the library cannot do that, or within a region.
  bool end_threads() const;
  void parallel(void (*function)(void*), void* argument, int threads) const;

 private:
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, which LLVM's and Intel's libraries have too
  using Query = int (*)();
  using Pause = int (*)(int);  // OpenMP 5.0

  Parallel parallel_ = nullptr;
  Query max_threads_ = nullptr;
  Query in_parallel_ = nullptr;
  Pause pause_ = nullptr;
};

}  // namespace moegraft
