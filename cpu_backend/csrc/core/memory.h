// Zeroed memory that is aligned to huge pages and asks for them: weights are streamed, and 4 KiB pages cost page walks.
#pragma once

#include <algorithm>
#include <cstddef>

namespace moegraft {

constexpr std::size_t kLineBytes = 64;

struct ByteRange {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// Begins to read at most `most` bytes from the front of `range` into the core's L2 and removes them from it.
inline void prefetch_front(ByteRange& range, std::size_t most) {
  const std::size_t taken = std::min(range.bytes, most);
  for (std::size_t at = 0; at < taken; at += kLineBytes) __builtin_prefetch(range.data + at, 0, 2);
  range = {range.data + taken, range.bytes - taken};
}

class AlignedMemory {
 public:
  AlignedMemory() = default;
  explicit AlignedMemory(std::size_t bytes);  // throws std::bad_alloc
  ~AlignedMemory();
  AlignedMemory(AlignedMemory&& other) noexcept;
  AlignedMemory& operator=(AlignedMemory&& other) noexcept;
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  // At least `bytes`, contents lost when it has to grow.
  void reserve(std::size_t bytes);

 private:
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace moegraft
