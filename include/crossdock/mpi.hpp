#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "crossdock/extend/communicator.hpp"

namespace crossdock {

struct MpiOptions {
  int64_t chunk_bytes = int64_t{4} << 20;  // a message is sent in pieces of this size
  int max_in_flight = 128;                 // data requests outstanding at once, all peers together
  int ranks_per_node = 0;                  // > 0: overrides the topology that MPI reports
  /// For all processes to take part when a communicator or a subgroup is made. Unset:
  /// CROSSDOCK_ARRIVAL_DEADLINE (seconds), else 600 s.
  std::optional<std::chrono::nanoseconds> setup_deadline{};
};

/// Whether this build has MPI.
CROSSDOCK_API bool mpi_is_built();

/// Whether this process was started by mpirun or the like (looked up in the environment).
CROSSDOCK_API bool mpi_is_launched();

/// A communicator over MPI_COMM_WORLD. Collective. Throws Error(kUnsupported) where MPI is not
/// built in.
///
/// Initialises MPI, with MPI_THREAD_MULTIPLE, if nobody has, and then finalises it at exit.
/// MPI_Finalize waits for every process for ever, so the processes first wait for each other with a
/// deadline: CROSSDOCK_ARRIVAL_DEADLINE, or CROSSDOCK_PROGRESS_DEADLINE once a communicator has
/// failed. If somebody is missing then, MPI is not finalised; the exit code stays the caller's, and
/// mpirun reports this process unless it runs with --enable-recovery.
///
/// What a communicator takes from MPI goes back once all its ranks have left it without a failure,
/// when the next one is made.
///
/// MPI itself has no deadlines: making communicators and subgroups blocks in it, on a thread that
/// is given up after setup_deadline with an Error (kTimeout); MPI_Init, and MPI without
/// MPI_THREAD_MULTIPLE, block without one. A process on the same machine that dies is noticed
/// within a fraction of a second, any other by the deadlines.
CROSSDOCK_API std::unique_ptr<Communicator> make_mpi_communicator(MpiOptions options = {});

/// A communicator over the caller's MPI_Comm, which is duplicated. `mpi_comm` points to an
/// MPI_Comm; the pointer keeps mpi.h out of this header. Collective over that communicator. MPI
/// must have been initialised with MPI_THREAD_MULTIPLE if several threads use groups at once.
CROSSDOCK_API std::unique_ptr<Communicator> make_mpi_communicator(const void* mpi_comm,
                                                                  MpiOptions options = {});

}  // namespace crossdock
