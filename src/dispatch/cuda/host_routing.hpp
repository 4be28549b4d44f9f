#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"
#include "dispatch/cuda/cuda_rank.hpp"

namespace crossdock::cuda {

/// Host copy of a routing on the device. Waits for the device, so it cannot be made in a capture.
class HostRouting {
 public:
  HostRouting() = default;
  HostRouting(const Routing& routing, const CudaRank& rank);
  HostRouting(const DenseRouting& routing, const CudaRank& rank);

  Routing routing() const;
  DenseRouting dense_routing() const;

 private:
  HostRouting(const char* routes_name, const ConstTensorView& routes,
              const ConstTensorView& weights, const ConstTensorView& mask, const CudaRank& rank);
  static ConstTensorView copy(const char* name, const ConstTensorView& tensor, Buffer& buffer,
                              const CudaRank& rank);
  void round_weights();

  Buffer route_bytes_;
  Buffer weight_bytes_;
  Buffer mask_bytes_;
  ConstTensorView routes_;  // expert_ids or map
  ConstTensorView weights_;
  ConstTensorView mask_;
};

/// Throws if the rank's stream is captured: a plan on the host waits for it.
void check_not_captured(const CudaRank& rank);

/// Copies to the device the parts of a host plan that calls need.
using MakeDeviceData = std::function<std::shared_ptr<const DevicePlanData>(const Plan& host_plan)>;

/// Copies the routing to the host, makes the plan there and copies it to the device. Collective.
Plan plan_on_host(CudaRank& rank, const Routing& routing, const MakeDeviceData& make_device_data);
Plan plan_on_host(CudaRank& rank, const DenseRouting& routing,
                  const MakeDeviceData& make_device_data);

}  // namespace crossdock::cuda
