#include <vector>

#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/exchange_plan.hpp"
#include "dispatch/cuda/packed_path.hpp"
#include "dispatch/strategies/direct/direct.hpp"
#include "dispatch/strategies/direct/relay.hpp"

namespace crossdock::cuda {
namespace {

// Rows that return to sources on other nodes: in the order of arrivals here, and of send_positions
// at the source, both without the rows that stay in a node.
RowTraffic make_far_returned(const PlanData& data, const std::vector<int>& node_of) {
  const auto is_far = [&](int a, int b) { return node_of[index(a)] != node_of[index(b)]; };
  RowTraffic traffic;
  for (int p = 0; p < data.P; ++p) {
    RowTraffic::Part part{.send_begin = traffic.num_sent, .recv_begin = traffic.num_received};
    if (is_far(p, data.rank)) {
      part.send_count = rows_between(data, p, data.rank);
      part.recv_count = rows_between(data, data.rank, p);
      for (int source = 0; source < data.rank; ++source) {
        if (is_far(source, p)) part.peer_begin += rows_between(data, source, p);
      }
    }
    traffic.num_sent += part.send_count;
    traffic.num_received += part.recv_count;
    traffic.parts.push_back(part);
  }
  return traffic;
}

struct RouteTargets {
  std::vector<RouteTarget> near;  // [T, K]
  std::vector<RouteTarget> sums;  // [T, K]
};

// A route within this node is summed in place; the row of a route to another node returns to the
// far_returned part of its owner.
RouteTargets make_targets(const PlanData& data, const CudaRank& rank,
                          const RowTraffic& far_returned) {
  const ChannelRanks& slots = rank.channel_ranks();
  RouteTargets targets;
  targets.near.assign(data.expert_ids.size(), {-1, -1});
  targets.sums = targets.near;
  for (size_t i = 0; i < data.expert_ids.size(); ++i) {
    if (data.expert_ids[i] < 0) continue;
    const int owner = data.owner[index(data.expert_ids[i])];
    if (rank.is_near(owner)) {
      targets.near[i] = {slots.slot_of(owner), static_cast<int32_t>(data.final_rows[i])};
      targets.sums[i] = targets.near[i];
    } else {
      const int64_t place = far_returned.parts[index(owner)].recv_begin + data.send_positions[i] -
                            data.send_offsets[index(owner)];
      targets.sums[i] = {slots.size(), static_cast<int32_t>(place)};
    }
  }
  return targets;
}

// [copies received, K]: the final rows of each copy, on this node.
std::vector<RouteTarget> make_copy_targets(const Relay& relay, int64_t K,
                                           const ChannelRanks& slots) {
  const int64_t num_copies = relay.arrival_offsets.back();
  std::vector<RouteTarget> targets(index(num_copies * K), {-1, -1});
  for (int64_t copy = 0; copy < num_copies; ++copy) {
    const int64_t first = relay.target_offsets[index(copy)];
    for (int64_t i = first; i < relay.target_offsets[index(copy) + 1]; ++i) {
      const RelayTarget& target = relay.targets[index(i)];
      targets[index(copy * K + i - first)] = {slots.slot_of(static_cast<int>(target.rank)),
                                              static_cast<int32_t>(target.row)};
    }
  }
  return targets;
}

// The rows here whose source is on another node, in the order of arrivals.
std::vector<int64_t> make_far_rows(const PlanData& data, const CudaRank& rank) {
  std::vector<int64_t> rows;
  for (const RowBlock& block : data.recv_blocks) {  // by source
    if (rank.is_near(block.source)) continue;
    for (int64_t i = 0; i < block.count; ++i) rows.push_back(block.row + i);
  }
  return rows;
}

// The sum of every received copy's rows, which this rank reads in place.
SumList make_gateway_sums(const Relay& relay, const ChannelRanks& slots) {
  SumList sums;
  for (size_t copy = 0; copy + 1 < relay.target_offsets.size(); ++copy) {
    for (int64_t i = relay.target_offsets[copy]; i < relay.target_offsets[copy + 1]; ++i) {
      const RelayTarget& target = relay.targets[index(i)];
      sums.terms.push_back({.source = slots.slot_of(static_cast<int>(target.rank)),
                            .row = static_cast<int32_t>(target.row),
                            .group = 0,
                            .weight = static_cast<float>(target.weight)});
    }
    sums.end_sum();
  }
  return sums;
}

// The sums of this rank's tokens: near rows, group by group, and the partial rows of copies.
SumList make_token_sums(const PlanData& data, const SourcePartials& partials,
                        const ChannelRanks& slots, int32_t arrived_source) {
  const auto* weights = reinterpret_cast<const float*>(data.weights.data());
  SumList sums;
  for (int64_t t = 0; t < data.T; ++t) {
    const int64_t first = partials.partial_token_offsets[index(t)];
    for (int64_t i = first; i < partials.partial_token_offsets[index(t) + 1]; ++i) {
      const int64_t number = partials.partials[index(i)];
      const auto group = static_cast<int32_t>(i - first);
      if (number < 0) {
        sums.terms.push_back({.source = arrived_source,
                              .row = static_cast<int32_t>(~number),
                              .group = group,
                              .weight = 1.0f});
        continue;
      }
      for (int64_t j = partials.near_offsets[index(number)];
           j < partials.near_offsets[index(number) + 1]; ++j) {
        const size_t slot = index(partials.near_slots[index(j)]);
        sums.terms.push_back({.source = slots.slot_of(data.owner[index(data.expert_ids[slot])]),
                              .row = static_cast<int32_t>(data.final_rows[slot]),
                              .group = group,
                              .weight = weights[slot]});
      }
    }
    sums.end_sum();
  }
  return sums;
}

// `plan` was made on the host by direct or hierarchical. Collective; waits for the GPU.
RelayPlan make_relay_plan(CudaRank& rank, const Plan& plan) {
  const PlanData& data = plan.data();
  const Relay& relay = relay_of(plan);
  RelayPlan made;
  made.K = static_cast<int32_t>(data.K);
  made.copies = agree_on_traffic(rank.group(), plan, relay.copy_offsets, relay.arrival_offsets);
  made.far_returned = make_far_returned(data, rank.group().topology().node_of_rank);
  const RouteTargets targets = make_targets(data, rank, made.far_returned);
  PackedArrays arrays;
  arrays.add(relay.copy_tokens, made.copy_tokens);
  arrays.add(targets.near, made.near_targets);
  arrays.add(make_copy_targets(relay, data.K, rank.channel_ranks()), made.copy_targets);
  arrays.add(make_far_rows(data, rank), made.far_rows);
  arrays.add(targets.sums, made.sum_targets);
  made.memory = arrays.upload(rank.pool(), rank.stream(), rank.watch());
  return made;
}

// Gateways sum the rows of a copy, the source sums near rows itself.
PartialSumLists make_relay_sums(const CudaRank& rank, const Plan& plan) {
  const Relay& relay = relay_of(plan);
  const ChannelRanks& slots = rank.channel_ranks();
  const int32_t arrived_source = relay.copy_tokens.empty() ? -1 : slots.size();
  return {.sent = make_gateway_sums(relay, slots),
          .send_offsets = relay.arrival_offsets,
          .recv_offsets = relay.copy_offsets,
          .tokens = make_token_sums(plan.data(), partials_of(plan), slots, arrived_source),
          .arrived_source = arrived_source};
}

}  // namespace

Packing relay_packing() {
  return {.relay = make_relay_plan, .sum_lists = make_relay_sums};
}

}  // namespace crossdock::cuda
