#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

/// For processes that mpirun or another launcher has started.
namespace crossdock::cli {

/// Whether this process prints for the whole job: rank 0, or any process that was not started by
/// mpirun. Collective under mpirun. Afterwards no process ends before rank 0 does; otherwise mpirun
/// would end the job when the first process fails.
bool speaks_for_job();

/// Under mpirun: throws the same ArgumentError on every process if their command lines differ.
/// Every process must call this within `setup_deadline` (not given: the communicator's).
void check_same_words(const std::vector<std::string>& words,
                      std::optional<std::chrono::nanoseconds> setup_deadline = {});

/// Under mpirun the processes are the ranks: throws ArgumentError if the given arguments request
/// anything else.
void check_against_job(int num_processes, const std::vector<std::string>& communicators,
                       const std::vector<int>& ranks);

}  // namespace crossdock::cli
