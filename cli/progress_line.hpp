#pragma once

#include <unistd.h>

#include <iostream>
#include <string>

namespace crossdock::cli {

/// One line on standard error that is written over, where a terminal watches; gone at the end.
class ProgressLine {
 public:
  ProgressLine() = default;
  ~ProgressLine() { show(""); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void show(const std::string& words) const {
    if (is_watched_) std::cerr << "\r\x1b[K" << words << std::flush;
  }

 private:
  bool is_watched_ = isatty(STDERR_FILENO) != 0;
};

}  // namespace crossdock::cli
