// The MPI communicator in a static library, which has MPI built in.
#include "comm/mpi/setup.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock {

bool mpi_is_built() {
  return true;
}

std::unique_ptr<Communicator> make_mpi_communicator(const MpiOptions& options) {
  return comm::make_world_communicator(options);
}

std::unique_ptr<Communicator> make_mpi_communicator(const void* mpi_comm,
                                                    const MpiOptions& options) {
  return comm::make_communicator_over(mpi_comm, options);
}

}  // namespace crossdock
