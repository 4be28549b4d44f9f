#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/packed_path.hpp"
#include "dispatch/strategies/alltoall/alltoall.hpp"
#include "dispatch/strategies/list.hpp"

namespace crossdock {
namespace {

// One partial row per (token, rank); the source adds a token's partial rows in rank order.
cuda::PartialSumLists list_sums_per_rank(const cuda::CudaRank& /*rank*/, const Plan& plan) {
  const auto& sums = plan.strategy_state<RankSums>();
  cuda::PartialSumLists lists{.sent = cuda::sums_at_experts(sums, sums.sum_offsets),
                              .send_offsets = sums.source_offsets,
                              .recv_offsets = sums.rank_offsets,
                              .tokens = {}};
  for (size_t t = 0; t + 1 < sums.token_offsets.size(); ++t) {
    const int64_t first = sums.token_offsets[t];
    for (int64_t i = first; i < sums.token_offsets[t + 1]; ++i) {
      lists.tokens.terms.push_back(
          {.source = lists.arrived_source,
           .row = static_cast<int32_t>(sums.partials[static_cast<size_t>(i)]),
           .group = static_cast<int32_t>(i - first),
           .weight = 1.0f});
    }
    lists.tokens.end_sum();
  }
  return lists;
}

}  // namespace

cuda::Packing cuda::alltoall_packing() {
  return {.sum_lists = list_sums_per_rank};
}

std::unique_ptr<Path> make_alltoall_device_path(const PathContext& context, Device device) {
  return cuda::make_packed_path(context, device.index, cuda::alltoall_packing());
}

}  // namespace crossdock
