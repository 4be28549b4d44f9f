#pragma once

#include <memory>

#include "crossdock/mpi.hpp"

namespace crossdock::comm {

/// The MPI communicator as a separate library, libcrossdock_mpi. A shared libcrossdock does not
/// link MPI, because MPI libraries have no common binary interface; it opens the plugin when a
/// program first requests an MPI communicator.
struct MpiPlugin {
  const char* build = "";  // first in every version: compared before anything else is used
  std::unique_ptr<Communicator> (*make_world)(const MpiOptions& options) = nullptr;
  std::unique_ptr<Communicator> (*make_over)(const void* mpi_comm,
                                             const MpiOptions& options) = nullptr;
};

/// The only function that the plugin exports, with C linkage.
using GetMpiPlugin = const MpiPlugin* (*)();
inline constexpr const char* kGetMpiPlugin = "crossdock_mpi_plugin";

}  // namespace crossdock::comm
