#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "crossdock/plan.hpp"
#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/gpu_call.hpp"
#include "dispatch/cuda/kernels/link_rows.hpp"
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

// Links between the rows of a token on one rank (see PlanLinks). With them, ranks can send one row
// per token and rank.

/// Memory for the links of a plan, which peers write.
struct ReadyLinks {
  std::shared_ptr<const PlanLinks> memory;
  ExposedMemory shown;
};

/// Takes the memory. REQUIRES: the plan's capacity is set.
ReadyLinks ready_links(GpuCall& call, const CudaPlan& plan);

/// Queues the kernel that writes the links, and adds them to the plan. They are entry 0 of the
/// call. REQUIRES: all ranks' links are free to be written when the kernel starts.
void queue_links(const GpuCall& call, const CudaPlan& plan, const ReadyLinks& links);

/// After a scatter to the links' rank_targets: copies each token to its other rows here and, if
/// row_weights is given, sets the weights of all rows.
void queue_fan_out(const GpuCall& call, const CudaPlan& plan, std::span<const FanOutPart> parts,
                   const TensorView& row_weights);

/// Sums the rows of each token here: rows [R, D] -> partials [R, D]. The sum is in the row of the
/// token's lowest slot here.
void queue_partial_sums(const GpuCall& call, const CudaPlan& plan, const GatherSumArgs& args,
                        const TensorView& partials);

}  // namespace crossdock::cuda
