#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/mesh.hpp"
#include "crossdock/sequence.hpp"

namespace crossdock {
namespace {

using Costs = std::vector<double>;

Costs costs_of(const BalanceArgs& args) {
  CROSSDOCK_CHECK(args.num_ranks >= 1 && args.num_ranks <= kMaxMeshRanks,
                  "num_ranks must be in [1, ", kMaxMeshRanks, "], got ", args.num_ranks);
  for (const double cost : {args.cost_per_token, args.cost_per_token_pair}) {
    CROSSDOCK_CHECK(cost >= 0.0 && std::isfinite(cost),
                    "cost_per_token and cost_per_token_pair must be finite and not negative, got ",
                    args.cost_per_token, " and ", args.cost_per_token_pair);
  }
  Costs costs;
  costs.reserve(args.lengths.size());
  int64_t num_tokens = 0;
  for (size_t s = 0; s < args.lengths.size(); ++s) {
    CROSSDOCK_CHECK(args.lengths[s] >= 0, "lengths[", s, "] must not be negative, got ",
                    args.lengths[s]);
    CROSSDOCK_CHECK(args.lengths[s] <= kMaxBytes - num_tokens,
                    "the lengths must sum to at most 2^60 tokens, got more with lengths[", s, "] (",
                    args.lengths[s], ")");
    num_tokens += args.lengths[s];
    const auto length = static_cast<double>(args.lengths[s]);
    costs.push_back(args.cost_per_token * length + args.cost_per_token_pair * length * length);
  }
  const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
  CROSSDOCK_CHECK(std::isfinite(total), "the sum of all costs must be finite; use a smaller unit");
  return costs;
}

// [N] rank of each sequence
std::vector<int> longest_first(const Costs& costs, int num_ranks) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater<>(), [&](size_t s) { return costs[s]; });
  // Among equal costs: the rank with the fewest sequences, then the lowest rank.
  using Load = std::tuple<double, int64_t, int>;  // cost, sequences, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int rank = 0; rank < num_ranks; ++rank) least.emplace(0.0, 0, rank);
  std::vector<int> ranks(costs.size());
  for (const size_t s : order) {
    const auto [cost, count, rank] = least.top();
    least.pop();
    ranks[s] = rank;
    least.emplace(cost + costs[s], count + 1, rank);
  }
  return ranks;
}

// Whether num_ranks ranges that cost at most `limit` each are enough.
bool fits(const Costs& costs, int num_ranks, double limit) {
  int needed = 1;
  double sum = 0.0;
  for (const double cost : costs) {
    if (cost > limit) return false;
    sum += cost;
    if (sum <= limit) continue;
    sum = cost;
    if (++needed > num_ranks) return false;
  }
  return true;
}

// The smallest limit that fits. A rounded sum never decreases when a range grows, so `fits` is
// monotone. Non-negative doubles have the same order as their bits, so a binary search over the
// bits ends at the exact result.
double smallest_limit(const Costs& costs, int num_ranks) {
  const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
  uint64_t low = 0;
  auto high = std::bit_cast<uint64_t>(total);  // fits
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (fits(costs, num_ranks, std::bit_cast<double>(middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return std::bit_cast<double>(low);
}

// [N] rank of each sequence. Each later rank gets at least one sequence while there are any.
std::vector<int> keep_order(const Costs& costs, int num_ranks) {
  const double limit = smallest_limit(costs, num_ranks);
  std::vector<int> ranks;
  ranks.reserve(costs.size());
  for (int rank = 0; ranks.size() < costs.size(); ++rank) {
    CROSSDOCK_ASSERT(rank < num_ranks);
    const auto ranks_left = static_cast<size_t>(num_ranks - rank - 1);
    double sum = costs[ranks.size()];
    ranks.push_back(rank);
    while (costs.size() - ranks.size() > ranks_left && sum + costs[ranks.size()] <= limit) {
      sum += costs[ranks.size()];
      ranks.push_back(rank);
    }
  }
  return ranks;
}

SequenceBalance balance_of(const BalanceArgs& args, const Costs& costs,
                           const std::vector<int>& ranks) {
  const auto n = static_cast<size_t>(args.num_ranks);
  SequenceBalance balance;
  balance.offsets.assign(n + 1, 0);
  balance.tokens_per_rank.assign(n, 0);
  balance.cost_per_rank.assign(n, 0.0);
  for (size_t s = 0; s < ranks.size(); ++s) {
    const auto rank = static_cast<size_t>(ranks[s]);
    ++balance.offsets[rank + 1];
    balance.tokens_per_rank[rank] += args.lengths[s];
    balance.cost_per_rank[rank] += costs[s];
  }
  std::partial_sum(balance.offsets.begin(), balance.offsets.end(), balance.offsets.begin());
  balance.sequences.resize(ranks.size());
  std::vector<int64_t> next(balance.offsets.begin(), balance.offsets.end() - 1);
  for (size_t s = 0; s < ranks.size(); ++s) {
    balance.sequences[static_cast<size_t>(next[static_cast<size_t>(ranks[s])]++)] =
        static_cast<int64_t>(s);
  }
  const double total =
      std::accumulate(balance.cost_per_rank.begin(), balance.cost_per_rank.end(), 0.0);
  if (total > 0.0) {
    balance.imbalance = std::ranges::max(balance.cost_per_rank) / (total / args.num_ranks);
  }
  return balance;
}

}  // namespace

std::span<const int64_t> SequenceBalance::of_rank(int rank) const {
  CROSSDOCK_CHECK(rank >= 0 && rank + 1 < std::ssize(offsets), "rank must be in [0, ",
                  std::ssize(offsets) - 1, "), got ", rank);
  const auto r = static_cast<size_t>(rank);
  return std::span(sequences).subspan(static_cast<size_t>(offsets[r]),
                                      static_cast<size_t>(offsets[r + 1] - offsets[r]));
}

SequenceBalance balance_sequences(const BalanceArgs& args) {
  const Costs costs = costs_of(args);
  const bool keeps_order = args.policy == BalancePolicy::kKeepOrder;
  return balance_of(
      args, costs,
      keeps_order ? keep_order(costs, args.num_ranks) : longest_first(costs, args.num_ranks));
}

}  // namespace crossdock
