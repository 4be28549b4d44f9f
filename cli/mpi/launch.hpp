#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace crossdock::cli {

/// Runs this program with `args` as `ranks` MPI processes on this machine, which may outnumber its
/// cores, and returns their standard output; standard error passes through. Throws
/// Error(kUnsupported) without mpirun, Error(kTimeout) after the limit (the processes are then
/// ended), Error(kCommunication) if they fail. A signal that asks this process to end ends them
/// first; if this process is killed, they end by themselves.
std::string run_under_mpi(int ranks, const std::vector<std::string>& args,
                          std::chrono::seconds limit);

/// The same for a job in which a process will be killed: the others continue, their exit statuses
/// are ignored, and mpirun's messages are not shown.
std::string run_under_mpi_with_a_death(int ranks, const std::vector<std::string>& args,
                                       std::chrono::seconds limit);

/// Replaces this process by `mpirun`, which runs this program with `args` as `ranks` processes as
/// above; output, signals and exit status are those of mpirun. Throws Error(kUnsupported) without
/// mpirun.
[[noreturn]] void continue_under_mpi(int ranks, const std::vector<std::string>& args);

}  // namespace crossdock::cli
