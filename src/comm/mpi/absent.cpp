// The MPI communicator in a build without MPI.
#include "core/build_info.hpp"
#include "core/check.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock {
namespace {

[[noreturn]] void throw_absent() {
  throw Error(ErrorCode::kUnsupported,
              concat("this build of Crossdock has no MPI: ", build_info::kMpiNote));
}

}  // namespace

bool mpi_is_built() {
  return false;
}

std::unique_ptr<Communicator> make_mpi_communicator(const MpiOptions& /*options*/) {
  throw_absent();
}

std::unique_ptr<Communicator> make_mpi_communicator(const void* /*mpi_comm*/,
                                                    const MpiOptions& /*options*/) {
  throw_absent();
}

}  // namespace crossdock
