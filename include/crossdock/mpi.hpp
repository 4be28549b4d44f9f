#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "crossdock/extend/communicator.hpp"

namespace crossdock {

struct MpiOptions {
  int64_t chunk_bytes = int64_t{4} << 20;  // largest message; longer blocks are sent in pieces
  int max_in_flight = 128;                 // data requests pending at once, over all peers
  int ranks_per_node = 0;                  // > 0: overrides the topology that MPI reports
  /// Time for all processes to take part when a communicator or a subgroup is made. Default:
  /// CROSSDOCK_ARRIVAL_DEADLINE (seconds), else 600 s.
  std::optional<std::chrono::nanoseconds> setup_deadline{};
  /// (optional) Called once while a communicator or a subgroup is made if that has taken
  /// `notice_after`. Calls of a group have GroupOptions::on_wait.
  OnWait on_wait{};
  std::chrono::nanoseconds notice_after = std::chrono::seconds(3);
};

/// Whether this build has MPI. A shared libcrossdock does not link MPI itself; it has MPI if the
/// plugin libcrossdock_mpi is in the same directory.
CROSSDOCK_API bool mpi_is_built();

/// Whether this process was started by mpirun or a similar launcher, judging by its environment.
CROSSDOCK_API bool mpi_is_launched();

/// A communicator over MPI_COMM_WORLD. Collective. Throws Error(kUnsupported) if this build has no
/// MPI, or if the plugin cannot be opened or comes from another build.
///
/// If MPI is not initialised yet, initialises it with MPI_THREAD_MULTIPLE and finalises it at exit.
/// MPI_Finalize waits for every process without a deadline, so the processes first wait for each
/// other with one: CROSSDOCK_ARRIVAL_DEADLINE, or CROSSDOCK_PROGRESS_DEADLINE once a communicator
/// has failed. If a process is missing by then, MPI is not finalised; this process keeps its exit
/// code, and mpirun reports it unless started with --enable-recovery.
///
/// Once all ranks have left a communicator without a failure, its MPI resources are released when
/// the next communicator is made.
///
/// MPI itself has no deadlines. Making a communicator or a subgroup blocks in MPI on a separate
/// thread; after setup_deadline the thread is abandoned and the call throws Error(kTimeout).
/// MPI_Init, and an MPI without MPI_THREAD_MULTIPLE, block without a deadline. The death of a
/// process is detected within a fraction of a second on the same machine, by the deadlines
/// elsewhere.
CROSSDOCK_API std::unique_ptr<Communicator> make_mpi_communicator(const MpiOptions& options = {});

/// A communicator over a duplicate of the caller's MPI_Comm. `mpi_comm` points to an MPI_Comm (a
/// void pointer keeps mpi.h out of this header). Collective over that MPI_Comm. MPI must have been
/// initialised with MPI_THREAD_MULTIPLE if several threads use groups at once.
CROSSDOCK_API std::unique_ptr<Communicator> make_mpi_communicator(const void* mpi_comm,
                                                                  const MpiOptions& options = {});

}  // namespace crossdock
