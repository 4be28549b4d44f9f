#include "cost/top_k_odds.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "plan/placement.hpp"

namespace crossdock {
namespace {

struct OddsCase {
  int64_t E;
  int64_t K;
  std::vector<int> node_of_rank;
  std::vector<int32_t> placement;  // empty: contiguous
  double zipf;
};

Topology topology_of(const std::vector<int>& node_of_rank) {
  return {.node_of_rank = node_of_rank,
          .num_nodes = 1 + *std::max_element(node_of_rank.begin(), node_of_rank.end())};
}

// All ordered draws of K experts without replacement, each with its probability.
template <typename Visit>
void for_each_draw(const OddsCase& c, std::vector<int32_t>& drawn, double probability,
                   const Visit& visit) {
  if (std::ssize(drawn) == c.K) {
    visit(drawn, probability);
    return;
  }
  const auto weight = [&](int32_t e) { return std::pow(e + 1.0, -c.zipf); };
  double left = 0;
  const auto is_drawn = [&](int32_t e) {
    return std::find(drawn.begin(), drawn.end(), e) != drawn.end();
  };
  for (int32_t e = 0; e < c.E; ++e) left += is_drawn(e) ? 0 : weight(e);
  for (int32_t e = 0; e < c.E; ++e) {
    if (is_drawn(e)) continue;
    drawn.push_back(e);
    for_each_draw(c, drawn, probability * weight(e) / left, visit);
    drawn.pop_back();
  }
}

TokenSpread enumerate(const OddsCase& c, const Placement& placement, const Topology& topology) {
  TokenSpread spread{.routes_to_rank = std::vector<double>(topology.node_of_rank.size()),
                     .reaches_rank = std::vector<double>(topology.node_of_rank.size()),
                     .reaches_node = std::vector<double>(static_cast<size_t>(topology.num_nodes))};
  std::vector<int32_t> drawn;
  for_each_draw(c, drawn, 1.0, [&](const std::vector<int32_t>& experts, double probability) {
    std::set<size_t> ranks;
    std::set<size_t> nodes;
    for (const int32_t e : experts) {
      const auto rank = static_cast<size_t>(placement.owner[static_cast<size_t>(e)]);
      spread.routes_to_rank[rank] += probability;
      ranks.insert(rank);
      nodes.insert(static_cast<size_t>(topology.node_of_rank[rank]));
    }
    for (const size_t rank : ranks) spread.reaches_rank[rank] += probability;
    for (const size_t node : nodes) spread.reaches_node[node] += probability;
  });
  return spread;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-11) << i;
}

TEST(TopKOdds, EqualTheEnumerationOfAllDraws) {
  const std::vector<OddsCase> cases = {
      {.E = 6, .K = 3, .node_of_rank = {0, 0, 0}, .placement = {}, .zipf = 0},
      {.E = 7, .K = 3, .node_of_rank = {0, 0, 1, 1}, .placement = {}, .zipf = 0},
      {.E = 7, .K = 4, .node_of_rank = {0, 1, 1, 2}, .placement = {3, 3, 0, 1, 3, 0, 0}, .zipf = 0},
      {.E = 3, .K = 2, .node_of_rank = {0, 0, 1, 1, 2}, .placement = {}, .zipf = 0},
      {.E = 5, .K = 5, .node_of_rank = {0, 1}, .placement = {}, .zipf = 1.5},
      {.E = 6, .K = 1, .node_of_rank = {0, 0, 1}, .placement = {}, .zipf = 1},
      {.E = 7, .K = 3, .node_of_rank = {0, 0, 1, 1}, .placement = {}, .zipf = 0.5},
      {.E = 7, .K = 4, .node_of_rank = {0, 1, 0, 1}, .placement = {3, 3, 0, 1, 3, 0, 0}, .zipf = 1},
      {.E = 7, .K = 4, .node_of_rank = {0, 1, 1, 2}, .placement = {}, .zipf = 3},
      {.E = 6, .K = 5, .node_of_rank = {0, 0, 1, 2}, .placement = {}, .zipf = 10},
  };
  for (const OddsCase& c : cases) {
    SCOPED_TRACE("E " + std::to_string(c.E) + " K " + std::to_string(c.K) + " zipf " +
                 std::to_string(c.zipf));
    const Topology topology = topology_of(c.node_of_rank);
    const Placement placement =
        make_placement({.num_experts = c.E, .top_k = c.K, .width = 1, .placement = c.placement},
                       static_cast<int>(c.node_of_rank.size()));
    const TokenSpread spread = expected_spread(placement, topology, {.top_k = c.K, .zipf = c.zipf});
    const TokenSpread expected = enumerate(c, placement, topology);
    expect_near(spread.routes_to_rank, expected.routes_to_rank);
    expect_near(spread.reaches_rank, expected.reaches_rank);
    expect_near(spread.reaches_node, expected.reaches_node);
  }
}

TEST(TopKOdds, RoutesAddUpToTopKAtAnySkew) {
  for (const double zipf : {0.0, 0.3, 1.0, 2.5, 6.0}) {
    for (const int64_t K : {1, 8, 60}) {
      const Topology topology = Topology::uniform(32, 8);
      const Placement placement = make_placement({.num_experts = 128, .top_k = K, .width = 1}, 32);
      const TokenSpread spread = expected_spread(placement, topology, {.top_k = K, .zipf = zipf});
      EXPECT_NEAR(std::accumulate(spread.routes_to_rank.begin(), spread.routes_to_rank.end(), 0.0),
                  static_cast<double>(K), 1e-9 * static_cast<double>(K))
          << "zipf " << zipf << " K " << K;
    }
  }
}

// As the skew vanishes, the integral approaches the closed formula.
TEST(TopKOdds, AVanishingSkewIsTheUniformDraw) {
  const Topology topology = Topology::uniform(12, 5);
  const Placement placement = make_placement({.num_experts = 100, .top_k = 8, .width = 1}, 12);
  const TokenSpread uniform = expected_spread(placement, topology, {.top_k = 8, .zipf = 0});
  const TokenSpread skewed = expected_spread(placement, topology, {.top_k = 8, .zipf = 1e-13});
  expect_near(skewed.routes_to_rank, uniform.routes_to_rank);
  expect_near(skewed.reaches_rank, uniform.reaches_rank);
  expect_near(skewed.reaches_node, uniform.reaches_node);
}

TEST(TopKOdds, PublishedFigureOfDistinctRanksAtEp8) {
  const Placement placement = make_placement({.num_experts = 256, .top_k = 8, .width = 1}, 8);
  const TokenSpread spread =
      expected_spread(placement, Topology::single_node(8), {.top_k = 8, .zipf = 0});
  const double distinct =
      std::accumulate(spread.reaches_rank.begin(), spread.reaches_rank.end(), 0.0);
  EXPECT_NEAR(distinct, 5.3, 0.05);         // distinct ranks per token
  EXPECT_NEAR(8.0 / distinct, 1.51, 0.01);  // an all-to-all compared with one copy per rank
}

}  // namespace
}  // namespace crossdock
