#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace crossdock {

/// One thing a rank did.
struct Event {
  const char* operation = "";  // a string literal: "plan", "dispatch", "experts", ...
  const char* phase = "";      // a string literal: what of it; "": all of it
  uint64_t sequence = 0;       // number of the collective in its group; 0 for local work
  int64_t bytes = 0;           // payload moved, 0 if that says nothing
  int64_t begin_ns = 0;        // steady clock
  int64_t end_ns = 0;          // 0 while it is under way
};

/// Remembers the last `capacity` events of one rank. Capacity 0: off, and then a Scope costs one
/// comparison. Thread-safe: work beside the group's user (shared experts) is recorded too.
class EventRecorder {
 public:
  explicit EventRecorder(int64_t capacity = 0);
  ~EventRecorder();
  EventRecorder(const EventRecorder&) = delete;
  EventRecorder& operator=(const EventRecorder&) = delete;

  bool is_on() const { return capacity_ > 0; }
  /// Oldest first.
  std::vector<Event> events() const;

  /// Records from construction to destruction.
  class Scope {
   public:
    Scope(EventRecorder& recorder, const char* operation, uint64_t sequence, int64_t bytes = 0,
          const char* phase = "")
        : recorder_(recorder.is_on() ? &recorder : nullptr) {
      if (recorder_) {
        index_ = recorder_->begin(
            {.operation = operation, .phase = phase, .sequence = sequence, .bytes = bytes});
      }
    }
    ~Scope() {
      if (recorder_) recorder_->end(index_);
    }
    void set_bytes(int64_t bytes) {
      if (recorder_) recorder_->set_bytes(index_, bytes);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    EventRecorder* recorder_;
    int64_t index_ = 0;
  };

 private:
  int64_t begin(Event event);
  void end(int64_t index);
  void set_bytes(int64_t index, int64_t bytes);

  struct Ring;
  int64_t capacity_ = 0;
  std::unique_ptr<Ring> ring_;
};

}  // namespace crossdock
