#include "dispatch/strategies/direct/source_partials.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/host/partial_sums.hpp"
#include "ops/sum_rows.hpp"

namespace crossdock {
namespace {

// A partial of a token, for sorting.
struct Partial {
  int group = 0;
  int64_t number = 0;
};

// A relayed copy of a token and its sum group.
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
void add_near(const StrategyCall& call, int64_t t, const SumGroup& group_of, SourcePartials& sums,
              std::vector<Partial>& partials) {
  const PlanData& plan = call.plan.data();
  std::vector<std::pair<int, int64_t>> slots;  // (group, slot)
  for (int64_t slot = t * plan.K; slot < (t + 1) * plan.K; ++slot) {
    const int32_t expert = plan.expert_ids[static_cast<size_t>(slot)];
    if (expert < 0) continue;
    const int owner = plan.owner[static_cast<size_t>(expert)];
    if (is_reachable(call, owner)) slots.emplace_back(group_of(owner), slot);
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

SourcePartials make_source_partials(const StrategyCall& call, const Relay& relay,
                                    const SumGroup& group_of) {
  const PlanData& plan = call.plan.data();
  const std::vector<TokenCopy> copies = copies_by_token(relay, group_of);
  SourcePartials sums;
  sums.near_offsets = sums.near_token_offsets = sums.partial_token_offsets = {0};
  std::vector<Partial> partials;
  size_t next_copy = 0;
  for (int64_t t = 0; t < plan.T; ++t) {
    partials.clear();
    add_near(call, t, group_of, sums, partials);
    for (; next_copy < copies.size() && copies[next_copy].token == t; ++next_copy) {
      partials.push_back({copies[next_copy].group, ~copies[next_copy].copy});
    }
    std::stable_sort(partials.begin(), partials.end(),
                     [](const Partial& a, const Partial& b) { return a.group < b.group; });
    for (const Partial& partial : partials) sums.partials.push_back(partial.number);
    sums.near_token_offsets.push_back(sums.num_near());
    sums.partial_token_offsets.push_back(std::ssize(sums.partials));
  }
  return sums;
}

void sum_grouped(const StrategyCall& call, const PeerRows& peers, const GroupedSumArgs& args) {
  const PlanData& plan = call.plan.data();
  const SourcePartials& partials = args.partials;
  const GatherSumArgs& sum = args.sum;
  const DType dtype = partial_dtype(call, sum);
  const int64_t row_bytes = partial_row_bytes(call, sum);
  const auto first = static_cast<size_t>(args.first_token);
  const auto last = static_cast<size_t>(args.last_token);

  // The near sums of these tokens.
  const auto first_near = static_cast<size_t>(partials.near_token_offsets[first]);
  const auto last_near = static_cast<size_t>(partials.near_token_offsets[last]);
  const int64_t first_slot = partials.near_offsets[first_near];
  std::vector<int64_t> offsets;
  for (size_t i = first_near; i <= last_near; ++i) {
    offsets.push_back(partials.near_offsets[i] - first_slot);
  }
  const int64_t weight_bytes = size_of(plan.weight_dtype);
  std::vector<const std::byte*> rows;
  const Buffer weights = call.group.pool().take_scratch(offsets.back() * weight_bytes);
  for (int64_t i = 0; i < offsets.back(); ++i) {
    const int64_t slot = partials.near_slots[static_cast<size_t>(first_slot + i)];
    const auto s = static_cast<size_t>(slot);
    const int owner = plan.owner[static_cast<size_t>(plan.expert_ids[s])];
    rows.push_back(peers.at(owner) + plan.final_rows[s] * sum.rows.row_bytes());
    std::copy_n(plan.weights.data() + slot * weight_bytes, weight_bytes,
                weights.data() + i * weight_bytes);
  }
  const Buffer near = call.group.pool().take_scratch((std::ssize(offsets) - 1) * row_bytes);
  ops::sum_rows({.rows = rows.data(),
                 .offsets = offsets.data(),
                 .weights = sum.weights.given() ? weights.data() : nullptr,
                 .out = near.data(),
                 .N = std::ssize(offsets) - 1,
                 .D = sum.out.shape[1],
                 .row_dtype = sum.rows.dtype,
                 .out_dtype = dtype},
                *call.group.threads());

  // All partials of these tokens.
  std::unordered_map<int64_t, int64_t> place_of_copy;
  for (const int64_t copy : args.returned.numbers) {
    place_of_copy.emplace(copy, std::ssize(place_of_copy));
  }
  rows.clear();
  offsets = {0};
  for (size_t t = first; t < last; ++t) {
    for (int64_t i = partials.partial_token_offsets[t]; i < partials.partial_token_offsets[t + 1];
         ++i) {
      const int64_t number = partials.partials[static_cast<size_t>(i)];
      rows.push_back(number >= 0
                         ? near.data() + (number - static_cast<int64_t>(first_near)) * row_bytes
                         : args.returned.rows.data() + place_of_copy.at(~number) * row_bytes);
    }
    offsets.push_back(std::ssize(rows));
  }
  ops::sum_rows(
      {.rows = rows.data(),
       .offsets = offsets.data(),
       .out = static_cast<std::byte*>(sum.out.data) + args.first_token * sum.out.row_bytes(),
       .N = args.last_token - args.first_token,
       .D = sum.out.shape[1],
       .row_dtype = dtype,
       .out_dtype = sum.out.dtype},
      *call.group.threads());
}

}  // namespace crossdock
