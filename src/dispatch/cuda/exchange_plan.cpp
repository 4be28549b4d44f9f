#include "dispatch/cuda/exchange_plan.hpp"

#include "dispatch/cuda/packed_arrays.hpp"

namespace crossdock::cuda {
namespace {

size_t index(int64_t i) {
  return static_cast<size_t>(i);
}

// Rows of the plan from this rank to its experts' owners.
RowTraffic make_out(const PlanData& data) {
  RowTraffic traffic{.parts = {}, .num_sent = data.num_sent(), .num_received = data.num_received()};
  for (int p = 0; p < data.P; ++p) {
    const size_t i = index(p);
    int64_t before = 0;
    for (int rank = 0; rank < data.rank; ++rank) before += rows_between(data, p, rank);
    traffic.parts.push_back({.send_begin = data.send_offsets[i],
                             .send_count = data.send_offsets[i + 1] - data.send_offsets[i],
                             .recv_begin = data.recv_offsets[i],
                             .recv_count = data.recv_offsets[i + 1] - data.recv_offsets[i],
                             .peer_begin = before});
  }
  return traffic;
}

// The same rows on their way back.
RowTraffic make_home(const PlanData& data) {
  const RowTraffic out = make_out(data);
  RowTraffic traffic{.parts = {}, .num_sent = out.num_received, .num_received = out.num_sent};
  for (int p = 0; p < data.P; ++p) {
    const RowTraffic::Part& there = out.parts[index(p)];
    int64_t before = 0;
    for (int rank = 0; rank < data.rank; ++rank) before += rows_between(data, rank, p);
    traffic.parts.push_back({.send_begin = there.recv_begin,
                             .send_count = there.recv_count,
                             .recv_begin = there.send_begin,
                             .recv_count = there.send_count,
                             .peer_begin = before});
  }
  return traffic;
}

// All tokens of every rank to every rank.
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

int64_t rows_between(const PlanData& data, int source, int destination) {
  int64_t rows = 0;
  for (int64_t i = data.owner_offsets[index(destination)];
       i < data.owner_offsets[index(destination) + 1]; ++i) {
    rows += data.counts[index(source * data.E + data.experts_by_owner[index(i)])];
  }
  return rows;
}

ExchangePlan::ExchangePlan(DevicePool& pool, const PlanData& data,
                           std::span<const int64_t> arrival_tokens, cudaStream_t stream)
    : out_(make_out(data)), home_(make_home(data)), tokens_(make_tokens(data)) {
  std::vector<int64_t> sent_tokens;
  for (const int64_t route : data.sent_routes) sent_tokens.push_back(route / data.K);
  std::vector<int64_t> rows(index(data.num_received()));
  std::vector<int64_t> tokens(arrival_tokens.begin(), arrival_tokens.end());
  for (const RowBlock& block : data.recv_blocks) {
    for (int64_t i = 0; i < block.count; ++i) {
      rows[index(block.arrival + i)] = block.row + i;
      if (!tokens.empty()) {
        tokens[index(block.arrival + i)] += tokens_.parts[index(block.source)].recv_begin;
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
  PackedArrays packer;
  const size_t at_routes = packer.add(data.sent_routes);
  const size_t at_sent_tokens = packer.add(sent_tokens);
  const size_t at_rows = packer.add(rows);
  const size_t at_tokens = packer.add(tokens);
  const size_t at_sums = packer.add(sum_targets);
  const size_t at_row_targets = packer.add(row_targets);
  memory_ = packer.upload(pool, stream);
  sent_routes_ = reinterpret_cast<int64_t*>(memory_.data() + at_routes);
  sent_tokens_ = reinterpret_cast<int64_t*>(memory_.data() + at_sent_tokens);
  arrival_rows_ = reinterpret_cast<int64_t*>(memory_.data() + at_rows);
  arrival_tokens_ = reinterpret_cast<int64_t*>(memory_.data() + at_tokens);
  sum_targets_ = reinterpret_cast<RouteTarget*>(memory_.data() + at_sums);
  row_targets_ = reinterpret_cast<RouteTarget*>(memory_.data() + at_row_targets);
}

}  // namespace crossdock::cuda
