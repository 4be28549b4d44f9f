#include "cli/text/progress_line.hpp"

#include <cmath>
#include <iostream>

#include "cli/processes/rank_failure.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kBetweenReports{100};

ProgressLine::ProgressLine()
    : is_rank_(is_rank_of_command()), is_shown_(!is_rank_ && can_show_progress()) {}

ProgressLine::~ProgressLine() {
  if (!is_rank_) show("");
}

void ProgressLine::show(const std::string& words, int64_t done) const {
  if (is_rank_) {
    const Clock::time_point now = Clock::now();
    if (now - reported_ < kBetweenReports) return;
    reported_ = now;
    report_progress({.done = done, .words = words});
  }
  if (!is_shown_) return;
  // Some terminals start a new line after the last column.
  std::cerr << "\r\x1b[K" << cut(words, message_width() - 1) << std::flush;
}

std::string rough_time(double seconds) {
  if (seconds < 99.5) return fixed(std::ceil(seconds), 0) + " s";
  return seconds < 5970 ? fixed(seconds / 60, 0) + " min" : fixed(seconds / 3600, 1) + " h";
}

std::string Position::text(int64_t done, const std::string& words) const {
  const double passed = std::chrono::duration<double>(Clock::now() - begin_).count();
  std::string text = std::to_string(done) + " of " + std::to_string(total_);
  if (done > 0 && passed > 1) {
    const double left = passed / static_cast<double>(done) * static_cast<double>(total_ - done);
    text += ", " + rough_time(left) + " left";
  }
  return text + ": " + words;
}

}  // namespace crossdock::cli
