#include "crossdock/recorder.hpp"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "core/check.hpp"

namespace crossdock {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// Event number i is at i % capacity. The lock is for readers on other threads; a group has one
// user at a time, so it is never contended on the way of a step.
struct EventRecorder::Ring {
  mutable std::mutex mutex;
  std::vector<Event> events;
  int64_t num_begun = 0;
};

EventRecorder::EventRecorder(int64_t capacity) : capacity_(capacity) {
  CROSSDOCK_CHECK(capacity >= 0, "a recorder's capacity must not be negative, got ", capacity);
  if (capacity == 0) return;
  ring_ = std::make_unique<Ring>();
  ring_->events.resize(static_cast<size_t>(capacity));
}

EventRecorder::~EventRecorder() = default;

std::vector<Event> EventRecorder::events() const {
  if (!is_on()) return {};
  const std::lock_guard lock(ring_->mutex);
  std::vector<Event> result;
  for (int64_t i = std::max<int64_t>(0, ring_->num_begun - capacity_); i < ring_->num_begun; ++i) {
    result.push_back(ring_->events[static_cast<size_t>(i % capacity_)]);
  }
  return result;
}

int64_t EventRecorder::begin(Event event) {
  const std::lock_guard lock(ring_->mutex);
  const int64_t index = ring_->num_begun++;
  event.begin_ns = now_ns();
  ring_->events[static_cast<size_t>(index % capacity_)] = event;
  return index;
}

void EventRecorder::end(int64_t index) {
  const std::lock_guard lock(ring_->mutex);
  if (index + capacity_ < ring_->num_begun) return;  // overwritten meanwhile
  ring_->events[static_cast<size_t>(index % capacity_)].end_ns = now_ns();
}

void EventRecorder::set_bytes(int64_t index, int64_t bytes) {
  const std::lock_guard lock(ring_->mutex);
  if (index + capacity_ < ring_->num_begun) return;
  ring_->events[static_cast<size_t>(index % capacity_)].bytes = bytes;
}

}  // namespace crossdock
