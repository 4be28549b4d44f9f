// The expected number of random routes that a capacity keeps.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "cost/step_sizes.hpp"
#include "cost/top_k_odds.hpp"
#include "crossdock/planner.hpp"
#include "plan/local_routes.hpp"

namespace crossdock {
namespace {

// By Pascal's rule, without any formula for a probability.
std::vector<double> binomial(int64_t n, double p) {
  std::vector<double> odds(static_cast<size_t>(n) + 1, 0.0);
  odds[0] = 1.0;
  for (int64_t i = 0; i < n; ++i) {
    for (size_t j = odds.size() - 1; j > 0; --j) odds[j] = odds[j] * (1 - p) + odds[j - 1] * p;
    odds[0] *= 1 - p;
  }
  return odds;
}

TEST(Binomial, EqualsTheSumOverAllCounts) {
  for (const int64_t n : {1, 7, 60, 400}) {
    for (const double p : {0.001, 0.0625, 0.5, 0.97}) {
      const std::vector<double> odds = binomial(n, p);
      for (const int64_t limit : {int64_t{0}, int64_t{1}, n / 16, n / 2, n - 1, n, n + 5}) {
        double at_most = 0;
        double mean = 0;
        for (int64_t j = 0; j <= n; ++j) {
          const double odd = odds[static_cast<size_t>(j)];
          if (j <= limit) at_most += odd;
          mean += odd * static_cast<double>(std::min(j, limit));
        }
        EXPECT_NEAR(binomial_at_most(n, p, limit), at_most, 1e-11) << n << " " << p << " " << limit;
        EXPECT_NEAR(binomial_limited_mean(n, p, limit), mean, 1e-9)
            << n << " " << p << " " << limit;
      }
    }
  }
}

TEST(Binomial, HasItsLimitsWhereNothingIsRandom) {
  EXPECT_EQ(binomial_at_most(10, 0.0, 0), 1);
  EXPECT_EQ(binomial_at_most(10, 1.0, 9), 0);
  EXPECT_EQ(binomial_at_most(10, 0.3, -1), 0);
  EXPECT_EQ(binomial_limited_mean(10, 1.0, 4), 4);
  EXPECT_EQ(binomial_limited_mean(0, 0.5, 0), 0);
  // Far from the mean, with many trials.
  EXPECT_EQ(binomial_limited_mean(int64_t{1} << 31, 0.5, 1000), 1000);
  EXPECT_NEAR(binomial_limited_mean(1 << 20, 0.25, 1 << 19), 1 << 18, 1e-6);
}

struct DropCase {
  double zipf;
  double factor;
  DropPolicy policy;
};

constexpr int kRanks = 6;
constexpr int64_t kTokens = 4000;
constexpr int64_t kExperts = 20;
constexpr int64_t kTopK = 4;

// The first K experts in a race are the ones drawn.
LocalRoutes draw_routes(double zipf, std::mt19937& random) {
  LocalRoutes routes;
  routes.T = kTokens;
  routes.counts.assign(kExperts, 0);
  routes.dropped.assign(kExperts, 0);
  routes.weights = Buffer(kTokens * kTopK * 4);
  auto* weights = reinterpret_cast<float*>(routes.weights.data());
  std::exponential_distribution<double> arrival(1.0);
  std::uniform_real_distribution<float> weight(0.0F, 1.0F);
  for (int64_t t = 0; t < kTokens; ++t) {
    std::vector<std::pair<double, int32_t>> race;
    for (int32_t e = 0; e < kExperts; ++e) {
      race.emplace_back(arrival(random) * std::pow(e + 1.0, zipf), e);
    }
    std::partial_sort(race.begin(), race.begin() + kTopK, race.end());
    for (int64_t k = 0; k < kTopK; ++k) {
      const int32_t expert = race[static_cast<size_t>(k)].second;
      routes.expert_ids.push_back(expert);
      ++routes.counts[static_cast<size_t>(expert)];
      *weights++ = weight(random);
    }
  }
  return routes;
}

// Each count, and their sum, may differ by the sampling error, which a capacity makes smaller;
// counts of ranks and nodes by another 1 %.
void expect_close(const std::vector<double>& counted, const std::vector<double>& expected,
                  double share) {
  ASSERT_EQ(counted.size(), expected.size());
  for (size_t i = 0; i < counted.size(); ++i) {
    EXPECT_NEAR(counted[i], expected[i], 5 * std::sqrt(expected[i]) + share * expected[i]) << i;
  }
  const double sum = std::accumulate(expected.begin(), expected.end(), 0.0);
  EXPECT_NEAR(std::accumulate(counted.begin(), counted.end(), 0.0), sum,
              5 * std::sqrt(sum) + share * sum);
}

class ExpectedDrops : public testing::TestWithParam<DropCase> {};

TEST_P(ExpectedDrops, AreThoseOfRandomRoutes) {
  const auto [zipf, factor, policy] = GetParam();
  DispatchConfig config{.num_experts = kExperts, .top_k = kTopK, .width = 1};
  config.capacity = Capacity{.factor = factor, .policy = policy};
  const Topology topology = Topology::uniform(kRanks, 2);
  const Placement placement = make_placement(config, kRanks);
  std::mt19937 random(7);
  std::vector<LocalRoutes> routes;
  std::vector<CountedRoutes> kept;
  for (int rank = 0; rank < kRanks; ++rank) {
    routes.push_back(draw_routes(zipf, random));
    drop_beyond_capacity(config, routes.back());
  }
  for (const LocalRoutes& one : routes) kept.push_back({one.expert_ids, kTopK});
  const RouteSums counted = counted_sums(kept, placement.owner, topology);
  const Drops drops{
      .tokens = kTokens, .capacity = capacity_rows(config, kTokens), .policy = policy};
  const RouteSums expected =
      expected_sums(expected_spread(placement, topology, {.top_k = kTopK, .zipf = zipf}, drops),
                    topology, kTokens);
  expect_close(counted.routes.kept, expected.routes.kept, 0.0);
  expect_close(counted.routes.sent_within, expected.routes.sent_within, 0.0);
  expect_close(counted.routes.sent_between, expected.routes.sent_between, 0.0);
  expect_close(counted.ranks.kept, expected.ranks.kept, 0.01);
  expect_close(counted.ranks.sent_between, expected.ranks.sent_between, 0.01);
  expect_close(counted.nodes.sent_between, expected.nodes.sent_between, 0.01);
  expect_close(counted.reach_own_node, expected.reach_own_node, 0.01);
}

std::vector<DropCase> drop_cases() {
  std::vector<DropCase> cases;
  for (const double zipf : {0.0, 0.7}) {
    for (const double factor : {0.4, 1.0, 1.3}) {
      for (const DropPolicy policy : {DropPolicy::kPosition, DropPolicy::kWeight}) {
        cases.push_back({zipf, factor, policy});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Policies, ExpectedDrops, testing::ValuesIn(drop_cases()));

TEST(CostsWithDrops, AreThoseWithoutWhereACapacityIsNeverReached) {
  CostInputs inputs;
  inputs.config.num_experts = 16;
  inputs.config.top_k = 2;
  inputs.config.width = 8;
  inputs.topology = Topology::uniform(4, 2);
  inputs.tokens = 500;
  const CostEstimate without = estimate_costs(inputs);
  inputs.config.capacity = Capacity{.factor = 16.0};
  const CostEstimate with = estimate_costs(inputs);
  EXPECT_EQ(with.routing.dropped_share, 0);
  EXPECT_EQ(with.strategies[3].dispatch.bytes.between_nodes,
            without.strategies[3].dispatch.bytes.between_nodes);
  inputs.config.capacity->factor = 0.5;
  const CostEstimate half = estimate_costs(inputs);
  EXPECT_NEAR(half.routing.dropped_share, 0.5, 0.02);
  EXPECT_NEAR(half.routing.rows_per_rank, 500, 20);
  EXPECT_LT(half.strategies[3].dispatch.bytes.between_nodes,
            0.6 * without.strategies[3].dispatch.bytes.between_nodes);
}

}  // namespace
}  // namespace crossdock
