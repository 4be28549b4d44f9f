// The only function that libcrossdock_mpi exports.
#include "comm/mpi/plugin.hpp"
#include "comm/mpi/setup.hpp"
#include "core/build_info.hpp"

extern "C" CROSSDOCK_API const crossdock::comm::MpiPlugin* crossdock_mpi_plugin() {
  using namespace crossdock::comm;
  static constexpr MpiPlugin kPlugin{.build = crossdock::build_info::kBuild,
                                     .make_world = make_world_communicator,
                                     .make_over = make_communicator_over};
  return &kPlugin;
}
