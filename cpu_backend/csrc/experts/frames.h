// Host memory for experts that lie in files, so that a model may be larger than memory: all layers of a model share frames, each of which
// holds one expert. It is a level of the memory hierarchy under the slots of a GPU: a resident set, a policy that ranks its experts, and
// reads that fill it, for what a layer demands first and then for what the next layer is expected to need.
//
// Reads bypass the page cache, so that nothing is held twice; where the file system cannot do that, what was read is dropped from it. Readers
// are a few threads that share the pieces of each expert, so that several requests are in the drive's queue; for reads of whole experts this
// reaches what io_uring does, and works where that is not allowed. Everything here is native, as the steps of a recorded program are.
//
// A layer's experts are pinned from demand() to the next demand(). Jobs wait for each expert where they first read it, with those that are in
// memory in front, and so compute while others arrive; the order changes no sum. What fails is kept for check(), as jobs cannot throw.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/memory.h"
#include "core/types.h"
#include "experts/cache_policy.h"
#include "experts/routing.h"

namespace moegraft {

// A file of experts cannot be read; the message names it and what to do.
struct ReadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The experts of one layer in a file: `count` times `bytes`, from `offset` on, a multiple of 64.
struct ExpertsInFile {
  std::string path;
  std::uint64_t offset;
  std::size_t bytes;
  int count;
  std::vector<std::uint32_t> checksums;  // CRC-32 of each expert, verified at its first read; empty: none
};

// Rows of weights, a router's or fitted ones, which predict what a layer will need from the hidden states of the one before. The memory is another owner's.
struct RouterRows {
  const void* weight = nullptr;  // (count, hidden)
  ActivationType type = ActivationType::kFloat32;
  int hidden = 0;
  std::vector<float> bias;  // of the logits; empty: none
  std::vector<float> choice_bias;  // added to the sigmoid of the logits for the choice (DeepSeek-V3); empty: none
};

struct Demand {
  const std::byte* hidden_states;  // (tokens, hidden); null: nothing is read ahead
  ActivationType activations;
  int hidden;
  int tokens;
  int top_k;
  int workers;
};

struct FrameCounts {
  std::int64_t demanded = 0;  // experts, once a layer and step
  std::int64_t resident = 0;  // of these, in memory when demanded
  std::int64_t arriving = 0;  // of these, being read because they were predicted
  std::int64_t reads = 0;  // experts
  std::int64_t read_bytes = 0;
  std::int64_t predicted = 0;  // reads of experts that were predicted
  std::int64_t unused = 0;  // of these, evicted without use
  std::int64_t waited_ns = 0;  // while some worker waited for an expert
  std::int64_t waited_bytes = 0;  // that arrived meanwhile
};

class ExpertFrames {
 public:
  // Throws std::invalid_argument.
  explicit ExpertFrames(int readers);
  ~ExpertFrames();
  ExpertFrames(const ExpertFrames&) = delete;
  ExpertFrames& operator=(const ExpertFrames&) = delete;

  // Returns the number of the layer; before open(). Throws ReadError where the file cannot be opened or is too short.
  int add(ExpertsInFile file);
  void set_router(int layer, RouterRows router);
  // Divides memory into frames, whose experts `policy` ranks from now on, and starts the readers; null: one with its defaults. Throws
  // std::invalid_argument where the memory is too small or the policy is for fewer experts, std::bad_alloc.
  void open(std::size_t bytes, std::shared_ptr<CachePolicy> policy = nullptr);
  bool is_open() const { return readers_running_; }
  int frames() const { return static_cast<int>(frames_.size()); }
  static std::size_t frame_bytes_for(std::size_t expert_bytes) { return (expert_bytes + 2 * kAlignment - 1) / kAlignment * kAlignment; }
  // For a layer, what is being read ahead, and copies.
  static int least_frames_for(int experts, int readers) { return experts + readers + 2; }
  int least_frames() const;
  std::size_t frame_bytes() const { return frame_bytes_; }
  int experts_of(int layer) const;  // throws std::invalid_argument where there is no such layer
  std::size_t bytes_of(int layer) const { return layers_[static_cast<std::size_t>(layer)]->file.bytes; }  // of an expert
  static constexpr std::size_t kAlignment = 4096;  // of direct reads, for every block size in use

  // What a layer computes with now: pins what is there, requests the rest, and orders the segments. One job at a time.
  void demand(int layer, Routing& routing, const Demand& demand);
  // The bytes of a demanded expert, once they are in memory. After an error, they are any.
  const std::byte* wait(int layer, int expert) noexcept;
  // Its bytes if they are in memory, else null.
  const std::byte* peek(int layer, int expert) const {
    return layers_[static_cast<std::size_t>(layer)]->entries[static_cast<std::size_t>(expert)].data.load(std::memory_order_acquire);
  }
  // Asks for experts that are not in memory, after what is demanded; those that have not begun to be read at the next demand() are forgotten.
  void ask(int layer, const std::vector<int>& experts);
  // Waits until an expert is in memory, where it stays until unpin(). Throws ReadError where it cannot be read. A thread holds one
  // at a time, as frames may be few.
  void pin(int layer, int expert);
  void unpin(int layer, int expert);
  // Copies an expert's bytes [start, start + bytes), read if needed. Throws ReadError where it cannot be read.
  void copy(int layer, int expert, std::size_t start, std::size_t bytes, std::byte* to);
  // Throws ReadError where an expert that was demanded could not be read, once. It is read again at its next demand.
  void check();

  FrameCounts counts() const;
  double precision() const;  // of predictions, a moving average
  std::vector<int> residents(int layer) const;

 private:
  enum class State : std::uint8_t { kAbsent, kQueued, kReading, kReady, kFailed };

  struct Entry {
    std::atomic<const std::byte*> data{nullptr};
    State state = State::kAbsent;
    bool verified = false;  // its checksum, once
    bool expected = false;  // of the layer that comes next: stays until then
    bool predicted = false;  // read ahead, and not used so far
    int frame = -1;
    int pins = 0;
    int copies = 0;  // of the pins, those of copy()
    int next_piece = 0, pieces_left = 0;
    int error = 0;  // of errno; -1: the file is too short
  };

  struct Layer {
    ExpertsInFile file;
    int descriptor = -1;
    bool direct = true;
    RouterRows router;
    std::unique_ptr<Entry[]> entries;
    std::vector<int> predicted;  // of the next demand
  };

  struct Key {
    int layer = -1, expert = -1;
  };

  struct Question {  // to the predictor
    int layer = -1, tokens = 0, top_k = 0;
    std::vector<float> hidden;
    std::uint64_t number = 0;
  };

  Entry& entry(Key key) const { return layers_[static_cast<std::size_t>(key.layer)]->entries[static_cast<std::size_t>(key.expert)]; }
  std::uint64_t begin_of(const Layer& layer, int expert) const;  // of its bytes in the file
  int pieces_of(const Layer& layer, int expert) const;
  void observe(int layer, const Routing& routing, int tokens);
  void learn_precision(Layer& layer);
  bool take_frames(std::vector<int>& frames, std::size_t count, bool for_demand);
  void evict(int frame);
  void release(int frame);  // evicts, and the frame is free
  void start_reading(Key key, int frame, std::deque<Key>& queue);
  void require(Key key, std::unique_lock<std::mutex>& lock);
  // Queues reads of experts that are not in memory; with `stay`, those that are stay until their layer comes.
  void expect(int layer, const std::vector<int>& experts, bool stay = true);
  void expect_all(int layer);
  void read();
  int read_piece(const Layer& layer, Key key, int piece, std::byte* frame, std::size_t& done) const;  // returns an error, or 0
  void finish(std::unique_lock<std::mutex>& lock, Key key);
  void predict();
  std::string describe(Key key, int error) const;
  void release_pins();
  void unpin(Entry& entry);
  void check_use() const;  // throws where the frames are not open, or in a forked child

  const int reader_count_;
  const pid_t owner_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::size_t frame_bytes_ = 0;
  AlignedMemory memory_;
  std::vector<Key> frames_;  // the expert in each
  std::vector<int> free_;
  bool readers_running_ = false;

  struct Shared;  // what a forked child must not destroy
  std::unique_ptr<Shared> shared_;
  std::shared_ptr<CachePolicy> policy_;
  std::deque<Key> demands_, predictions_;  // with a frame, and of the latter those that have none yet
  std::vector<Key> pinned_;
  Question question_;
  std::uint64_t demand_number_ = 0;
  double precision_ = 0.7;  // until measured
  std::atomic<bool> failed_{false};
  std::string error_;
  FrameCounts counts_;
  int waiting_ = 0;
  std::int64_t waiting_since_ns_ = 0;
  bool stopping_ = false;
};

}  // namespace moegraft
