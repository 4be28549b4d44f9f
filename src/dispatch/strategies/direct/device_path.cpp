#include "dispatch/device_path.hpp"

#include "dispatch/strategies/alltoall/alltoall.hpp"
#include "dispatch/strategies/direct/cuda_direct.hpp"
#include "dispatch/strategies/direct/relay_plan.hpp"
#include "dispatch/strategies/packings.hpp"

namespace crossdock {

cuda::Packing cuda::relay_packing() {
  return {.relay = make_relay_plan, .sum_lists = make_relay_sums};
}

// Within one node all ranks reach each other's rows; between nodes copies are exchanged. If GPUs of
// a node do not reach each other, all rows are exchanged, as in alltoall.
std::unique_ptr<Path> make_direct_device_path(const PathContext& context, Device device,
                                              bool sums_per_rank) {
  if (!context.gpus_reach_each_other) {
    PathContext exchanging = context;
    exchanging.strategy = make_alltoall();
    return make_alltoall_device_path(exchanging, device);
  }
  if (context.group.topology().num_nodes <= 1) {
    return std::make_unique<cuda::CudaDirect>(context, device.index, sums_per_rank);
  }
  return std::make_unique<cuda::CudaPacked>(context, device.index, cuda::relay_packing());
}

}  // namespace crossdock
