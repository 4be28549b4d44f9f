#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "crossdock/recorder.hpp"

namespace crossdock::detail {

/// The memory of an EventRecorder. A shared one can be opened by other processes of the node and
/// outlives its owner while one of them has it open: what a killed rank did last can be read.
class EventRing {
 public:
  /// REQUIRES: capacity > 0
  EventRing(int64_t capacity, bool is_shared);
  /// The ring of another recorder, of this process or another one; null if it cannot be opened.
  static std::unique_ptr<EventRing> open(int process, int descriptor);
  ~EventRing();
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  /// -1 if it is not shared.
  int descriptor() const { return descriptor_; }

  int64_t begin(Event event);
  /// Changes event `index`, unless it has been overwritten meanwhile.
  void end(int64_t index);
  void set_bytes(int64_t index, int64_t bytes);
  void set_peers(int64_t index, const EventPeers& peers);

  /// Oldest first. Of an opened ring an event that its owner writes at this moment may be torn.
  std::vector<Event> events() const;

  /// True for the first who asks, of all who see this ring: he writes the events down.
  bool claim();

 private:
  struct Memory;

  EventRing(int descriptor, Memory* memory, size_t num_bytes);
  Event* find(int64_t index);

  int descriptor_;
  Memory* memory_;
  size_t num_bytes_;
  mutable std::mutex mutex_;  // of the threads that share this object; nearly never contended
};

}  // namespace crossdock::detail
