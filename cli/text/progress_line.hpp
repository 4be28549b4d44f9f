#pragma once

#include <string>

namespace crossdock::cli {

/// One line on standard error that is overwritten, if the terminal can show that. Cut to the
/// terminal's width; erased by the destructor.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void show(const std::string& words) const;

 private:
  bool is_shown_;
};

}  // namespace crossdock::cli
