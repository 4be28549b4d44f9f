#include "dispatch/cuda/partial_sum_plan.hpp"

#include <utility>

#include "dispatch/cuda/packed_arrays.hpp"

namespace crossdock::cuda {
namespace {

void add(const SumList& list, PackedArrays& arrays, PartialSumPlan::List& place) {
  arrays.add(list.terms, place.terms);
  arrays.add(list.offsets, place.offsets);
  place.num_sums = std::ssize(list.offsets) - 1;
}

}  // namespace

SumList sums_at_experts(const RankSums& sums, std::vector<int64_t> offsets) {
  const auto* weights = reinterpret_cast<const float*>(sums.weights.data());
  SumList list{.terms = {}, .offsets = std::move(offsets)};
  for (size_t i = 0; i < sums.rows.size(); ++i) {
    list.terms.push_back(
        {.source = 0, .row = static_cast<int32_t>(sums.rows[i]), .group = 0, .weight = weights[i]});
  }
  return list;
}

PartialSumPlan make_partial_sum_plan(CudaRank& rank, const Plan& plan,
                                     const PartialSumLists& lists) {
  PartialSumPlan made;
  made.traffic = agree_on_traffic(rank.group(), plan, lists.send_offsets, lists.recv_offsets);
  made.arrived_source = lists.arrived_source;
  PackedArrays arrays;
  add(lists.sent, arrays, made.sent);
  add(lists.tokens, arrays, made.tokens);
  made.memory = arrays.upload(rank.pool(), rank.stream(), rank.watch());
  return made;
}

}  // namespace crossdock::cuda
