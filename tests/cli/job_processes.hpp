#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cli/command.hpp"

namespace crossdock::cli {

/// Processes, except zombies, with all of these words in their environment, which all processes of
/// a job inherit. "NAME=value" is a word.
std::vector<pid_t> processes_with(const std::vector<std::string>& words);

/// Whether the process has a memory file whose name begins with this.
bool has_file(pid_t process, const std::string& name);

/// The command `crossdock`, while it runs.
class RunningCommand {
 public:
  /// As a shell reads them; `environment`: "NAME=value ...".
  RunningCommand(const std::string& environment, const std::string& arguments);
  /// Kills it if it runs.
  ~RunningCommand();
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;

  pid_t process() const { return process_; }
  /// How it has ended, within a minute.
  CommandResult wait();

 private:
  std::string files_;  // the beginning of their names
  pid_t process_ = -1;
};

/// Waits up to a minute.
template <typename Condition>
bool comes_true(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return true;
}

}  // namespace crossdock::cli
