#pragma once

#include <mpi.h>

#include <memory>
#include <span>

#include "comm/mpi/communicator.hpp"

// Making MPI communicators: the only calls that block in MPI, until MpiOptions::setup_deadline.
namespace crossdock::comm {

// The two overloads of make_mpi_communicator in crossdock/mpi.hpp.
std::unique_ptr<Communicator> make_world_communicator(const MpiOptions& options);
std::unique_ptr<Communicator> make_communicator_over(const void* mpi_comm,
                                                     const MpiOptions& options);

struct MpiSubgroup {
  MPI_Comm parent = MPI_COMM_NULL;
  const Members& of;           // all ranks of the parent
  std::span<const int> ranks;  // ranks of the subgroup
};
/// Called only by the ranks of the subgroup.
std::unique_ptr<Communicator> make_subgroup(const MpiSubgroup& subgroup, const MpiOptions& options);

}  // namespace crossdock::comm
