#include "core/environment.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock {

bool mpi_is_launched() {
  // Open MPI; PMIx (prte, Slurm); PMI-1/2 (MPICH, Intel MPI, Slurm).
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
    if (!environment_variable(variable).empty()) return true;
  }
  return false;
}

}  // namespace crossdock
