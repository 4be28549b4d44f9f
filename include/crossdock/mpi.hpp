#pragma once

#include <memory>
#include <string>

#include "crossdock/communicator.hpp"

namespace crossdock {

struct MpiOptions {
  int64_t chunk_bytes = int64_t{4} << 20;  // a message is sent in pieces of this size
  int max_in_flight = 128;                 // requests outstanding at once, all peers together
  int ranks_per_node = 0;                  // > 0: overrides the topology that MPI reports
};

/// Whether this build has MPI, and if not, why.
bool mpi_is_built();

/// Whether this process was started by mpirun or the like (looked up in the environment).
bool mpi_is_launched();

/// A communicator over MPI_COMM_WORLD. Initialises MPI if nobody has (and then finalises it at
/// exit). Collective. Throws Error(kUnsupported) where MPI is not built in.
std::unique_ptr<Communicator> make_mpi_communicator(MpiOptions options = {});

/// A communicator over the caller's MPI_Comm, which is duplicated. `mpi_comm` points to an
/// MPI_Comm; the pointer keeps mpi.h out of this header. Collective over that communicator.
std::unique_ptr<Communicator> make_mpi_communicator(const void* mpi_comm, MpiOptions options = {});

}  // namespace crossdock
