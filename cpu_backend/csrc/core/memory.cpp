#include "core/memory.h"

#include <sys/mman.h>
#if defined(__linux__)
#include <malloc.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace moegraft {
namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;  // x86-64 and most Arm kernels
}

AlignedMemory::AlignedMemory(std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
  mapping_bytes_ = bytes + kHugePage;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  data_ = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(mapping_) + kHugePage - 1) & ~(kHugePage - 1));
  size_ = bytes;
#ifdef MADV_HUGEPAGE
  // A small object must not occupy a whole huge page; a failure costs speed, never correctness.
  if (bytes >= kHugePage) (void)madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

AlignedMemory::~AlignedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

AlignedMemory::AlignedMemory(AlignedMemory&& other) noexcept { *this = std::move(other); }

AlignedMemory& AlignedMemory::operator=(AlignedMemory&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void AlignedMemory::prepare_ranges(std::size_t range_bytes) {
#ifdef MADV_NOHUGEPAGE
  if (range_bytes < 4 * kHugePage && data_ != nullptr) (void)madvise(data_, size_, MADV_NOHUGEPAGE);
#else
  (void)range_bytes;
#endif
}

void AlignedMemory::reserve(std::size_t bytes) {
  if (bytes <= size_) return;
  *this = AlignedMemory();  // freed first: both at once may not fit
  *this = AlignedMemory(bytes + bytes / 4);
}

void keep_freed_memory() {
#if defined(__GLIBC__)
  static const bool configured = [] {
    for (const char* name : {"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"})
      if (std::getenv(name) != nullptr) return false;
    // The largest that glibc takes; and enough for 2048 tokens of Qwen3-30B-A3B's shapes, which then have no page faults (28,000 before).
    return mallopt(M_MMAP_THRESHOLD, 32 << 20) == 1 && mallopt(M_TRIM_THRESHOLD, 128 << 20) == 1;
  }();
  (void)configured;
#endif
}

}  // namespace moegraft
