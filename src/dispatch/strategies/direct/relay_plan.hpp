#pragma once

#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/exchange_plan.hpp"

namespace crossdock::cuda {

/// `plan` was made on the host by direct or hierarchical. Collective; waits for the GPU.
RelayPlan make_relay_plan(CudaRank& rank, const Plan& plan);

}  // namespace crossdock::cuda
