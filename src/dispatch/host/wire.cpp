#include "dispatch/host/wire.hpp"

#include <algorithm>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/peer_rows.hpp"
#include "ops/copy_rows.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

// Removes the block of `rank` from the offsets; returns its size.
int64_t remove_block(std::vector<int64_t>& offsets, size_t rank) {
  const int64_t size = offsets[rank + 1] - offsets[rank];
  for (size_t r = rank + 1; r < offsets.size(); ++r) offsets[r] -= size;
  return size;
}

}  // namespace

ExchangedRows::ExchangedRows(const PlanData& plan)
    : rank_(static_cast<size_t>(plan.rank)),
      send_offsets_(plan.send_offsets),
      recv_offsets_(plan.recv_offsets) {
  staying_sent_ = remove_block(send_offsets_, rank_);
  const int64_t staying_received = remove_block(recv_offsets_, rank_);
  recv_blocks_.reserve(plan.recv_blocks.size());
  for (RowBlock block : plan.recv_blocks) {
    if (block.source == plan.rank) continue;
    if (block.source > plan.rank) block.arrival -= staying_received;
    recv_blocks_.push_back(block);
  }
}

std::vector<int64_t> byte_offsets(std::span<const int64_t> row_offsets, int64_t row_bytes) {
  std::vector<int64_t> offsets(row_offsets.begin(), row_offsets.end());
  for (int64_t& offset : offsets) offset *= row_bytes;
  return offsets;
}

Buffer exchange_rows(const StrategyCall& call, const RowExchange& rows) {
  Group& group = call.group;
  const std::vector<int64_t> send_offsets = byte_offsets(rows.send_offsets, rows.row_bytes);
  const std::vector<int64_t> recv_offsets = byte_offsets(rows.recv_offsets, rows.row_bytes);
  Buffer recv = group.pool().take_scratch(recv_offsets.back());
  group.all_to_all_v(shared_bytes(rows.send), send_offsets, shared_bytes(recv), recv_offsets,
                     group.wait_context(call.operation, call.sequence));
  return recv;
}

namespace {

// Packs the rows of other ranks, in the order in which they arrived.
Buffer pack_by_source(const StrategyCall& call, const ExchangedRows& travelling,
                      const ConstTensorView& rows) {
  std::vector<ops::BlockCopy> blocks;
  for (const RowBlock& block : travelling.recv_blocks()) {
    blocks.push_back({.from = block.row, .to = block.arrival, .count = block.count});
  }
  Buffer packed = call.group.pool().take_scratch(travelling.num_received() * rows.row_bytes());
  ops::copy_blocks({.from = static_cast<const std::byte*>(rows.data),
                    .to = packed.data(),
                    .blocks = blocks,
                    .row_bytes = rows.row_bytes()});
  return packed;
}

}  // namespace

void return_and_sum(const StrategyCall& call, const GatherSumArgs& args) {
  const PlanData& plan = call.plan.data();
  const int64_t row_bytes = args.rows.row_bytes();
  const ExchangedRows travelling(plan);

  Buffer packed = pack_by_source(call, travelling, args.rows);
  const Buffer arrived = exchange_rows(call, {.send = packed,
                                              .send_offsets = travelling.recv_offsets(),
                                              .recv_offsets = travelling.send_offsets(),
                                              .row_bytes = row_bytes});
  packed = {};

  const auto* here = static_cast<const std::byte*>(args.rows.data);
  std::vector<const std::byte*> rows(plan.expert_ids.size(), nullptr);
  for (size_t slot = 0; slot < rows.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const bool stayed = plan.owner[static_cast<size_t>(plan.expert_ids[slot])] == plan.rank;
    rows[slot] =
        stayed ? here + plan.final_rows[slot] * row_bytes
               : arrived.data() + travelling.send_index(plan.send_positions[slot]) * row_bytes;
  }
  ops::sum_rows({.rows = rows.data(),
                 .K = plan.K,
                 .weights = args.weights.data,
                 .out = static_cast<std::byte*>(args.out.data),
                 .N = plan.T,
                 .D = args.out.shape[1],
                 .row_dtype = args.rows.dtype,
                 .out_dtype = args.out.dtype},
                *call.group.threads());
}

namespace {

// Tells the rank that holds a row how to sum it.
struct RowOrigin {
  int64_t token;
  int64_t row;
  double weight;
};

// The origins of all rows this rank sends, by (owner, token, slot).
Buffer pack_origins(const StrategyCall& call) {
  const PlanData& plan = call.plan.data();
  Buffer packed =
      call.group.pool().take_scratch(plan.num_sent() * static_cast<int64_t>(sizeof(RowOrigin)));
  auto* origins = reinterpret_cast<RowOrigin*>(packed.data());
  std::vector<int64_t> next(plan.send_offsets.begin(), plan.send_offsets.end() - 1);
  for (size_t slot = 0; slot < plan.expert_ids.size(); ++slot) {
    if (plan.expert_ids[slot] < 0) continue;
    const auto owner = static_cast<size_t>(plan.owner[static_cast<size_t>(plan.expert_ids[slot])]);
    origins[next[owner]++] = {.token = static_cast<int64_t>(slot) / plan.K,
                              .row = plan.final_rows[slot],
                              .weight = weight_at(plan, slot)};
  }
  return packed;
}

// Groups the rows of the same source and token, in slot order.
void group_by_token(const StrategyCall& call, const Buffer& arrived, RankSums& sums) {
  const PlanData& plan = call.plan.data();
  const auto* origins = reinterpret_cast<const RowOrigin*>(arrived.data());
  const auto num_received = static_cast<size_t>(plan.num_received());
  sums.weights = call.group.pool().take(plan.num_received() * size_of(plan.weight_dtype));
  sums.rows.resize(num_received);
  sums.source_offsets.push_back(0);
  for (size_t source = 0; source < static_cast<size_t>(plan.P); ++source) {
    const int64_t first = plan.recv_offsets[source];
    for (int64_t i = first; i < plan.recv_offsets[source + 1]; ++i) {
      if (i == first || origins[i].token != origins[i - 1].token) {
        sums.sum_offsets.push_back(i);
        sums.tokens.push_back(origins[i].token);
      }
      sums.rows[static_cast<size_t>(i)] = origins[i].row;
      if (plan.weight_dtype == DType::kF64) {
        reinterpret_cast<double*>(sums.weights.data())[i] = origins[i].weight;
      } else {
        reinterpret_cast<float*>(sums.weights.data())[i] = static_cast<float>(origins[i].weight);
      }
    }
    sums.source_offsets.push_back(static_cast<int64_t>(sums.tokens.size()));
  }
  sums.sum_offsets.push_back(plan.num_received());
}

// Calls visit(ranks) for every token in order, with the distinct ranks of its routes, ascending.
template <typename Visit>
void for_each_token(const PlanData& plan, const Visit& visit) {
  std::vector<int32_t> ranks;
  for (int64_t t = 0; t < plan.T; ++t) {
    ranks.clear();
    for (int64_t slot = t * plan.K; slot < (t + 1) * plan.K; ++slot) {
      const int32_t expert = plan.expert_ids[static_cast<size_t>(slot)];
      if (expert >= 0) ranks.push_back(plan.owner[static_cast<size_t>(expert)]);
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    visit(ranks);
  }
}

void number_partials(const PlanData& plan, RankSums& sums) {
  std::vector<int64_t>& offsets = sums.rank_offsets;
  offsets.assign(static_cast<size_t>(plan.P) + 1, 0);
  for_each_token(plan, [&](const std::vector<int32_t>& ranks) {
    for (const int32_t rank : ranks) ++offsets[static_cast<size_t>(rank) + 1];
  });
  for (size_t rank = 0; rank + 1 < offsets.size(); ++rank) offsets[rank + 1] += offsets[rank];
  std::vector<int64_t> next = offsets;
  sums.token_offsets.push_back(0);
  for_each_token(plan, [&](const std::vector<int32_t>& ranks) {
    for (const int32_t rank : ranks) sums.partials.push_back(next[static_cast<size_t>(rank)]++);
    sums.token_offsets.push_back(static_cast<int64_t>(sums.partials.size()));
  });
}

std::vector<const std::byte*> addresses(const void* base, const std::vector<int64_t>& rows,
                                        int64_t row_bytes) {
  std::vector<const std::byte*> result(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    result[i] = static_cast<const std::byte*>(base) + rows[i] * row_bytes;
  }
  return result;
}

Buffer sum_by_offsets(const StrategyCall& call, const RankSums& sums,
                      const std::vector<int64_t>& offsets, const GatherSumArgs& args) {
  const auto num_sums = static_cast<int64_t>(offsets.size()) - 1;
  Buffer partials = call.group.pool().take_scratch(num_sums * partial_row_bytes(call, args));
  const auto rows = addresses(args.rows.data, sums.rows, args.rows.row_bytes());
  ops::sum_rows({.rows = rows.data(),
                 .offsets = offsets.data(),
                 .weights = args.weights.given() ? sums.weights.data() : nullptr,
                 .out = partials.data(),
                 .N = num_sums,
                 .D = args.rows.shape[1],
                 .row_dtype = args.rows.dtype,
                 .out_dtype = partial_dtype(call, args)},
                *call.group.threads());
  return partials;
}

}  // namespace

RankSums exchange_rank_sums(const StrategyCall& call) {
  const PlanData& plan = call.plan.data();
  const Buffer packed = pack_origins(call);
  const Buffer arrived =
      exchange_rows(call, {.send = packed,
                           .send_offsets = plan.send_offsets,
                           .recv_offsets = plan.recv_offsets,
                           .row_bytes = static_cast<int64_t>(sizeof(RowOrigin))});
  RankSums sums;
  group_by_token(call, arrived, sums);
  number_partials(plan, sums);
  return sums;
}

DType partial_dtype(const StrategyCall& call, const GatherSumArgs& args) {
  return partial_dtype(call.plan.data().config->partial_sums, args.rows.dtype);
}

int64_t partial_row_bytes(const StrategyCall& call, const GatherSumArgs& args) {
  return args.rows.shape[1] * size_of(partial_dtype(call, args));
}

Buffer sum_at_experts(const StrategyCall& call, const RankSums& sums, const GatherSumArgs& args) {
  return sum_by_offsets(call, sums, sums.sum_offsets, args);
}

std::vector<int64_t> dense_sum_offsets(const PlanData& plan, const RankSums& sums) {
  std::vector<int64_t> offsets{0};
  size_t sum = 0;
  for (size_t source = 0; source < static_cast<size_t>(plan.P); ++source) {
    const auto last = static_cast<size_t>(sums.source_offsets[source + 1]);
    for (int64_t token = 0; token < plan.tokens_per_rank[source]; ++token) {
      if (sum < last && sums.tokens[sum] == token) ++sum;
      offsets.push_back(sums.sum_offsets[sum]);
    }
  }
  return offsets;
}

Buffer sum_at_experts_dense(const StrategyCall& call, const RankSums& sums,
                            const GatherSumArgs& args) {
  return sum_by_offsets(call, sums, dense_sum_offsets(call.plan.data(), sums), args);
}

void sum_partials(const StrategyCall& call, const RankSums& sums, const Buffer& arrived,
                  const GatherSumArgs& args) {
  const auto rows = addresses(arrived.data(), sums.partials, partial_row_bytes(call, args));
  ops::sum_rows({.rows = rows.data(),
                 .offsets = sums.token_offsets.data(),
                 .out = static_cast<std::byte*>(args.out.data),
                 .N = call.plan.data().T,
                 .D = args.out.shape[1],
                 .row_dtype = partial_dtype(call, args),
                 .out_dtype = args.out.dtype},
                *call.group.threads());
}

}  // namespace crossdock
