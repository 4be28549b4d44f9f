#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace crossdock::cli {

/// Runs this program again with `args` as `ranks` MPI processes on this machine, more than it has
/// cores if need be, and returns what they wrote to standard output; standard error passes
/// through. Throws Error(kUnsupported) without mpirun, Error(kTimeout) past the limit (the
/// processes are then ended), Error(kCommunication) if they fail. A signal that asks this process
/// to end ends them first; if this process is killed, they end by themselves.
std::string run_under_mpi(int ranks, const std::vector<std::string>& args,
                          std::chrono::seconds limit);

/// The same for processes one of which is going to be killed: the others live on, how they end does
/// not matter, and what mpirun has to say about it is not shown.
std::string run_under_mpi_with_a_death(int ranks, const std::vector<std::string>& args,
                                       std::chrono::seconds limit);

/// This process becomes `mpirun`, which runs this program again with `args` as `ranks` processes as
/// above: output, signals and exit status are theirs. Throws Error(kUnsupported) without mpirun.
[[noreturn]] void continue_under_mpi(int ranks, const std::vector<std::string>& args);

}  // namespace crossdock::cli
