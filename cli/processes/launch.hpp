#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "cli/processes/rank_failure.hpp"

namespace crossdock::cli {

/// Processes of this program on this machine, which may outnumber its cores.
constexpr std::chrono::hours kNoLimit{1'000'000};

struct ProcessJob {
  std::string communicator;  // "mpi" or "sockets"
  int ranks = 0;
  std::vector<std::string> args;   // of each process
  std::chrono::seconds limit{60};  // on the time of the whole job
  /// Called with what rank 0 reports. Not given: shows its words.
  std::function<void(const RankProgress&)> on_progress{};
};

/// Runs the job and returns the standard output of its processes; standard error passes through.
/// The mpi communicator needs mpirun, sockets needs nothing. Throws Error(kUnsupported) without
/// mpirun, Error(kTimeout) after the limit (the processes are then ended), Error(kCommunication) if
/// they fail, with the rank that failed first and the reason. A signal to terminate this process
/// ends the processes of the job first, and then this process; if this process is killed, they end
/// by themselves.
std::string run_processes(const ProcessJob& job);

/// The same for a job in which a process will be killed: the others continue, their exit statuses
/// are ignored, and standard error is not shown.
std::string run_processes_with_a_death(const ProcessJob& job);

/// The same as run_processes, but prints the output, unless a rank has failed, and returns the exit
/// status: that of ranks that have printed why they end with it, or 0.
int show_processes(const ProcessJob& job);

}  // namespace crossdock::cli
