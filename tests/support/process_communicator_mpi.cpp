// For programs with mpi_main.cpp.
#include "crossdock/mpi.hpp"
#include "support/process_communicator.hpp"

namespace crossdock::testing {

std::unique_ptr<Communicator> make_process_communicator(int ranks_per_node) {
  return make_mpi_communicator({.ranks_per_node = ranks_per_node});
}

}  // namespace crossdock::testing
