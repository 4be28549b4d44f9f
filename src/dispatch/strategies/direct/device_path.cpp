#include "dispatch/device_path.hpp"

#include "dispatch/cuda/cuda_packed.hpp"
#include "dispatch/strategies/direct/cuda_direct.hpp"
#include "dispatch/strategies/direct/relay_plan.hpp"

namespace crossdock {

// Within one node all ranks reach each other's rows; between nodes copies are exchanged. If GPUs of
// a node do not reach each other, all rows are exchanged, one per route.
std::unique_ptr<Path> make_direct_device_path(const PathContext& context, Device device) {
  if (!context.gpus_reach_each_other) {
    return std::make_unique<cuda::CudaPacked>(context, device.index, cuda::Packing{});
  }
  if (context.group.topology().num_nodes <= 1) {
    return std::make_unique<cuda::CudaDirect>(context, device.index);
  }
  return std::make_unique<cuda::CudaPacked>(context, device.index,
                                            cuda::Packing{.relay = cuda::make_relay_plan});
}

}  // namespace crossdock
