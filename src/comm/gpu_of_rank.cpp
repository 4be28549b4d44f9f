#include <algorithm>

#include "crossdock/cuda.hpp"
#include "crossdock/group.hpp"

namespace crossdock {

int cuda_device_of(Group& group) {
  const int num_devices = std::max(1, cuda_device_count());
  if (group.communicator().shares_address_space()) return group.rank() % num_devices;
  const std::vector<int>& nodes = group.topology().node_of_rank;
  const auto own = nodes.begin() + group.rank();
  return static_cast<int>(std::count(nodes.begin(), own, *own)) % num_devices;
}

}  // namespace crossdock
