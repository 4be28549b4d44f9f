#include "cli/text/log.hpp"

#include <cstdlib>
#include <iostream>
#include <mutex>
#include <string_view>

#include "cli/text/layout.hpp"
#include "cli/text/terminal.hpp"
#include "cli/text/wait_notice.hpp"
#include "crossdock/error.hpp"

namespace crossdock::cli {
namespace {

void print_line(LogLevel /*level*/, const std::string& line) {
  static std::mutex mutex;  // of ranks that are threads
  const std::lock_guard lock(mutex);
  const std::string text = wrap("crossdock: " + line, message_width(), 2) + "\n";
  std::cerr << (can_show_progress() ? "\r\x1b[K" + text : text) << std::flush;
}

LogLevel level_from_environment() {
  const char* value = std::getenv("CROSSDOCK_LOG");
  const std::string_view name = value == nullptr ? "" : value;
  if (name.empty()) return LogLevel::kNone;
  if (name == "info") return LogLevel::kInfo;
  if (name == "debug") return LogLevel::kDebug;
  throw Error(ErrorCode::kInvalidArgument,
              "CROSSDOCK_LOG must be info or debug, got \"" + std::string(name) + "\"");
}

}  // namespace

GroupOptions printing_options(GroupOptions options) {
  options.on_wait = print_wait_notice;
  options.log_level = level_from_environment();
  if (options.log_level != LogLevel::kNone) options.on_log = print_line;
  return options;
}

}  // namespace crossdock::cli
