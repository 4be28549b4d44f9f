#pragma once

#include <string>
#include <vector>

namespace crossdock::cli {

constexpr int kCannotStart = 127;  // the exit status, as in shells

/// The command with which this program (`program`) starts `ranks` processes of itself with `args`,
/// as mpirun does for MPI: with the variables that the sockets communicator reads (RANK,
/// WORLD_SIZE, ...). It ends when all of them have ended, with the status of the first that failed;
/// the others then have a few seconds to end by themselves. A signal to terminate it ends its
/// processes first. survives_deaths: the others continue if one ends, and the status is 0.
std::vector<std::string> rank_launcher_command(const std::string& program, int ranks,
                                               bool survives_deaths,
                                               const std::vector<std::string>& args);

/// Whether this process was started by such a command.
bool is_rank_launcher(int argc, char** argv);

/// Executes the command; returns the exit status. REQUIRES: is_rank_launcher.
int launch_ranks(int argc, char** argv);

}  // namespace crossdock::cli
