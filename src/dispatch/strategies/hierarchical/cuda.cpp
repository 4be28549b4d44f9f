#include "dispatch/path.hpp"
#include "dispatch/strategies/direct/direct.hpp"
#include "dispatch/strategies/list.hpp"

namespace crossdock {

// Rows travel as in direct, and between nodes as the gateways in a plan's relay say. Within a node
// the source adds up all rows of a token.
std::unique_ptr<Path> make_hierarchical_device_path(const PathContext& context, Device device) {
  return cuda::make_direct_path(context, device.index, /*sums_per_rank=*/false);
}

}  // namespace crossdock
