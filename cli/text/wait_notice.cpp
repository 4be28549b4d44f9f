#include "cli/text/wait_notice.hpp"

#include <algorithm>
#include <iostream>

#include "cli/text/layout.hpp"
#include "cli/text/terminal.hpp"

namespace crossdock::cli {
namespace {

bool speaks(const WaitNotice& notice) {
  const std::vector<int>& awaited = notice.awaited;
  if (awaited.empty()) return true;
  if (notice.sequence == 0 && awaited.front() == 0) return true;
  // Whether all lower ranks are awaited; ranks are ascending.
  const auto lower = std::lower_bound(awaited.begin(), awaited.end(), notice.rank);
  return lower - awaited.begin() == notice.rank;
}

}  // namespace

void print_wait_notice(const WaitNotice& notice) {
  if (!speaks(notice)) return;
  const std::string line = wrap("crossdock: " + notice.text(), message_width(), 2) + "\n";
  std::cerr << (can_show_progress() ? "\r\x1b[K" + line : line) << std::flush;
}

}  // namespace crossdock::cli
