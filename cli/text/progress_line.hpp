#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace crossdock::cli {

/// One line on standard error that is overwritten, if the terminal can show that. Cut to the
/// terminal's width; erased by the destructor. In a rank that the command has started, the command
/// shows it.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// `done`: how much of its work a rank has done, in units that the command knows.
  void show(const std::string& words, int64_t done = 0) const;

 private:
  bool is_rank_;
  bool is_shown_;
  mutable std::chrono::steady_clock::time_point reported_{};
};

/// The position in a whole job and the time left, judged by the time that its parts took so far.
class Position {
 public:
  explicit Position(int64_t total) : total_(total) {}

  /// "3 of 48, 25 s left: words". `done` parts of the total are complete, or nearly.
  std::string text(int64_t done, const std::string& words) const;

 private:
  int64_t total_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// "45 s", "12 min", "3.5 h".
std::string rough_time(double seconds);

}  // namespace crossdock::cli
