// For programs with sockets_main.cpp.
#include "crossdock/sockets.hpp"
#include "support/process_communicator.hpp"

namespace crossdock::testing {

std::unique_ptr<Communicator> make_process_communicator(int ranks_per_node) {
  return make_sockets_communicator(
      SocketsOptions{.ranks_per_node = ranks_per_node, .setup_deadline = std::chrono::seconds(60)});
}

}  // namespace crossdock::testing
