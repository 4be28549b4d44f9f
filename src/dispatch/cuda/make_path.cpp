#include <utility>

#include "core/check.hpp"
#include "dispatch/cuda/cuda_staged.hpp"
#include "dispatch/cuda/host_staging.hpp"
#include "dispatch/device_path.hpp"
#include "dispatch/strategies/direct/cuda_direct.hpp"

namespace crossdock {
namespace {

std::unique_ptr<cuda::CudaPath> make_cuda_path(DevicePathContext context, Device device) {
  const std::string name = context.strategy_name;
  void* const nccl_comm = context.options.nccl_comm;
  const bool is_direct = name == "direct" || name == "hierarchical";
  if (is_direct && context.group.topology().num_nodes <= 1) {
    return std::make_unique<cuda::CudaDirect>(std::move(context), device.index);
  }
  if (is_direct || name == "alltoall" || name == "allgather") {
    return std::make_unique<cuda::CudaStaged>(context, device.index, nccl_comm);
  }
  throw Error(ErrorCode::kUnsupported, concat("strategy \"", name, "\" has no GPU side"));
}

}  // namespace

std::unique_ptr<DevicePath> make_device_path(DevicePathContext context, Device device) {
  return make_cuda_path(std::move(context), device);
}

std::unique_ptr<DevicePath> make_staged_path(DevicePathContext context, Device device) {
  Group& group = context.group;
  return std::make_unique<cuda::HostStaging>(make_cuda_path(std::move(context), device), group,
                                             device.index);
}

}  // namespace crossdock
