#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "crossdock/extend/communicator.hpp"

/// For processes that mpirun, torchrun, srun or another launcher has started.
namespace crossdock::cli {

/// The communicator of the job to which this process belongs: "mpi" under mpirun, "sockets" if its
/// environment names its rank (torchrun, srun, ...), empty if it was started alone. `wanted` are
/// the communicators on the command line: sockets takes precedence over mpi if it is wanted, and is
/// not used if only others are.
std::string launched_communicator(const std::vector<std::string>& wanted);

/// The rank of this process in its job, as its launcher says; -1 if it does not say.
int rank_in_job(const std::string& communicator);

/// Says why this process is no rank although a variable of a launcher is set; empty if none is, or
/// if the command line says what the ranks are.
std::string note_on_environment(const std::vector<std::string>& wanted);

struct JobOptions {
  int ranks_per_node = 0;   // 0: as the communicator reports
  int max_in_flight = 0;    // with mpi; 0: its default
  int64_t chunk_bytes = 0;  // with mpi; 0: its default
  /// Not given: the communicator's.
  std::optional<std::chrono::nanoseconds> setup_deadline{};
};

/// A communicator of the processes of the job. Collective. `communicator`: see
/// launched_communicator, not empty.
std::unique_ptr<Communicator> make_job_communicator(const std::string& communicator,
                                                    const JobOptions& options);

/// Whether this process prints for the whole job: rank 0, or any process that was started alone
/// (`communicator` is empty). Collective. Afterwards no process ends before rank 0 does; otherwise
/// the launcher would end the job when the first process fails.
bool speaks_for_job(const std::string& communicator);

/// The size, nodes and note (Communicator::note) of the job, for the process that speaks for it;
/// empty before speaks_for_job, and for processes that were started alone.
const std::string& job_description();

/// In a job: throws the same ArgumentError on every process if their command lines differ. Every
/// process must call this within `setup_deadline` (not given: the communicator's).
void check_same_words(const std::string& communicator, const std::vector<std::string>& words,
                      std::optional<std::chrono::nanoseconds> setup_deadline = {});

/// In a job the processes are the ranks: throws ArgumentError if the given arguments request
/// anything else.
void check_against_job(const Communicator& job, const std::vector<std::string>& communicators,
                       const std::vector<int>& ranks);

}  // namespace crossdock::cli
