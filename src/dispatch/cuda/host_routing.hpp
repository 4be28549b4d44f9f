#pragma once

#include <cuda_runtime.h>

#include "crossdock/buffer.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/routing.hpp"
#include "dispatch/cuda/cuda_rank.hpp"

namespace crossdock::cuda {

/// A routing of the device, copied to host memory. Waits for the device, so not during a capture.
class HostRouting {
 public:
  HostRouting() = default;
  HostRouting(const Routing& routing, cudaStream_t stream);
  HostRouting(const DenseRouting& routing, cudaStream_t stream);

  Routing routing() const;
  DenseRouting dense_routing() const;

 private:
  ConstTensorView copy(const ConstTensorView& tensor, Buffer& buffer, cudaStream_t stream);

  Buffer route_bytes_;
  Buffer weight_bytes_;
  Buffer mask_bytes_;
  ConstTensorView routes_;  // expert_ids or map
  ConstTensorView weights_;
  ConstTensorView mask_;
};

/// A plan that the host has made, with its arrays on the device too.
Plan with_device_arrays(CudaRank& rank, const Plan& host_plan);

/// Copies the routing to the host, makes its plan there and brings that to the device. Collective.
Plan plan_on_host(CudaRank& rank, const Routing& routing, const DevicePath::PlanOnHost& plan);
Plan plan_on_host(CudaRank& rank, const DenseRouting& routing,
                  const DevicePath::PlanDenseOnHost& plan);

}  // namespace crossdock::cuda
