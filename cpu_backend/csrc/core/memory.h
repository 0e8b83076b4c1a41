// Zeroed memory that is aligned to huge pages and asks for them: weights are streamed, and 4 KiB pages cost page walks.
#pragma once

#include <cstddef>

namespace moegraft {

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
