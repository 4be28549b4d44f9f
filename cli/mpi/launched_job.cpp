#include "cli/mpi/launched_job.hpp"

#include <algorithm>

#include "cli/commands.hpp"
#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::cli {

bool speaks_for_job() {
  if (!mpi_is_built() || !mpi_is_launched()) return true;
  try {
    // Once MPI is initialised, processes wait for each other at exit.
    return make_mpi_communicator({.setup_deadline = std::chrono::seconds(10)})->rank() == 0;
  } catch (const Error&) {
    return true;  // the others did not arrive; better printed twice than not at all
  }
}

void check_same_words(const std::vector<std::string>& words,
                      std::optional<std::chrono::nanoseconds> setup_deadline) {
  if (!mpi_is_built() || !mpi_is_launched()) return;
  std::string own;
  for (const std::string& word : words) own += " " + word;
  Group group(make_mpi_communicator({.setup_deadline = setup_deadline}));
  const Agreement all =
      group.agree({.operation = "command_line", .body = std::as_bytes(std::span(own))});
  const auto words_of = [&all](int rank) {
    const auto body = all.body(rank);
    return std::string(reinterpret_cast<const char*>(body.data()), body.size());
  };
  for (int rank = 1; rank < group.size(); ++rank) {
    if (words_of(rank) == words_of(0)) continue;
    throw ArgumentError(
        "every process of the job must have the same arguments; rank 0 has `crossdock" +
        words_of(0) + "`, rank " + std::to_string(rank) + " has `crossdock" + words_of(rank) + "`");
  }
}

void check_against_job(int num_processes, const std::vector<std::string>& communicators,
                       const std::vector<int>& ranks) {
  if (std::ranges::find(communicators, "threads") != communicators.end()) {
    throw ArgumentError(
        "under mpirun the processes are the ranks; for threads, run the command without mpirun");
  }
  if (!ranks.empty() && ranks != std::vector<int>{num_processes}) {
    throw ArgumentError("--ranks must be the number of processes, " +
                        std::to_string(num_processes) + ", or be omitted under mpirun");
  }
}

}  // namespace crossdock::cli
