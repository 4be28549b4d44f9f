#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/packed_path.hpp"
#include "dispatch/path.hpp"
#include "dispatch/strategies/allgather/allgather.hpp"
#include "dispatch/strategies/list.hpp"

namespace crossdock {
namespace {

// A reduce-scatter: one partial row per token from every rank, added in rank order.
cuda::PartialSumLists list_reduce_scatter(const cuda::CudaRank& /*rank*/, const Plan& plan) {
  const PlanData& data = plan.data();
  const RankSums& sums = rank_sums_of(plan);
  cuda::PartialSumLists lists{.sent = cuda::sums_at_experts(sums, dense_sum_offsets(data, sums)),
                              .send_offsets = token_offsets(data),
                              .recv_offsets = {},
                              .tokens = {}};
  for (int rank = 0; rank <= data.P; ++rank) lists.recv_offsets.push_back(rank * data.T);
  for (int64_t t = 0; t < data.T; ++t) {
    for (int rank = 0; rank < data.P; ++rank) {
      lists.tokens.terms.push_back({.source = lists.arrived_source,
                                    .row = static_cast<int32_t>(rank * data.T + t),
                                    .group = rank,
                                    .weight = 1.0f});
    }
    lists.tokens.end_sum();
  }
  return lists;
}

}  // namespace

cuda::Packing cuda::allgather_packing() {
  return {.arrival_tokens = arrival_tokens_of, .sum_lists = list_reduce_scatter};
}

std::unique_ptr<Path> make_allgather_device_path(const PathContext& context, Device device) {
  return cuda::make_packed_path(context, device.index, cuda::allgather_packing());
}

}  // namespace crossdock
