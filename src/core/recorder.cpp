#include "crossdock/recorder.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <type_traits>

#include "core/check.hpp"
#include "core/descriptor.hpp"
#include "core/event_ring.hpp"

namespace crossdock::detail {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void* map(int descriptor, size_t num_bytes) {
  const int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

// Event number i is at i % capacity.
struct EventRing::Memory {
  std::atomic<int64_t> num_begun;
  std::atomic<bool> is_claimed;
  int64_t capacity;
  Event events[1];  // NOLINT: [capacity]

  static size_t bytes(int64_t capacity) {
    return sizeof(Memory) + static_cast<size_t>(capacity - 1) * sizeof(Event);
  }
};

EventRing::EventRing(int64_t capacity, bool is_shared)
    : descriptor_(is_shared ? above_standard(memfd_create("crossdock-events", MFD_CLOEXEC)) : -1),
      memory_(nullptr),
      num_bytes_(Memory::bytes(capacity)) {
  static_assert(std::is_trivially_copyable_v<Event>, "events are read by other processes");
  const WriteSignalBlock no_signals;
  if (descriptor_ >= 0 && ftruncate(descriptor_, static_cast<off_t>(num_bytes_)) != 0) {
    close(descriptor_);
    descriptor_ = -1;  // not shared
  }
  memory_ = static_cast<Memory*>(map(descriptor_, num_bytes_));
  if (memory_ == nullptr) {
    if (descriptor_ >= 0) close(descriptor_);
    throw std::bad_alloc();
  }
  memory_->capacity = capacity;  // the rest is zero, as required
}

EventRing::EventRing(int descriptor, Memory* memory, size_t num_bytes)
    : descriptor_(descriptor), memory_(memory), num_bytes_(num_bytes) {}

std::unique_ptr<EventRing> EventRing::open(int process, int descriptor) {
  const std::string path = concat("/proc/", process, "/fd/", descriptor);
  const int own = above_standard(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (own < 0) return nullptr;
  struct stat file {};
  const bool is_ring = fstat(own, &file) == 0 && file.st_size >= static_cast<off_t>(sizeof(Memory));
  const auto num_bytes = static_cast<size_t>(file.st_size);
  auto* memory = is_ring ? static_cast<Memory*>(map(own, num_bytes)) : nullptr;
  if (memory == nullptr) {
    close(own);
    return nullptr;
  }
  return std::unique_ptr<EventRing>(new EventRing(own, memory, num_bytes));
}

EventRing::~EventRing() {
  munmap(memory_, num_bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

int64_t EventRing::begin(Event event) {
  const std::lock_guard lock(mutex_);
  const int64_t index = memory_->num_begun.load(std::memory_order_relaxed);
  event.begin_ns = now_ns();
  memory_->events[index % memory_->capacity] = event;
  memory_->num_begun.store(index + 1, std::memory_order_release);
  return index;
}

// Null if the event has been overwritten. REQUIRES: mutex_ is held.
Event* EventRing::find(int64_t index) {
  const int64_t num_begun = memory_->num_begun.load(std::memory_order_relaxed);
  return index + memory_->capacity < num_begun ? nullptr
                                               : &memory_->events[index % memory_->capacity];
}

void EventRing::end(int64_t index) {
  const std::lock_guard lock(mutex_);
  if (Event* event = find(index)) event->end_ns = now_ns();
}

void EventRing::set_bytes(int64_t index, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (Event* event = find(index)) event->bytes = bytes;
}

void EventRing::set_peers(int64_t index, const EventPeers& peers) {
  const std::lock_guard lock(mutex_);
  if (Event* event = find(index)) event->peers = peers;
}

std::vector<Event> EventRing::events() const {
  const std::lock_guard lock(mutex_);
  const int64_t num_begun = memory_->num_begun.load(std::memory_order_acquire);
  std::vector<Event> result;
  for (int64_t i = std::max<int64_t>(0, num_begun - memory_->capacity); i < num_begun; ++i) {
    result.push_back(memory_->events[i % memory_->capacity]);
  }
  return result;
}

bool EventRing::claim() {
  return !memory_->is_claimed.exchange(true);
}

}  // namespace crossdock::detail

namespace crossdock {
namespace {

constexpr int64_t kMaxEvents = int64_t{1} << 30;

// Truncates longer names; the last character stays 0.
template <size_t kSize>
void set_name(char (&name)[kSize], const char* text) {  // NOLINT: as Event has them
  std::strncpy(name, text, kSize - 1);
}

}  // namespace

void EventPeers::add(int rank) {
  ++count;
  if (rank < 64) first_64 |= uint64_t{1} << rank;
}

EventRecorder::EventRecorder(int64_t capacity, bool is_shared) {
  CROSSDOCK_CHECK(capacity >= 0 && capacity <= kMaxEvents,
                  "the capacity of a recorder must be from 0 to ", kMaxEvents, " events, got ",
                  capacity);
  if (capacity > 0) ring_ = std::make_unique<detail::EventRing>(capacity, is_shared);
}

EventRecorder::~EventRecorder() = default;

std::vector<Event> EventRecorder::events() const {
  return is_on() ? ring_->events() : std::vector<Event>{};
}

EventRecorder::Scope::Scope(EventRecorder& recorder, const char* operation, uint64_t sequence,
                            int64_t bytes, const char* phase)
    : ring_(recorder.ring()) {
  if (ring_ == nullptr) return;
  Event event{.sequence = sequence, .bytes = bytes};
  set_name(event.operation, operation);
  set_name(event.phase, phase);
  index_ = ring_->begin(event);
}

EventRecorder::Scope::~Scope() {
  if (ring_ != nullptr) ring_->end(index_);
}

void EventRecorder::Scope::set_bytes(int64_t bytes) {
  if (ring_ != nullptr) ring_->set_bytes(index_, bytes);
}

void EventRecorder::Scope::set_peers(const EventPeers& peers) {
  if (ring_ != nullptr) ring_->set_peers(index_, peers);
}

}  // namespace crossdock
