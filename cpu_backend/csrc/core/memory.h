// Memory of packed weights and of the jobs' scratch.
#pragma once

#include <cstddef>

namespace moegraft {

// Zeroed, aligned to huge pages, and asks for them: weights are streamed, and 4 KiB pages cost page walks.
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
  // Before it is written to: for memory whose pages are placed in ranges of `range_bytes`. Where few huge pages make up a range, too much
  // of it would be on the neighbour's node.
  void prepare_ranges(std::size_t range_bytes);
  // At least `bytes`, contents lost when it has to grow.
  void reserve(std::size_t bytes);

 private:
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Lets malloc keep up to 128 MiB of freed memory in each of its arenas, unless the environment configures it: a prompt frees its activations,
// some MiB each, and allocates as many again. glibc returns them to the system by default, so that the system clears each page again.
void keep_freed_memory();

// Allocates consecutive arrays in one block of memory, each aligned to a cache line; without memory it only counts their bytes.
class Arrays {
 public:
  explicit Arrays(std::byte* memory) : memory_(memory) {}
  std::size_t bytes() const { return bytes_; }
  template <class Element>
  Element* take(std::size_t count) {
    std::byte* start = memory_ != nullptr ? memory_ + bytes_ : nullptr;
    bytes_ += (count * sizeof(Element) + 63) / 64 * 64;
    return reinterpret_cast<Element*>(start);
  }

 private:
  std::byte* memory_;
  std::size_t bytes_ = 0;
};

}  // namespace moegraft
