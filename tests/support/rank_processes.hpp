#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace crossdock::testing {

/// The last argument of a program that runs as a rank.
inline constexpr const char* kAsRank = "--as-rank";

/// The processes of one job of communicator sockets. Each of them is this program, started by exec
/// so that it inherits no CUDA state. They are killed if this process ends before them.
class RankProcesses {
 public:
  /// Starts them. `arguments`: the program's name and arguments; kAsRank is appended.
  RankProcesses(int size, const std::vector<std::string>& arguments);
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// How the process of a rank has ended, as waitpid describes it. Kills the process at the
  /// deadline and returns nothing.
  std::optional<int> wait_for(int rank, std::chrono::steady_clock::time_point deadline) const;

 private:
  std::vector<pid_t> processes_;
};

}  // namespace crossdock::testing
