#include "crossdock/recorder.hpp"

#include <cstring>

#include "core/check.hpp"
#include "core/event_ring.hpp"

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
