#include "dispatch/source_partials.hpp"

#include <algorithm>

#include "dispatch/partial_sums.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

// One partial of a token while they are put in order.
struct Partial {
  int group = 0;
  int64_t number = 0;
};

// The copy numbers of every token, as (token, group, copy) in ascending order.
struct TokenCopy {
  int64_t token = 0;
  int group = 0;
  int64_t copy = 0;
};

std::vector<TokenCopy> copies_by_token(const Relay& relay, const SumGroup& group_of) {
  std::vector<TokenCopy> copies;
  for (size_t gateway = 0; gateway + 1 < relay.copy_offsets.size(); ++gateway) {
    for (int64_t i = relay.copy_offsets[gateway]; i < relay.copy_offsets[gateway + 1]; ++i) {
      copies.push_back(
          {relay.copy_tokens[static_cast<size_t>(i)], group_of(static_cast<int>(gateway)), i});
    }
  }
  std::stable_sort(copies.begin(), copies.end(),
                   [](const TokenCopy& a, const TokenCopy& b) { return a.token < b.token; });
  return copies;
}

// Adds the near sums of token t to `partials`, and lists their slots in `sums`.
void add_near(const Exchange& exchange, int64_t t, const SumGroup& group_of, SourcePartials& sums,
              std::vector<Partial>& partials) {
  const PlanData& plan = exchange.plan.data();
  std::vector<std::pair<int, int64_t>> slots;  // (group, slot)
  for (int64_t slot = t * plan.K; slot < (t + 1) * plan.K; ++slot) {
    const int32_t expert = plan.expert_ids[static_cast<size_t>(slot)];
    if (expert < 0) continue;
    const int owner = plan.owner[static_cast<size_t>(expert)];
    if (is_reachable(exchange, owner)) slots.emplace_back(group_of(owner), slot);
  }
  std::sort(slots.begin(), slots.end());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i == 0 || slots[i].first != slots[i - 1].first) {
      partials.push_back({slots[i].first, sums.num_near()});
      sums.near_offsets.push_back(sums.near_offsets.back());
    }
    sums.near_slots.push_back(slots[i].second);
    ++sums.near_offsets.back();
  }
}

}  // namespace

SourcePartials make_source_partials(const Exchange& exchange, const Relay& relay,
                                    const SumGroup& group_of) {
  const PlanData& plan = exchange.plan.data();
  const std::vector<TokenCopy> copies = copies_by_token(relay, group_of);
  SourcePartials sums{.near_slots = {}, .near_offsets = {0}, .partials = {}, .token_offsets = {0}};
  constexpr int64_t kFar = int64_t{1} << 62;  // marks copies until the number of near sums is known
  std::vector<Partial> partials;
  size_t next_copy = 0;
  for (int64_t t = 0; t < plan.T; ++t) {
    partials.clear();
    add_near(exchange, t, group_of, sums, partials);
    for (; next_copy < copies.size() && copies[next_copy].token == t; ++next_copy) {
      partials.push_back({copies[next_copy].group, kFar + copies[next_copy].copy});
    }
    std::stable_sort(partials.begin(), partials.end(),
                     [](const Partial& a, const Partial& b) { return a.group < b.group; });
    for (const Partial& partial : partials) sums.partials.push_back(partial.number);
    sums.token_offsets.push_back(std::ssize(sums.partials));
  }
  for (int64_t& number : sums.partials) {
    if (number >= kFar) number += sums.num_near() - kFar;
  }
  return sums;
}

void sum_grouped(const Exchange& exchange, const SourcePartials& partials, const Buffer& returned,
                 const PeerRows& peers, const GatherSumArgs& args) {
  const PlanData& plan = exchange.plan.data();
  const int64_t D = args.out.shape[1];
  const DType dtype = partial_dtype(args);
  const int64_t row_bytes = partial_row_bytes(args);

  std::vector<const std::byte*> rows;
  const Buffer weights =
      exchange.group.pool().take(std::ssize(partials.near_slots) * size_of(plan.weight_dtype));
  std::byte* next_weight = weights.data();
  for (const int64_t slot : partials.near_slots) {
    const auto s = static_cast<size_t>(slot);
    const int owner = plan.owner[static_cast<size_t>(plan.expert_ids[s])];
    rows.push_back(peers.at(owner) + plan.final_rows[s] * args.rows.row_bytes());
    next_weight = std::copy_n(plan.weights.data() + slot * size_of(plan.weight_dtype),
                              size_of(plan.weight_dtype), next_weight);
  }
  const Buffer near = exchange.group.pool().take(partials.num_near() * row_bytes);
  ops::sum_rows({.rows = rows.data(),
                 .offsets = partials.near_offsets.data(),
                 .weights = args.weights.given() ? weights.data() : nullptr,
                 .out = near.data(),
                 .N = partials.num_near(),
                 .D = D,
                 .row_dtype = args.rows.dtype,
                 .out_dtype = dtype});

  rows.clear();
  for (const int64_t number : partials.partials) {
    rows.push_back(number < partials.num_near()
                       ? near.data() + number * row_bytes
                       : returned.data() + (number - partials.num_near()) * row_bytes);
  }
  ops::sum_rows({.rows = rows.data(),
                 .offsets = partials.token_offsets.data(),
                 .out = static_cast<std::byte*>(args.out.data),
                 .N = plan.T,
                 .D = D,
                 .row_dtype = dtype,
                 .out_dtype = args.out.dtype});
}

}  // namespace crossdock
