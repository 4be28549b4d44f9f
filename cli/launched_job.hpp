#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

/// This process as one of a job that mpirun, or the like, has started.
namespace crossdock::cli {

/// Whether this process is the one that prints what all processes of the job have to say: rank 0;
/// without mpirun always. Under mpirun every process must call this. None of them then ends before
/// rank 0 does: mpirun ends the whole job when the first one returns a failure.
bool speaks_for_job();

/// Under mpirun: throws the same ArgumentError on every process where their arguments, the words
/// of the command line, differ. Every process must call this, within `setup_deadline` (not given:
/// the engine's).
void check_same_words(const std::vector<std::string>& words,
                      std::optional<std::chrono::nanoseconds> setup_deadline = {});

/// Under mpirun the processes are the ranks: throws ArgumentError where the arguments, as far as
/// they were given, ask for others.
void check_against_job(int num_processes, const std::vector<std::string>& communicators,
                       const std::vector<int>& ranks);

}  // namespace crossdock::cli
