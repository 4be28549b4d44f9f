#pragma once

#include <cstdint>
#include <functional>

#include "crossdock/plan.hpp"
#include "dispatch/cuda/cuda_rank.hpp"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// A routing that this rank has checked, in the form that the plan kernels take.
struct ReadyRouting {
  DeviceRouting slots{};
  std::function<void()> queue{};  // queues the kernels that fill the slots; may be empty
};

/// Checks a routing and takes memory for what must be converted. Throws Error(kInvalidArgument).
ReadyRouting ready_routing(CudaRank& rank, const Routing& routing);
/// K is the number of slots per token.
ReadyRouting ready_routing(CudaRank& rank, const DenseRouting& routing, int64_t K);

/// The number of slots per token for a plan of these maps, identical on every rank: the
/// configuration's bound, or the largest number that a map needs. In the latter case the call is
/// collective, waits for the GPU and throws the same error on all ranks if a map is refused.
int64_t agree_num_slots(CudaRank& rank, const DenseRouting& routing);

}  // namespace crossdock::cuda
