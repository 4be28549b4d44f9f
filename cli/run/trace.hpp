#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/recorder.hpp"

namespace crossdock::cli {

constexpr const char* kTrace = "the trace";  // in messages about its file

/// The events of one rank's steps, for a trace. The oldest steps are dropped when there are too
/// many events.
class TraceLog {
 public:
  /// Call this after every step with the events of the recorder; events of earlier steps are
  /// ignored. is_whole: the recorder still has all events of this step.
  void add_step(std::span<const Event> recorded, bool is_whole);

  std::vector<Event> events() const;
  int64_t num_steps() const { return num_steps_; }
  /// Number of steps, from the first, that are missing or incomplete.
  int64_t num_lost() const { return num_lost_; }

 private:
  std::deque<std::vector<Event>> steps_;
  int64_t num_steps_ = 0;  // added so far
  int64_t num_lost_ = 0;
  int64_t num_events_ = 0;
  int64_t newest_ns_ = 0;  // when the last event began
};

/// Number of steps in a trace (always the last ones) and number of missing earlier steps.
struct TraceSummary {
  std::string file;
  int64_t num_steps = 0;
  int64_t num_lost = 0;
};

/// Writes the events of all ranks to `file` as a Chrome trace, which Perfetto and chrome://tracing
/// open: one track per rank, more where work overlapped. Rank 0 writes the file (see write_file).
/// Collective. Throws Error on all ranks if the file cannot be written.
TraceSummary write_trace(Group& group, const TraceLog& log, const std::string& file);

}  // namespace crossdock::cli
