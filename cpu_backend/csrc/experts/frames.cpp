#include "experts/frames.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "core/crc32.h"
#include "core/float_conversion.h"
#include "core/thread_pool.h"

namespace moegraft {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;  // drives give their bandwidth from about 256 KiB on; smaller pieces end sooner
constexpr double kPrecisionGain = 0.02;
constexpr double kLeastPrecision = 0.3;  // below, what is read in vain costs more than what comes early saves; an estimate
#ifdef O_DIRECT
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif
constexpr int kMostPredictedTokens = 32;
constexpr int kShort = -1;  // an error: the file ends too soon
constexpr int kDamaged = -2;
constexpr auto kSpinForExpert = std::chrono::microseconds{20};  // a piece takes hundreds

float widened(const void* values, ActivationType type, std::size_t at) {
  if (type == ActivationType::kFloat32) return static_cast<const float*>(values)[at];
  const std::uint16_t half = static_cast<const std::uint16_t*>(values)[at];
  return type == ActivationType::kBFloat16 ? float_from_bf16(half) : float_from_f16(half);
}

float dot(const void* row, ActivationType type, const float* x, int count) {
  constexpr int kSums = 16;
  float sums[kSums] = {};
  const int whole = count / kSums * kSums;
  const auto add = [&](const auto& value) {
    for (int i = 0; i < whole; i += kSums)
      for (int k = 0; k < kSums; ++k) sums[k] += value(i + k) * x[i + k];
    for (int i = whole; i < count; ++i) sums[0] += value(i) * x[i];
  };
  if (type == ActivationType::kFloat32) add([row](int i) { return static_cast<const float*>(row)[i]; });
  else if (type == ActivationType::kBFloat16) add([row](int i) { return float_from_bf16(static_cast<const std::uint16_t*>(row)[i]); });
  else add([row](int i) { return float_from_f16(static_cast<const std::uint16_t*>(row)[i]); });
  return std::accumulate(sums, sums + kSums, 0.0f);
}

// The experts that a router chooses for any of the tokens, those of most tokens first.
std::vector<int> chosen(const RouterRows& router, int experts, const std::vector<float>& hidden, int tokens, int top_k) {
  std::vector<int> wanted(static_cast<std::size_t>(experts));
  std::vector<float> scores(static_cast<std::size_t>(experts));
  std::vector<int> order(static_cast<std::size_t>(experts));
  const std::size_t row_bytes = element_bytes(router.type) * static_cast<std::size_t>(router.hidden);
  for (int token = 0; token < tokens; ++token) {
    const float* x = hidden.data() + static_cast<std::size_t>(token) * static_cast<std::size_t>(router.hidden);
    for (int e = 0; e < experts; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const float product = dot(static_cast<const std::byte*>(router.weight) + row_bytes * at, router.type, x, router.hidden);
      const float logit = router.bias.empty() ? product : product + router.bias[at];
      scores[at] = router.choice_bias.empty() ? logit : 1.0f / (1.0f + std::exp(-logit)) + router.choice_bias[at];
    }
    std::iota(order.begin(), order.end(), 0);
    const int count = std::min(top_k, experts);
    std::partial_sort(order.begin(), order.begin() + count, order.end(),
                      [&](int a, int b) { return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)]; });
    for (int i = 0; i < count; ++i) ++wanted[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])];
  }
  std::vector<int> found;
  for (int e = 0; e < experts; ++e)
    if (wanted[static_cast<std::size_t>(e)] > 0) found.push_back(e);
  std::stable_sort(found.begin(), found.end(),
                   [&](int a, int b) { return wanted[static_cast<std::size_t>(a)] > wanted[static_cast<std::size_t>(b)]; });
  return found;
}

[[noreturn]] void raise_file_error(const std::string& path, int error) {
  throw ReadError(path + ": " + std::generic_category().message(error));
}

}  // namespace

struct ExpertFrames::Shared {
  mutable std::mutex mutex;
  std::condition_variable work;    // for readers
  std::condition_variable landed;  // an expert, or one that failed
  std::condition_variable asked;   // for the predictor
  std::vector<std::thread> threads;
};

ExpertFrames::ExpertFrames(int readers) : reader_count_(readers), owner_(getpid()), shared_(std::make_unique<Shared>()) {
  if (readers < 1 || readers > 64) throw std::invalid_argument("readers is " + std::to_string(readers) + "; it must be 1 to 64");
}

ExpertFrames::~ExpertFrames() {
  if (getpid() != owner_) {
    (void)shared_.release();  // a forked child has no such threads to join
  } else {
    {
      const std::lock_guard<std::mutex> lock(shared_->mutex);
      stopping_ = true;
    }
    shared_->work.notify_all();
    shared_->asked.notify_all();
    shared_->landed.notify_all();
    for (std::thread& thread : shared_->threads) thread.join();
  }
  for (const auto& layer : layers_)
    if (layer->descriptor >= 0) close(layer->descriptor);
}

int ExpertFrames::add(ExpertsInFile file) {
  if (is_open()) throw std::invalid_argument("a layer must be added before the frames are opened");
  if (file.count < 1 || file.bytes < 1 || file.offset % 64 != 0)
    throw std::invalid_argument("experts in a file need a count, a size and an offset that is a multiple of 64");
  if (!file.checksums.empty() && file.checksums.size() != static_cast<std::size_t>(file.count))
    throw std::invalid_argument("expected a checksum for each of " + std::to_string(file.count) + " experts, found " +
                                std::to_string(file.checksums.size()));
  auto layer = std::make_unique<Layer>();
  layer->entries = std::make_unique<Entry[]>(static_cast<std::size_t>(file.count));
  layer->descriptor = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | kDirect);
  layer->direct = kDirect != 0;
  if (layer->descriptor >= 0) {
    // Some file systems refuse at the first read.
    const AlignedMemory block(kAlignment);
    if (pread(layer->descriptor, block.data(), kAlignment, 0) < 0) close(std::exchange(layer->descriptor, -1));
  }
  if (layer->descriptor < 0) {
    layer->direct = false;
    layer->descriptor = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (layer->descriptor < 0) raise_file_error(file.path, errno);
  }
  layer->file = std::move(file);
  struct stat status{};
  const ExpertsInFile& experts = layer->file;
  const std::uint64_t end = experts.offset + static_cast<std::uint64_t>(experts.bytes) * static_cast<std::uint64_t>(experts.count);
  const int error = fstat(layer->descriptor, &status) != 0 ? errno : 0;
  if (error != 0 || static_cast<std::uint64_t>(status.st_size) < end) {
    close(layer->descriptor);
    layer->descriptor = -1;
    if (error != 0) raise_file_error(experts.path, error);
    throw ReadError(experts.path + ": expected at least " + std::to_string(end) + " bytes, found " + std::to_string(status.st_size));
  }
  frame_bytes_ = std::max(frame_bytes_, frame_bytes_for(experts.bytes));
  layers_.push_back(std::move(layer));
  return static_cast<int>(layers_.size()) - 1;
}

void ExpertFrames::set_router(int layer, RouterRows router) {
  (void)experts_of(layer);
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  layers_[static_cast<std::size_t>(layer)]->router = std::move(router);
}

int ExpertFrames::experts_of(int layer) const {
  if (layer < 0 || layer >= static_cast<int>(layers_.size()))
    throw std::invalid_argument("layer " + std::to_string(layer) + " is out of range: there are " + std::to_string(layers_.size()));
  return layers_[static_cast<std::size_t>(layer)]->file.count;
}

int ExpertFrames::least_frames() const {
  int most = 0;
  for (const auto& layer : layers_) most = std::max(most, layer->file.count);
  return least_frames_for(most, reader_count_);
}

void ExpertFrames::open(std::size_t bytes, std::shared_ptr<CachePolicy> policy) {
  if (is_open()) return;
  if (layers_.empty()) throw std::invalid_argument("no layer has experts in files");
  std::size_t all = 0;
  int most = 0;
  for (const auto& layer : layers_) all += static_cast<std::size_t>(layer->file.count), most = std::max(most, layer->file.count);
  const int layers = static_cast<int>(layers_.size());
  if (policy == nullptr) policy = std::make_shared<CachePolicy>(PolicyOptions{}, layers, most);
  if (policy->layers() != layers || policy->experts() < most)
    throw std::invalid_argument("the cache policy is for " + std::to_string(policy->layers()) + " layers of " +
                                std::to_string(policy->experts()) + " experts, and there are " + std::to_string(layers) + " of " +
                                std::to_string(most));
  const std::size_t least = static_cast<std::size_t>(least_frames());
  const std::size_t count = std::min(bytes / frame_bytes_, std::max(all, least));
  if (count < least)
    throw std::invalid_argument("memory of " + std::to_string(bytes) + " bytes holds " + std::to_string(count) +
                                " experts; a layer and what is read ahead need " + std::to_string(least) + ", that is " +
                                std::to_string(least * frame_bytes_) + " bytes");
  memory_ = AlignedMemory(count * frame_bytes_);
  policy_ = std::move(policy);
#ifdef MADV_DONTFORK
  // Reads go on while a child is alive, and would copy pages that it shares.
  (void)madvise(memory_.data(), memory_.size(), MADV_DONTFORK);
#endif
  frames_.assign(count, {});
  for (int frame = static_cast<int>(count) - 1; frame >= 0; --frame) free_.push_back(frame);
  for (int i = 0; i < reader_count_; ++i) shared_->threads.emplace_back([this] { read(); });
  shared_->threads.emplace_back([this] { predict(); });
  readers_running_ = true;
}

std::uint64_t ExpertFrames::begin_of(const Layer& layer, int expert) const {
  return layer.file.offset + static_cast<std::uint64_t>(layer.file.bytes) * static_cast<std::uint64_t>(expert);
}

int ExpertFrames::pieces_of(const Layer& layer, int expert) const {
  return static_cast<int>((begin_of(layer, expert) % kAlignment + layer.file.bytes + kPiece - 1) / kPiece);
}

// The policy sees the weights of the experts that tokens use, where the slots of a GPU have all scores of a router.
void ExpertFrames::observe(int number, const Routing& routing, int tokens) {
  policy_->begin(number, tokens);
  for (const Segment& segment : routing.segments())
    for (int i = 0; i < segment.pairs; ++i) {
      const Pair& pair = routing.pairs()[static_cast<std::size_t>(segment.first_pair + i)];
      policy_->use(segment.expert, pair.token);
      policy_->score(segment.expert, pair.token, std::abs(double{pair.weight}));
    }
  policy_->end();
}

void ExpertFrames::learn_precision(Layer& layer) {
  if (layer.predicted.empty()) return;
  const auto right = std::count_if(layer.predicted.begin(), layer.predicted.end(),
                                   [&](int expert) { return layer.entries[static_cast<std::size_t>(expert)].pins > 0; });
  precision_ += kPrecisionGain * (static_cast<double>(right) / static_cast<double>(layer.predicted.size()) - precision_);
  layer.predicted.clear();
}

void ExpertFrames::release_pins() {
  for (const Key& key : pinned_) --entry(key).pins;
  pinned_.clear();
}

void ExpertFrames::evict(int frame) {
  Key& key = frames_[static_cast<std::size_t>(frame)];
  Entry& old = entry(key);
  old.data.store(nullptr, std::memory_order_relaxed);
  old.state = State::kAbsent;
  old.frame = -1;
  old.expected = false;
  if (std::exchange(old.predicted, false)) ++counts_.unused;
  key = {};
}

void ExpertFrames::release(int frame) {
  evict(frame);
  free_.push_back(frame);
}

// Appends `count` frames without an expert; those of the lowest rank lose theirs. Experts that are read ahead make room only for a demand.
bool ExpertFrames::take_frames(std::vector<int>& frames, std::size_t count, bool for_demand) {
  while (count > 0 && !free_.empty()) {
    frames.push_back(free_.back());
    free_.pop_back();
    --count;
  }
  if (count == 0) return true;
  struct Candidate {
    bool expected;  // these go last
    double rank;
    int frame;
  };
  std::vector<Candidate> candidates;
  candidates.reserve(frames_.size());
  for (std::size_t frame = 0; frame < frames_.size(); ++frame) {
    const Key key = frames_[frame];
    if (key.layer < 0) continue;
    const Entry& held = entry(key);
    if (held.state != State::kReady || held.pins > 0 || (held.expected && !for_demand)) continue;
    candidates.push_back({held.expected, policy_->rank(key.layer, key.expert), static_cast<int>(frame)});
  }
  const std::size_t taken = std::min(count, candidates.size());
  std::partial_sort(
      candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(taken), candidates.end(),
      [](const Candidate& a, const Candidate& b) { return std::tie(a.expected, a.rank, a.frame) < std::tie(b.expected, b.rank, b.frame); });
  for (std::size_t i = 0; i < taken; ++i) {
    evict(candidates[i].frame);
    frames.push_back(candidates[i].frame);
  }
  return taken == count;
}

void ExpertFrames::start_reading(Key key, int frame, std::deque<Key>& queue) {
  Entry& each = entry(key);
  each.state = State::kReading;
  each.frame = frame;
  each.error = 0;
  each.next_piece = 0;
  each.pieces_left = pieces_of(*layers_[static_cast<std::size_t>(key.layer)], key.expert);
  frames_[static_cast<std::size_t>(frame)] = key;
  queue.push_back(key);
}

void ExpertFrames::check_use() const {
  if (!is_open()) throw std::invalid_argument("experts in frames are used before these were opened");
  if (getpid() != owner_)
    throw std::runtime_error("the frames of these experts stayed in the parent process of a fork; load the model in the child process");
}

void ExpertFrames::demand(int number, Routing& routing, const Demand& call) {
  check_use();
  std::unique_lock<std::mutex> lock(shared_->mutex);
  Layer& layer = *layers_[static_cast<std::size_t>(number)];
  release_pins();
  ++demand_number_;
  // What the step before expected and has not begun to read: it is demanded now, or was wrong.
  predictions_.erase(std::remove_if(predictions_.begin(), predictions_.end(),
                                    [&](const Key& key) {
                                      Entry& each = entry(key);
                                      if (each.state != State::kQueued) return false;
                                      each.state = State::kAbsent;
                                      each.expected = false;
                                      return true;
                                    }),
                     predictions_.end());
  observe(number, routing, call.tokens);
  const std::vector<Segment>& segments = routing.segments();
  const auto is_first = [&](std::size_t i) { return i == 0 || segments[i].expert != segments[i - 1].expert; };
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (!is_first(i)) continue;
    Entry& each = layer.entries[static_cast<std::size_t>(segments[i].expert)];
    ++each.pins;
    pinned_.push_back({number, segments[i].expert});
    ++counts_.demanded;
    each.predicted = false;
    if (each.state == State::kReady) {
      ++counts_.resident;
    } else if (each.state == State::kFailed) {  // at a copy's request, which has not ended yet
      error_ = describe({number, segments[i].expert}, each.error);
      failed_.store(true, std::memory_order_release);
    } else if (each.state == State::kReading) {
      ++counts_.arriving;
      const auto queued = std::find_if(predictions_.begin(), predictions_.end(),
                                       [&](const Key& key) { return key.layer == number && key.expert == segments[i].expert; });
      if (queued != predictions_.end()) {
        demands_.push_back(*queued);
        predictions_.erase(queued);
      }
    }
  }
  learn_precision(layer);
  for (int e = 0; e < layer.file.count; ++e) {
    Entry& each = layer.entries[static_cast<std::size_t>(e)];
    each.expected = false;
    if (std::exchange(each.predicted, false)) ++counts_.unused;
  }

  // The segments in the order of the job's units, of which each worker has a contiguous range: those in memory begin all ranges.
  std::vector<int> present, missing, order(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i)
    (layer.entries[static_cast<std::size_t>(segments[i].expert)].state == State::kReady ? present : missing).push_back(static_cast<int>(i));
  present.insert(present.end(), missing.begin(), missing.end());
  std::size_t next = 0;
  const int count = static_cast<int>(segments.size());
  for (int step = 0; next < present.size(); ++step)
    for (int worker = 0; worker < call.workers; ++worker) {
      const int place = Phase::first_unit(count, worker, call.workers) + step;
      if (place < Phase::first_unit(count, worker + 1, call.workers)) order[static_cast<std::size_t>(place)] = present[next++];
    }
  routing.set_order(std::move(order));

  std::vector<Key> requests;
  for (const int i : missing) {
    const Key key = {number, segments[static_cast<std::size_t>(i)].expert};
    if (entry(key).state == State::kAbsent) requests.push_back(key), entry(key).state = State::kQueued;
  }
  std::vector<int> frames;
  while (!take_frames(frames, requests.size() - frames.size(), true)) shared_->landed.wait(lock);  // for what is being read ahead
  for (std::size_t i = 0; i < requests.size(); ++i) start_reading(requests[i], frames[i], demands_);

  const int following = number + 1;
  if (call.hidden_states != nullptr && following < static_cast<int>(layers_.size())) {
    const Layer& after = *layers_[static_cast<std::size_t>(following)];
    if (after.router.weight != nullptr && after.router.hidden == call.hidden) {
      // Of many tokens some, spread over all, name the experts that are used most.
      const int asked = std::min(call.tokens, kMostPredictedTokens);
      question_.layer = following;
      question_.tokens = asked;
      question_.top_k = call.top_k;
      question_.number = demand_number_;
      question_.hidden.clear();
      const auto columns = static_cast<std::size_t>(call.hidden);
      for (int i = 0; i < asked; ++i) {
        const std::size_t row = columns * static_cast<std::size_t>(Phase::first_unit(call.tokens, i, asked));
        for (std::size_t at = row; at < row + columns; ++at) question_.hidden.push_back(widened(call.hidden_states, call.activations, at));
      }
      shared_->asked.notify_one();
    } else if (call.tokens * call.top_k >= 2 * after.file.count) {
      expect_all(following);
    }
  }
  if (!demands_.empty() || !predictions_.empty()) shared_->work.notify_all();
}

void ExpertFrames::expect(int number, const std::vector<int>& experts, bool stay) {
  for (const int expert : experts) {
    Entry& each = entry({number, expert});
    each.expected |= stay;
    if (each.state != State::kAbsent) continue;
    each.state = State::kQueued;
    predictions_.push_back({number, expert});
  }
}

void ExpertFrames::ask(int number, const std::vector<int>& experts) {
  check_use();
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  expect(number, experts, false);
  if (!predictions_.empty()) shared_->work.notify_all();
}

// A step of many tokens needs nearly all experts: those of the highest ranks, which are used most, first.
void ExpertFrames::expect_all(int number) {
  const Layer& layer = *layers_[static_cast<std::size_t>(number)];
  std::vector<int> experts(static_cast<std::size_t>(layer.file.count));
  std::iota(experts.begin(), experts.end(), 0);
  std::stable_sort(experts.begin(), experts.end(), [&](int a, int b) { return policy_->rank(number, a) > policy_->rank(number, b); });
  expect(number, experts);
}

void ExpertFrames::require(Key key, std::unique_lock<std::mutex>& lock) {
  Entry& each = entry(key);
  if (each.state == State::kQueued) {
    const auto kept = predictions_.size();
    predictions_.erase(std::remove_if(predictions_.begin(), predictions_.end(),
                                      [&](const Key& other) { return other.layer == key.layer && other.expert == key.expert; }),
                       predictions_.end());
    if (predictions_.size() == kept) return;  // what has asked for it starts the read once it has a frame
  } else if (each.state != State::kAbsent) {
    return;
  }
  each.state = State::kQueued;
  std::vector<int> frames;
  while (!take_frames(frames, 1 - frames.size(), true)) shared_->landed.wait(lock);
  start_reading(key, frames[0], demands_);
  shared_->work.notify_all();
}

const std::byte* ExpertFrames::wait(int number, int expert) noexcept {
  const auto ready = [&] { return peek(number, expert) != nullptr; };
  if (const std::byte* data = peek(number, expert)) return data;
  if (!spin_until(ready, kSpinForExpert)) {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    if (waiting_++ == 0) waiting_since_ns_ = now_ns();
    shared_->landed.wait(lock, ready);
    if (--waiting_ == 0) counts_.waited_ns += now_ns() - waiting_since_ns_;
  }
  return peek(number, expert);
}

void ExpertFrames::pin(int number, int expert) {
  check_use();
  const Key key = {number, expert};
  std::unique_lock<std::mutex> lock(shared_->mutex);
  Entry& each = entry(key);
  ++each.pins;
  ++each.copies;
  each.predicted = false;
  require(key, lock);
  shared_->landed.wait(lock, [&] { return each.state == State::kReady || each.state == State::kFailed; });
  if (each.state != State::kFailed) return;
  const std::string reason = describe(key, each.error);
  unpin(each);
  throw ReadError(reason);
}

void ExpertFrames::unpin(int number, int expert) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  Entry& each = entry({number, expert});
  if (each.copies > 0) unpin(each);
}

void ExpertFrames::unpin(Entry& each) {
  --each.copies;
  if (--each.pins > 0) return;
  if (each.state == State::kFailed) release(each.frame);
  shared_->landed.notify_all();  // a frame can be had
}

void ExpertFrames::copy(int number, int expert, std::size_t start, std::size_t bytes, std::byte* to) {
  pin(number, expert);
  std::memcpy(to, peek(number, expert) + start, bytes);
  unpin(number, expert);
}

void ExpertFrames::check() {
  if (!failed_.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  failed_.store(false, std::memory_order_relaxed);
  release_pins();
  for (std::size_t frame = 0; frame < frames_.size(); ++frame) {
    if (frames_[frame].layer < 0 || entry(frames_[frame]).state != State::kFailed) continue;
    if (entry(frames_[frame]).pins == 0) release(static_cast<int>(frame));
  }
  throw ReadError(std::exchange(error_, {}));
}

std::string ExpertFrames::describe(Key key, int error) const {
  const Layer& layer = *layers_[static_cast<std::size_t>(key.layer)];
  const std::string place =
      layer.file.path + ": expert " + std::to_string(key.expert) + " at byte " + std::to_string(begin_of(layer, key.expert)) + " ";
  if (error == kDamaged) return place + "is damaged (its checksum does not match): remove the file, and load the model again";
  if (error == kShort) return place + "is not there: the file was cut off after it was opened; remove it, and load the model again";
  return place + "cannot be read (" + std::generic_category().message(error) + "): check the disk";
}

int ExpertFrames::read_piece(const Layer& layer, Key key, int piece, std::byte* frame, std::size_t& done) const {
  const std::uint64_t begin = begin_of(layer, key.expert), first = begin / kAlignment * kAlignment;
  const std::uint64_t whole = (begin + layer.file.bytes - first + kAlignment - 1) / kAlignment * kAlignment;
  const std::uint64_t skipped = kPiece * static_cast<std::uint64_t>(piece);
  const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(kPiece, whole - skipped));
  // Behind the last expert the file may end within a block.
  const auto needed = static_cast<std::size_t>(std::min<std::uint64_t>(size, begin + layer.file.bytes - first - skipped));
  while (done < needed) {
    const ssize_t got = pread(layer.descriptor, frame + skipped + done, size - done, static_cast<off_t>(first + skipped + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return kShort;
    done += static_cast<std::size_t>(got);
  }
#ifdef POSIX_FADV_DONTNEED
  if (!layer.direct)
    (void)posix_fadvise(layer.descriptor, static_cast<off_t>(first + skipped), static_cast<off_t>(size), POSIX_FADV_DONTNEED);
#endif
  return 0;
}

void ExpertFrames::read() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  std::vector<int> taken;
  while (true) {
    shared_->work.wait(lock, [this] { return stopping_ || !demands_.empty() || !predictions_.empty(); });
    if (stopping_) return;
    std::deque<Key>& queue = demands_.empty() ? predictions_ : demands_;
    const Key key = queue.front();
    Entry& each = entry(key);
    if (each.state == State::kQueued) {  // expected, and still without a frame
      queue.pop_front();
      taken.clear();
      if (!take_frames(taken, 1, false)) {
        each.state = State::kAbsent;
        each.expected = false;
        continue;
      }
      start_reading(key, taken[0], predictions_);
      each.predicted = true;
      ++counts_.predicted;
      predictions_.pop_back();
      predictions_.push_front(key);
    }
    const Layer& layer = *layers_[static_cast<std::size_t>(key.layer)];
    const int piece = each.next_piece++;
    if (each.next_piece == pieces_of(layer, key.expert)) queue.pop_front();
    std::byte* const frame = memory_.data() + frame_bytes_ * static_cast<std::size_t>(each.frame);
    lock.unlock();
    std::size_t bytes = 0;
    const int error = read_piece(layer, key, piece, frame, bytes);
    lock.lock();
    if (error != 0) each.error = error;
    counts_.read_bytes += static_cast<std::int64_t>(bytes);
    if (waiting_ > 0) counts_.waited_bytes += static_cast<std::int64_t>(bytes);
    if (--each.pieces_left == 0) finish(lock, key);
  }
}

void ExpertFrames::finish(std::unique_lock<std::mutex>& lock, Key key) {
  const Layer& layer = *layers_[static_cast<std::size_t>(key.layer)];
  Entry& each = entry(key);
  const std::byte* const data =
      memory_.data() + frame_bytes_ * static_cast<std::size_t>(each.frame) + begin_of(layer, key.expert) % kAlignment;
  if (each.error == 0 && !each.verified && !layer.file.checksums.empty()) {
    lock.unlock();
    const bool right = crc32(data, layer.file.bytes) == layer.file.checksums[static_cast<std::size_t>(key.expert)];
    lock.lock();
    if (!right) each.error = kDamaged;
    each.verified = right;
  }
  ++counts_.reads;
  if (each.error == 0) {
    each.state = State::kReady;
    each.data.store(data, std::memory_order_release);
  } else if (each.pins > 0) {
    each.state = State::kFailed;
    each.data.store(data, std::memory_order_release);
    if (each.pins > each.copies) {
      error_ = describe(key, each.error);
      failed_.store(true, std::memory_order_release);
    }
  } else {  // expected only: its demand reads it again
    release(each.frame);
  }
  shared_->landed.notify_all();
}

void ExpertFrames::predict() {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  std::uint64_t answered = 0;
  Question question;
  while (true) {
    shared_->asked.wait(lock, [&] { return stopping_ || question_.number != answered; });
    if (stopping_) return;
    question = question_;
    answered = question.number;
    Layer& layer = *layers_[static_cast<std::size_t>(question.layer)];
    const RouterRows router = layer.router;
    lock.unlock();
    std::vector<int> experts = chosen(router, layer.file.count, question.hidden, question.tokens, question.top_k);
    lock.lock();
    if (question.number != demand_number_) continue;  // the layer has come meanwhile
    if (precision_ >= kLeastPrecision) expect(question.layer, experts);
    layer.predicted = std::move(experts);
    if (!predictions_.empty()) shared_->work.notify_all();
  }
}

FrameCounts ExpertFrames::counts() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return counts_;
}

double ExpertFrames::precision() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return precision_;
}

std::vector<int> ExpertFrames::residents(int layer) const {
  std::vector<int> found;
  for (int expert = 0; expert < layers_[static_cast<std::size_t>(layer)]->file.count; ++expert)
    if (peek(layer, expert) != nullptr) found.push_back(expert);
  return found;
}

}  // namespace moegraft
