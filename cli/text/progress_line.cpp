#include "cli/text/progress_line.hpp"

#include <iostream>

#include "cli/text/layout.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {

ProgressLine::ProgressLine() : is_shown_(can_show_progress()) {}

ProgressLine::~ProgressLine() {
  show("");
}

void ProgressLine::show(const std::string& words) const {
  if (!is_shown_) return;
  // Some terminals start a new line after the last column.
  std::cerr << "\r\x1b[K" << cut(words, message_width() - 1) << std::flush;
}

}  // namespace crossdock::cli
