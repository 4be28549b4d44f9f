#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "crossdock/recorder.hpp"

namespace crossdock::detail {

/// The memory of an EventRecorder. A shared ring can be opened by other processes on the node and
/// outlives its owner while one of them has it open, so the last events of a killed rank can be
/// read.
class EventRing {
 public:
  /// REQUIRES: capacity > 0
  EventRing(int64_t capacity, bool is_shared);
  /// The ring of another recorder, in this process or another; null if it cannot be opened.
  static std::unique_ptr<EventRing> open(int process, int descriptor);
  ~EventRing();
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  /// -1 if not shared.
  int descriptor() const { return descriptor_; }

  int64_t begin(Event event);
  /// Changes event `index`, unless it has been overwritten.
  void end(int64_t index);
  void set_bytes(int64_t index, int64_t bytes);
  void set_peers(int64_t index, const EventPeers& peers);

  /// Oldest first. In an opened ring, an event that its owner is writing may be torn.
  std::vector<Event> events() const;

  /// True for the first caller among all that share this ring, which then reports the events.
  bool claim();

 private:
  struct Memory;

  EventRing(int descriptor, Memory* memory, size_t num_bytes);
  Event* find(int64_t index);

  int descriptor_;
  Memory* memory_;
  size_t num_bytes_;
  mutable std::mutex mutex_;  // for threads that share this object; rarely contended
};

}  // namespace crossdock::detail
