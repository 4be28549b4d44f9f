#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "crossdock/testing/reference.hpp"
#include "crossdock/threads.hpp"
#include "dispatch/random_case.hpp"

namespace crossdock {

struct Nodes {
  int num_ranks;
  int ranks_per_node;  // 0: all ranks on one node
};

inline ThreadOptions options_for(const Nodes& nodes) {
  ThreadOptions options = short_deadlines();
  options.ranks_per_node = nodes.ranks_per_node;
  return options;
}

/// Routes of all ranks and the rows that the experts return.
struct SumsCase {
  DispatchConfig config;
  std::vector<reference::RankInput> ranks;
  DType dtype;
  reference::Layout layout;
  reference::PerRank rows;
};

/// Random rows that use all bits of the dtype, and random weights.
inline SumsCase random_sums(int num_ranks, DType dtype, PartialSums sums, int64_t width = 37,
                            const std::optional<Capacity>& capacity = {}) {
  std::vector<int64_t> tokens(static_cast<size_t>(num_ranks));
  for (size_t r = 0; r < tokens.size(); ++r)
    tokens[r] = r == 1 ? 0 : 9 + 2 * static_cast<int64_t>(r);
  DispatchCase made = random_case(
      {.num_experts = 11, .top_k = 6, .width = width, .capacity = capacity, .partial_sums = sums},
      tokens, 3);
  std::mt19937 random(4);
  std::uniform_real_distribution<double> distribution(-1.0, 1.0);
  for (reference::RankInput& rank : made.ranks) {
    for (double& weight : rank.weights) {
      weight = reference::round_to(DType::kF32, distribution(random));
    }
  }
  SumsCase result{.config = made.config,
                  .ranks = made.ranks,
                  .dtype = dtype,
                  .layout = reference::lay_out(made.config, made.ranks),
                  .rows = {}};
  for (int r = 0; r < num_ranks; ++r) {
    std::vector<double> rows(static_cast<size_t>(result.layout.num_rows(r) * made.config.width));
    for (double& value : rows) value = reference::round_to(dtype, distribution(random));
    result.rows.push_back(rows);
  }
  return result;
}

struct Sums {
  reference::PerRank out, grad_x;
};

inline void expect_same_bits(const reference::PerRank& got, const reference::PerRank& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t r = 0; r < got.size(); ++r) {
    ASSERT_EQ(got[r].size(), wanted[r].size());
    const reference::Comparison difference = reference::compare(got[r], wanted[r]);
    EXPECT_EQ(difference.num_different, 0) << "rank " << r << " from " << difference.first;
  }
}

inline reference::PerRank weights_of(const SumsCase& given) {
  reference::PerRank weights;
  for (const reference::RankInput& rank : given.ranks) weights.push_back(rank.weights);
  return weights;
}

/// The sums that a strategy must give: per node with hierarchical, otherwise per rank.
inline Sums wanted_sums(const SumsCase& given, const std::string& strategy, const Nodes& nodes) {
  std::vector<int> groups(given.ranks.size());
  std::iota(groups.begin(), groups.end(), 0);
  if (strategy == "hierarchical") {
    for (int& group : groups) {
      group = nodes.ranks_per_node == 0 ? 0 : group / nodes.ranks_per_node;
    }
  }
  const reference::PartialGroups partials{
      .sums = given.config.partial_sums, .rows = given.dtype, .group_of_rank = groups};
  const reference::PerRank weights = weights_of(given);
  const int64_t D = given.config.width;
  return {reference::combine_partial(given.layout, D, partials, given.rows, &weights),
          reference::combine_partial(given.layout, D, partials, given.rows)};
}

}  // namespace crossdock
