#pragma once

#include <functional>
#include <memory>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/plan.hpp"
#include "dispatch/cuda/cuda_rank.hpp"

namespace crossdock::cuda {

/// Throws if the rank's stream is captured: a plan on the host waits for it.
void check_not_captured(const CudaRank& rank);

/// Copies to the device the parts of a host plan that calls need.
using MakeDeviceData = std::function<std::shared_ptr<const DevicePlanData>(const Plan& host_plan)>;

/// Copies the routing to the host, makes the plan there and copies it to the device. Collective.
Plan plan_on_host(CudaRank& rank, const Routing& routing, const MakeDeviceData& make_device_data);
Plan plan_on_host(CudaRank& rank, const DenseRouting& routing,
                  const MakeDeviceData& make_device_data);

}  // namespace crossdock::cuda
