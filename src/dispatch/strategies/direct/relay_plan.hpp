#pragma once

#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/exchange_plan.hpp"
#include "dispatch/cuda/partial_sum_plan.hpp"

namespace crossdock::cuda {

/// `plan` was made on the host by direct or hierarchical. Collective; waits for the GPU.
RelayPlan make_relay_plan(CudaRank& rank, const Plan& plan);

/// The sums of such a plan with partial sums: gateways sum the rows of a copy, the source sums near
/// rows itself.
PartialSumLists make_relay_sums(const CudaRank& rank, const Plan& plan);

}  // namespace crossdock::cuda
