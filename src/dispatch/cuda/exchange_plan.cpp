#include "dispatch/cuda/exchange_plan.hpp"

#include <cstring>
#include <utility>

#include "core/tensor_memory.hpp"
#include "crossdock/extend/plan_data.hpp"

namespace crossdock::cuda {
namespace {

// Offset of this rank's rows in the send buffer of every other rank: rows_to(p, rank) rows go from
// p to rank.
template <typename RowsTo>
std::vector<int64_t> peer_begins(const PlanData& data, const RowsTo& rows_to) {
  std::vector<int64_t> begins(index(data.P), 0);
  for (int p = 0; p < data.P; ++p) {
    for (int rank = 0; rank < data.rank; ++rank) begins[index(p)] += rows_to(p, rank);
  }
  return begins;
}

// Rows of the plan from this rank to its experts' owners.
RowTraffic make_out(const PlanData& data) {
  const auto rows_to = [&](int p, int rank) { return rows_between(data, p, rank); };
  return make_traffic(data.send_offsets, data.recv_offsets, peer_begins(data, rows_to));
}

// The same rows in the opposite direction.
RowTraffic make_returned(const PlanData& data) {
  const auto rows_to = [&](int p, int rank) { return rows_between(data, rank, p); };
  return make_traffic(data.recv_offsets, data.send_offsets, peer_begins(data, rows_to));
}

// All tokens of every rank, sent to every rank.
RowTraffic make_tokens(const PlanData& data) {
  RowTraffic traffic{.parts = {}, .num_sent = data.T, .num_received = 0};
  for (const int64_t tokens : data.tokens_per_rank) {
    traffic.parts.push_back({.send_begin = 0,
                             .send_count = data.T,
                             .recv_begin = traffic.num_received,
                             .recv_count = tokens,
                             .peer_begin = 0});
    traffic.num_received += tokens;
  }
  return traffic;
}

}  // namespace

RowTraffic make_traffic(std::span<const int64_t> send_offsets,
                        std::span<const int64_t> recv_offsets,
                        std::span<const int64_t> peer_begins) {
  RowTraffic traffic{
      .parts = {}, .num_sent = send_offsets.back(), .num_received = recv_offsets.back()};
  for (size_t p = 0; p < peer_begins.size(); ++p) {
    traffic.parts.push_back({.send_begin = send_offsets[p],
                             .send_count = send_offsets[p + 1] - send_offsets[p],
                             .recv_begin = recv_offsets[p],
                             .recv_count = recv_offsets[p + 1] - recv_offsets[p],
                             .peer_begin = peer_begins[p]});
  }
  return traffic;
}

RowTraffic agree_on_traffic(Group& group, const Plan& plan,
                            const std::vector<int64_t>& send_offsets,
                            const std::vector<int64_t>& recv_offsets) {
  const Agreement all = group.agree({.operation = "plan",
                                     .subject = plan.id(),
                                     .body = std::as_bytes(std::span(send_offsets)),
                                     .under_way = true});
  std::vector<int64_t> begins(index(group.size()));
  for (int p = 0; p < group.size(); ++p) {
    const std::byte* offset = all.body(p).data() + index(group.rank()) * sizeof(int64_t);
    std::memcpy(&begins[index(p)], offset, sizeof(int64_t));
  }
  return make_traffic(send_offsets, recv_offsets, begins);
}

int64_t rows_between(const PlanData& data, int source, int destination) {
  int64_t rows = 0;
  for (int64_t i = data.owner_offsets[index(destination)];
       i < data.owner_offsets[index(destination) + 1]; ++i) {
    rows += data.counts[index(source * data.E + data.experts_by_owner[index(i)])];
  }
  return rows;
}

ExchangePlan make_exchange_plan(DevicePool& pool, const PlanData& data,
                                std::span<const int64_t> arrival_tokens, cudaStream_t stream,
                                StreamWatch& watch) {
  ExchangePlan plan;
  plan.out = make_out(data);
  plan.home = make_returned(data);
  plan.tokens = make_tokens(data);
  std::vector<int64_t> sent_tokens;
  for (const int64_t route : data.sent_routes) sent_tokens.push_back(route / data.K);
  std::vector<int64_t> rows(index(data.num_received()));
  std::vector<int64_t> tokens(arrival_tokens.begin(), arrival_tokens.end());
  for (const RowBlock& block : data.recv_blocks) {
    for (int64_t i = 0; i < block.count; ++i) {
      rows[index(block.arrival + i)] = block.row + i;
      if (!tokens.empty()) {
        tokens[index(block.arrival + i)] += plan.tokens.parts[index(block.source)].recv_begin;
      }
    }
  }
  std::vector<RouteTarget> sum_targets;
  for (const int64_t position : data.send_positions) {
    sum_targets.push_back({position < 0 ? -1 : 0, static_cast<int32_t>(position)});
  }
  std::vector<RouteTarget> row_targets;
  for (int64_t row = 0; row < data.num_rows(); ++row) {
    row_targets.push_back({0, static_cast<int32_t>(row)});
  }
  PackedArrays arrays;
  arrays.add(data.sent_routes, plan.sent_routes);
  arrays.add(sent_tokens, plan.sent_tokens);
  arrays.add(rows, plan.arrival_rows);
  arrays.add(tokens, plan.arrival_tokens);
  arrays.add(sum_targets, plan.sum_targets);
  arrays.add(row_targets, plan.row_targets);
  plan.memory = arrays.upload(pool, stream, watch);
  return plan;
}

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
