#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "crossdock/error.hpp"

namespace crossdock {

namespace detail {
class EventRing;
}

/// The ranks that an event exchanged data with.
struct CROSSDOCK_API EventPeers {
  int32_t count = 0;
  uint64_t first_64 = 0;  // bit r: rank r is included; ranks from 64 on are only counted

  void add(int rank);
};

/// One operation of a rank, or a phase of one. Plain data, so that other processes can read it.
struct Event {
  char operation[24] = "";  // "plan", "dispatch", "experts", ...
  char phase[24] = "";      // "rendezvous", "exchange", ...; "": the whole operation
  uint64_t sequence = 0;    // number of the collective in its group; 0 for local work
  int64_t bytes = 0;        // payload moved; 0 if not applicable
  int64_t begin_ns = 0;     // steady clock
  int64_t end_ns = 0;       // 0 while in progress
  EventPeers peers{};
};

/// Keeps the most recent `capacity` events of one rank. With capacity 0 the recorder is off, and a
/// Scope costs one comparison. Thread-safe: work on other threads (shared experts) is recorded too.
class CROSSDOCK_API EventRecorder {
 public:
  /// is_shared: other processes on the node can read its events.
  explicit EventRecorder(int64_t capacity = 0, bool is_shared = false);
  ~EventRecorder();
  EventRecorder(const EventRecorder&) = delete;
  EventRecorder& operator=(const EventRecorder&) = delete;

  bool is_on() const { return ring_ != nullptr; }
  /// The recorded events, oldest first.
  std::vector<Event> events() const;

  /// (for the library) Null if the recorder is off.
  detail::EventRing* ring() { return ring_.get(); }

  /// Records an event that lasts from construction to destruction. The recorder must outlive it.
  class Scope {
   public:
    Scope(EventRecorder& recorder, const char* operation, uint64_t sequence, int64_t bytes = 0,
          const char* phase = "");
    ~Scope();
    void set_bytes(int64_t bytes);
    void set_peers(const EventPeers& peers);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    detail::EventRing* ring_;
    int64_t index_ = 0;
  };

 private:
  std::unique_ptr<detail::EventRing> ring_;
};

}  // namespace crossdock
